"""A directory of tensors as Hugging Face stores models: config.json and one or more safetensors files.

A tensor, or some of its rows, is read when it is needed and converted to float32 from any stored type.
Nothing here knows what a tensor is for; that each is used, and once, is kept count of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from colibri.common.folder import Folder
from colibri.common.names import check_name, shown
from colibri.errors import ExportError
from colibri.frontends.checkpoints.quantized import combine, quantization_of
from colibri.frontends.tensor_files import FP8, PLAIN, Stored, read_header

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a directory by name, and its configuration."""

    def __init__(self, directory: str | Path) -> None:
        """Read the configuration and all headers; raises ExportError where something is missing or damaged."""
        self.directory = Path(directory)
        self.folder = Folder(directory)
        if not self.folder.has("config.json"):
            raise ExportError(f"{self.directory / 'config.json'} is missing: {self.directory} is no directory of a "
                              "Hugging Face model")  # fmt: skip
        self.config = self.folder.json("config.json")
        self.tensors: dict[str, Stored] = {}
        self._taken: set[str] = set()
        for file, wanted in self._files():
            for stored in read_header(self.folder, file):
                if stored.name in self.tensors:
                    raise ExportError(f"tensor {stored.name!r} is in two files of {self.directory}: remove one")
                self.tensors[stored.name] = stored
            for name in wanted:
                if name not in self.tensors:
                    raise ExportError(f"{self.directory / file} lacks tensor {name!r}, which the index says is there: "
                                      "fetch it again")  # fmt: skip
        combine(self.tensors, quantization_of(self.config))

    def _files(self) -> list[tuple[str, list[str]]]:
        """Each file, and the tensors the index says are in it."""
        if self.folder.has(WHOLE):
            return [(WHOLE, [])]
        if not self.folder.has(INDEX):
            others = self.folder.names((".bin", ".pt", ".pth", ".gguf"))
            hint = f"; {others[0]} is in a format that is not read: save the model as safetensors" if others else ""
            raise ExportError(f"{self.directory} has no {WHOLE} and no {INDEX}{hint}")
        index = self.directory / INDEX
        listed = self.folder.json(INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise ExportError(f"{index} has no weight_map from tensors to files: fetch it again")
        shards: dict[str, list[str]] = {}
        for name, file in listed.items():
            shards.setdefault(file, []).append(check_name(name, f"a tensor of {index}"))
        for file, names in shards.items():
            if not self.folder.has(file):
                raise ExportError(
                    f"{index} names {shown(file)} for {names[0]!r}, which is not there: fetch the missing file"
                )
        return sorted(shards.items())

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def either(self, *names: str) -> str:
        """The first of the names there is a tensor of; the first where there is none."""
        return next((name for name in names if name in self.tensors), names[0])

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor `name`, which must have this shape and not have been taken before."""
        if name not in self.tensors:
            near = [n for n in self.tensors if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:1]
            hint = f" (there is {near[0]!r})" if near else ""
            raise ExportError(
                f"tensor {name!r} of shape {shape} is missing{hint}: the checkpoint is incomplete, or its config.json "
                "describes another model"
            )
        stored = self.tensors[name]
        if stored.shape != shape:
            raise ExportError(
                f"tensor {name!r} has shape {stored.shape}, not {shape} as config.json asks: the two do not belong "
                "together"
            )
        if stored.kind not in (*PLAIN, *FP8, "MXFP4", "FP8"):
            raise ExportError(f"tensor {name!r} holds {stored.kind}, not floats: use an unquantised checkpoint")
        if name in self._taken:
            raise ExportError(f"tensor {name!r} is used twice: the family's description is wrong; please report it")
        self._taken.add(name)
        return stored

    def finish(self, ignored: Iterable[str]) -> None:
        """Raise ExportError where a tensor has not been taken and matches none of the patterns."""
        patterns = [re.compile(p) for p in ignored]
        left = [n for n in self.tensors if n not in self._taken and not any(p.fullmatch(n) for p in patterns)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ExportError(
                f"tensor {left[0]!r}{more} has no place in this model: config.json describes another model, or the "
                "checkpoint has parts (adapters, prediction heads) that are not supported; remove what does not belong"
            )

    def equal(self, a: str, b: str) -> bool:
        """Whether two tensors hold the same numbers, compared a few rows at a time."""
        first, second = self.tensors[a], self.tensors[b]
        step = max(1, (1 << 22) // max(1, math.prod(first.shape[1:])))
        return first.shape == second.shape and all(
            np.array_equal(first.rows(n, min(n + step, first.shape[0])), second.rows(n, min(n + step, first.shape[0])))
            for n in range(0, first.shape[0], step)
        )


__all__ = ["Checkpoint", "Stored"]
