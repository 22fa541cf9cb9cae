"""Checks of a worker's machine: before it joins, and of its GPU while it trains."""
