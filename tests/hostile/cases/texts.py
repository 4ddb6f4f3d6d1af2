"""Operations that know positions: embedding, rotation, the attention cache, attention, delays, the delta rule."""

from __future__ import annotations

from colibri.format import spec
from tests.hostile.cases import costs
from tests.hostile.cases.table import U32, U64, Fields, Row, of, place, table

TOO_MANY = (0, 1 << 20, 1 << 27, spec.LIMIT, spec.LIMIT + 1, 1 << 31, U32 - 63, U32)
CACHES = ("cache", "attention")


def _of_cache(code: str) -> list[Row]:
    """What cache and attention have in common."""
    return [
        *((f"{code} with {name} {n}", "PROGRAM", {f"{code}.{field}": n})
          for name, field in (("key", "key"), ("value", "value"), ("heads", "key_heads"), ("positions", "positions"))
          for n in TOO_MANY),
        (f"{code} of one page for two", "PROGRAM", {f"{code}.positions": 64}),
        (f"{code} of no whole pages", "PROGRAM", {f"{code}.positions": 127}),
        (f"{code} with an endless window", "PROGRAM", {f"{code}.window": spec.LIMIT + 1}),
        (f"{code} in an unknown format", "PROGRAM", {f"{code}.func": 3}),
    ]  # fmt: skip


def _kept(code: str) -> list[Row]:
    """Where an operation keeps what later tokens see."""
    return [
        (f"{code} keeps at head", "PROGRAM", {f"{code}.work.offset": 0}),
        (f"{code} keeps at end", "PROGRAM", {f"{code}.work.offset": lambda e: e["header.context_bytes"] // 32 * 32}),
        (f"{code} keeps at nowhere", "PROGRAM", {f"{code}.work.offset": U64 - 31}),
        (f"{code} keeps at an odd place", "PROGRAM", {f"{code}.work.offset": of(f"{code}.work.offset", 4)}),
        (f"{code} keeps in the output", "PROGRAM", {f"{code}.work.space": "output"}),
    ]


def _two_rows(apart: int) -> Fields:
    """The first delay recalls two time steps."""
    width = of("delay.width")
    out = {"row_stride": width, "sample_stride": lambda e: 2 * width(e), "offset": spec.HEAD_BYTES}
    return {"delay.rows": 2, "delay.apart": apart, "delay.out": out}


OUTPUT = {"space": "output", "offset": 0, "sample_stride": of("header.output_floats"), "row_stride": 0}

CASES = [
    *table(
        "text",
        *((f"{code} before the tail has its {operand} in the output", "PROGRAM", {f"{code}.{operand}": OUTPUT})
          for code in ("linear", "rmsnorm", "embed", "moe", "attention") for operand in ("a", "out")),
        *((f"{code} in an expert", "PROGRAM", {"expert linear": lambda e, code=code: e[code]})
          for code in ("embed", "rope", "cache", "attention", "delay")),
        *_of_cache("cache"), *_of_cache("attention"),
        *_kept("cache"), *_kept("attention"), *_kept("delay"),
        ("attention of more heads than share keys", "PROGRAM", {"attention.rows": of("attention.rows", 1)}),
        ("cache of more rows than heads", "PROGRAM", {"cache.rows": of("cache.rows", 1)}),
        ("queries times samples overflow", "PROGRAM", {"attention.rows": spec.LIMIT}),
        ("queries out of the cache", "PROGRAM", {"attention.a.offset": of("attention.work.offset")}),
        ("rope turns an odd number", "PROGRAM", {"rope.turned": 3}),
        ("rope turns more than there is", "PROGRAM", {"rope.turned": 10}),
        ("rope turns nothing", "OK", {"rope.turned": 0}),
        ("embed of another width", "PROGRAM", {"embed.width": 8}),
        ("embed of several rows", "PROGRAM", {"embed.rows": 2}),
        ("delay of fewer slots than it looks back", "PROGRAM", {"delay.slots": 4}),
        ("delay of nothing", "PROGRAM", {"delay.steps": 0}),
        *((f"delay of {n} {field}", "PROGRAM", {f"delay.{field}": n})
          for n in (1 << 20, spec.LIMIT, U32) for field in ("steps", "slots")),
        ("delay of more rows than fit apart", "PROGRAM", {"delay.rows": 2}),
        *((f"delay of rows {n} apart, from the future", "PROGRAM", _two_rows(n)) for n in (3, 1 << 20, U32)),
        ("delay of two rows onto another value", "ORDER", _two_rows(2)),
        ("delay that only stores", "ORDER", {"delay.out.space": "none"}),
        ("delay that only recalls", "OK", {"delay.a.space": "none"}),
        ("delay that stores from a constant", "PROGRAM", {"delay.a.space": "const"}),
        ("delay that recalls into the input", "PROGRAM", {"delay.out.space": "input"}),
        ("delay of what it keeps", "ORDER",
         {"delay.a": {"offset": of("delay.work.offset", 4), "space": "arena", "sample_stride": 0}}),
        ("a source text without an encoder", "PROGRAM", {"attention.window": 0, "attention.mask": "cross"}),
        cost=costs.of_text,
    ),
    *table("text", ("attention over its own cache", "OK or PROGRAM",
                    {"attention.out.offset": of("attention.work.offset")})),
    *table(
        "text_window",
        *((f"{code} of one page for a window", "PROGRAM", {f"{code}.positions": 64}) for code in CACHES),
        *((f"{code} with a wider window", "OK or PROGRAM", {f"{code}.window": 79}) for code in CACHES),
        ("fewer sinks than heads", "PROGRAM", {"attention.rows": of("attention.rows", 2)}),
        cost=costs.of_text,
    ),
    *table(
        "text_int8",
        *((f"{code} in a larger format", "OK or PROGRAM", {f"{code}.func": 0}) for code in CACHES),
        cost=costs.of_text,
    ),
    *table(
        "text_delta",
        *_kept("delta"),
        ("delta in the tail", "PROGRAM", {"header.tail_op": place("delta")}),
        ("delta in an expert", "PROGRAM", {"expert linear": lambda e: e["delta"]}),
        *((f"delta of {field} {n}", "PROGRAM", {f"delta.{field}": n})
          for field in ("key", "value", "key_heads") for n in TOO_MANY),
        ("delta of a longer key", "PROGRAM", {"delta.key": 7}),
        ("delta of a shorter key", "OK", {"delta.key": 5}),
        ("delta of a longer value", "PROGRAM", {"delta.value": 6}),
        ("delta of a shorter value", "OK or ORDER", {"delta.value": 4}),
        ("delta of key heads that do not serve all values", "PROGRAM", {"delta.key_heads": 3}),
        ("delta of more key heads than there are", "ORDER", {"delta.key_heads": 4}),
        ("delta of fewer key heads", "OK", {"delta.key_heads": 1}),
        ("delta of more heads than it keeps", "PROGRAM", {"delta.rows": 6}),
        ("delta of fewer heads", "OK or ORDER", {"delta.rows": 2}),
        ("delta of no values", "PROGRAM", {"delta.b.space": "none"}),
        ("delta of values from a constant", "PROGRAM", {"delta.b.space": "const"}),
        ("delta of values out of its state", "ORDER", {"delta.b.offset": of("delta.work.offset")}),
        ("delta of keys out of its state", "ORDER", {"delta.a.offset": of("delta.work.offset")}),
        ("delta onto its state", "ORDER", {"delta.out.offset": of("delta.work.offset")}),
        ("delta onto its keys", "ORDER", {"delta.out.offset": of("delta.a.offset")}),
        ("delta with its state where others write", "ORDER", {"delta.work.offset": spec.HEAD_BYTES}),
        cost=costs.of_text,
    ),
    # The first attention is the encoder's, the second the decoder's to its own text, the third the other.
    *table(
        "exchange",
        ("encoder-decoder: an unknown mask", "PROGRAM", {"attention[1].window": 0, "attention[1].mask": 3}),
        ("encoder-decoder: an encoder that looks at a source text", "PROGRAM",
         {"attention[0].window": 0, "attention[0].mask": "cross"}),
        ("encoder-decoder: all, through a window", "PROGRAM",
         {"attention[0].window": 5, "attention[0].mask": "full"}),
        ("encoder-decoder: a source text through a window", "PROGRAM",
         {"attention[2].window": 5, "attention[2].mask": "cross"}),
        ("encoder-decoder: biases for both ways, used for one", "ORDER",
         {"attention[0].window": 0, "attention[0].mask": "causal"}),
        ("encoder-decoder: biases for one way, used for both", "PROGRAM",
         {"attention[1].window": 0, "attention[1].mask": "full"}),
        ("encoder-decoder: an encoder that writes the output", "PROGRAM", {"rmsnorm.out": OUTPUT}),
        cost=costs.of_text,
    ),
]  # fmt: skip
