"""What all tests share: Hypothesis without deadlines, which a busy machine would miss, with the
same examples at each run, and without files."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")
