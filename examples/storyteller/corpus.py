"""The text that the storyteller learns from: the King James Bible and WordNet's glosses, out of Debian packages.

`documents` finds the packages' files where they are installed, or else downloads and unpacks the packages into a
temporary folder, which needs apt and the network but no root. Run this file to write `validation.txt` beside it and
to see the sizes.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
VALIDATION = HERE / "validation.txt"
END = "<|endoftext|>"  # closes every document, in the files as in training

PACKAGES = ("bible-kjv", "bible-kjv-text", "wordnet-base")
WHOLE_BIBLE = "Gen1:1-Rev22:21"
UNWRAPPED = "100000"  # columns, so that every verse stays on its line
CHAPTER = re.compile(r"(?:[1-3] )?[A-Z][A-Za-z ]+ \d+")
VERSE = re.compile(r" +\d+ (?P<text>.+)")

KINDS = ("noun", "verb", "adj", "adv")
ENTRIES_PER_PAGE = 25
SYNTACTIC_MARKER = re.compile(r"\((?:a|p|ip)\)$")
# Entries that WordNet itself marks as insulting or obscene, and the plainly sexual, are no text for a demo.
UNWANTED = re.compile(
    r"slur|offensive|obscen|disparag|derogat|vulgar|insulting|sexual|genital|prostitut", re.IGNORECASE
)

VALIDATION_SHARE = 60  # one document in so many


@dataclass(frozen=True)
class Document:
    """A chapter of the Bible or a page of the dictionary."""

    name: str
    text: str  # lines, each closed by a newline

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the validation text: decided by its name alone, so the same in every run."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) % VALIDATION_SHARE == 0


def unpack(folder: Path) -> Path:
    """Download the packages into `folder` and unpack them there; the root of what they would install."""
    root = folder / "root"
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True, capture_output=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    return root


def chapters(root: Path) -> Iterator[Document]:
    """The Bible's chapters: a heading, then one verse a line, without their numbers."""
    command = [root / "usr/bin/bible", "-p", root / "usr/lib", "-l", UNWRAPPED, WHOLE_BIBLE]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, encoding="ascii").stdout
    heading, verses = "", list[str]()
    for line in [*printed.splitlines(), "End 1"]:
        if verse := VERSE.fullmatch(line):
            verses.append(" ".join(verse["text"].split()))
        elif CHAPTER.fullmatch(line):
            if verses:
                yield Document(heading, "\n".join([heading, *verses, ""]))
            heading, verses = line, []


def entry(line: str, kind: str) -> str | None:
    """`word, synonym (noun): gloss; "example"` from a line of WordNet's data.* (wndb(5WN)), or None to leave it out.

    Left out are entries without an example, and those with capitals: names, and the Latin ones of species.
    """
    data, _, gloss = line.partition(" | ")
    fields = data.split()
    words = [SYNTACTIC_MARKER.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
    if '"' not in gloss or UNWANTED.search(gloss) or any(word != word.lower() for word in words):
        return None
    return f"{', '.join(words)} ({kind}): {' '.join(gloss.split())}"


def pages(root: Path) -> Iterator[Document]:
    """The dictionary's pages: entries in WordNet's own order, in which kindred meanings are often neighbours."""
    for kind in KINDS:
        with (root / f"usr/share/wordnet/data.{kind}").open(encoding="ascii") as lines:
            entries = [found for line in lines if not line.startswith("  ") and (found := entry(line, kind))]
        for page, start in enumerate(range(0, len(entries), ENTRIES_PER_PAGE)):
            yield Document(f"{kind} {page}", "\n".join([*entries[start : start + ENTRIES_PER_PAGE], ""]))


def documents() -> list[Document]:
    """All documents, in the order of the books."""
    installed = Path("/")
    if (installed / "usr/bin/bible").exists() and (installed / "usr/share/wordnet/data.noun").exists():
        return [*chapters(installed), *pages(installed)]
    with tempfile.TemporaryDirectory() as folder:
        root = unpack(Path(folder))
        return [*chapters(root), *pages(root)]


def join(chosen: list[Document]) -> str:
    """One text of many documents."""
    return "".join(document.text + END for document in chosen)


def split() -> tuple[list[Document], list[Document]]:
    """The documents for training, and those held out."""
    every = documents()
    return [d for d in every if not d.held_out], [d for d in every if d.held_out]


def main() -> None:
    """Write validation.txt and print what there is."""
    training, held_out = split()
    VALIDATION.write_text(join(held_out), encoding="ascii")
    for name, chosen in (("training", training), ("validation", held_out)):
        bible = [d for d in chosen if CHAPTER.fullmatch(d.name)]
        print(
            f"{name:11}{len(chosen):6,} documents {len(join(chosen)):12,} bytes, "
            f"of them {len(bible):,} chapters {len(join(bible)):,} bytes"
        )


if __name__ == "__main__":
    main()
