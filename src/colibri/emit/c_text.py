"""Text parts that all generated C has in common."""

from __future__ import annotations

import re


def comment(text: str) -> str:
    """A text that cannot end a comment."""
    return re.sub(r"[^\w .,+=()@×-]", "_", text)
