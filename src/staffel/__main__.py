"""`python -m staffel` is the `staffel` command."""

from staffel.cli import main

main()
