"""Reshard: holdings, the recovery rule, transfers, parity, snapshot placement."""
