"""What is the user's doing: told in one line, ends with exit code 2."""


class UserError(Exception):
    """The message says what is wrong, where, and how to mend it."""


class LayoutRefused(UserError):
    """A layout that no number of workers of this run can be brought into."""
