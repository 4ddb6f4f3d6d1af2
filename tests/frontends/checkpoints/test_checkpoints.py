"""Language models from checkpoints: the same logits and routes as transformers, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import colibri
from colibri.errors import ExportError
from colibri.exporter import build, export_lm
from colibri.frontends.checkpoints.language_families import ADAPTERS, MISSING
from colibri.frontends.checkpoints.language_models import load_checkpoint
from colibri.frontends.checkpoints.language_settings import NEUTRAL, ROPE, Adapter
from colibri.frontends.checkpoints.rotary import rotary_of
from colibri.ir.graph import Graph, Node, Router
from colibri.ir.weights import Deferred
from colibri.passes import optimize
from colibri.pipeline.context_length import set_context
from colibri.reference.interpreter import Trace, run
from tests.frontends.checkpoints.variants import (
    BASES,
    CASES,
    LONG,
    RELEASED,
    SOURCE,
    TOKENS,
    VARIANTS,
    VOCABULARY,
    Model,
    config_of,
    make,
    rope,
)

Array = np.ndarray[Any, Any]

IDS = np.random.default_rng(7).integers(0, VOCABULARY, TOKENS)
FAMILY = pytest.mark.parametrize("family", VARIANTS)


def ours(graph: Graph, ids: Array = IDS) -> tuple[Array, list[Array]]:
    """Logits (tokens, vocabulary), and the sorted experts (tokens, k) of every mixture."""
    trace = Trace()
    source = [SOURCE.astype(np.float32)[:, None]] if graph.encoder() else None
    (logits,) = run(graph, [np.asarray(ids, np.float32)[:, None]], trace, source)
    return logits, [np.sort(route[:, 0], -1) for route in trace.routes]


def agree(model: Model, graph: Graph, ids: Array = IDS) -> float:
    """The largest difference of the logits, of the largest logit; routes must be the same."""
    ids = ids[: getattr(model.module.config, "expert_capacity", len(ids))]  # tokens that come singly are never dropped
    want = model.logits(ids)
    have, routes = ours(graph, ids)
    assert len(routes) == len(model.routes)
    for a, b in zip(routes, model.routes, strict=True):
        assert np.array_equal(a, b)
    error = float(np.abs(have - want).max() / np.abs(want).max())
    assert error <= 1e-4
    return error


def edit(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; None takes one out."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config.pop(name, None)
        if value is not None:
            config[name] = value
    path.write_text(json.dumps(config))


def retensor(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of model.safetensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)


def refuses(directory: Path, *words: str, **more: Any) -> None:
    with pytest.raises(ExportError) as error:
        load_checkpoint(directory, **more)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def mixtures(graph: Graph) -> Iterator[tuple[Node, Router, list[Graph]]]:
    for node in graph.moe_nodes():
        yield node, node.attrs["router"], node.attrs["experts"]


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "variant"), CASES, ids=[f"{f}, {v}" if v else f for f, v in CASES])
def test_a_family_computes_what_transformers_does(family: str, variant: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, VARIANTS[family][variant])
    graph = load_checkpoint(tmp_path)
    agree(model, graph)
    assert graph.shapes[graph.inputs[0]] == (1,) and graph.outputs == ["logits"] and graph.context == 64


@FAMILY
def test_bfloat16_reads_as_float32(family: str, tmp_path: Path) -> None:
    agree(make(family, tmp_path, {}, torch.bfloat16), load_checkpoint(tmp_path))


def test_float16_reads_as_float32(tmp_path: Path) -> None:
    agree(make("qwen3_moe", tmp_path, {}, torch.float16), load_checkpoint(tmp_path))


@FAMILY
def test_the_greedy_continuation_is_the_same(family: str, tmp_path: Path) -> None:
    model, graph = make(family, tmp_path, {}, seed=3), load_checkpoint(tmp_path)
    mine, theirs = list(IDS[:5]), list(IDS[:5])
    for _ in range(6):
        mine.append(int(ours(graph, np.array(mine))[0][-1].argmax()))
        theirs.append(int(model.logits(np.array(theirs))[-1].argmax()))
    assert mine == theirs


@FAMILY
def test_names_of_the_modules_themselves_load_too(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, {})
    state = {name: value.contiguous().clone() for name, value in model.module.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    agree(model, load_checkpoint(tmp_path))


@FAMILY
def test_shards_load_as_one_file_does(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    model.module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    agree(model, load_checkpoint(tmp_path))


@FAMILY
def test_a_configuration_that_leaves_out_what_its_class_says(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, {})
    shortest = model.module.config.to_diff_dict()
    (tmp_path / "config.json").write_text(json.dumps({**shortest, "model_type": model.module.config.model_type}))
    agree(model, load_checkpoint(tmp_path))


def test_the_older_spelling_of_positions(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
               "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    settings = {"rope_parameters": {**{k: v for k, v in scaling.items() if k != "type"}, "rope_type": "yarn",
                                    "rope_theta": 500.0}}  # fmt: skip
    model = make("deepseek_v2", tmp_path, settings)
    edit(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling, torch_dtype="float32", dtype=None,
         scoring_func="softmax", moe_layer_freq=1, seq_aux=True, aux_loss_alpha=0.001)  # fmt: skip
    agree(model, load_checkpoint(tmp_path))


def test_minimax_as_it_was_released(tmp_path: Path) -> None:
    model = make("minimax_m2", tmp_path, {"rotary_dim": 4})
    edit(tmp_path, rope_parameters=None, partial_rotary_factor=None, rope_theta=5e6, rotary_dim=4,
         attn_type_list=[1, 1], use_qk_norm=True)  # fmt: skip
    agree(model, load_checkpoint(tmp_path))
    edit(tmp_path, partial_rotary_factor=1.0)
    refuses(tmp_path, "rotary_dim", "partial_rotary_factor")
    edit(tmp_path, partial_rotary_factor=None, attn_type_list=[1, 0])
    refuses(tmp_path, "attn_type_list")


@pytest.mark.parametrize("name", RELEASED)
def test_configurations_of_releases_are_known(name: str, tmp_path: Path) -> None:
    """Every field has a meaning; what is missing then are the tensors."""
    (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
    save_file({}, tmp_path / "model.safetensors")
    refuses(tmp_path, "model.embed_tokens.weight", "missing")


@FAMILY
def test_the_engine_gives_the_reference_s_bits(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, {})
    build(load_checkpoint(tmp_path), calibration=[IDS[:16].astype(np.float32)[:, None]])  # raises where they differ


def test_a_model_that_also_sees_gives_its_text_part(tmp_path: Path) -> None:
    model = make("llama4", tmp_path, {})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text,
        "vision_config": {"hidden_size": 8}, "image_token_index": 5}))  # fmt: skip

    def nest(tensors: dict[str, Any]) -> None:
        for name in [*tensors]:
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_model.class_embedding"] = torch.zeros(8)

    retensor(tmp_path, nest)
    agree(model, load_checkpoint(tmp_path))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "mixtral"])
def test_what_is_not_needed_at_inference_is_left(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, {})
    extra = {"deepseek_v3": "model.layers.2.eh_proj.weight", "glm4_moe": "model.layers.2.shared_head.norm.weight",
             "ernie4_5_moe": "model.mtp_block.0.mlp.down_proj.weight",
             "mixtral": "model.layers.1.self_attn.rotary_emb.inv_freq"}[family]  # fmt: skip
    retensor(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))
    agree(model, load_checkpoint(tmp_path))


def test_an_output_matrix_stored_beside_the_embedding_it_is_tied_to(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path, {"tie_word_embeddings": True})
    same = "lm_head.weight"
    retensor(tmp_path, lambda t: t.update({same: t["model.embed_tokens.weight"].clone()}))
    agree(model, load_checkpoint(tmp_path))
    retensor(tmp_path, lambda t: t[same][7].add_(1))
    refuses(tmp_path, same, "tie_word_embeddings")


# --- positions --------------------------------------------------------------------------------------------------------


def test_llama3_as_llama4_has_it_with_nothing_between_the_frequencies(tmp_path: Path) -> None:
    said = rope("llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=32)
    agree(make("llama4", tmp_path, said), load_checkpoint(tmp_path))


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 2.0},
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "longrope": {"short_factor": [1.0 + n / 64 for n in range(64)], "long_factor": [1.0 + n for n in range(64)],
                 "original_max_position_embeddings": 1024},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 2048},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 150000.0])
def test_tables_are_those_of_transformers_at_released_sizes(kind: str, theta: float) -> None:
    """Frequencies are within two places of float32, so angles are within 8191 · 2⁻²³ · 2 of a turn's radian."""
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    said = {"rope_type": kind, "rope_theta": theta, **SCALINGS[kind]}
    config = transformers.MixtralConfig(head_dim=128, max_position_embeddings=163840, rope_parameters=said)
    module = MixtralRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.arange(8192)[None])
    rotary = rotary_of(config.to_dict(), 8192, theta=1.0, longest=163840)
    frequency, _ = rotary.frequencies(128)
    assert np.abs(frequency.view(np.int32) - module.inv_freq.numpy().view(np.int32)).max() <= 4
    have, want = rotary.table(128), torch.cat([cos[0, :, :64], sin[0, :, :64]], 1).numpy()
    assert have.dtype == np.float32 and np.abs(have - want).max() <= 2e-4


def test_longrope_of_phimoe_has_long_factors_in_long_contexts(tmp_path: Path) -> None:
    """transformers 5.24 keeps the short factors there, with the long mscale; the model's own code does not."""
    said = rope("longrope", **LONG, short_mscale=1.2, long_mscale=1.4, original_max_position_embeddings=16)
    model = make("phimoe", tmp_path, said)
    embedding = model.module.model.rotary_emb
    init = embedding.rope_init_fn
    embedding.rope_init_fn = lambda config: init(config, seq_len=TOKENS)
    agree(model, load_checkpoint(tmp_path))
    embedding.rope_init_fn = init
    agree(model, load_checkpoint(tmp_path, context=16), IDS[:16])


def test_dynamic_scaling_goes_by_the_exported_context(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path, {**rope("dynamic", factor=3.0), "max_position_embeddings": 32})
    agree(model, load_checkpoint(tmp_path, context=32), IDS[:32])
    agree(model, load_checkpoint(tmp_path, context=TOKENS), IDS)  # transformers takes the text's own length


def test_the_context_is_the_model_s_but_at_most_4096(tmp_path: Path) -> None:
    make("mixtral", tmp_path, {"max_position_embeddings": 100000})
    assert load_checkpoint(tmp_path).context == 4096
    assert load_checkpoint(tmp_path, context=5000, cache="int8").context == 5000
    assert {n.attrs["cache"] for n in load_checkpoint(tmp_path, cache="fp16").nodes if n.op == "attention"} == {"fp16"}
    refuses(tmp_path, "cache", cache="int3")
    refuses(tmp_path, "context", context=0)


def test_tables_let_a_context_grow_as_far_as_its_angles_hold() -> None:
    scaling = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for said, context, rows in (
        ({}, 16, 64),
        ({"rope_type": "yarn", "factor": 2.0}, 16, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 16, 50),  # max_position_embeddings
        ({"rope_type": "dynamic", "factor": 2.0}, 60, 60),
        ({"rope_type": "longrope", **scaling}, 16, 30),  # original_max_position_embeddings
        ({"rope_type": "longrope", **scaling}, 40, 64),
    ):
        config = {"rope_parameters": said, "original_max_position_embeddings": 30}
        short, long = (
            rotary_of(config, c, theta=100.0, longest=50, positions=64).table(8) for c in (context, max(rows, context))
        )
        assert len(short) == rows, said
        assert short.tobytes() == long[:rows].tobytes(), said


def test_a_window_wider_than_the_context_comes_into_view_when_that_grows(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make("mixtral", source, {"sliding_window": 20, "max_position_embeddings": 64})
    for name, context in (("short", 16), ("long", 64)):
        export_lm(load_checkpoint(source, context), tmp_path / name, dtype="fp32", workers=1)
    set_context(tmp_path / "short", 64)
    short, long = (colibri.load(tmp_path / name) for name in ("short", "long"))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (64, 1))
    assert short(ids).tobytes() == long(ids).tobytes()
    assert short.context_bytes == long.context_bytes


def test_latent_attention_caches_what_is_compressed(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path, {})
    graph = load_checkpoint(tmp_path)
    for node in graph.nodes:
        if node.op == "attention":
            assert [graph.shapes[i] for i in node.inputs] == [(4, 16), (1, 16), (1, 12)]


# --- configurations ---------------------------------------------------------------------------------------------------


def class_of(adapter: Adapter) -> Any:
    return getattr(transformers, adapter.config_class)


@FAMILY
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    adapter = ADAPTERS[family]
    config = class_of(adapter)
    for name, default in adapter.defaults.items():
        names = [name, *(alias for alias, of in adapter.aliases.items() if of == name)]
        found = [getattr(config, n) for n in names if hasattr(config, n)]
        if not found:  # of no class, but read from what checkpoints say
            lengths = {"max_position_embeddings": 512}  # distances have no end; what releases were trained with
            assert name in ("head_dim", "rotary_dim", "decoder_start_token_id", *lengths)
            assert default == lengths.get(name)
        for value in found:
            assert (value, type(value)) == (default, type(default)), name
    assert config.default_theta == adapter.theta
    if adapter.partial is not None:
        said = config(**{**BASES[family]}).rope_parameters
        assert said.get("partial_rotary_factor", 1.0) == adapter.partial
    if adapter.rope is not None:
        said = config(**{**BASES[family]}).rope_parameters
        assert said == {**adapter.rope, "rope_theta": adapter.theta}


@FAMILY
def test_every_field_of_the_class_is_known(family: str) -> None:
    adapter = ADAPTERS[family]
    known = {*adapter.defaults, *adapter.aliases, *adapter.only, *adapter.neutral.split(), *NEUTRAL, *ROPE}
    derived = {"return_dict"}  # written by the library for any class
    assert not set(config_of(family, {}).to_dict()) - known - derived


@FAMILY
def test_every_field_that_changes_the_result_is_switched_by_a_variant(family: str) -> None:
    """Sizes beside: they change shapes, which are checked."""
    sizes = re.compile(
        r"vocab_size|.*hidden_size|num_.*(layers|heads|experts.*)|max_position.*|.*intermediate_size.*|.*_(rank|dim)|"
        r"n_routed_experts|moe_num_experts|num_nextn.*|moe_k|d_(model|kv|ff)"
    )
    base = {**ADAPTERS[family].defaults, **config_of(family, {}).to_dict()}
    # What has one value that is supported, or matters to who generates.
    fixed = {"deepseek_v2": {"norm_topk_prob"}, "phimoe": {"num_experts_per_tok"}, "gpt_oss": {"hidden_act"},
             "switch_transformers": {"decoder_start_token_id"}}  # fmt: skip
    same = {name: True for name in ADAPTERS[family].defaults if not sizes.fullmatch(name)}
    for settings in VARIANTS[family].values():
        config = {**ADAPTERS[family].defaults, **config_of(family, settings).to_dict()}
        for name in same:
            same[name] &= config.get(name) == base.get(name)
    activations = {"hidden_act"}  # one table for all
    assert not {name for name, kept in same.items() if kept} - fixed.get(family, set()) - activations


@FAMILY
def test_an_unknown_field_is_refused_by_name(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, {})
    edit(tmp_path, attention_wobble=0.5)
    refuses(tmp_path, "attention_wobble", ADAPTERS[family].title)


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("mixtral", {"hidden_act": "mish"}, "hidden_act"),
        ("mixtral", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("mixtral", {"num_experts": 9}, "num_local_experts"),
        ("mixtral", {"sliding_window": 0}, "sliding_window"),
        ("mixtral", {"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ("mixtral", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("mixtral", {"rope_parameters": {"rope_type": "default", "wobble": 1}}, "wobble"),
        ("mixtral", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ("mixtral", {"rope_parameters": {"rope_type": "longrope", **LONG, "short_factor": [1.0]}}, "longrope"),
        ("mixtral", {"rope_theta": -1.0, "rope_parameters": None}, "rope_theta"),
        ("mixtral", {"architectures": ["MixtralForSequenceClassification"]}, "MixtralForSequenceClassification"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "static"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ("lfm2_moe", {"layer_types": None}, "layer_types"),
        ("lfm2_moe", {"use_pos_enc": False}, "use_pos_enc"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("phimoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("phimoe", {"rope_parameters": {"rope_type": "longrope", **LONG}}, "short_mscale"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_moe", {"num_shared_expert": [1, 2]}, "num_shared_expert"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 99}, "moe_intermediate_size"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
        ("llama4", {"attention_chunk_size": 32}, "chunks of 32"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_known_is_refused_by_name(
    family: str, change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    make(family, tmp_path, {})
    edit(tmp_path, **change)
    refuses(tmp_path, word)


def test_a_chunk_that_holds_the_context_changes_nothing(tmp_path: Path) -> None:
    model = make("llama4", tmp_path, {"attention_chunk_size": 32})
    agree(model, load_checkpoint(tmp_path, context=32), IDS[:32])


def test_unknown_architectures_are_refused_with_those_that_are_known(tmp_path: Path) -> None:
    make("mixtral", tmp_path, {})
    edit(tmp_path, model_type="gru_moe")
    refuses(tmp_path, "gru_moe", *ADAPTERS)
    for kind, (title, reason) in MISSING.items():
        edit(tmp_path, model_type=kind)
        refuses(tmp_path, kind, title, reason, "PyTorch")


# --- tensors ----------------------------------------------------------------------------------------------------------


@FAMILY
def test_a_missing_an_extra_and_a_misshaped_tensor_are_named(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, {})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for name in load_file(path):
        if name != "model.embed_tokens.weight" and re.search(r"\.[2-9]\.|[.]1[.].*[.]1[.]", name):
            continue  # others of the same kind
        retensor(tmp_path, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        refuses(tmp_path, "tensor", "missing")
        path.write_bytes(whole)
        retensor(tmp_path, lambda tensors, name=name: tensors.update({name: tensors[name][..., 1:]}))  # type: ignore[misc]
        refuses(tmp_path, name, "shape")
        path.write_bytes(whole)
    retensor(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.gate.weight": torch.ones(2)}))
    refuses(tmp_path, "model.layers.0.self_attn.gate.weight", "no place")


@FAMILY
def test_every_number_of_the_checkpoint_counts(family: str, tmp_path: Path) -> None:
    """Each tensor is read, and is not another's: other values in it are another result. Experts go together."""
    make(family, tmp_path, {}, seed=1)
    ids = IDS[:12]
    before = ours(load_checkpoint(tmp_path), ids)[0]
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()

    def flip(tensors: dict[str, Any], names: list[str]) -> None:
        for name in names:
            tensors[name].mul_(-1.7)

    parts: dict[str, list[str]] = {}
    for name in load_file(path):
        parts.setdefault(re.sub(r"experts\.(expert_)?\d+", "experts", name), []).append(name)
    for part, names in parts.items():
        retensor(tmp_path, lambda tensors, names=names: flip(tensors, names))  # type: ignore[misc]
        assert not np.array_equal(before, ours(load_checkpoint(tmp_path), ids)[0]), part
        path.write_bytes(whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_with_their_tensor(value: float, tmp_path: Path) -> None:
    make("mixtral", tmp_path, {})
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][5, 1] = value

    retensor(tmp_path, spoil)
    graph = load_checkpoint(tmp_path)  # weights of experts are not read yet
    with pytest.raises(ExportError, match=re.escape(name) + r".*row 5"):
        ours(graph)
    retensor(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(value))
    refuses(tmp_path, "model.norm.weight")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    refuses(tmp_path, "config.json", "missing")
    make("mixtral", tmp_path, {})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for cut in (3, 200, len(whole) - 4):
        path.write_bytes(whole[:cut])
        refuses(tmp_path, "model.safetensors", "fetch it again")
    path.write_bytes(whole[:8] + b"?" * length + whole[8 + length :])
    refuses(tmp_path, "header")
    path.write_bytes(whole.replace(b'"shape":[32]', b'"shape":[33]'))
    refuses(tmp_path, "bytes")
    path.unlink()
    refuses(tmp_path, "no model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuses(tmp_path, "pytorch_model.bin", "safetensors")
    (tmp_path / "config.json").write_text("{")
    refuses(tmp_path, "JSON")


def test_an_index_must_be_true(tmp_path: Path) -> None:
    model = make("mixtral", tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    model.module.save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shard.rename(tmp_path / "away")
    refuses(tmp_path, shard.name, "not there")
    (tmp_path / "away").rename(shard)
    listed["weight_map"]["model.ghost.weight"] = shard.name
    index.write_text(json.dumps(listed))
    refuses(tmp_path, "model.ghost.weight", shard.name)
    index.write_text(json.dumps({"weight_map": 3}))
    refuses(tmp_path, "weight_map")


def test_integers_are_no_weights(tmp_path: Path) -> None:
    make("mixtral", tmp_path, {})
    name = "model.layers.0.self_attn.q_proj.weight"
    retensor(tmp_path, lambda tensors: tensors.update({name: torch.zeros(32, 32, dtype=torch.int8)}))
    refuses(tmp_path, name, "I8")


def test_fp8_scaled_in_blocks(tmp_path: Path) -> None:
    """As DeepSeek-V3 is released: e4m3 numbers times a float32 for each block, the last blocks smaller."""
    model = make("deepseek_v3", tmp_path, {})
    block = (12, 16)
    state = model.module.state_dict()

    def pack(tensors: dict[str, Any]) -> None:
        for name in [*tensors]:
            value = tensors[name]
            if value.ndim != 2 or "proj" not in name:
                continue
            grid = [-(-size // step) for size, step in zip(value.shape, block, strict=True)]
            scale = torch.rand(grid) + 0.5
            wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            wide = wide[: value.shape[0], : value.shape[1]]
            tensors[name] = (value / wide).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            put(name, tensors[name].float() * wide)

    def put(name: str, value: Any) -> None:
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj.weight", name)
        if expert is None:
            state[name].copy_(value)
        else:
            stacked = state[f"{expert[1]}.{'down' if expert[3] == 'down' else 'gate_up'}_proj"][int(expert[2])]
            rows = {"gate": slice(0, 24), "up": slice(24, 48), "down": slice(None)}[expert[3]]
            stacked[rows].copy_(value)

    retensor(tmp_path, pack)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*block]}
    edit(tmp_path, quantization_config=config)
    agree(model, load_checkpoint(tmp_path))
    edit(tmp_path, quantization_config={**config, "weight_block_size": [128, 128]})
    refuses(tmp_path, "blocks of 128 x 128")
    edit(tmp_path, quantization_config={"quant_method": "fp8"})
    refuses(tmp_path, "weight_block_size")
    edit(tmp_path, quantization_config=config)
    retensor(tmp_path, lambda t: t.pop("model.layers.0.self_attn.o_proj.weight_scale_inv"))
    refuses(tmp_path, "model.layers.0.self_attn.o_proj.weight", "scale_inv")


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_code_of_eight_bits(kind: str) -> None:
    from colibri.frontends.tensor_files import CODES

    names = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
    want = torch.arange(256, dtype=torch.uint8).view(getattr(torch, names[kind])).float().numpy()
    assert np.array_equal(CODES[kind], want, equal_nan=True)


def test_mxfp4_as_gpt_oss_is_released(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make("gpt_oss", tmp_path, {"hidden_size": 64, "intermediate_size": 32})
    state = model.module.state_dict()
    generator = torch.Generator().manual_seed(5)

    def pack(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if re.search(r"experts\.(gate_up|down)_proj$", n)]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 127, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))

    retensor(tmp_path, pack)
    edit(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    agree(model, load_checkpoint(tmp_path))
    name = "model.layers.0.mlp.experts.down_proj"
    retensor(tmp_path, lambda tensors: tensors[f"{name}_scales"].fill_(255))
    with pytest.raises(ExportError, match=name):
        ours(load_checkpoint(tmp_path))
    retensor(tmp_path, lambda tensors: tensors.update({f"{name}_scales": torch.zeros(3, dtype=torch.uint8)}))
    refuses(tmp_path, name, "MXFP4")


MEASURE = """
    import resource, sys
    import numpy as np
    from colibri.frontends.checkpoints.language_models import load_checkpoint
    from colibri.ir.weights import loaded
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = peak()
    graph = load_checkpoint(sys.argv[1])
    made = peak()
    experts = [node.attrs["experts"] for node in graph.moe_nodes()][1]
    weights = [loaded(value) for value in experts[3].constants.values()]
    print(made - start, peak() - made, sum(w.nbytes for w in weights) / 2**20)
"""


def test_a_gigabyte_is_read_a_weight_at_a_time(tmp_path: Path) -> None:
    hidden, inner, experts, layers, vocabulary = 1024, 2048, 8, 5, 2048
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": hidden,
              "intermediate_size": inner, "num_local_experts": experts, "num_hidden_layers": layers,
              "vocab_size": vocabulary, "num_attention_heads": 16, "num_key_value_heads": 16,
              "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden),
              "model.norm.weight": (hidden,)}  # fmt: skip
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
        for e in range(experts):
            block = f"{at}.block_sparse_moe.experts.{e}"
            shapes |= {f"{block}.w1.weight": (inner, hidden), f"{block}.w3.weight": (inner, hidden)}
            shapes[f"{block}.w2.weight"] = (hidden, inner)
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    assert offset > 1 << 30
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # a hole: no disk is used
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)], capture_output=True, text=True, check=True
    )
    graph, read, expert = map(float, done.stdout.split())
    assert graph < 40 and read < 3 * expert and expert == 24  # MiB


# --- the graph --------------------------------------------------------------------------------------------------------


@FAMILY
def test_trap_one_program_for_all_experts_of_a_layer(family: str, tmp_path: Path) -> None:
    """Experts of mixed formats gave garbage elsewhere; here one layer's experts differ in nothing but their numbers."""
    make(family, tmp_path, {})
    graph = load_checkpoint(tmp_path)
    for _, _, experts in mixtures(graph):
        assert len({expert.signature() for expert in experts}) == 1
        linears = [node for node in experts[0].nodes if node.op == "linear"]
        assert all(isinstance(experts[0].constants[node.inputs[1]], Deferred) for node in linears)
    assert np.array_equal(ours(optimize(graph))[0], ours(graph)[0])


@FAMILY
def test_trap_router_matrices_are_float32_and_known_by_their_place(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, {}, torch.bfloat16)
    graph = load_checkpoint(tmp_path)
    producers = graph.producers()
    for node, router, _ in mixtures(graph):
        source = producers[node.inputs[1]]
        weight = graph.constants[source.inputs[1]]
        assert source.op == "linear" and isinstance(weight, Deferred) and weight.kind is np.ndarray
        assert weight.shape == (router.experts, 32) and graph.array(source.inputs[1]).dtype == np.float32


# --- what went wrong elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe", "lfm2_moe", "deepseek_v3", "glm4_moe"])
def test_trap_norm_topk_prob_is_lost(family: str, tmp_path: Path) -> None:
    """Both settings are transformers', they differ, and a configuration that says nothing means its class's default."""
    results = {}
    for value in (True, False):
        model = make(family, tmp_path, {"norm_topk_prob": value})
        agree(model, load_checkpoint(tmp_path))
        results[value] = ours(load_checkpoint(tmp_path))[0]
    assert np.abs(results[True] - results[False]).max() > 0.01
    edit(tmp_path, norm_topk_prob=None)
    default = ADAPTERS[family].defaults["norm_topk_prob"]
    assert np.array_equal(ours(load_checkpoint(tmp_path))[0], results[default])


def rerouted(graph: Graph, **changes: Any) -> Graph:
    """The graph with other descriptors."""
    from dataclasses import replace

    nodes = []
    for node in graph.nodes:
        attrs = dict(node.attrs)
        if node.op == "moe":
            attrs["router"] = replace(attrs["router"], **changes)
        nodes.append(Node(node.op, node.output, node.inputs, attrs))
    return replace(graph, nodes=nodes)


@pytest.mark.parametrize("family", ["lfm2_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "llama4"])
def test_trap_softmax_instead_of_sigmoid(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, {})
    graph = load_checkpoint(tmp_path)
    assert all(router.score == "sigmoid" for _, router, _ in mixtures(graph))
    agree(model, graph)
    with pytest.raises(AssertionError):
        agree(model, rerouted(graph, score="softmax"))


SHARED = {"qwen2_moe": "mlp.shared_expert.down_proj", "deepseek_v2": "mlp.shared_experts.down_proj",
          "deepseek_v3": "mlp.shared_experts.down_proj", "glm4_moe": "mlp.shared_experts.down_proj",
          "ernie4_5_moe": "mlp.shared_experts.down_proj", "hunyuan_v1_moe": "mlp.shared_mlp.down_proj",
          "llama4": "feed_forward.shared_expert.down_proj"}  # fmt: skip


@pytest.mark.parametrize("family", SHARED)
def test_trap_shared_experts_are_forgotten(family: str, tmp_path: Path) -> None:
    """They count, with and without their numbers, and a checkpoint without their tensors is refused."""
    model = make(family, tmp_path, {})
    graph = load_checkpoint(tmp_path)
    agree(model, graph)
    name = f"model.layers.1.{SHARED[family]}.weight"
    retensor(tmp_path, lambda tensors: tensors[name].zero_())
    without = load_checkpoint(tmp_path)
    assert np.abs(ours(without)[0] - ours(graph)[0]).max() > 0.01
    model.module.get_submodule(name.removesuffix(".weight")).weight.data.zero_()
    agree(model, without)
    retensor(tmp_path, lambda tensors: tensors.pop(name))
    refuses(tmp_path, name)


def test_trap_the_shared_gate_is_skipped_or_applied_to_the_sum(tmp_path: Path) -> None:
    model = make("qwen2_moe", tmp_path, {"num_hidden_layers": 1})
    graph = load_checkpoint(tmp_path)
    agree(model, graph)
    producers = graph.producers()
    (moe,) = graph.moe_nodes()
    (total,) = [node for node in graph.nodes if node.op == "binary" and moe.output in node.inputs]
    gated = producers[next(i for i in total.inputs if i != moe.output)]
    assert total.attrs["func"] == "add" and gated.attrs["func"] == "mul"
    assert producers[gated.inputs[1]].attrs["func"] == "sigmoid"
    # A gate of zeros is a half, exactly.
    name = "model.layers.0.mlp.shared_expert_gate"
    retensor(tmp_path, lambda tensors: tensors[f"{name}.weight"].zero_())
    model.module.get_submodule(name).weight.data.zero_()
    agree(model, load_checkpoint(tmp_path))


@pytest.mark.parametrize("groups", [3, 16, 0, None])
def test_trap_groups_that_do_not_divide_the_experts(groups: int | None, tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_group": groups}))
    refuses(tmp_path, "group")


def test_trap_masked_groups_are_minus_infinity_not_zero(tmp_path: Path) -> None:
    """With every corrected score below zero, a mask of zero would choose from the groups that take no part."""
    model = make("deepseek_v3", tmp_path, {"n_group": 4, "topk_group": 2})
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = -3 + 0.5 * torch.randn(8)
    retensor(tmp_path, lambda tensors: tensors[name].copy_(bias))
    model.module.state_dict()[name].copy_(bias)
    agree(model, load_checkpoint(tmp_path))
    for route in ours(load_checkpoint(tmp_path))[1]:
        assert all(len({*(chosen // 2)}) <= 2 for chosen in route)


def test_trap_groups_ranked_by_the_wrong_rule(tmp_path: Path) -> None:
    settings = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    for family, rule, said in (("deepseek_v2", "max", settings), ("deepseek_v3", "top2", {})):
        model = make(family, tmp_path / family, said)
        graph = load_checkpoint(tmp_path / family)
        assert all(router.group_rule == rule and router.groups == 2 for _, router, _ in mixtures(graph))
        agree(model, graph)
        with pytest.raises(AssertionError):
            agree(model, rerouted(graph, group_rule="top2" if rule == "max" else "max"))


def test_trap_deepseek_v2_never_normalises(tmp_path: Path) -> None:
    model = make("deepseek_v2", tmp_path, {})
    agree(model, load_checkpoint(tmp_path))
    edit(tmp_path, norm_topk_prob=True)
    refuses(tmp_path, "norm_topk_prob")


def test_trap_the_selection_bias_moves_choices_but_not_weights(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "ernie4_5_moe", "lfm2_moe", "minimax_m2"):
        directory = tmp_path / family
        model = make(family, directory, {})
        graph = load_checkpoint(directory)
        agree(model, graph)
        plain = rerouted(graph, bias=())
        assert any((a != b).any() for a, b in zip(ours(graph)[1], ours(plain)[1], strict=True))


def test_trap_an_expert_that_is_never_chosen_leaks(tmp_path: Path) -> None:
    """Numbers that overflow in an expert nobody chooses reach nothing."""
    model = make("deepseek_v3", tmp_path, {"n_group": 1, "topk_group": 1})
    at = "model.layers.1.mlp"
    bias = torch.zeros(8)
    bias[3] = -10

    def wild(tensors: dict[str, Any]) -> None:
        tensors[f"{at}.gate.e_score_correction_bias"].copy_(bias)
        tensors[f"{at}.experts.3.down_proj.weight"].fill_(3e38)
        tensors[f"{at}.experts.3.up_proj.weight"].fill_(3e38)

    retensor(tmp_path, wild)
    model.module.state_dict()[f"{at}.gate.e_score_correction_bias"].copy_(bias)
    assert np.isfinite(ours(load_checkpoint(tmp_path))[0]).all()
    agree(model, load_checkpoint(tmp_path))


@FAMILY
def test_trap_a_router_of_zeros_ties(family: str, tmp_path: Path) -> None:
    """As modules come from their class: the lowest experts are chosen, in order, whatever a library's sort does."""
    make(family, tmp_path, {})
    router = re.compile(
        r".*(\.gate\.weight|\.gate\.wg\.weight|\.router\.((layer|classifier)\.)?weight|\.router\.bias|_bias)$"
    )

    def zero(tensors: dict[str, Any]) -> None:
        for name, value in tensors.items():
            if router.fullmatch(name) and "proj" not in name:
                value.zero_()

    retensor(tmp_path, zero)
    graph = load_checkpoint(tmp_path)
    for route, (_, descriptor, _) in zip(ours(graph)[1], mixtures(graph), strict=True):
        assert (route == np.arange(descriptor.k)).all()


@FAMILY
def test_trap_results_depend_on_what_else_is_computed(family: str, tmp_path: Path) -> None:
    """Bits of a position are those of any text that begins alike, and of any run."""
    make(family, tmp_path, {})
    graph = load_checkpoint(tmp_path)
    long, short = ours(graph, IDS[:20])[0], ours(graph, IDS[:13])[0]
    assert long[:13].tobytes() == short.tobytes()
    other = np.concatenate([IDS[:13], (IDS[13:20] + 1) % VOCABULARY])
    assert ours(graph, other)[0][:13].tobytes() == short.tobytes()


def test_trap_the_input_of_llama4_s_experts_is_what_is_weighted(tmp_path: Path) -> None:
    model = make("llama4", tmp_path, {})
    graph = load_checkpoint(tmp_path)
    agree(model, graph)
    with pytest.raises(AssertionError):
        agree(model, rerouted(graph, apply="output"))


def test_trap_hunyuan_norms_after_turning_and_qwen_before(tmp_path: Path) -> None:
    for family, after in (("hunyuan_v1_moe", True), ("qwen3_moe", False)):
        make(family, tmp_path / family, {})
        graph = load_checkpoint(tmp_path / family)
        turned = {node.output for node in graph.nodes if node.op == "rope"}
        norms = [n for n in graph.nodes if n.op == "rmsnorm" and len(graph.shapes[n.output]) == 2]
        assert len(norms) == 4 and all((n.inputs[0] in turned) == after for n in norms)
