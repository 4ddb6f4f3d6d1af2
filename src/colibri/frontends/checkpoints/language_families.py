"""Families of language models: tensor names, attention and feed-forward of each.

An `Adapter` is a family: every field of its configuration that changes what is computed, with the default of the
configuration's class, and a function from these settings to a `Decoder`; docs/extending/adding-a-family.md shows how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from colibri.common.names import shown
from colibri.errors import ExportError
from colibri.frontends.checkpoints.decoders import (
    Convolution,
    Decoder,
    Dense,
    Heads,
    Latent,
    Mixture,
    Separate,
    Stacked,
)
from colibri.frontends.checkpoints.encoder_decoders import EncoderDecoder, Stack
from colibri.frontends.checkpoints.language_settings import Adapter, Settings

A = (Separate("mlp.experts"), Stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
B = (
    Separate("block_sparse_moe.experts", ("w1", "w3", "w2")), Separate("mlp.experts", ("w1", "w3", "w2")),
    Stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)  # fmt: skip
B_GATE = ("block_sparse_moe.gate.weight", "mlp.gate.weight")


def _mixtral(c: Settings) -> Decoder:
    heads = c.attention(window=c.window(True))
    return c.plan(
        lambda n: heads, lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, B_GATE, B)
    )  # fmt: skip


def _sparse(c: Settings, n: int) -> bool:
    """Whether a layer of a Qwen model is a mixture."""
    return n not in (c.mlp_only_layers or []) and (n + 1) % c.decoder_sparse_step == 0


def _qwen2_moe(c: Settings) -> Decoder:
    sliding = [
        bool(c.use_sliding_window and (n + 1) % 2 and n < c.max_window_layers) for n in range(c.num_hidden_layers)
    ]
    kinds = c.kinds(["sliding_attention" if s else "full_attention" for s in sliding], "sliding_attention",
                    "full_attention")  # fmt: skip
    if "sliding_attention" in kinds and not c.use_sliding_window:
        raise c.refuse("layer_types has sliding_attention, but use_sliding_window is false: correct config.json")
    shared = Dense(c.shared_expert_intermediate_size, "mlp.shared_expert")
    return c.plan(
        lambda n: c.attention(window=c.window(kinds[n] == "sliding_attention"), bias=c.qkv_bias),
        lambda n: Mixture(c.router(n), c.num_experts, c.moe_intermediate_size, ("mlp.gate.weight",), A, shared=shared,
                          shared_gate="mlp.shared_expert_gate") if _sparse(c, n) else Dense(c.intermediate_size),
    )  # fmt: skip


def _qwen3_moe(c: Settings) -> Decoder:
    heads = c.attention(
        window=c.window(c.use_sliding_window), bias=c.attention_bias, out_bias=c.attention_bias, norm="head"
    )
    return c.plan(
        lambda n: heads,
        lambda n: Mixture(c.router(n), c.num_experts, c.moe_intermediate_size, ("mlp.gate.weight",), A)
        if _sparse(c, n) else Dense(c.intermediate_size),
    )  # fmt: skip


def _olmoe(c: Settings) -> Decoder:
    heads = c.attention(bias=c.attention_bias, out_bias=c.attention_bias, norm="whole", clip=c.clip_qkv)
    return c.plan(
        lambda n: heads, lambda n: Mixture(c.router(n), c.num_experts, c.intermediate_size, ("mlp.gate.weight",), A)
    )


def _granitemoe(c: Settings) -> Decoder:
    heads = c.attention(bias=c.attention_bias, out_bias=c.attention_bias, scale=c.attention_multiplier)
    block = "block_sparse_moe"
    ways = (Stacked(f"{block}.input_linear.weight", f"{block}.output_linear.weight"),
            Stacked(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"))  # fmt: skip
    gate = (f"{block}.router.layer.weight", f"{block}.router.weight")
    return c.plan(
        lambda n: heads, lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, gate, ways),
        embedding_factor=c.embedding_multiplier, residual_factor=c.residual_multiplier, logits_divisor=c.logits_scaling,
    )  # fmt: skip


def _phimoe(c: Settings) -> Decoder:
    if c.rotary.kind not in ("default", "longrope"):
        raise c.refuse(f"rotary positions of type {c.rotary.kind!r} are not supported, only 'default' and 'longrope'")
    heads = c.attention(window=c.window(True), bias=c.attention_bias, out_bias=c.attention_bias)
    gate = ("block_sparse_moe.gate.weight", "mlp.router.weight")
    return c.plan(
        lambda n: heads, lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, gate, B),
        norm="layernorm", head_bias=c.lm_head_bias,
    )  # fmt: skip


def _gpt_oss(c: Settings) -> Decoder:
    alternating = ["full_attention" if n % 2 else "sliding_attention" for n in range(c.num_hidden_layers)]
    kinds = c.kinds(alternating, "sliding_attention", "full_attention")
    ways = (Stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", transposed=True, alternating=True, bias=True),)
    return c.plan(
        lambda n: c.attention(window=c.window(kinds[n] == "sliding_attention"), bias=c.attention_bias,
                              out_bias=c.attention_bias, sinks=True),
        lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, ("mlp.router.weight",), ways,
                          gate_bias=True, clamped=(c.swiglu_limit, c.swiglu_alpha)),
    )  # fmt: skip


def _lfm2_moe(c: Settings) -> Decoder:
    kinds, names = c.kinds([], "conv", "full_attention"), ("w1", "w3", "w2")
    heads = c.attention(norm="head", norms=("q_layernorm", "k_layernorm"), out="out_proj")
    ways = (Separate("feed_forward.experts", names),
            Stacked("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"))  # fmt: skip
    bias = ("feed_forward.expert_bias",) if c.use_expert_bias else ()
    return c.plan(
        lambda n: Convolution(c.conv_L_cache, c.conv_bias) if kinds[n] == "conv" else heads,
        lambda n: Dense(c.intermediate_size, "feed_forward", names) if n < c.num_dense_layers else Mixture(
            c.router(n), c.num_experts, c.moe_intermediate_size, ("feed_forward.gate.weight",), ways, bias=bias),
        eps=c.norm_eps, norms=("operator_norm", "ffn_norm", "embedding_norm"),
    )  # fmt: skip


def _latent(c: Settings, interleaved: bool) -> Latent:
    if c.kv != c.heads:
        raise c.refuse(
            f"num_key_value_heads = {c.kv} differs from the {c.heads} heads, which latent attention does not know"
        )
    rotary, dim = c.rotary, c.qk_rope_head_dim
    scale = (c.qk_nope_head_dim + dim) ** -0.5 * rotary.score_factor()
    return Latent(c.heads, c.kv_lora_rank, c.qk_nope_head_dim, dim, c.v_head_dim, scale, c.q_lora_rank,
                  c.attention_bias, c.table(dim), interleaved)  # fmt: skip


def _shared(c: Settings, count: int | None, bias: bool = False) -> Dense | None:
    return Dense(c.moe_intermediate_size * count, "mlp.shared_experts", bias=bias) if count else None


def _deepseek_v2(c: Settings) -> Decoder:
    latent = _latent(c, True)
    shared = _shared(c, c.n_shared_experts, c.mlp_bias)
    return c.plan(
        lambda n: latent,
        lambda n: Dense(c.intermediate_size, bias=c.mlp_bias) if n < c.first_k_dense_replace else Mixture(
            c.router(n), c.n_routed_experts, c.moe_intermediate_size, ("mlp.gate.weight",), A, shared=shared),
    )  # fmt: skip


CORRECTION = ("mlp.gate.e_score_correction_bias",)


def _corrected(c: Settings, mixer: Heads | Latent) -> Decoder:
    """Feed-forward layers as DeepSeek-V3 has them: the first dense, then experts chosen with a correction bias."""
    shared = _shared(c, c.n_shared_experts)
    return c.plan(
        lambda n: mixer,
        lambda n: Dense(c.intermediate_size) if n < c.first_k_dense_replace else Mixture(
            c.router(n), c.n_routed_experts, c.moe_intermediate_size, ("mlp.gate.weight",), A, shared=shared,
            bias=CORRECTION),
    )  # fmt: skip


def _deepseek_v3(c: Settings) -> Decoder:
    plan = _corrected(c, _latent(c, c.rope_interleave))
    return replace(plan, ignored=(*plan.ignored, *c.later_layers()))


def _glm4_moe(c: Settings) -> Decoder:
    plan = _corrected(c, c.attention(bias=c.attention_bias, norm="head" if c.use_qk_norm else ""))
    return replace(plan, ignored=(*plan.ignored, *c.later_layers()))


def _ernie4_5_moe(c: Settings) -> Decoder:
    heads = c.attention(bias=c.use_bias, out_bias=c.use_bias, interleaved=True)
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index
    bias = ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias")
    shared = _shared(c, c.moe_num_shared_experts, c.use_bias)

    def feed(n: int) -> Dense | Mixture:
        if (n + 1) % c.moe_layer_interval or not c.moe_layer_start_index <= n <= last:
            return Dense(c.intermediate_size, bias=c.use_bias)
        return Mixture(c.router(n), c.moe_num_experts, c.moe_intermediate_size, ("mlp.gate.weight",), A, bias=bias,
                       bias_rank=2, shared=shared)  # fmt: skip

    return c.plan(lambda n: heads, feed, head_bias=c.use_bias)


def _hunyuan_v1_moe(c: Settings) -> Decoder:
    heads = c.attention(bias=c.attention_bias, out_bias=c.attention_bias, norm="head", norm_last=True,
                        norms=("query_layernorm", "key_layernorm"))  # fmt: skip
    for name, alike in (
        ("moe_intermediate_size", c.intermediate_size),
        ("num_shared_expert", 1),
        ("num_experts", None),
    ):
        found = c.config.get(name, alike)
        if isinstance(found, list):
            if len(found) != c.num_hidden_layers or any(other != found[0] for other in found):
                raise c.refuse(f"{name} = {shown(found)} differs between layers, which is not supported")
            found = found[0]
        if alike is not None and found != alike:
            raise c.refuse(f"{name} = {shown(found)} is not supported, only {alike}")
    count = c.num_experts[0] if isinstance(c.num_experts, list) else c.num_experts
    shared = Dense(c.intermediate_size, "mlp.shared_mlp")
    return c.plan(
        lambda n: heads,
        lambda n: Mixture(c.router(n), count, c.intermediate_size, ("mlp.gate.wg.weight",), A, shared=shared),
    )


def _minimax_m2(c: Settings) -> Decoder:
    kinds = c.config.get("attn_type_list", [])
    if not isinstance(kinds, list) or not all(kind == 1 for kind in kinds):
        raise c.refuse("attn_type_list has other kinds than 1, of linear attention, which is not supported")
    heads = c.attention(norm="whole")
    bias = ("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias")
    return c.plan(
        lambda n: heads, lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, B_GATE, B, bias=bias)
    )  # fmt: skip


def _llama4(c: Settings) -> Decoder:
    layers = range(c.num_hidden_layers)
    turned = c.no_rope_layers or [int((n + 1) % c.no_rope_layer_interval != 0) for n in layers]
    step = c.interleave_moe_layer_step
    sparse = list(range(step - 1, len(layers), step)) if c.moe_layers is None else c.moe_layers
    chunk = c.attention_chunk_size
    kinds = c.kinds(["chunked_attention" if t and chunk is not None else "full_attention" for t in turned],
                    "chunked_attention", "full_attention")  # fmt: skip
    if "chunked_attention" in kinds and chunk is not None and c.context > chunk:
        raise c.refuse(
            f"attention in chunks of {chunk} positions is not supported: export a context of at most {chunk}"
        )
    if "chunked_attention" in kinds and chunk is not None:
        c.positions = min(c.positions, chunk)
    if len(turned) != len(layers):
        raise c.refuse(f"no_rope_layers has {len(turned)} entries for {len(layers)} layers: correct config.json")
    # Layers without positions sharpen their attention with distance (arXiv 2501.19399), from floor_scale on.
    steps = np.floor((np.arange(c.positions, dtype=np.float32) + 1) / np.float32(c.floor_scale))
    stretch = np.log1p(steps) * np.float32(c.attn_scale) + np.float32(1)
    stretched = c.attn_temperature_tuning and bool((stretch != 1).any())
    if stretched and c.dim % 2:
        raise c.refuse(f"attn_temperature_tuning needs heads of an even size, not {c.dim}")
    block = "feed_forward"
    shared = Dense(c.intermediate_size, f"{block}.shared_expert")
    ways = (Stacked(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj", transposed=True),)
    inside = "language_model." if "language_model.model.embed_tokens.weight" in c.checkpoint else ""
    heads = c.attention(bias=c.attention_bias, out_bias=c.attention_bias, interleaved=True,
                        norm="l2" if c.use_qk_norm else "")  # fmt: skip
    still = replace(heads, table=None, interleaved=False, norm="", stretch=stretch if stretched else None)
    return c.plan(
        lambda n: heads if turned[n] else still,
        lambda n: Mixture(c.router(n), c.num_local_experts, c.intermediate_size, (f"{block}.router.weight",), ways,
                          shared=shared) if n in sparse else Dense(c.intermediate_size_mlp, block),
        prefix=inside,
    )  # fmt: skip


def _switch(c: Settings) -> EncoderDecoder:
    def stack(name: str, layers: int, sparse: int) -> Stack:
        step = layers // sparse if sparse > 0 else layers
        said = c.config.get(f"{name}_sparse_step", step)
        if said != step:
            raise c.refuse(
                f"{name}_sparse_step = {shown(said)} contradicts {sparse} sparse layers of {layers}: leave it out"
            )
        return Stack(name, layers, lambda n: step > 0 and (step == 1 or n % step == 1))

    if c.relative_attention_num_buckets < 4 or c.relative_attention_max_distance <= c.relative_attention_num_buckets:
        raise c.refuse(f"relative_attention_num_buckets = {c.relative_attention_num_buckets} and "
                       f"relative_attention_max_distance = {c.relative_attention_max_distance} leave distances without "
                       "a bucket: correct config.json")  # fmt: skip
    decoder = c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers
    start = c.config.get("pad_token_id") if c.decoder_start_token_id is None else c.decoder_start_token_id
    start = 0 if start is None else start
    if type(start) is not int or not 0 <= start < c.vocab_size:
        raise c.refuse(f"decoder_start_token_id or pad_token_id = {shown(start)} is not one of {c.vocab_size} tokens")
    return EncoderDecoder(
        vocabulary=c.vocab_size, hidden=c.d_model, eps=c.layer_norm_epsilon, activation=c.activation("dense_act_fn"),
        tied=c.tie_word_embeddings, encoder=stack("encoder", c.num_layers, c.num_sparse_encoder_layers),
        decoder=stack("decoder", decoder, c.num_sparse_decoder_layers), heads=c.num_heads, dim=c.d_kv, width=c.d_ff,
        router=c.router(0)(None), router_bias=c.router_bias, buckets=c.relative_attention_num_buckets,
        distance=c.relative_attention_max_distance, start=start,
    )  # fmt: skip


def _fields(
    vocab: int, hidden: int, layers: int, heads: int, kv: int | None, longest: int, **more: Any
) -> dict[str, Any]:
    """Fields every family has, then its own."""
    return {
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "max_position_embeddings": longest, "tie_word_embeddings": False, "head_dim": None,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, **more,
    }  # fmt: skip


LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
          "attention_bias": False}  # fmt: skip
LATENT_NEUTRAL = "qk_head_dim seq_aux aux_loss_alpha"
MTP = {"num_mtp_layers": "num_nextn_predict_layers"}
LOCAL = {"num_experts": "num_local_experts"}

ADAPTERS: dict[str, Adapter] = {
    "mixtral": Adapter(
        "Mixtral", ("MixtralForCausalLM",), "MixtralConfig",
        _fields(32000, 4096, 32, 32, 8, 131072, intermediate_size=14336, rms_norm_eps=1e-5, sliding_window=None,
                num_experts_per_tok=2, num_local_experts=8),
        _mixtral, LOCAL, theta=1e6),
    "qwen2_moe": Adapter(
        "Qwen2-MoE", ("Qwen2MoeForCausalLM",), "Qwen2MoeConfig",
        _fields(151936, 2048, 24, 16, 16, 32768, intermediate_size=5632, use_sliding_window=False, sliding_window=4096,
                max_window_layers=28, decoder_sparse_step=1, moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632, num_experts_per_tok=4, num_experts=60, norm_topk_prob=False,
                mlp_only_layers=None, qkv_bias=True, layer_types=None),
        _qwen2_moe, {"num_local_experts": "num_experts"}),
    "qwen3_moe": Adapter(
        "Qwen3-MoE", ("Qwen3MoeForCausalLM",), "Qwen3MoeConfig",
        _fields(151936, 2048, 24, 32, 4, 32768, intermediate_size=6144, attention_bias=False, use_sliding_window=False,
                sliding_window=4096, decoder_sparse_step=1, moe_intermediate_size=768, num_experts_per_tok=8,
                num_experts=128, norm_topk_prob=False, mlp_only_layers=None),
        _qwen3_moe, {"num_local_experts": "num_experts"}, neutral="max_window_layers"),
    "olmoe": Adapter(
        "OLMoE", ("OlmoeForCausalLM",), "OlmoeConfig",
        _fields(50304, 2048, 16, 16, None, 4096, intermediate_size=2048, rms_norm_eps=1e-5, attention_bias=False,
                clip_qkv=None, num_experts_per_tok=8, num_experts=64, norm_topk_prob=False),
        _olmoe, {"num_local_experts": "num_experts"}),
    "granitemoe": Adapter(
        "GraniteMoE", ("GraniteMoeForCausalLM",), "GraniteMoeConfig",
        _fields(32000, 4096, 32, 32, None, 2048, intermediate_size=11008, attention_bias=False,
                embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
                num_local_experts=8, num_experts_per_tok=2),
        _granitemoe, LOCAL),
    "phimoe": Adapter(
        "Phi-3.5-MoE", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), "PhimoeConfig",
        _fields(32064, 4096, 32, 32, 8, 131072, intermediate_size=6400, rms_norm_eps=1e-5, sliding_window=None,
                num_experts_per_tok=2, num_local_experts=16, attention_bias=False, lm_head_bias=False,
                router_jitter_noise=0.01),
        _phimoe, LOCAL, neutral="input_jitter_noise", theta=1e6, mscales=True),
    "gpt_oss": Adapter(
        "GPT-OSS", ("GptOssForCausalLM",), "GptOssConfig",
        _fields(201088, 2880, 36, 64, 8, 131072, intermediate_size=2880, head_dim=64, rms_norm_eps=1e-5,
                sliding_window=128, num_experts_per_tok=4, num_local_experts=128, swiglu_alpha=1.702, swiglu_limit=7.0,
                layer_types=None, attention_bias=True),
        _gpt_oss, {**LOCAL, "experts_per_token": "num_experts_per_tok"}, {"hidden_act": ("silu",)},
        neutral="initial_context_length", theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
              "original_max_position_embeddings": 4096}),
    "lfm2_moe": Adapter(
        "LFM2-MoE", ("Lfm2MoeForCausalLM",), "Lfm2MoeConfig",
        {**{k: v for k, v in _fields(65536, 2048, 32, 32, 8, 128000, tie_word_embeddings=True).items()
            if k not in ("hidden_act", "rms_norm_eps")},
         "intermediate_size": 7168, "moe_intermediate_size": 1792, "norm_eps": 1e-5, "conv_bias": False,
         "conv_L_cache": 3, "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True,
         "routed_scaling_factor": 1.0, "norm_topk_prob": True, "layer_types": None},
        _lfm2_moe, {"tie_embedding": "tie_word_embeddings", "num_local_experts": "num_experts"},
        {"use_pos_enc": (True,)}, theta=1e6),
    "deepseek_v2": Adapter(
        "DeepSeek-V2", ("DeepseekV2ForCausalLM",), "DeepseekV2Config",
        _fields(102400, 4096, 32, 32, None, 2048, intermediate_size=11008, mlp_bias=False, first_k_dense_replace=0,
                n_group=None, n_routed_experts=64, n_shared_experts=2, routed_scaling_factor=1.0, topk_group=None,
                topk_method="greedy", norm_topk_prob=False, num_experts_per_tok=None, moe_intermediate_size=1407,
                **LATENT),
        _deepseek_v2, {"num_experts": "n_routed_experts"}, {"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
        neutral=LATENT_NEUTRAL),
    "deepseek_v3": Adapter(
        "DeepSeek-V3", ("DeepseekV3ForCausalLM",), "DeepseekV3Config",
        _fields(129280, 7168, 61, 128, 128, 4096, intermediate_size=18432, moe_intermediate_size=2048,
                n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, n_group=8, topk_group=4,
                num_experts_per_tok=8, first_k_dense_replace=3, norm_topk_prob=True, rope_interleave=True,
                num_nextn_predict_layers=1, **LATENT),
        _deepseek_v3, {"num_local_experts": "n_routed_experts", **MTP},
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}, neutral=LATENT_NEUTRAL),
    "glm4_moe": Adapter(
        "GLM-4.5", ("Glm4MoeForCausalLM",), "Glm4MoeConfig",
        _fields(151552, 4096, 46, 96, 8, 131072, intermediate_size=10944, rms_norm_eps=1e-5, attention_bias=False,
                moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128,
                routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
                use_qk_norm=False, num_nextn_predict_layers=1),
        _glm4_moe, {"num_local_experts": "n_routed_experts", **MTP},
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}, partial=0.5),
    "ernie4_5_moe": Adapter(
        "Ernie-4.5", ("Ernie4_5_MoeForCausalLM",), "Ernie4_5_MoeConfig",
        _fields(103424, 2560, 28, 20, 4, 131072, intermediate_size=12288, rms_norm_eps=1e-5, tie_word_embeddings=True,
                use_bias=False, moe_intermediate_size=1536, moe_k=6, moe_num_experts=64, moe_num_shared_experts=2,
                moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1, moe_norm_min=1e-12),
        _ernie4_5_moe, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        {"moe_use_aux_free": (True,), "moe_gate": ("topk",), "compression_ratio": (1.0,),
         "use_rmsnorm": (True,), "is_quantized": (False,)},
        neutral="moe_capacity num_nextn_predict_layers use_flash_attention fuse_rope", theta=500000.0,
        ignored=(r".*mtp.*",)),
    "hunyuan_v1_moe": Adapter(
        "HunYuan-MoE-V1", ("HunYuanMoEV1ForCausalLM",), "HunYuanMoEV1Config",
        _fields(290943, 4096, 32, 32, None, 2048, intermediate_size=11008, rms_norm_eps=1e-5, attention_bias=False,
                num_experts=1, moe_topk=1),
        _hunyuan_v1_moe,
        {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk", "attention_head_dim": "head_dim"},
        {"use_cla": (False,), "use_qk_norm": (True,), "norm_type": ("rms",), "position_embedding_xdrope": (False,),
         "use_rotary_pos_emb": (True,), "use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,), "mlp_bias": (False,),
         "moe_layer_num_skipped": (0,), "group_limited_greedy": (False,), "routed_scaling_factor": (1.0, False),
         "use_mla": (False,), "add_classification_head": (False,)},
        neutral="eod_token_id sep_token_id moe_intermediate_size num_shared_expert cla_share_factor moe_drop_tokens "
                "moe_random_routing_dropped_token n_group topk_group kv_lora_rank q_lora_rank qk_nope_head_dim "
                "qk_rope_head_dim v_head_dim class_num dense_list pool_type org_vocab_size num_media_embeds pad_id "
                "skip_cls_token mask_init_id image_token_id im_start_id im_end_id im_newline_id text_start_id "
                "text_end_id video_start_id video_end_id anyres_pooling_size anyres_vit_max_image_size "
                "anyres_vit_two_views vit_add_patchemb_bias vit_input_resolution vit_mapping_type vit_norm_type "
                "vit_patch vit_path vit_remove_prenorm vit_token vit_type vit_used_rms_norm xdrope_section"),
    "minimax_m2": Adapter(
        "MiniMax-M2", ("MiniMaxM2ForCausalLM",), "MiniMaxM2Config",
        _fields(200064, 3072, 62, 48, 8, 196608, intermediate_size=1536, head_dim=128, num_experts_per_tok=8,
                num_local_experts=256, rotary_dim=None),
        _minimax_m2, LOCAL,
        {"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "use_routing_bias": (True,),
         "scoring_func": ("sigmoid",), "shared_intermediate_size": (0,), "norm_topk_prob": (True,),
         "sliding_window": (None,)},
        neutral="mtp_transformer_layers num_mtp_modules use_mtp shared_moe_mode mlp_intermediate_size "
                "layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta attn_type_list",
        theta=5e6, partial=1.0,
        ignored=(r"model\.mtp.*",)),
    "llama4": Adapter(
        "Llama-4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "Llama4TextConfig",
        _fields(202048, 5120, 48, 40, 8, 131072, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128,
                rms_norm_eps=1e-5, num_experts_per_tok=1, num_local_experts=16, moe_layers=None,
                interleave_moe_layer_step=1, use_qk_norm=True, no_rope_layers=None, no_rope_layer_interval=4,
                attention_chunk_size=8192, layer_types=None, attn_temperature_tuning=True, floor_scale=8192,
                attn_scale=0.1, attention_bias=False),
        _llama4, LOCAL, neutral="for_llm_compressor", theta=500000.0,
        ignored=(r"vision_model\..*", r"multi_modal_projector\..*")),
    "switch_transformers": Adapter(
        "Switch Transformer", ("SwitchTransformersForConditionalGeneration",), "SwitchTransformersConfig",
        {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "expert_capacity": 64, "num_layers": 12,
         "num_sparse_encoder_layers": 3, "num_decoder_layers": 12, "num_sparse_decoder_layers": 3, "num_heads": 12,
         "num_experts": 8, "router_bias": False, "relative_attention_num_buckets": 32,
         "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "dense_act_fn": "relu",
         "tie_word_embeddings": True, "max_position_embeddings": 512, "decoder_start_token_id": None},
        _switch,
        {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers",
         "n_positions": "max_position_embeddings"},
        {"feed_forward_proj": ("relu",), "is_gated_act": (False,), "router_dtype": ("float32",),
         "router_type": ("tokens_masked",), "add_cross_attention": (False,), "is_encoder_decoder": (True,)},
        neutral="dropout_rate initializer_factor router_z_loss_coef add_router_probs router_ignore_padding_tokens "
                "encoder_sparse_step decoder_sparse_step output_past batch_prioritized_routing"),
}  # fmt: skip

# Releases that are another family under a name of their own.
SAME = {"kimi_k2": "deepseek_v3"}

# Families whose routing is known, but which this module has no plan for, and what is lacking.
MISSING = {
    "jamba": ("Jamba", "no operation computes the selective state space of its Mamba layers"),
    "qwen3_next": ("Qwen3-Next", "no operation computes the gated delta rule of its linear attention"),
    "qwen3_5_moe": ("Qwen3.5-MoE", "no operation computes the gated delta rule of its linear attention"),
    "kimi_linear": ("Kimi-Linear", "no operation computes the gated delta rule of its linear attention"),
    "nemotron_h": ("Nemotron-H", "no operation computes the selective state space of its Mamba-2 layers"),
    "gemma4": ("Gemma-4", "no operation attends to the cache of another layer, as its last layers do"),
}  # fmt: skip


def adapter_of(kind: str, config: Mapping[str, Any]) -> Adapter:
    """The family of a model type and its configuration; raises ExportError where there is none."""
    if kind in MISSING:
        title, reason = MISSING[kind]
        raise ExportError(
            f"{title} ({kind}) is not supported: {reason}; export its mixtures as PyTorch modules, or use another "
            "family"
        )
    if kind not in ADAPTERS:
        raise ExportError(
            f"model type {shown(kind)} is not known; known are {', '.join(sorted(ADAPTERS))}: export the PyTorch "
            "module instead, or add the family (docs/extending/adding-a-family.md)"
        )
    adapter = ADAPTERS[kind]
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(name in adapter.architectures for name in named):
        what = f"{adapter.title}: architectures {shown(named)} is not {' or '.join(adapter.architectures)}"
        if "vision_config" in config or "ConditionalGeneration" in str(named):
            raise ExportError(f"{what}: the release has parts for images or sound, which Colibri does not run; use the "
                              "family's text-only release")  # fmt: skip
        raise ExportError(f"{what}: only models that predict the next token are supported")
    return adapter
