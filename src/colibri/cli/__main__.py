"""`python -m colibri.cli` is the `colibri` command."""

from colibri.cli import main

main()
