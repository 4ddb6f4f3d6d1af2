"""Fields of configurations: the kind and the range of each, for every family.

One table, and one function that applies it: to what a configuration says, to values inside rope_parameters, to what
routers are made of. A value outside would give a model that computes NaN, or memory without end before a tensor is
looked at. Sizes are bounded by what has been trained, with room, and then once more by the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from colibri.common.names import shown
from colibri.format import spec

_WORDS = {"count": "a whole number", "number": "a number", "flag": "true or false", "text": "a text"}


@dataclass(frozen=True)
class Field:
    """What a value must be: its `kind`, and for numbers the least and the most.

    `null`: may be null, which means what the family's class says. `lists`: is a list of such values, or ("either") may
    be one. `also` are values of another kind that releases have.
    """

    kind: str
    least: float = 0
    most: float = 0
    null: bool = False
    lists: bool | str = False
    also: type | None = None

    def problem(self, value: Any) -> str:
        """What is wrong with a value, as it follows its name; empty where nothing is."""
        if value is None:
            return "" if self.null else " is null: write its value into config.json"
        if type(value) is self.also:
            return ""
        if self.lists and isinstance(value, list):
            return self._of_list(value)
        if self.lists is True:
            return f" = {shown(value)} is not a list: correct config.json"
        return self._of_one(value)

    def _of_list(self, values: list[Any]) -> str:
        if len(values) > _LAYERS:
            return f" lists {len(values)} values, more than {_LAYERS}: correct config.json"
        return next((problem for value in values if (problem := self._of_one(value))), "")

    def _of_one(self, value: Any) -> str:
        kinds: dict[str, tuple[type, ...]] = {"count": (int,), "number": (int, float), "flag": (bool,), "text": (str,)}
        if type(value) not in kinds[self.kind]:
            return f" = {shown(value)} is not {_WORDS[self.kind]}: correct config.json"
        if self.kind in ("count", "number") and not self.least <= value <= self.most:
            return f" = {shown(value)} is not between {self.least:,} and {self.most:,}: correct config.json"
        return ""


_LAYERS, _WIDE, _HEAD, _MANY = 4096, 1 << 20, 1024, spec.LIMIT


def _table(field: Field, names: str) -> dict[str, Field]:
    return dict.fromkeys(names.split(), field)


def _count(least: int, most: int, **more: Any) -> Field:
    return Field("count", least, most, **more)


def _number(least: float, most: float, **more: Any) -> Field:
    return Field("number", least, most, **more)


_FACTOR = _number(1e-6, 1e6)

FIELDS: dict[str, Field] = {
    # Sizes.
    **_table(_count(1, 1 << 24), "vocab_size"),
    **_table(_count(1, _WIDE), "hidden_size d_model intermediate_size intermediate_size_mlp moe_intermediate_size "
                               "shared_expert_intermediate_size d_ff kv_lora_rank"),
    **_table(_count(1, _WIDE, null=True), "q_lora_rank"),
    **_table(_count(1, _HEAD), "d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim conv_L_cache"),
    **_table(_count(1, _HEAD, null=True), "head_dim rotary_dim"),
    **_table(_count(1, _LAYERS), "num_hidden_layers num_layers num_attention_heads num_heads decoder_sparse_step "
                                 "moe_layer_interval interleave_moe_layer_step no_rope_layer_interval"),
    **_table(_count(1, _LAYERS, null=True), "num_key_value_heads num_decoder_layers"),
    **_table(_count(0, _LAYERS), "num_sparse_encoder_layers num_sparse_decoder_layers max_window_layers "
                                 "first_k_dense_replace num_dense_layers moe_layer_start_index "
                                 "moe_num_shared_experts"),
    **_table(_count(0, 64), "num_nextn_predict_layers"),  # each a pattern that every tensor left over is held against
    **_table(_count(-1, _LAYERS), "moe_layer_end_index"),
    **_table(_count(0, _LAYERS, null=True), "n_shared_experts"),
    **_table(_count(1, spec.MAX_EXPERTS), "n_routed_experts moe_num_experts num_local_experts"),
    **_table(_count(1, spec.MAX_EXPERTS, lists="either"), "num_experts moe_topk moe_k"),
    **_table(_count(1, spec.MAX_EXPERTS, null=True), "num_experts_per_tok n_group topk_group"),
    # Positions.
    **_table(_count(1, _MANY), "max_position_embeddings floor_scale relative_attention_max_distance expert_capacity"),
    **_table(_count(0, _MANY, null=True), "sliding_window"),
    **_table(_count(1, _MANY, null=True), "attention_chunk_size"),
    **_table(_count(2, _MANY, null=True), "original_max_position_embeddings"),
    **_table(_count(4, _WIDE), "relative_attention_num_buckets"),
    **_table(_count(0, _MANY, null=True), "decoder_start_token_id"),
    **_table(_number(1.0001, 1e15, null=True), "rope_theta"),
    **_table(_number(1e-6, 1, null=True), "partial_rotary_factor"),
    **_table(_number(0, 1e3), "attn_scale"),
    # Numbers. An epsilon of zero makes NaN of a row of zeros.
    **_table(_number(1e-30, 1), "rms_norm_eps norm_eps layer_norm_epsilon"),
    **_table(_FACTOR, "embedding_multiplier logits_scaling residual_multiplier attention_multiplier swiglu_alpha "
                      "swiglu_limit routed_scaling_factor"),
    **_table(replace(_FACTOR, null=True), "clip_qkv"),
    **_table(_number(0, 1e3), "router_jitter_noise moe_norm_min"),
    # Switches and lists.
    **_table(Field("flag"), "tie_word_embeddings use_sliding_window norm_topk_prob qkv_bias attention_bias "
                            "lm_head_bias conv_bias use_expert_bias mlp_bias rope_interleave use_qk_norm use_bias "
                            "router_bias"),
    **_table(Field("flag", also=int), "attn_temperature_tuning"),
    **_table(Field("text"), "hidden_act dense_act_fn topk_method"),
    **_table(Field("text", null=True, lists=True), "layer_types"),
    **_table(_count(0, _LAYERS, null=True, lists=True), "mlp_only_layers moe_layers"),
    **_table(_count(0, 1, null=True, lists=True), "no_rope_layers"),
}  # fmt: skip

# Entries of rope_parameters other than FIELDS.
ROPE_FIELDS: dict[str, Field] = {
    **{name: FIELDS[name] for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")},
    **_table(Field("text", null=True), "type rope_type"),
    **_table(replace(_FACTOR, null=True), "factor attention_factor short_mscale long_mscale"),
    **_table(_number(1e-6, 1e9, null=True), "alpha"),
    **_table(_FACTOR, "low_freq_factor high_freq_factor"),
    **_table(replace(_FACTOR, null=True), "beta_fast beta_slow"),
    **_table(_number(0, 1e3, null=True), "mscale mscale_all_dim"),
    **_table(replace(_FACTOR, lists=True), "short_factor long_factor"),
    **_table(Field("flag"), "truncate"),
}  # fmt: skip


def problem_of(name: str, value: Any, fields: Mapping[str, Field] = FIELDS) -> str:
    """What is wrong with a field's value, its name first; empty where nothing is or the field is not in the table."""
    found = fields[name].problem(value) if name in fields else ""
    return f"{name}{found}" if found else ""


__all__ = ["FIELDS", "ROPE_FIELDS", "Field", "problem_of"]
