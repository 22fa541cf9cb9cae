"""Attention: of packed documents, over the ranks of `cp`, in place of that of other libraries."""
