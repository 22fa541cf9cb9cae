"""A script's own modules and each worker's copy of them."""
