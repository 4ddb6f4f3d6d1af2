"""`python -m colibri.cli`: the `colibri` command."""

from colibri.cli.main import main

main()
