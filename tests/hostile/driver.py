"""Runs models under AddressSanitizer and UndefinedBehaviorSanitizer: fuzz.c gets each in a buffer of exactly its size.

A stray access, an overflow or a hang ends the driver and fails the test with the names of the cases that did it.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from colibri.format import spec
from tests.engine.conftest import compile_c, compiler, find_clang
from tests.hostile.editor import BASES, Editor, image
from tools import size

HERE = Path(__file__).parent
E = {name: code for code, (name, _) in enumerate(spec.ERRORS)}
NOT_RUN = -1
REPAIR = 1
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@dataclass(frozen=True)
class Case:
    """One mutated model: what is changed in which base, and whether the checksums are made to fit again."""

    name: str
    base: str
    patches: tuple[tuple[int, bytes], ...] = ()
    size: int | None = None
    repair: bool = True

    @staticmethod
    def of(name: str, edit: Editor) -> Case:
        """What was changed in the editor."""
        return Case(name, edit.base, edit.patches())

    def packed(self) -> bytes:
        """The case as fuzz.c reads it."""
        size = len(image(self.base)) if self.size is None else self.size
        head = struct.pack("<4I", BASES.index(self.base), size, REPAIR if self.repair else 0, len(self.patches))
        return head + b"".join(struct.pack("<2I", at, len(data)) + data for at, data in self.patches)


@dataclass(frozen=True)
class Result:
    """The codes of one case, NOT_RUN where the engine was not asked."""

    check: int
    diagnose: int
    one: int  # status after forward with batch 1
    most: int  # after forward with max_batch
    selftest: int


@dataclass(frozen=True)
class Fuzz:
    """The engine under sanitizers, with the best kernels and with the plain ones, and its bases."""

    binaries: tuple[Path, Path]
    bases: tuple[Path, ...]

    def __call__(self, cases: Sequence[Case]) -> list[Result]:
        """The result of every case; fails where one crashes the engine, breaks a sanitizer's rule or hangs."""
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda binary: self._run(binary, cases), self.binaries))
        crashes = [c for _, crashed in parts for c in crashed]
        assert not crashes, f"{len(crashes)} cases broke the engine (up to 5 a process):\n" + "\n".join(crashes)
        (results, _), (others, _) = parts
        assert len(results) == len(cases)
        assert results == others, "the kernels disagree"
        for case, result in zip(cases, results, strict=True):
            assert sound(result), f"{case.name}: {result}"
        return results

    def _run(self, binary: Path, cases: Sequence[Case]) -> tuple[list[Result], list[str]]:
        results: list[Result] = []
        crashes: list[str] = []
        first = 0
        while first < len(cases) and len(crashes) < 5:
            done = subprocess.run(
                [binary, *self.bases],
                input=b"".join(c.packed() for c in cases[first:]),
                capture_output=True,
                timeout=600,
                check=False,
            )
            found = [Result(*map(int, line.split())) for line in done.stdout.decode().splitlines()]
            results += found
            first += len(found)
            if done.returncode == 0:
                break
            words = [
                w
                for w in done.stderr.decode("utf-8", "replace").splitlines()
                if "ERROR" in w or "error" in w or " in c" in w
            ]
            what = f"{cases[first].base}: {cases[first].name}" if first < len(cases) else "the driver's end"
            crashes.append(f"{what}: status {done.returncode}: {' | '.join(words[:6])}")
            first += 1
        return results, crashes


def sound(result: Result) -> bool:
    """Either refused with a code and not run, or accepted and run (where it is not too much work) without complaint."""
    if not 0 <= result.check < len(spec.ERRORS):
        return False
    ran = (result.diagnose, result.one, result.most)
    if result.check not in (E["OK"], E["CHECKSUM"]):
        return ran == (NOT_RUN,) * 3 and result.selftest == NOT_RUN
    codes = {E["OK"], NOT_RUN}
    if result.most == E["CONTEXT"]:  # of a language model whose context a whole batch does not fit
        codes.add(result.most)
    # CONTEXT: of a certificate with more rows than the context has places
    return set(ran) <= codes and result.selftest in (E["OK"], E["SELFTEST"], E["CONTEXT"], NOT_RUN)


def build(folder: Path) -> Fuzz:
    """Both drivers and the bases, in `folder`."""
    cc = find_clang() or compiler("gcc")
    flags = ["-O1", "-g", *SANITIZERS]
    binaries = []
    for kernels, more in (("best", ""), ("plain", "-UCLB_X86")):
        built = size.build(folder / kernels, cc, " ".join([*flags, more]), target="libcolibri.a")
        sources = [HERE / "fuzz.c", built / "libcolibri.a"]
        binaries.append(compile_c(cc, folder / f"fuzz_{kernels}", sources, "-std=gnu11", *flags))
    bases = []
    for name in BASES:
        bases.append(folder / f"{name}.bin")
        bases[-1].write_bytes(image(name))
    return Fuzz((binaries[0], binaries[1]), tuple(bases))
