"""What callers of the core may catch: each message says what, where and how to mend it."""


class ElasticError(ValueError):
    """Any refusal of the core that is the caller's doing."""


class InvalidLayout(ElasticError):
    """The degrees of a layout do not make a mesh."""
