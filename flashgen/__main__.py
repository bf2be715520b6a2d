"""`python -m flashgen`."""

from .cli import main

main()
