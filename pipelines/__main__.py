"""`python -m pipelines` runs the `elastic` command from a source checkout."""

from pipelines.cli import main

main()
