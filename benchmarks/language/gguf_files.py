"""The peer's model files: GGUF with random weights of true shapes, or with the weights of a checkpoint.

    python -m benchmarks.language.gguf_files olmoe --format Q4_K

Random blocks are valid ones whose numbers vary as the synthetic checkpoint's do; one tensor is in memory at a time.
The architecture is the shape's own, `olmoe` or `qwen3moe`; there is no tokenizer (`no_vocab`).
"""

from __future__ import annotations

import argparse
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.language.home import FILES, enter, make_room
from benchmarks.language.shapes import SHAPES, Config, deviation, expert_width, head_dim, weights

FORMATS = ("Q8_0", "Q4_0", "Q4_K")
_ARCHITECTURE = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
_BLOCKS = 1 << 15  # different ones in a file; tensors begin at different ones
_LAYER = {  # of a layer: the checkpoint's names
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj", "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}  # fmt: skip
Shape = tuple[int, ...]
Make = Callable[[Shape, str, str, int], Any]  # shape, the checkpoint's name, its kind here, experts it is stacked from


def _tensors(config: Config) -> Iterator[tuple[str, str, Shape]]:
    """The peer's name, the checkpoint's, and the shape."""
    d, dim, width, count = config["hidden_size"], head_dim(config), expert_width(config), config["num_experts"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    whole = config["model_type"] == "olmoe"  # its norms are of all heads together
    shapes: dict[str, Shape] = {
        "attn_norm": (d,), "attn_q": (q, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, q),
        "attn_q_norm": (q if whole else dim,), "attn_k_norm": (kv if whole else dim,), "ffn_norm": (d,),
        "ffn_gate_inp": (count, d), "ffn_gate_exps": (count, width, d), "ffn_up_exps": (count, width, d),
        "ffn_down_exps": (count, d, width),
    }  # fmt: skip
    yield "token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], d)
    for layer in range(config["num_hidden_layers"]):
        for name, of in _LAYER.items():
            yield f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{of}.weight", shapes[name]
    yield "output_norm.weight", "model.norm.weight", (d,)
    yield "output.weight", "lm_head.weight", (config["vocab_size"], d)


def _kind(name: str, shape: Shape, wanted: str) -> str:
    """How a tensor is stored: norms and routers are float32, as the peer's own quantiser leaves them."""
    return "F32" if len(shape) == 1 or "gate_inp" in name else wanted


def write(path: Path, config: Config, kind: str, context: int, make: Make) -> None:
    """A file whose tensors are what `make` gives, as bytes (rows, bytes of a row) or float32."""
    import gguf
    import numpy as np

    partial = path.with_suffix(".gguf.partial")
    writer = gguf.GGUFWriter(partial, _ARCHITECTURE[config["model_type"]])
    writer.add_context_length(max(context, config["max_position_embeddings"]))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(expert_width(config))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    entries = []
    for name, of, shape in _tensors(config):
        stored = _kind(name, shape, kind)
        of_kind = getattr(gguf.GGMLQuantizationType, stored)
        per_block, bytes_of_block = gguf.GGML_QUANT_SIZES[of_kind]
        size = math.prod(shape) // per_block * bytes_of_block
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=of_kind)
        entries.append((of, shape, stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for of, shape, stored in entries:
        writer.write_tensor_data(make(shape, of, stored, config["num_experts"]))
    writer.close()
    partial.rename(path)


class RandomBlocks:
    """Makes tensors of random blocks."""

    def __init__(self, config: Config) -> None:
        import numpy as np

        self._np, self._config = np, config
        self._pools: dict[tuple[str, float], Any] = {}
        self._random = np.random.default_rng(0)

    def __call__(self, shape: Shape, of: str, kind: str, experts: int) -> Any:
        """A tensor: ones where it is a norm."""
        import gguf

        np = self._np
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        seed, size = zlib.crc32(of.encode()) % _BLOCKS, deviation(self._config, of, shape[-1])
        if kind == "F32":
            return self._random.standard_normal(shape, np.float32) * np.float32(size)
        per_block, _ = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, kind)]
        pool = self._pool(kind, size, per_block)
        return np.resize(np.roll(pool, seed, axis=0), (math.prod(shape) // per_block, pool.shape[1]))

    def _pool(self, kind: str, size: float, per_block: int) -> Any:
        """Blocks of numbers whose deviation is `size`."""
        import gguf

        np = self._np
        if (kind, size) not in self._pools:
            if kind == "Q4_K":
                self._pools[kind, size] = self._q4_k(size)
            else:
                numbers = self._random.standard_normal((_BLOCKS, per_block), np.float32) * np.float32(size)
                self._pools[kind, size] = gguf.quants.quantize(numbers, getattr(gguf.GGMLQuantizationType, kind))
        return self._pools[kind, size]

    def _q4_k(self, size: float) -> Any:
        """d · scale · code - dmin · least: the same 6-bit number as scale and least, dmin = 7.5 d, so the mean is 0."""
        np, blocks = self._np, self._np.empty((_BLOCKS, 144), self._np.uint8)
        scale = self._random.integers(32, 64, (_BLOCKS, 8), np.uint8)
        d = size / (4.61 * 48)  # the deviation of a code is 4.61, the mean scale 48
        blocks[:, 0:4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
        low, high = scale[:, :4], scale[:, 4:]
        blocks[:, 4:8] = low | (high >> 4) << 6
        blocks[:, 8:12] = low | (high >> 4) << 6
        blocks[:, 12:16] = (high & 15) | (high & 15) << 4
        blocks[:, 16:] = self._random.integers(0, 256, (_BLOCKS, 128), np.uint8)
        return blocks


def random_file(shape: str, kind: str, context: int, keep: Iterable[Path], disk: float) -> Path:
    """The peer's file of a shape, made where it is missing."""
    path = FILES / f"{shape}-{kind}.gguf"
    if not path.exists():
        bits = {"Q8_0": 8.6, "Q4_0": 4.6, "Q4_K": 4.6}[kind]
        make_room(weights(SHAPES[shape]) * bits / 8, keep, disk * 1e9)
        begin = time.monotonic()
        print(f"writing {path.name}", flush=True)
        write(path, SHAPES[shape], kind, context, RandomBlocks(SHAPES[shape]))
        print(f"  {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - begin:.0f} s", flush=True)
    return path


def from_checkpoint(directory: Path, path: Path) -> Config:
    """A float32 file of a checkpoint (olmoe); its configuration."""
    import numpy as np

    from colibri.frontends.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint(directory)
    config = {**checkpoint.config, "rope_theta": checkpoint.config["rope_parameters"]["rope_theta"]}

    def make(shape: Shape, of: str, kind: str, experts: int) -> Any:
        name = "model.embed_tokens.weight" if of == "lm_head.weight" and config["tie_word_embeddings"] else of
        if "{e}" not in name:
            return np.ascontiguousarray(checkpoint.tensors[name].read().reshape(shape))
        if (first := name.format(e=0)) in checkpoint.tensors:
            return np.stack([checkpoint.tensors[name.format(e=e)].read() for e in range(experts)])
        raise SystemExit(f"{directory} has no tensor {first!r}: its experts are stored in another way")

    write(path, config, "F32", config["max_position_embeddings"], make)
    return config


def tensor_bytes(path: Path) -> dict[str, int]:
    """The bytes of each tensor of a file."""
    import gguf

    return {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors}


def active_bytes(path: Path, config: Config) -> int:
    """Bytes of the weights that one token reads."""
    share = config["num_experts_per_tok"] / config["num_experts"]
    sizes = {name: size for name, size in tensor_bytes(path).items() if name != "token_embd.weight"}
    return round(sum(size * (share if "_exps" in name else 1) for name, size in sizes.items()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--format", choices=FORMATS, default="Q8_0")
    parser.add_argument("--disk", type=float, default=20.0, help="GB of models at a time; the oldest are deleted")
    args = parser.parse_args()
    enter()
    print(random_file(args.shape, args.format, 0, (), args.disk))


if __name__ == "__main__":
    main()
