"""Tiny random language models of every family, with every option of their configurations that changes the result."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from torch import nn

from colibri.frontends.checkpoints.language_families import ADAPTERS

Array = np.ndarray[Any, Any]

VOCABULARY, TOKENS = 48, 40
SOURCE = np.random.default_rng(8).integers(0, VOCABULARY, TOKENS)  # the text that encoders read
ROUTERS = re.compile(r"(TopKRouter|TopkRouter|Top1Router|V1Gate|Llama4Router)$")
ENCODERS = ("switch_transformers",)  # families that read a source text
BASE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40, "moe_intermediate_size": 24}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 6}  # fmt: skip
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "intermediate_size": 40,
          "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "intermediate_size": 40, "moe_intermediate_size": 24,
         "moe_num_shared_experts": 1}  # fmt: skip
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "intermediate_size_mlp": 40,
          "head_dim": 8}  # fmt: skip

SWITCH = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3,
          "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_heads": 4, "num_experts": 4,
          "max_position_embeddings": 64, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
          "decoder_start_token_id": 3, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip

BASES: dict[str, dict[str, Any]] = {
    "mixtral": {**LOCAL, "head_dim": 8},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 28},
    "qwen3_moe": {**QWEN, "head_dim": 12},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "granitemoe": LOCAL,
    "phimoe": LOCAL,
    "gpt_oss": {**LOCAL, "head_dim": 8, "sliding_window": 8},
    "lfm2_moe": {**QWEN, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "deepseek_v2": {**LATENT, **ROUTED},
    "deepseek_v3": {**LATENT, **ROUTED, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**ROUTED, "head_dim": 8},
    "ernie4_5_moe": ERNIE,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "intermediate_size": 24, "head_dim": 8},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "llama4": LLAMA4,
    "switch_transformers": SWITCH,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 1.5, 4.0, 9.0]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
NO_DENSE = {"first_k_dense_replace": 0}

# What is switched, by family; "" is the family as it is in BASES.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "": {}, "window": {"sliding_window": 8}, "wide heads": {"head_dim": 10, "num_experts_per_tok": 3},
        "tied": {"tie_word_embeddings": True}, "gelu": {"hidden_act": "gelu"}, "one each": {"num_key_value_heads": 4},
        "eps": {"rms_norm_eps": 0.1, "rope_theta": 100.0}, "linear": rope("linear", factor=3.0),
        "dynamic": rope("dynamic", factor=3.0), "yarn": rope("yarn", **YARN),
        "yarn, factors": rope("yarn", **YARN, attention_factor=0.8, beta_fast=4.0, beta_slow=0.5, truncate=False),
        "yarn, mscale": rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.2),
        "longrope, short": rope("longrope", **LONG, factor=4.0, original_max_position_embeddings=64),
        "longrope, long": rope("longrope", **LONG, original_max_position_embeddings=16),
        "longrope, attention factor": rope("longrope", **LONG, attention_factor=1.3,
                                           original_max_position_embeddings=16),
        "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=32),
    },
    "qwen2_moe": {
        "": {}, "normalized": {"norm_topk_prob": True}, "no bias": {"qkv_bias": False},
        "windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "windows, first": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                           "num_hidden_layers": 3},
        "windows, listed": {"use_sliding_window": True, "sliding_window": 8,
                            "layer_types": ["full_attention", "sliding_attention"]},
        "dense first": {"mlp_only_layers": [0]}, "dense often": {"decoder_sparse_step": 2},
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "hidden_act": "gelu_pytorch_tanh"},
    },
    "qwen3_moe": {
        "": {}, "normalized": {"norm_topk_prob": True}, "bias": {"attention_bias": True},
        "window": {"use_sliding_window": True, "sliding_window": 8}, "dense first": {"mlp_only_layers": [0]},
        "dense often": {"decoder_sparse_step": 2, "hidden_act": "relu"},
        "tied": {"tie_word_embeddings": True, "head_dim": 8, "rms_norm_eps": 0.1},
    },
    "olmoe": {
        "": {}, "normalized": {"norm_topk_prob": True}, "clipped": {"clip_qkv": 0.5}, "bias": {"attention_bias": True},
        "one each": {"num_key_value_heads": None, "rms_norm_eps": 0.1, "hidden_act": "gelu"},
        "tied": {"tie_word_embeddings": True},
    },
    "granitemoe": {
        "": {}, "multipliers": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
                                "logits_scaling": 5.0},
        "bias": {"attention_bias": True, "rms_norm_eps": 0.1}, "tied": {"tie_word_embeddings": True},
        "one each": {"num_key_value_heads": None, "hidden_act": "relu"},
    },
    "phimoe": {
        "": {}, "biases": {"attention_bias": True, "lm_head_bias": True}, "window": {"sliding_window": 8},
        "far": {"router_jitter_noise": 0.4, "rms_norm_eps": 0.1}, "tied": {"tie_word_embeddings": True},
        "longrope, short": rope("longrope", **LONG, short_mscale=1.2, long_mscale=1.4,
                                original_max_position_embeddings=64),
        "gelu": {"hidden_act": "gelu"},
    },
    "gpt_oss": {
        "": {}, "listed": {"layer_types": ["full_attention", "sliding_attention"]},
        "all see all": {"layer_types": ["full_attention"] * 2}, "no bias": {"attention_bias": False},
        "limits": {"swiglu_limit": 0.6, "swiglu_alpha": 1.1, "sliding_window": 5}, "plain": rope("default"),
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "head_dim": 12, "num_experts_per_tok": 3},
    },
    "lfm2_moe": {
        "": {}, "turned": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
        "bias": {"conv_bias": True, "conv_L_cache": 4}, "no bias": {"use_expert_bias": False},
        "plain weights": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
        "untied": {"tie_word_embeddings": False, "norm_eps": 0.1},
    },
    "deepseek_v2": {
        "": {}, "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                           "routed_scaling_factor": 1.5},
        "plain queries": {"q_lora_rank": None, "n_shared_experts": 2},
        "bias": {"attention_bias": True, "mlp_bias": True},
        "yarn": rope("yarn", **YARN, mscale=0.7, mscale_all_dim=0.9), "no dense": NO_DENSE,
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "hidden_act": "gelu"},
    },
    "deepseek_v3": {
        "": {}, "one group": {"n_group": 1, "topk_group": 1}, "halves": {"rope_interleave": False},
        "groups": {"n_group": 4, "topk_group": 3, "routed_scaling_factor": 1.3},
        "plain queries": {"q_lora_rank": None, "n_shared_experts": 2, **NO_DENSE}, "bias": {"attention_bias": True},
        "plain weights": {"norm_topk_prob": False},
        "yarn": rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1},
    },
    "glm4_moe": {
        "": {}, "norms": {"use_qk_norm": True, **NO_DENSE}, "bias": {"attention_bias": True, "n_shared_experts": 2},
        "quarter": rope("default", partial_rotary_factor=0.25), "whole": rope("default", partial_rotary_factor=1.0),
        "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        "plain weights": {"norm_topk_prob": False},
        "yarn": rope("yarn", **YARN, partial_rotary_factor=0.5),
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1},
    },
    "ernie4_5_moe": {
        "": {}, "no shared": {"moe_num_shared_experts": 0}, "two shared": {"moe_num_shared_experts": 2},
        "bias": {"use_bias": True}, "least sum": {"moe_norm_min": 0.9},
        "some dense": {"moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 4,
                       "num_hidden_layers": 6},
        "untied": {"tie_word_embeddings": False, "rms_norm_eps": 0.1, "moe_layer_start_index": 0},
        "dense last": {"moe_layer_start_index": 0, "moe_layer_end_index": 0},
    },
    "hunyuan_v1_moe": {
        "": {}, "alpha": rope("dynamic", alpha=50.0, factor=1.0), "bias": {"attention_bias": True},
        "own k": {"moe_topk": [1, 3]}, "linear": rope("linear", factor=2.0),
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "head_dim": 12, "num_key_value_heads": None},
    },
    "minimax_m2": {
        "": {}, "half": rope("default", partial_rotary_factor=0.5), "old name": {"rotary_dim": 4},
        "wide heads": {"head_dim": 12, "rms_norm_eps": 0.1}, "tied": {"tie_word_embeddings": True},
    },
    "llama4": {
        "": {}, "dense between": {"interleave_moe_layer_step": 2}, "no norms": {"use_qk_norm": False},
        "listed": {"moe_layers": [0], "num_experts_per_tok": 2},
        "still layer": {"no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.7},
        "still often": {"no_rope_layer_interval": 2, "attn_temperature_tuning": False},
        "bias": {"attention_bias": True, "attention_chunk_size": None},
        "all see all": {"layer_types": ["full_attention"] * 2, "rms_norm_eps": 0.1},
        "chunk": {"attention_chunk_size": 64}, "tied": {"tie_word_embeddings": True, "head_dim": 12},
    },
    "switch_transformers": {
        "": {}, "untied": {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1}, "full": {"expert_capacity": 5},
        "router bias": {"router_bias": True, "dense_act_fn": "gelu"},
        "all sparse": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3},
        "few sparse": {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0, "num_decoder_layers": None},
        "far": {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 30},
    },
}  # fmt: skip
CASES = [(family, name) for family, names in VARIANTS.items() for name in names]


@dataclass
class Model:
    """A saved model, and what transformers computes with it."""

    module: Any
    directory: Path
    routes: list[Array] = field(default_factory=list)

    def logits(self, ids: Array) -> Array:
        """(tokens, vocabulary); `routes` becomes (tokens, k) sorted experts of every mixture, -1 where dropped."""
        self.routes = []
        handles = [
            m.register_forward_hook(self._seen) for m in self.module.modules() if ROUTERS.search(type(m).__name__)
        ]
        with torch.no_grad():
            text, source = (torch.from_numpy(np.asarray(x, np.int64))[None] for x in (ids, SOURCE))
            reads = self.module.config.is_encoder_decoder
            given = {"input_ids": source, "decoder_input_ids": text} if reads else {"input_ids": text}
            logits: Array = self.module(**given).logits[0].float().numpy()
        for handle in handles:
            handle.remove()
        return logits

    def _seen(self, module: nn.Module, args: Any, result: Any) -> None:
        if "Top1" in type(module).__name__:
            hot = result[0][0].numpy()
            self.routes.append(np.where(hot.any(-1, keepdims=True), hot.argmax(-1, keepdims=True), -1))
            return
        own = type(module).__name__ == "Llama4Router"
        chosen = result[1].topk(module.top_k, dim=-1).indices if own else result[2]
        self.routes.append(np.sort(chosen.reshape(-1, chosen.shape[-1]).numpy(), -1))


def config_of(family: str, settings: Mapping[str, Any]) -> Any:
    config = getattr(transformers, ADAPTERS[family].config_class)
    return config(**{**({} if family in ENCODERS else BASE), **BASES[family], **settings})


def make(family: str, directory: Path, settings: Mapping[str, Any], dtype: Any = torch.float32, seed: int = 0) -> Model:
    """A model with random weights, norms, biases and buffers, nothing left at zero or one, saved to `directory`."""
    config = config_of(family, settings)
    architecture = getattr(transformers, ADAPTERS[family].architectures[0])
    torch.manual_seed(seed)
    module = architecture(config).eval()
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(value.shape)
            if "norm" in name and name.endswith("weight"):
                value.copy_(1 + 0.3 * noise)
            elif value.ndim < 2 or "correction" in name or name.endswith("_bias"):
                value.copy_(0.3 * noise)
            elif "embed" in name:
                value.copy_(noise)
            else:
                turned = family in ("gpt_oss", "llama4") and value.ndim == 3
                scored = family in ENCODERS and name.endswith(".q.weight")  # whose scores are not scaled
                scale = 1.3 / value.shape[-2 if turned else -1] ** 0.5 / (config.d_kv**0.5 if scored else 1)
                value.copy_(noise * scale)
    module.to(dtype).save_pretrained(directory)
    if dtype != torch.float32:
        module = architecture.from_pretrained(directory, dtype=torch.float32).eval()
    return Model(module, directory)


def _released(kind: str, architecture: str, sizes: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    hidden, layers, heads, kv = sizes
    return {
        "architectures": [architecture], "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "torch_dtype": "bfloat16", "hidden_act": "silu",
        "transformers_version": "4.46.0", "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0,
        **more,
    }  # fmt: skip


# What configurations say that are spread with the models, where it is more than the class of today writes.
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LATENT_RELEASED = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "ep_size": 1,
    "moe_layer_freq": 1, "pretraining_tp": 1, "attention_bias": False, "aux_loss_alpha": 0.001, "seq_aux": True,
    "rope_theta": 10000, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": _released("mixtral", "MixtralForCausalLM", (4096, 32, 32, 8), rope_theta=1e6, sliding_window=None,
                              router_aux_loss_coef=0.02, max_position_embeddings=32768),
    "OLMoE-1B-7B": _released("olmoe", "OlmoeForCausalLM", (2048, 16, 16, 16), clip_qkv=None, rope_scaling=None,
                             rope_theta=10000.0, norm_topk_prob=False, attention_bias=False),
    "Qwen1.5-MoE": _released("qwen2_moe", "Qwen2MoeForCausalLM", (2048, 24, 16, 16), max_window_layers=21,
                             sliding_window=32768, use_sliding_window=False, decoder_sparse_step=1, rope_theta=1e6),
    "Qwen3-30B-A3B": _released("qwen3_moe", "Qwen3MoeForCausalLM", (2048, 48, 32, 4), head_dim=128, rope_scaling=None,
                               max_window_layers=48, mlp_only_layers=[], norm_topk_prob=True, sliding_window=None,
                               use_sliding_window=False, rope_theta=1e6, num_experts=128),
    "Phi-3.5-MoE": _released(
        "phimoe", "PhiMoEForCausalLM", (4096, 32, 32, 8), hidden_dropout=0.0, input_jitter_noise=0.01,
        lm_head_bias=True, attention_bias=True, original_max_position_embeddings=4096, sliding_window=131072,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.24,
                      "long_mscale": 1.24, "original_max_position_embeddings": 4096}),
    "gpt-oss-20b": _released(
        "gpt_oss", "GptOssForCausalLM", (2880, 24, 64, 8), experts_per_token=4, num_experts_per_tok=4, head_dim=64,
        initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 12, swiglu_limit=7.0,
        rope_theta=150000, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096}),
    "DeepSeek-V2-Lite": _released(
        "deepseek_v2", "DeepseekV2ForCausalLM", (2048, 27, 16, 16), **LATENT_RELEASED, q_lora_rank=None, n_group=1,
        topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, num_experts_per_tok=6,
        rope_scaling={"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}),
    "DeepSeek-V3": _released(
        "deepseek_v3", "DeepseekV3ForCausalLM", (7168, 61, 128, 128), **LATENT_RELEASED, topk_method="noaux_tc",
        scoring_func="sigmoid", num_nextn_predict_layers=1, quantization_config={**FP8, "fmt": "e4m3"}),
    "Kimi-K2": _released(
        "kimi_k2", "DeepseekV3ForCausalLM", (7168, 61, 64, 64), **LATENT_RELEASED, topk_method="noaux_tc", n_group=1,
        topk_group=1, n_routed_experts=384, num_nextn_predict_layers=0, quantization_config={**FP8, "fmt": "e4m3"}),
    "GLM-4.5": _released("glm4_moe", "Glm4MoeForCausalLM", (5120, 92, 96, 8), head_dim=128, partial_rotary_factor=0.5,
                         rope_scaling=None, rope_theta=1000000, use_qk_norm=True, attention_bias=True,
                         num_nextn_predict_layers=1, first_k_dense_replace=3),
    "ERNIE-4.5-21B-A3B": _released(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", (2560, 28, 20, 4), head_dim=128, moe_capacity=[64, 64, 64],
        moe_gate="topk", moe_use_aux_free=True, num_nextn_predict_layers=1, use_rmsnorm=True, rope_theta=500000),
    "Hunyuan-A13B": _released(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", (4096, 2, 32, 8), attention_head_dim=128, intermediate_size=3072,
        moe_intermediate_size=[3072, 3072], num_shared_expert=[1, 1], moe_topk=[8, 8], num_experts=64, use_cla=False,
        cla_share_factor=2, norm_topk_prob=True, use_qk_norm=True, routed_scaling_factor=False, n_group=False,
        moe_layer_num_skipped=0, use_mixed_mlp_moe=True, dense_list=[4096, 0], kv_lora_rank=None,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
                      "mscale": 1.0, "mscale_all_dim": 1.0}),
    "MiniMax-M2": _released(
        "minimax_m2", "MiniMaxM2ForCausalLM", (3072, 62, 48, 8), head_dim=128, rotary_dim=64, rope_theta=5000000,
        attn_type_list=[1] * 62, use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1, qk_norm_type="per_layer",
        use_qk_norm=True, scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0,
        quantization_config={**FP8, "fmt": "float8_e4m3fn"}),
    "granite-3.0-1b-a400m": _released("granitemoe", "GraniteMoeForCausalLM", (1024, 24, 16, 8), rope_scaling=None,
                                      embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
                                      attention_multiplier=0.015625, tie_word_embeddings=True),
    "Llama-4-Scout": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {},
        "text_config": _released(
            "llama4_text", "Llama4ForCausalLM", (5120, 48, 40, 8), attn_temperature_tuning=4, no_rope_layers=[],
            for_llm_compressor=False, _attn_implementation_autoset=True, head_dim=128, rope_theta=500000.0,
            rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192})},
}  # fmt: skip
