"""What quantising costs: a trained model in Colibri's formats and in the peer's, against float32.

    python -m benchmarks.language.quality --publish

The model is examples/storyteller/checkpoint; speed does not matter here, so the machine need not be quiet.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.language.engines import LlamaCpp
from benchmarks.language.gguf_files import from_checkpoint, tensor_bytes
from benchmarks.language.home import FILES, ROOT, enter, save
from benchmarks.language.page import publish

CHECKPOINT = ROOT / "examples" / "storyteller" / "checkpoint"
TEXT = ROOT / "examples" / "storyteller" / "validation.txt"
CONTEXT = 256
OURS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": "fp16"},
    "fp32, cache fp16": {"dtype": "fp32", "cache": "fp16"},
    "fp32, cache int8": {"dtype": "fp32", "cache": "int8"},
    "int8": {"dtype": "int8"},
    "int8, cache fp16": {"dtype": "int8", "cache": "fp16"},
    "int8, cache int8": {"dtype": "int8", "cache": "int8"},
    "int8, float activations": {"dtype": "int8", "activations": "float"},
    "int8 with E, 1 %": {"dtype": "int8", "share": 0.01},
    "int8 with E, 5 %": {"dtype": "int8", "share": 0.05},
    "int8 with E, 8 %": {"dtype": "int8", "share": 0.08},
    "int4": {"dtype": "int4"},
    "int4, cache int8": {"dtype": "int4", "cache": "int8"},
    "int4 with E, 1 %": {"dtype": "int4", "share": 0.01},
    "int4 with E, 5 %": {"dtype": "int4", "share": 0.05},
}
THEIRS = {"F16": 1, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2}  # enum llama_ftype
BLOCKS = ("Q8_0", "Q5_0", "Q4_1", "Q4_0", "Q4_K")
_BLOCK, _SUPER = 32, 256  # weights that share a scale; of K formats, blocks whose scales share one


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.language.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--publish", action="store_true", help="write docs/language-performance.md")
    args = parser.parse_args()
    enter()
    save("quality", measure(args.tokens // CONTEXT * CONTEXT))
    print(publish(args.publish))


class Judge:
    """Compares logits with float32's."""

    def __init__(self, tokens: int) -> None:
        import numpy as np

        from colibri.text.tokenizer import Tokenizer

        self._np = np
        ids = Tokenizer(CHECKPOINT).encode(TEXT.read_text(encoding="utf-8"))
        if len(ids) <= tokens:
            raise SystemExit(f"the text has {len(ids):,} tokens, which is not more than {tokens:,}")
        self.pieces = [list(map(int, ids[a : a + CONTEXT])) for a in range(0, tokens, CONTEXT)]
        self._next = np.array(ids[1 : tokens + 1]).reshape(-1, CONTEXT)[:, :-1].reshape(-1)
        self._base: Any = None
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, engine: str, logits: Iterable[Any], size: int, weights: int) -> None:
        """A row, from the logits of each piece; the first is what the others are compared with."""
        np = self._np
        kept = np.concatenate([np.asarray(x, np.float64)[:-1] for x in logits])
        kept -= kept.max(-1, keepdims=True)
        p = kept - np.log(np.exp(kept).sum(-1, keepdims=True))
        if self._base is None:
            self._base = p
        kl = (np.exp(self._base) * (self._base - p)).sum(-1)
        row = {
            "name": name, "engine": engine, "bytes": size, "bits": 8 * size / weights,
            "perplexity": float(np.exp(-p[np.arange(len(p)), self._next].mean())), "kl": float(kl.mean()),
            "kl99": float(np.quantile(kl, 0.99)), "top": float((p.argmax(-1) == self._base.argmax(-1)).mean()),
        }  # fmt: skip
        self.rows.append(row)
        print(f"  {name:28s} {engine:10s} {size:10,d} bytes, perplexity {row['perplexity']:.4f}, KL {row['kl']:.6f}",
              flush=True)  # fmt: skip


def measure(tokens: int) -> dict[str, Any]:
    """All formats."""
    judge = Judge(tokens)
    weights = _weights()
    _ours(judge, "fp32", weights, dtype="fp32")
    for name, options in OURS.items():
        _ours(judge, name, weights, **options)
    _theirs(judge, weights)
    for kind in BLOCKS:
        _ours(judge, f"{kind} in blocks", weights, size=_in_blocks(kind), rounded=kind, dtype="fp32")
    return {"tokens": tokens, "context": CONTEXT, "rows": judge.rows}


def _ours(
    judge: Judge, name: str, weights: int, *, cache: str = "fp32", size: int = 0, rounded: str = "", **options: Any
) -> None:
    import colibri
    from colibri.frontends.checkpoints.language_models import load_checkpoint
    from colibri.pipeline.language import export_lm

    graph = load_checkpoint(CHECKPOINT, context=CONTEXT, cache=cache)
    if rounded:
        _round(graph, rounded)
    path = FILES / "storyteller.bin"
    export_lm(graph, path, **options)
    model = colibri.load(path, threads=2)
    package = model.package

    def logits() -> Iterable[Any]:
        for piece in judge.pieces:
            model.reset()
            yield model.logits(piece)

    held = int(package.header["shared_bytes"]) + sum(int(e["bytes"]) for e in package.experts)
    judge.add(name, "Colibri" if not rounded else "gguf", logits(), size or held, weights)
    path.unlink()


def _round(graph: Any, kind: str) -> None:
    """Put every matrix but the routers through a format of the peer's."""
    import gguf
    import numpy as np

    from colibri.ir.graph import logit_masks
    from colibri.ir.weights import Deferred

    of = getattr(gguf.GGMLQuantizationType, kind)

    def through(x: Any) -> Any:
        padded = np.zeros((x.shape[0], -(-x.shape[1] // _BLOCK) * _BLOCK), np.float32)
        padded[:, : x.shape[1]] = x
        flat = padded.reshape(-1)
        if kind == "Q4_K":  # its blocks of 256 go on from row to row
            flat = np.pad(flat, (0, -len(flat) % _SUPER))
            packed = _by_ggml(flat.reshape(-1, _SUPER), of)
        else:
            packed = gguf.quants.quantize(flat.reshape(-1, _BLOCK), of)
        back = gguf.quants.dequantize(packed, of).reshape(-1)[: padded.size].reshape(padded.shape)
        return np.ascontiguousarray(back[:, : x.shape[1]], np.float32)

    routed = {node.inputs[1] for node in graph.moe_nodes()}
    routers = {node.inputs[1] for node in graph.nodes if node.op == "linear" and node.output in routed}
    kept = routers | set(logit_masks(graph))
    for part in (graph, *(expert for node in graph.moe_nodes() for expert in node.attrs["experts"])):
        for name, value in list(part.constants.items()):
            if isinstance(value, Deferred) and len(value.shape) == 2 and name not in kept:
                part.constants[name] = Deferred(value.shape, np.ndarray, lambda value=value: through(value.load()))


def _by_ggml(rows: Any, kind: Any) -> Any:
    """The bytes of rows of one block each, by the peer's own quantiser: the gguf package has none for K formats."""
    import ctypes

    import gguf
    import llama_cpp
    import numpy as np

    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    packed = np.empty((len(rows), gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    source = np.ascontiguousarray(rows, np.float32)
    at = [ctypes.c_void_p(x.ctypes.data) for x in (source, packed)]
    sizes = [ctypes.c_int64(n) for n in (0, len(rows), rows.shape[1])]
    done = library.ggml_quantize_chunk(ctypes.c_int(int(kind)), *at, *sizes, ctypes.c_void_p(0))
    if done != packed.size:
        raise SystemExit(f"ggml_quantize_chunk wrote {done} bytes, not {packed.size}")
    return packed


def _theirs(judge: Judge, weights: int) -> None:
    """The peer's rows, but Q4_K: its blocks of 256 do not fit rows of 160, and the peer takes Q5_0 instead."""
    from llama_cpp import llama_cpp as c

    whole, path = FILES / "storyteller-f32.gguf", FILES / "storyteller.gguf"
    from_checkpoint(CHECKPOINT, whole)
    engine = LlamaCpp()
    engine.imports()
    for kind, number in {"F32": 0, **THEIRS}.items():
        options = c.llama_model_quantize_default_params()
        options.ftype, options.pure, options.nthread = number, True, 2
        options.output_tensor_type = options.token_embedding_type = c.GGML_TYPE_COUNT
        if c.llama_model_quantize(str(whole).encode(), str(path).encode(), options):
            print(f"  {kind}: llama.cpp refuses", flush=True)
            continue
        size = sum(n for name, n in tensor_bytes(path).items() if name != "output.weight")
        engine.load(path, 2, CONTEXT, "fp32")
        judge.add(kind, "llama.cpp", (engine.all_logits(piece) for piece in judge.pieces), size, weights)
        engine.free()
        path.unlink()
    whole.unlink()


def _weights() -> int:
    from colibri.frontends.checkpoints.checkpoint import Checkpoint

    return sum(math.prod(t.shape) for t in Checkpoint(CHECKPOINT).tensors.values())


def _in_blocks(kind: str) -> int:
    """Bytes of the checkpoint where every matrix but the routers is in a format of blocks, the rest float32."""
    import gguf

    from colibri.frontends.checkpoints.checkpoint import Checkpoint

    per_block, size = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
    total = 0
    for name, t in Checkpoint(CHECKPOINT).tensors.items():
        plain = len(t.shape) == 1 or name.endswith("mlp.gate.weight")
        padded = 0 if plain else t.shape[0] * -(-t.shape[1] // _BLOCK) * _BLOCK
        total += 4 * math.prod(t.shape) if plain else -(-padded // per_block) * size
    return total


if __name__ == "__main__":
    main()
