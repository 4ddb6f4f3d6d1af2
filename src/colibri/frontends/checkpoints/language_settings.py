"""Settings of a language model's configuration: only fields that its family's class knows, and all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from colibri.common.names import shown
from colibri.errors import ExportError
from colibri.frontends.checkpoints.checkpoint import Checkpoint
from colibri.frontends.checkpoints.config_fields import problem_of
from colibri.frontends.checkpoints.decoders import ACTIVATIONS, Decoder, Heads
from colibri.frontends.checkpoints.encoder_decoders import EncoderDecoder
from colibri.frontends.checkpoints.families import router_of
from colibri.frontends.checkpoints.rotary import Rotary, rotary_of
from colibri.ir.graph import Array, Router

MOST_POSITIONS = 4096  # of a context that is not asked for: caches grow with it
GROWTH = 4  # times the context that tables of positions hold, where the model goes so far: it may become longer later


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields that say nothing about the result at inference: names, tokens with a meaning, training, how the library runs.
NEUTRAL = _words("""
    architectures model_type _name_or_path auto_map transformers_version torch_dtype dtype use_cache bos_token_id
    eos_token_id pad_token_id initializer_range attention_dropout output_router_logits router_aux_loss_coef
    pretraining_tp output_attentions output_hidden_states return_dict is_decoder is_encoder_decoder
    chunk_size_feed_forward
    id2label label2id problem_type tokenizer_class task_specific_params _attn_implementation
    _attn_implementation_autoset
    _experts_implementation quantization_config router_jitter_noise hidden_dropout hidden_dropout_prob
    attention_probs_dropout_prob resid_pdrop embd_pdrop ep_size
""")
ROPE = _words("rope_parameters rope_scaling rope_theta original_max_position_embeddings")


@dataclass(frozen=True)
class Adapter:
    """A family: its configuration, and how a plan is made of it.

    `defaults` are those of the configuration's class; what is in no list of this class is refused. `aliases` are other
    names of fields. `only` are fields with the values that are known, `neutral` fields that change nothing. `rope` is
    what holds where no rope_parameters are given, `partial` the share of a head that is turned, where the family knows
    it. `ignored` are patterns of tensors that are not needed.
    """

    title: str
    architectures: tuple[str, ...]
    config_class: str
    defaults: Mapping[str, Any]
    plan: Callable[[Settings], Decoder | EncoderDecoder]
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    neutral: str = ""
    theta: float = 10000.0
    rope: Mapping[str, Any] | None = None
    partial: float | None = None
    mscales: bool = False
    ignored: tuple[str, ...] = ()


class Settings:
    """The fields of one configuration as attributes, each said by it or the class's default, and nothing else."""

    def __init__(
        self, config: Mapping[str, Any], adapter: Adapter, context: int | None, checkpoint: Checkpoint
    ) -> None:
        self.config, self.adapter, self.checkpoint = config, adapter, checkpoint
        self._values = dict(adapter.defaults)
        self._check_names()
        for name in adapter.defaults:
            self._values[name] = self._read(name)
        for name, allowed in adapter.only.items():
            if name in config and not any(type(config[name]) is type(a) and config[name] == a for a in allowed):
                able = " or ".join(repr(a) for a in allowed)
                raise self.refuse(f"{name} = {shown(config[name])} is not supported, only {able}")
        self.context = min(self.max_position_embeddings, MOST_POSITIONS) if context is None else context
        self.positions = max(self.context, min(self.max_position_embeddings, GROWTH * self.context))
        self._tables: dict[int, Array] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"{name} is not among the defaults of this family")
        return self._values[name]

    def refuse(self, message: str) -> ExportError:
        return ExportError(f"{self.adapter.title}: {message}")

    def _check_names(self) -> None:
        adapter = self.adapter
        known = {*adapter.defaults, *adapter.aliases, *adapter.only, *adapter.neutral.split(), *NEUTRAL, *ROPE}
        known |= {"partial_rotary_factor"} if adapter.partial is not None else set()
        unknown = [f"{name} = {shown(value)}" for name, value in self.config.items() if name not in known]
        if unknown:
            one = len(unknown) == 1
            raise self.refuse(
                f"config.json has {', '.join(unknown)}, which {'is' if one else 'are'} not known and may change the "
                f"result; remove {'it' if one else 'them'} if the model computes the same without, or add to the "
                "family (docs/extending/adding-a-family.md)"
            )

    def _read(self, name: str) -> Any:
        names = [name, *(alias for alias, of in self.adapter.aliases.items() if of == name)]
        said = {n: self.config[n] for n in names if n in self.config}
        if not said:
            return self.adapter.defaults[name]
        spelt, value = next(iter(said.items()))
        if any(other != value for other in said.values()):
            pairs = ", ".join(f"{n} = {shown(v)}" for n, v in said.items())
            raise self.refuse(f"config.json contradicts itself, {pairs}: leave one of them")
        if value is None and self.adapter.defaults[name] is None:
            return None
        if problem := problem_of(name, value):
            raise self.refuse(problem.replace(name, spelt, 1))
        return value

    @property
    def heads(self) -> int:
        return int(self.num_attention_heads)

    @property
    def kv(self) -> int:
        return self.heads if self.num_key_value_heads is None else int(self.num_key_value_heads)

    @property
    def dim(self) -> int:
        found = int(self.head_dim or self.hidden_size // self.heads)
        if found < 1:
            raise self.refuse(
                f"hidden_size = {self.hidden_size} has no room for {self.heads} heads: correct config.json"
            )
        return found

    @property
    def rotary(self) -> Rotary:
        """The positions; a family that turns whole heads must not be told to turn a part."""
        config = dict(self.config)
        if not (config.get("rope_scaling") or config.get("rope_parameters")) and self.adapter.rope is not None:
            config["rope_parameters"] = dict(self.adapter.rope)
        turned = self._values.get("rotary_dim")
        if turned is not None:
            config.setdefault("partial_rotary_factor", turned / self.dim)
        rotary = rotary_of(
            config, self.context, theta=self.adapter.theta, longest=self.max_position_embeddings,
            partial=self.adapter.partial or 1.0, mscales=self.adapter.mscales, positions=self.positions,
        )  # fmt: skip
        if rotary.partial != 1 and self.adapter.partial is None:
            raise self.refuse(
                f"partial_rotary_factor = {rotary.partial} is not known of this family: correct config.json"
            )
        if turned is not None and int(rotary.partial * self.dim) != turned:
            raise self.refuse(
                f"rotary_dim = {turned} contradicts a partial_rotary_factor of {rotary.partial}: leave one of them"
            )
        return rotary

    def table(self, dim: int) -> Array:
        """The angles of heads of `dim`, one array however often it is asked for."""
        if dim not in self._tables:
            self._tables[dim] = self.rotary.table(dim)
        return self._tables[dim]

    def kinds(self, default: list[str], *allowed: str) -> list[str]:
        """The kind of each layer."""
        found = self.layer_types or default
        if not isinstance(found, list) or len(found) != self.num_hidden_layers or not set(found) <= set(allowed):
            raise self.refuse(f"layer_types = {shown(found)} is not one of {', '.join(allowed)} for each layer")
        return found

    def window(self, sliding: bool) -> int:
        """The positions a layer sees, 0 for all."""
        if not sliding or self.sliding_window is None:
            return 0
        if self.sliding_window < 1:
            raise self.refuse(f"sliding_window = {self.sliding_window} leaves nothing to see: correct config.json")
        return int(self.sliding_window)

    def attention(self, **more: Any) -> Heads:
        """Heads as most families have them."""
        dim = self.dim
        return replace(Heads(self.heads, self.kv, dim, dim**-0.5, table=self.table(dim)), **more)

    def activation(self, name: str) -> str:
        """The activation that the field `name` says, silu where the family has no such field."""
        said = self._values.get(name, "silu")
        if said not in ACTIVATIONS:
            raise self.refuse(f"{name} = {said!r} is not supported, only {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[said]

    def plan(self, mixer: Callable[[int], Any], feed: Callable[[int], Any], **more: Any) -> Decoder:
        """A plan with what all configurations say alike."""
        plan = Decoder(
            vocabulary=self.vocab_size, hidden=self.hidden_size, layers=self.num_hidden_layers, mixer=mixer, feed=feed,
            eps=self._values.get("rms_norm_eps", 0.0), activation=self.activation("hidden_act"),
            tied=self.tie_word_embeddings, ignored=(r".*rotary_emb\.inv_freq", *self.adapter.ignored),
        )  # fmt: skip
        return replace(plan, **more)

    def router(self, layer: int) -> Callable[[Array | None], Router]:
        """The router of a layer, once its selection bias is known."""
        return lambda bias: router_of(self.config, layer=layer, bias=bias)

    def later_layers(self) -> tuple[str, ...]:
        """Patterns of the layers behind the last, which predict tokens further ahead (MTP)."""
        first = self.num_hidden_layers
        return tuple(rf"model\.layers\.{n}\..*" for n in range(first, first + self.num_nextn_predict_layers))
