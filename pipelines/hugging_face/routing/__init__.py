"""Mixtures of experts in models of `transformers`: the loss of their routers."""
