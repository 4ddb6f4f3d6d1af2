"""The shapes that are measured: configurations as Hugging Face writes them, and the work of a token."""

from __future__ import annotations

import math
from typing import Any

Config = dict[str, Any]

_OLMOE: Config = {
    "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "vocab_size": 50304, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "norm_topk_prob": False,
    "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
_QWEN: Config = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "norm_topk_prob": True, "tie_word_embeddings": False, "rope_theta": 1e6, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
# OLMoE's longest text is 4,096 tokens; it is doubled here, so that decoding at position 4,096 can be measured.
SHAPES: dict[str, Config] = {
    "olmoe": _OLMOE,
    "qwen3-30b": _QWEN,
    "olmoe-2": {**_OLMOE, "num_hidden_layers": 2},
    "qwen3-2": {**_QWEN, "num_hidden_layers": 2},
}


def head_dim(config: Config) -> int:
    """Numbers of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def expert_width(config: Config) -> int:
    """Hidden numbers of an expert."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def deviation(config: Config, name: str, width: int) -> float:
    """Of a random matrix's numbers, by the checkpoint's name for it and its inputs.

    Embeddings have numbers of size 1, and what the layers add to them is about as large together: were it larger, the
    text so far would drown each token, and routes would crowd on the experts that this text likes.
    """
    if "embed_tokens" in name:
        return 1.0
    layers = 2 * config["num_hidden_layers"] if "o_proj" in name or "down_proj" in name else 1
    return 1 / math.sqrt(width * layers)


def _layer(config: Config, experts: int) -> int:
    d, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * d * (heads + kv) * head_dim(config)
    return int(attention + d * config["num_experts"] + experts * 3 * d * expert_width(config))


def weights(config: Config) -> int:
    """Of the whole model."""
    both = 2 * config["vocab_size"] * config["hidden_size"]
    return int(config["num_hidden_layers"] * _layer(config, config["num_experts"]) + both)


def prefill_macs(config: Config, tokens: int) -> int:
    """Products with weights for a text of this many tokens, and the logits of its last one."""
    each = config["num_hidden_layers"] * _layer(config, config["num_experts_per_tok"])
    return int(tokens * each + config["vocab_size"] * config["hidden_size"])
