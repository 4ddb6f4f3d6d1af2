"""Synthetic checkpoints: true shapes, random weights made when they are read, exported in bounded memory.

    python -m benchmarks.language.synthetic olmoe --dtype int4 --cache int8 --context 4352

Speed and memory do not depend on what the weights are, only routes do: `shapes.deviation` keeps them from crowding.
"""

from __future__ import annotations

import argparse
import math
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.language.home import FILES, enter, make_room
from benchmarks.language.shapes import SHAPES, Config, deviation, weights

CONTEXT = 4352  # position 4,096 and some tokens more
DISK = 20.0  # GB of models at a time
_POOL, _STARTS = 1 << 22, 1 << 20  # random numbers there are, and places where a tensor's may begin
_WEIGHT_BYTES = {"int8": 1.1, "int4": 0.62}  # at most, to make room for


class Synthetic:
    """Stands in for a `Checkpoint`: has every tensor that is asked for, made when read."""

    def __init__(self, config: Config) -> None:
        import numpy as np

        self.config, self._np = config, np
        self._pool = np.random.default_rng(0).standard_normal(_POOL, np.float32)

    def __contains__(self, name: str) -> bool:
        return not name.endswith("bias") and "fused" not in name and "gate_up_proj" not in name

    def either(self, *names: str) -> str:
        """The first name."""
        return names[0]

    def equal(self, a: str, b: str) -> bool:
        """No two tensors hold the same."""
        return False

    def finish(self, ignored: Iterable[str]) -> None:
        """Nothing is left over."""

    def take(self, name: str, shape: tuple[int, ...]) -> Any:
        """The tensor: ones for norms, else random numbers."""
        from colibri.frontends.checkpoints.checkpoint import Stored

        np, width, seed = self._np, math.prod(shape[1:]), zlib.crc32(name.encode())

        def rows(first: int, end: int) -> Any:
            if len(shape) == 1:
                return np.ones(end - first, np.float32)
            pieces = []
            for start in range(first * width, end * width, step := _POOL - _STARTS):
                at = (seed + start * 7919) % _STARTS
                pieces.append(self._pool[at : at + min(step, end * width - start)])
            scaled = np.concatenate(pieces) * np.float32(deviation(self.config, name, shape[-1]))
            return scaled.reshape(end - first, *shape[1:])

        return Stored(name, tuple(shape), "F32", rows)


def graph(config: Config, context: int, cache: str) -> Any:
    """The graph of a shape."""
    from colibri.frontends.checkpoints.decoders import build
    from colibri.frontends.checkpoints.language_families import adapter_of
    from colibri.frontends.checkpoints.language_settings import Settings

    checkpoint: Any = Synthetic(config)
    adapter = adapter_of(config["model_type"], config)
    settings = Settings(config, adapter, context, checkpoint)
    return build("synthetic", adapter.plan(settings), checkpoint, settings.context, cache)


def exported(
    shape: str, dtype: str, cache: str = "fp16", context: int = CONTEXT, keep: Iterable[Path] = (), disk: float = DISK
) -> Path:
    """The model file of a shape, made where it is missing."""
    path = FILES / f"{shape}-{dtype}-{cache}-{context}.bin"
    if not path.exists():
        from colibri.pipeline.language import export_lm

        make_room(weights(SHAPES[shape]) * _WEIGHT_BYTES[dtype], keep, disk * 1e9)
        begin = time.monotonic()
        print(f"exporting {path.name}", flush=True)
        export_lm(graph(SHAPES[shape], context, cache), path, dtype=dtype)
        print(f"  {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - begin:.0f} s", flush=True)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=_WEIGHT_BYTES, default="int8")
    parser.add_argument("--cache", choices=["fp32", "fp16", "int8"], default="fp16")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--disk", type=float, default=DISK, help="GB of models at a time; the oldest are deleted")
    args = parser.parse_args()
    enter()
    print(exported(args.shape, args.dtype, args.cache, args.context, disk=args.disk))


if __name__ == "__main__":
    main()
