"""Regular expressions that cut text into pieces, compiled to tables for the C tokenizer.

A published pattern (GPT-2, cl100k, o200k, Llama 3, Qwen, DeepSeek, …) is an ordered choice of sequences of character
sets with greedy repeats, contractions and a look at the next character. That much, and no more, is understood here; it
becomes a deterministic automaton over character classes that takes the match a backtracking matcher would take first
(the states are lists of threads in order of preference, as in RE2). What a set contains is asked from the library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri.errors import ExportError
from colibri.text import unicode_probe

MATCHED = 0x8000  # of a table entry: a match ends before the character just read
MOST_STATES = 4096


@dataclass(frozen=True)
class Set:
    """One character of the set that `atom` describes to the library; `inverted`: any other character."""

    atom: str
    inverted: bool = False


@dataclass(frozen=True)
class Cat:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    choices: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    node: Node
    least: int
    most: int | None
    greedy: bool = True
    possessive: bool = False


@dataclass(frozen=True)
class Look:
    """The next character is in the set (`negated`: is not, or there is none); `or_end`: or there is none."""

    set: Set
    negated: bool = False
    or_end: bool = False


Node = Set | Cat | Alt | Repeat | Look


# --- parsing ----------------------------------------------------------------------------------------------------------


def literal(text: str) -> Node:
    """The node that matches `text`."""
    return _cat([Set(f"\\x{{{ord(c):X}}}") for c in text])


def parse(pattern: str) -> Node:
    """The tree of a regular expression; raises ExportError where it uses anything that is not understood."""
    parser = _Parser(pattern)
    node = parser.choice(False)
    if parser.at < len(pattern):
        parser.refuse("an unmatched ')'")
    return node


def _cat(parts: Sequence[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Cat(tuple(parts))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def refuse(self, what: str) -> None:
        raise ExportError(
            f"the split pattern {self.pattern!r} has {what} at {self.at}, which the C tokenizer does not know: "
            "use the Python tokenizer (colibri.text.tokenizer.Tokenizer)"
        )

    def take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def choice(self, fold: bool) -> Node:
        choices = [self.sequence(fold)]
        while self.take("|"):
            choices.append(self.sequence(fold))
        return choices[0] if len(choices) == 1 else Alt(tuple(choices))

    def sequence(self, fold: bool) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self.repeat(self.item(fold)))
        return _cat(parts)

    def repeat(self, node: Node) -> Node:
        counted = re.compile(r"\{(\d+)(,?)(\d*)\}").match(self.pattern, self.at)
        if self.take("?"):
            least, most = 0, 1
        elif self.take("*"):
            least, most = 0, None
        elif self.take("+"):
            least, most = 1, None
        elif counted is not None:
            self.at = counted.end()
            least = int(counted[1])
            most = int(counted[3]) if counted[3] else None if counted[2] else least
            if (most or least) > 64:
                self.refuse("a repeat of more than 64")
        else:
            return node
        if isinstance(node, Look):
            self.refuse("a repeated look-ahead")
        lazy = self.take("?")
        possessive = not lazy and counted is None and self.take("+")
        if self.at < len(self.pattern) and self.pattern[self.at] in "?*+{":
            self.refuse("a repeat of a repeat")
        return Repeat(node, least, most, not lazy, possessive)

    def item(self, fold: bool) -> Node:
        at, c = self.at, self.pattern[self.at]
        if c == "(":
            return self.group(fold)
        if c == "[":
            self.bracket()
        elif c == "\\":
            if (
                re.compile(r"\\([pP]\{\^?\w+\}|[sSdDwWrntfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^\w])").match(
                    self.pattern, at
                )
                is None
            ):
                self.refuse("an escape")
            self.at = re.compile(r"\\([pP]\{\^?\w+\}|x..|u....|.)", re.S).match(self.pattern, at).end()  # type: ignore[union-attr]
        elif c == "$":
            self.at += 1
            return Look(Set("\\n"), or_end=True)
        elif c in "^?*+{":
            self.refuse(f"an unexpected {c!r}")
        elif c == ".":
            self.at += 1
        else:
            self.at += 1
            return Set(f"(?i:\\x{{{ord(c):X}}})" if fold else f"\\x{{{ord(c):X}}}")
        atom = self.pattern[at : self.at]
        return Set(f"(?i:{atom})" if fold else atom)

    def bracket(self) -> None:
        depth, first = 0, self.at
        while True:
            if self.at >= len(self.pattern):
                self.refuse("an open '['")
            c = self.pattern[self.at]
            self.at += 2 if c == "\\" else 1
            depth += (c == "[") - (c == "]")
            if depth == 0:
                break
        if self.pattern[first : self.at] == "[]" or self.pattern.startswith("[^]", first):
            self.refuse("a ']' at the start of a set")

    def group(self, fold: bool) -> Node:
        look = None
        if self.take("(?:"):
            pass
        elif self.take("(?i:"):
            fold = True
        elif self.take("(?!"):
            look = True
        elif self.take("(?="):
            look = False
        elif self.pattern.startswith("(?", self.at) or self.pattern.startswith("(*", self.at):
            self.refuse("a group of an unknown kind")
        else:
            self.at += 1
        node = self.choice(fold)
        if not self.take(")"):
            self.refuse("an open '('")
        if look is None:
            return node
        if not isinstance(node, Set):
            self.refuse("a look-ahead of more than one character")
        assert isinstance(node, Set)
        return Look(node, negated=look)


def atoms(node: Node) -> Iterator[str]:
    """The sets a tree mentions."""
    match node:
        case Set():
            yield node.atom
        case Look():
            yield node.set.atom
        case Repeat():
            yield from atoms(node.node)
        case Cat():
            for part in node.parts:
                yield from atoms(part)
        case Alt():
            for choice in node.choices:
                yield from atoms(choice)


# --- compiling --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alphabet:
    """The character classes that a tokenizer's patterns tell apart."""

    classes: unicode_probe.Classes  # by code point
    names: tuple[str, ...]
    members: tuple[tuple[bool, ...], ...]  # [class][atom]

    @staticmethod
    def of(names: Sequence[str]) -> Alphabet:
        unique = tuple(sorted(set(names)))
        try:
            classes, members = unicode_probe.partition(unique)
        except OverflowError as error:
            raise ExportError(f"the split patterns need {error}, more than 255: use the Python tokenizer") from None
        except Exception as error:  # the library's regular expressions raise bare exceptions
            raise ExportError(f"the library does not compile a split pattern: {error}") from None
        return Alphabet(classes, unique, members)

    @property
    def size(self) -> int:
        return len(self.members)

    def mask(self, s: Set) -> int:
        """The classes of a set, one bit each; the bit after them is the end of the text."""
        column = self.names.index(s.atom)
        return sum(1 << n for n, row in enumerate(self.members) if row[column] != s.inverted)


def _instructions(node: Node, alphabet: Alphabet, pattern: str) -> list[tuple[str, int, int]]:
    """A program of ("set", classes), ("look", classes), ("split", first choice, second choice) and ("match")."""
    code: list[tuple[str, int, int]] = []
    end = 1 << alphabet.size

    def refuse(why: str) -> None:
        raise ExportError(f"the split pattern {pattern!r} {why}: use the Python tokenizer")

    def nullable(n: Node) -> bool:
        match n:
            case Set():
                return False
            case Look():
                return True
            case Repeat():
                return n.least == 0 or nullable(n.node)
            case Cat():
                return all(map(nullable, n.parts))
            case Alt():
                return any(map(nullable, n.choices))

    def starts(n: Node) -> int:
        match n:
            case Set():
                return alphabet.mask(n)
            case Look():
                return end - 1
            case Repeat():
                return starts(n.node)
            case Alt():
                return _any(map(starts, n.choices))
            case Cat():
                found = 0
                for part in n.parts:
                    found |= starts(part)
                    if not nullable(part):
                        break
                return found

    def emit(n: Node, rest: tuple[Node, ...], looped: bool) -> None:
        match n:
            case Set():
                code.append(("set", alphabet.mask(n), 0))
            case Look():
                mask = alphabet.mask(n.set)
                code.append(("look", ~mask & (2 * end - 1) if n.negated else mask | (end if n.or_end else 0), 0))
            case Cat():
                for i, part in enumerate(n.parts):
                    emit(part, n.parts[i + 1 :] + rest, looped)
            case Alt():
                exits = []
                for choice in n.choices[:-1]:
                    at = len(code)
                    code.append(("split", at + 1, 0))
                    emit(choice, rest, looped)
                    exits.append(len(code))
                    code.append(("split", 0, 0))
                    code[at] = ("split", at + 1, len(code))
                emit(n.choices[-1], rest, looped)
                for at in exits:
                    code[at] = ("split", len(code), len(code))
            case Repeat():
                if n.most is None and nullable(n.node):
                    refuse("repeats something empty")
                if n.possessive:
                    # Giving characters back would not help what follows, so greedy means the same.
                    follows, after = 0, True
                    for part in rest:
                        follows |= starts(part)
                        after = after and nullable(part)
                        if not after:
                            break
                    if looped or not isinstance(n.node, Set) or not (after or follows & alphabet.mask(n.node) == 0):
                        refuse("has a possessive repeat that is not the same as a greedy one")
                for _ in range(n.least):
                    emit(n.node, rest, True)
                if n.most is None:
                    at = len(code)
                    code.append(("split", 0, 0))
                    emit(n.node, rest, True)
                    code.append(("split", at, at))
                    code[at] = ("split", at + 1, len(code)) if n.greedy else ("split", len(code), at + 1)
                else:
                    skips = []
                    for _ in range(n.most - n.least):
                        skips.append(len(code))
                        code.append(("split", 0, 0))
                        emit(n.node, rest, True)
                    for at in skips:
                        code[at] = ("split", at + 1, len(code)) if n.greedy else ("split", len(code), at + 1)

    if nullable(node):
        refuse("can match nothing")
    emit(node, (), False)
    code.append(("match", 0, 0))
    return code


def _any(masks: Any) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def compile_pattern(node: Node, alphabet: Alphabet, pattern: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The automaton, (states, classes + 1): the next state, and MATCHED; the last column stands for the text's end.

    State 0 is the end of the search, 1 its start. The match is the last one seen.
    """
    code = _instructions(node, alphabet, pattern)
    columns = alphabet.size + 1
    numbers: dict[tuple[int, ...], int] = {(): 0, (0,): 1}
    states = list(numbers)
    rows: list[list[int]] = [[0] * columns]
    for state in states:  # grows
        if not state:
            continue
        row = []
        for column in range(columns):
            matched, following = _step(code, state, column, column == columns - 1)
            if following not in numbers:
                numbers[following] = len(states)
                states.append(following)
            row.append(numbers[following] | (MATCHED if matched else 0))
        rows.append(row)
        if len(states) > MOST_STATES:
            raise ExportError(f"the split pattern {pattern!r} needs too large a table: use the Python tokenizer")
    table = _minimal(np.array(rows, np.uint16))
    if not _linear(table[:, :-1]):
        raise ExportError(f"the split pattern {pattern!r} may look far ahead in vain: use the Python tokenizer")
    return table


def _step(
    code: list[tuple[str, int, int]], state: tuple[int, ...], column: int, at_end: bool
) -> tuple[bool, tuple[int, ...]]:
    stack = list(reversed(state))
    seen: set[int] = set()
    following: list[int] = []
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        kind, a, b = code[at]
        if kind == "match":
            return True, tuple(following)  # threads of lower preference end here
        if kind == "split":
            stack += [b, a]
        elif kind == "look" and a >> column & 1:
            stack.append(at + 1)
        elif kind == "set" and not at_end and a >> column & 1 and at + 1 not in following:
            following.append(at + 1)
    return False, tuple(following)


def _minimal(table: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The table without states that behave the same (Moore's refinement); 0 and 1 keep their places."""
    matched, following = table & MATCHED, table & ~np.uint16(MATCHED)
    blocks, count = np.zeros(len(table), np.int64), 1
    while True:
        _, first, refined = np.unique(
            np.column_stack([blocks, matched, blocks[following]]), axis=0, return_index=True, return_inverse=True
        )
        refined = refined.reshape(-1)
        if len(first) == count:
            break
        blocks, count = refined, len(first)
    order = sorted(range(count), key=lambda block: int(first[block]))
    place = np.empty(count, np.uint16)
    place[order] = np.arange(count)
    small: np.ndarray[Any, np.dtype[np.uint16]] = (matched | place[blocks][following])[first[order]]
    return small


def _linear(table: np.ndarray[Any, np.dtype[np.uint16]]) -> bool:
    """Whether searches read each character a bounded number of times.

    Either every step without a match leads where a search started at that very character would be: then what has been
    read in vain need not be tried again (as in `\\s+$`). Or a search does not go in circles before its first match, and
    after one only over characters that the search after it will match (as in `\\s*[\\r\\n]+|\\s+`).
    """
    rows = table.tolist()
    if all(entry == rows[1][column] for row in rows for column, entry in enumerate(row) if entry and entry < MATCHED):
        return True
    first = [1]
    edges: set[tuple[Any, Any]] = set()
    for state in first:  # grows
        for entry in rows[state]:
            if entry and not entry & MATCHED:
                edges.add((state, entry))
                if entry not in first:
                    first.append(entry)
    if _circular(edges):
        return False
    edges = set()
    pairs = {
        (entry & ~MATCHED, rows[1][column])
        for row in rows
        for column, entry in enumerate(row)
        if entry & MATCHED and entry & ~MATCHED
    }
    ahead = list(pairs)
    for state, next_search in ahead:  # grows
        for column, entry in enumerate(rows[state]):
            if entry and not entry & MATCHED:
                following = rows[next_search][column]
                pair = (entry, following & ~MATCHED)
                if not following & MATCHED:
                    edges.add(((state, next_search), pair))
                if pair not in pairs:
                    pairs.add(pair)
                    ahead.append(pair)
    return not _circular(edges)


def _circular(edges: set[tuple[Any, Any]]) -> bool:
    while edges:
        sources = {a for a, _ in edges}
        left = {(a, b) for a, b in edges if b in sources}
        if left == edges:
            return True
        edges = left
    return False


def pieces(table: np.ndarray[Any, np.dtype[np.uint16]], classes: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """Cut a text given by its characters' classes: begin, end, and whether the pattern matched (else: between matches).

    What the C tokenizer does, in Python, to check a table against the library.
    """
    rows = table.tolist()
    begin = at = 0
    while at < len(classes):
        state, last, n = 1, 0, at
        while n < len(classes) and state:
            state = rows[state][classes[n]]
            last = n if state & MATCHED else last
            state &= ~MATCHED
            n += 1
        if state and rows[state][-1] & MATCHED:
            last = n
        if last:
            if begin < at:
                yield begin, at, False
            yield at, last, True
            begin = at = last
        else:
            at += 1
    if begin < at:
        yield begin, at, False
