"""How the engine's C is written, where no formatter and no linter looks."""

from __future__ import annotations

import re

import pytest

from tools import size

MOST_CONDITIONS = 3

# Files that are denser than size.TOKENS_A_LINE, and no denser than this: the lines of the library are limited too, and
# these have not been made simpler yet. A file that gets there leaves the table.
DENSER = {
    "freestanding/string.h": 15.0,  # declarations of the C standard, a line each
    # proofs: comparisons that end in a return, one or two a line
    "src/check/operations.c": 13.8,
    "src/check/operand.c": 12.9,
    "src/check/program.c": 11.9,
    "src/check/file.c": 11.2,
    "src/check/order.c": 10.7,
    # vector kernels, whose generated code must stay as it is: functions of one instruction, and loops in registers
    "src/simd/avx2.c": 11.6,
    "src/simd/avx512.c": 11.5,
    "src/simd/tile.h": 11.4,
    "src/simd/plain.c": 10.3,
    "src/core/elementary.h": 10.3,
    # operations
    "src/ops/moe.c": 11.6,
    "src/ops/routing.c": 11.5,
    "src/ops/cache.c": 11.0,
    "src/ops/linear.c": 11.0,
    "src/core/rows.c": 11.1,
    "src/ops/embed.c": 10.8,
    "src/ops/elementwise.c": 10.8,
    "src/ops/rope.c": 10.6,
    "src/ops/attention.c": 10.5,
    "src/ops/delay.c": 10.4,
}
FILES = size.c_files()

_PREPROCESSOR_CONDITION = re.compile(r"^[ \t]*#[ \t]*(?:if|elif)(?:\\\n|[^\n])*", re.M)
_END_OF_EXPRESSION = re.compile(r"[;{}]|\breturn\b")


def crowded(text: str) -> list[str]:
    """Expressions of C that join more conditions than a reader holds at once."""
    code = _PREPROCESSOR_CONDITION.sub("", size.COMMENT_OR_TEXT.sub(" ", text))
    parts = (" ".join(part.split()) for part in _END_OF_EXPRESSION.split(code))
    return [part for part in parts if len(re.findall(r"&&|\|\|", part)) >= MOST_CONDITIONS]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if (a && b || c) return d && e;", 0),
        ("if (a && b && (c || d)) return 0;", 1),
        ("return a || /* && */ b ||\n c || d;", 1),
        ("int x = a && b; int y = c && d; char z = '&&||';", 0),
        ("#if a && b && c && \\\n d || e\nint x;\n#endif", 0),
    ],
)
def test_a_joined_condition_is_counted_by_expression(text: str, found: int) -> None:
    assert len(crowded(text)) == found


def test_no_expression_joins_more_than_three_conditions() -> None:
    assert {str(p): parts for p in FILES if (parts := crowded(p.read_text(encoding="utf-8")))} == {}


def test_an_early_exit_is_no_macro() -> None:
    assert [str(p) for p in FILES if "RETURN_IF" in p.read_text(encoding="utf-8")] == []


def test_no_file_is_denser_than_is_easy_to_read() -> None:
    found = size.density()
    assert len(found) > 60
    assert {path: tokens for path, tokens in found.items() if tokens > DENSER.get(path, size.TOKENS_A_LINE)} == {}
    assert [path for path in DENSER if found[path] <= size.TOKENS_A_LINE] == []
