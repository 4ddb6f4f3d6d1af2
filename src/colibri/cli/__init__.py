"""The `colibri` command."""

from colibri.cli.app import main

__all__ = ["main"]
