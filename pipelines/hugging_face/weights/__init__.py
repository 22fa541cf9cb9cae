"""Weights of models of `transformers`: read from their folders, and written as such."""
