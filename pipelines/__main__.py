"""`python -m pipelines` is the `elastic` command, from a working directory."""

from pipelines.cli import main

main()
