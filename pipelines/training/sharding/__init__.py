"""Sharding: ZeRO stages, FSDP2, replicas."""
