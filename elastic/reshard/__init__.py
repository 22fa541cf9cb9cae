"""Reshard: holdings, the recovery rule, transfers, parity, shards, snapshot placement."""
