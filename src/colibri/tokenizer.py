"""A door: text to token ids and back. See `colibri.text.tokenizer`."""

from colibri.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
