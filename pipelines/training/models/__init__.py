"""Built-in models: the transformer, a mixture of experts, an MLP."""
