"""Switch Transformer: an encoder that reads a source text, and a decoder that answers it (Fedus et al. 2021).

Its parts are T5's (Raffel et al. 2020): biases by distance in place of positions, scores that are not scaled, an
RMSNorm before each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from colibri.frontends.checkpoints.checkpoint import Checkpoint
from colibri.frontends.checkpoints.decoders import Around, Builder
from colibri.ir.graph import Array, Graph, Router


@dataclass(frozen=True)
class Stack:
    """One of the two: how many layers, and which of them are mixtures."""

    name: str
    layers: int
    sparse: Callable[[int], bool]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Around):
    """An encoder-decoder model: its two stacks, and what is alike in both.

    `dim` is a head's, `width` an expert's or dense part's. `start` is the token a decoder's texts begin with. The
    capacity of `router` holds for a source text, all of whose tokens come at once. Of a decoder's tokens none is
    dropped, as when it generates, one token after the other.
    """

    encoder: Stack
    decoder: Stack
    heads: int
    dim: int
    width: int
    router: Router
    router_bias: bool
    buckets: int
    distance: int
    start: int


def build_encoder_decoder(name: str, plan: EncoderDecoder, checkpoint: Checkpoint, context: int, cache: str) -> Graph:
    """The graph of a token of either text: an id of the text to the logits of the next.

    Raises ExportError for what does not fit the plan.
    """
    return _Parts(name, plan, checkpoint, context, cache).whole()


class _Parts(Builder[EncoderDecoder]):
    def whole(self) -> Graph:
        plan, graph = self.plan, self.graph
        graph.start = plan.start
        token = graph.add_input("token", (1,))
        embedding = self.table("shared.weight")
        read = self.stack(self.plan.encoder, self.add("embed", token, self.embedding("encoder", embedding)))
        seen = []
        for n in range(self.plan.decoder.layers):
            self.at = f"decoder.block.{n}.layer.1.EncDecAttention."
            seen.append((self.rows(read, "k"), self.rows(read, "v")))
        h = self.stack(self.plan.decoder, self.add("embed", token, self.embedding("decoder", embedding)), seen)
        self.at = ""
        if plan.tied:
            h = self.scaled(h, plan.hidden**-0.5, "tied_scale")
        graph.outputs = [self.add("linear", h, *self.output(embedding), output="logits")]
        self.checkpoint.finish(plan.ignored)
        graph.validate()
        return graph

    def embedding(self, stack: str, shared: str) -> str:
        """A stack's table: the shared one, but where the model is not tied and has one of its own."""
        name = f"{stack}.embed_tokens.weight"
        if not self.plan.tied and name in self.checkpoint:
            return self.table(name)
        self.same(name, shared)
        return shared

    def stack(self, stack: Stack, h: str, seen: Sequence[tuple[str, str]] | None = None) -> str:
        """All layers; `seen` are for each the keys and values of the source text, where the stack looks at one."""
        at = f"{stack.name}.block."
        self.at = f"{at}0.layer.0.SelfAttention."
        table = self.take("relative_attention_bias.weight", self.plan.buckets, self.plan.heads).read()
        bias = self.graph.add_constant(f"{stack.name}.bias", self.biases(table, seen is None))
        for n in range(stack.layers):
            inside = f"{at}{n}.layer."
            x = self.norm_of(f"{inside}0.", h)
            self.at = f"{inside}0.SelfAttention."
            h = self.residual(h, self.attend(x, self.rows(x, "k"), self.rows(x, "v"),
                                             "full" if seen is None else "causal", bias))  # fmt: skip
            if seen is not None:
                x = self.norm_of(f"{inside}1.", h)
                self.at = f"{inside}1.EncDecAttention."
                h = self.residual(h, self.attend(x, *seen[n], "cross"))
            feed = f"{inside}{1 if seen is None else 2}."
            x = self.norm_of(feed, h)
            self.at = f"{feed}mlp."
            h = self.residual(h, self.switch(x, seen is None) if stack.sparse(n) else self.two(x))
        self.at = f"{stack.name}."
        return self.normed(h, "final_layer_norm")

    def norm_of(self, at: str, h: str) -> str:
        self.at = at
        return self.normed(h, "layer_norm")

    def rows(self, x: str, part: str) -> str:
        y = self.linear(x, part, self.plan.heads * self.plan.dim)
        return self.shaped(y, self.plan.heads, self.plan.dim)

    def attend(self, x: str, k: str, v: str, mask: str, *bias: str) -> str:
        y = self.add("attention", self.rows(x, "q"), k, v, *bias, scale=1.0, window=0, softcap=0.0, cache=self.cache,
                     mask=mask)  # fmt: skip
        return self.linear(self.shaped(y, self.plan.heads * self.plan.dim), "o", self.plan.hidden)

    def biases(self, table: Array, both_ways: bool) -> Array:
        """(heads, distances) of a table (buckets, heads): from the farthest position before to the own or farthest."""
        longest = self.graph.context - 1
        behind = longest if both_ways else 0
        places = buckets(np.arange(-longest, behind + 1), both_ways, self.plan.buckets, self.plan.distance)
        return np.ascontiguousarray(table[places].T)

    def two(self, x: str) -> str:
        acted = self.add("unary", self.linear(x, "wi", self.plan.width), func=self.plan.activation)
        return self.linear(acted, "wo", self.plan.hidden)

    def switch(self, x: str, together: bool) -> str:
        router = self.plan.router if together else replace(self.plan.router, capacity=0)
        logits = self.linear(x, "router.classifier", router.experts, self.plan.router_bias)
        return self.add("moe", x, logits, router=router, experts=[self.one(e) for e in range(router.experts)])

    def one(self, e: int) -> Graph:
        hidden, width = self.plan.hidden, self.plan.width
        graph = Graph(f"{self.at}expert_{e}")
        x = graph.add_input("x", (hidden,))
        for name, rows, columns in (("wi", width, hidden), ("wo", hidden, width)):
            stored = self.take(f"experts.expert_{e}.{name}.weight", rows, columns)
            x = graph.add("linear", x, graph.add_constant(f"{name}.{stored.name}", stored.part(stored.shape)))
            x = graph.add("unary", x, func=self.plan.activation) if name == "wi" else x
        graph.outputs = [x]
        return graph


def buckets(distances: np.ndarray[tuple[int], np.dtype[np.int64]], both_ways: bool, count: int, farthest: int) -> Array:
    """Each distance's bucket (Raffel et al. 2020): one a distance up to the half, then growing ones up to `farthest`.

    `both_ways`: half of the buckets are for positions behind. In float32, as the library computes it.
    """
    f = np.float32
    half = count // 2 if both_ways else count
    far = np.abs(distances) if both_ways else -np.minimum(distances, 0)
    exact = half // 2
    with np.errstate(divide="ignore"):
        grown = np.log(far.astype(f) / f(exact)) / f(math.log(farthest / exact)) * f(half - exact)
    large = np.minimum(exact + np.where(far < exact, 0, grown).astype(np.int64), half - 1)
    places: Array = np.where(far < exact, far, large) + (half * (distances > 0) if both_ways else 0)
    return places
