"""Sharding over `fsdp`: ZeRO stages 0 to 2, and stage 3 by FSDP2."""
