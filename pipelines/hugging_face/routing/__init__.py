"""Mixtures of experts in models of `transformers`: their experts, and the loss of their routers."""
