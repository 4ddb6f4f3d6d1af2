"""Mutations of the JSON in a checkpoint's or an export's directory: deterministic, by number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

# Put into JSON as they stand, for the standard's own writer does not write them.
RAW = {"@nan": "NaN", "@inf": "Infinity", "@-inf": "-Infinity", "@huge": "1e999", "@digits": "9" * 5000,
       "@deep": "[" * 3000 + "]" * 3000, "@deeper": '{"a":' * 100_000 + "1" + "}" * 100_000, "@bare": "nope",
       "@surrogate": '"\\ud800"'}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 65, 4097, 1 << 20, (1 << 31) - 1, 1 << 63, 10**30, -(10**30), 0.0,
    0.5, 1e-320, 1e-30, 1e30, 1e308, -1e308, "", "x", "0", "1e5", "x" * 100_000, "\x1b[2J\x1b]52;c;eA==\x07", "\0",
    "../../x", "/etc/passwd", "é\u202e", [], {}, [0], [None], [[]], [1] * 64, ["x"], [1.5, "x", None], {"x": 1},
    {"rope_type": "linear", "factor": 0}, list(range(2000)), {"__proto__": {}}, *RAW,
]  # fmt: skip
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "alpha": 10.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
     "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": True, "attention_factor": 1.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0,
     "original_max_position_embeddings": 16, "short_mscale": 1.0, "long_mscale": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
]  # fmt: skip


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a document; of long lists and dictionaries the first and the last."""
    if depth > 6:
        return
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))]
    else:
        return
    for key in keys if len(keys) < 80 else [*keys[:30], *keys[-5:]]:
        yield value, key
        yield from places(value[key], depth + 1)


def written(document: Any) -> bytes:
    text = json.dumps(document)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode("utf-8", "surrogatepass")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a JSON file with something in them changed."""
    if rng.random() < 0.12:
        return garbled(data, rng)
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        change(document, rng)
    text = written(document)
    if rng.random() < 0.04:  # a name twice
        first = next(iter(document), "x") if isinstance(document, dict) else "x"
        text = b"{" + json.dumps(first).encode() + b": 1, " + text[1:]
    return text


def change(document: Any, rng: random.Random) -> None:
    found = [*places(document)]
    if not found:
        return
    holder, key = rng.choice(found)
    match rng.randrange(10):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("x", "", "\x1b[1m", "rope_scaling", "text_config", "quantization_config", "head_dim",
                               "sliding_window", "__class__"))] = copy.deepcopy(rng.choice(VALUES))  # fmt: skip
        case 2 if isinstance(holder, dict):
            holder[rng.choice(("Ä", "num_hidden_layer", "factor"))] = holder.pop(key)
        case 3:
            other = holder[rng.choice([*holder])] if isinstance(holder, dict) else rng.choice(holder)
            holder[key] = copy.deepcopy(other)
        case 4 if isinstance(document, dict) and "vocab_size" in document:
            scaling = dict(rng.choice(ROPES))
            scaling[rng.choice([*scaling])] = copy.deepcopy(rng.choice(VALUES))
            document[rng.choice(("rope_scaling", "rope_parameters"))] = scaling
        case 5 if isinstance(holder[key], int | float):
            holder[key] = holder[key] * rng.choice((2, -1, 0.5, 1000, 1e18)) + rng.choice((0, 1, -1))
        case 6 if isinstance(holder[key], str | list):
            holder[key] = holder[key] * rng.choice((0, 2, 50))
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))


def garbled(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at + 1 :]
        case 3:
            return data[:at] + bytes(rng.randrange(256) for _ in range(4)) + data[at:]
        case 4:
            return rng.choice((b"", b"[]", b"null", b"3", b'"x"', b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{} {}"))
        case 5:
            return b"[" * rng.choice((100, 5000, 1_000_000))
        case 6:
            return data.replace(b'"', b"'", 3)
        case _:
            return data + b"\0"


def header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header, or its length, is mutated."""
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.1:
        wrong = rng.choice((0, 1, length - 1, length + 1, 1 << 25, 1 << 40, (1 << 64) - 1))
        return wrong.to_bytes(8, "little") + data[8:]
    if rng.random() < 0.3:
        tensors = json.loads(text)
        name = rng.choice([n for n in tensors if n != "__metadata__"])
        other = rng.choice([n for n in tensors if n != "__metadata__"])
        entry = tensors[name]
        start, end = entry["data_offsets"]
        match rng.randrange(5):
            case 0:
                entry["data_offsets"] = tensors[other]["data_offsets"]
            case 1:
                entry["data_offsets"] = [start + 4, end + 4]
            case 2:
                entry["data_offsets"] = [end, start]
            case 3:
                entry["shape"], entry["data_offsets"] = [1 << 40, 1 << 40], [0, 1 << 62]
            case _:
                entry["dtype"] = rng.choice(("I8", "F8_E4M3", "F8_E8M0", "F64", "F4", "Q4_0", "BOOL", None, 3))
        text = json.dumps(tensors).encode()
    else:
        text = mutated(text, rng)
    return len(text).to_bytes(8, "little") + text + rest


def template(data: bytes, rng: random.Random) -> bytes:
    """A chat template with something in it changed."""
    more = (b"{{ 1 // 0 }}", b"{% for x in range(3) %}", b"{{ undefined.x.y }}", b"{{ messages[99].content }}", b"\xff",
            b"{{ '\x1b[2J' }}", b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"{{ ''.__class__ }}", b"{{", b"\0",
            b"{{ messages | tojson | length }}")  # fmt: skip
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(more) + data[at:] if rng.random() < 0.7 else garbled(data, rng)
