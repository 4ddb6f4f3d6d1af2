"""Writer of what follows from `colibri.format` and other tables of the package: C headers, tables in the documents.

python tools/generate.py          # names the files that are out of date
python tools/generate.py --write  # and rewrites them
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from colibri.format import spec, tokenizer_spec
from colibri.frontends.checkpoints import families
from colibri.frontends.checkpoints.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tools import generate_tokenizer  # noqa: E402
from tools.c_text import WIDTH, aligned, comment, formatted, macro  # noqa: E402

_C_TYPES = {
    "u8": "uint8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "f32": "float",
    "tensor": "uint32_t",
}


def c_format() -> str:
    """The content of engine/src/format/format.h."""
    lines = [
        "/* The records and enumerations of model.bin. Generated from colibri.format.spec; see docs/format.md. */",
        "#ifndef COLIBRI_FORMAT_H", "#define COLIBRI_FORMAT_H", "", "#include <stdint.h>", "",
        "/* Records are read in place from the caller's bytes. */",
        "#if defined(__GNUC__)", "#define CLB_ALIAS __attribute__((may_alias))",
        "#else", "#define CLB_ALIAS", "#endif", "",
        '#define CLB_MAGIC "COLIBRI"',
        f"#define CLB_NONE 0x{spec.NONE:X}u",
        *(f"#define CLB_{name} {value}u" for name, value in spec.LIMITS.items()),
    ]  # fmt: skip
    for enum, names in spec.ENUMS.items():
        entries = [f"CLB_{enum.upper()}_{n.upper()}" for n in (*names, "count")]
        lines += ["", f"enum clb_{enum} {{ {', '.join(entries)} }};"]
    for r in spec.RECORDS.values():
        lines += ["", *comment(r.doc), "typedef struct {"]
        named = [f for f in r.fields if r is spec.OP and _first_word(f.name) is not None]
        before = r.fields.index(named[0]) if named else len(r.fields)
        lines += _members(r.fields[:before], "    ")
        if named:
            lines += ["    union { /* what each operation calls these words */", "        struct {"]
            lines += [*_members(named, " " * 12), "        };", *_views(), "    };"]
            lines += _members(r.fields[before + len(named) :], "    ")
        lines += [f"}} CLB_ALIAS clb_{r.name};", f'_Static_assert(sizeof(clb_{r.name}) == {r.bytes}, "no padding");']
    return "\n".join([*lines, "", "#endif", ""])


def _members(fields: Sequence[spec.Field], indent: str) -> list[str]:
    """Declarations, those of one type together."""
    lines = []
    for kind, some in itertools.groupby(fields, lambda f: _C_TYPES.get(f.type, f"clb_{f.type}")):
        names = ", ".join(f"{f.name}[{f.count}]" if f.count > 1 else f.name for f in some)
        lines += textwrap.wrap(f"{kind} {names};", WIDTH, initial_indent=indent, subsequent_indent=indent + "    ")
    return lines


def _first_word(field: str) -> int | None:
    """Where a field of the operation record is, in words from `w0`; None where it is before that or behind."""
    at, first, end = (_words("op", name)[0] for name in (field, "w0", "before"))
    return at - first if first <= at < end else None


def _views() -> list[str]:
    """The structs of what each operation calls the words from `w0` on."""
    lines = []
    for view, words in spec.VIEWS.items():
        lines.append("        struct {")
        at = 0
        for word in words:
            if word.at > at:
                lines.append(f"            uint32_t unused_{at}[{word.at - at}];")
            size = f"[{word.count}]" if word.count > 1 else ""
            row = f"            {_C_TYPES[word.type]} {word.name}{size};"
            lines += aligned([row], [word.doc + _range(word)], " " * 12)
            at = word.at + word.count
        lines.append(f"        }} {view};")
    return lines


def _range(word: spec.Named) -> str:
    most = {spec.LIMIT: "CLB_LIMIT", spec.LIMIT // 2: "CLB_LIMIT / 2"}.get(word.most, str(word.most))
    return "" if (word.least, word.most) == (0, spec.NONE) else f"; {word.least} to {most}"


def c_operations() -> str:
    """The content of engine/src/format/operations.h."""
    lines = [
        "/* One row for each operation. Generated from src/colibri/format/spec.py. */",
        "#ifndef COLIBRI_OPERATIONS_H", "#define COLIBRI_OPERATIONS_H", "", '#include "format.h"', "",
        "enum clb_trait {",
        *aligned([f"    CLB_{name.upper()} = 1 << {n}," for n, name in enumerate(spec.TRAITS)],
                 list(spec.TRAITS.values())), "};",
    ]  # fmt: skip
    rows = [(o.name.upper(), o.proof, f"CLB_{o.functions.upper()}_COUNT" if o.functions else "UINT16_MAX + 1",
             " | ".join(f"CLB_{trait.upper()}" for trait in o.traits) or "0")
            for o in spec.OPERATIONS]  # fmt: skip
    lines += _x_macro("CLB_OPERATIONS", "code, its proof clb_…_proof, how many functions it knows, traits", rows)
    for name, walk, doc in (
        ("CLB_ROW_KERNELS", "rows", "what computes each row by itself: code, clb_…"),
        ("CLB_BATCH_KERNELS", "batch", "what runs all samples of a batch together: code, clb_…"),
    ):
        lines += _x_macro(name, doc, [(o.name.upper(), o.kernel) for o in spec.operations(walk)])
    records = [f"CLB_RANGES_OF_{record.upper()}" for record in spec.RANGES]
    records[0] += " = CLB_OP_COUNT"
    lines += ["", "/* Words of a record, of an operation from w0 on, that have a range. */", "typedef struct {",
              "    uint16_t code; /* an operation's, or a record's */", "    uint8_t first, count;",
              "    uint32_t least, most;", "} clb_range;",
              f"enum {{ {', '.join(records)} }};", ""]  # fmt: skip
    known = [(f"CLB_OP_{o.name.upper()}", [(w.at, w.count, w.least, w.most) for w in spec.VIEWS[o.view] if _range(w)])
             for o in spec.OPERATIONS]  # fmt: skip
    known += [(f"CLB_RANGES_OF_{record.upper()}", [(*_words(record, field), *fields[field]) for field in fields])
              for record, fields in spec.RANGES.items()]  # fmt: skip
    ranges = [f"X({owner}, {at}, {count}, {least}, {most}u)"
              for owner, own in known for at, count, least, most in _joined(own)]  # fmt: skip
    lines += macro("CLB_RANGES(X)", ranges)
    return "\n".join([*lines, "", "#endif", ""])


def _words(record: str, field: str) -> tuple[int, int]:
    """Where a field is in its record, in words of 32 bits, and how many it has."""
    at = (spec.RECORDS[record].dtype.fields or {})[field][1]
    return int(at) // 4, next(f.count for f in spec.RECORDS[record].fields if f.name == field)


def _joined(ranges: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Ranges (first word, words, least, most), those of neighbours joined where they are the same."""
    joined: list[tuple[int, int, int, int]] = []
    for at, count, *limits in ranges:
        first, before, *others = joined[-1] if joined else (-1, 0)
        if (first + before, others) == (at, limits):
            joined[-1] = (first, before + count, limits[0], limits[1])
        else:
            joined.append((at, count, limits[0], limits[1]))
    return joined


def _x_macro(name: str, doc: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A macro that hands each row to another."""
    return ["", *comment(doc), *macro(f"{name}(X)", [f"X({', '.join(row)})" for row in rows])]


def c_errors() -> str:
    """The enumeration of colibri.h."""
    return "\n".join(
        line
        for n, (name, text) in enumerate(spec.ERRORS)
        for line in (*comment(text, "    "), f"    COLIBRI_{'OK' if name == 'OK' else f'ERR_{name}'} = {n},")
    )


def c_error_text() -> str:
    """The content of engine/src/format/error_text.h."""
    rows = ",\n".join(
        f'    {{"COLIBRI_{"OK" if name == "OK" else f"ERR_{name}"}", "{text}"}}' for name, text in spec.ERRORS
    )
    return (
        "/* Names and sentences of enum colibri_error, by value. Generated from src/colibri/format/spec.py. */\n"
        f"static const char *const error_table[{len(spec.ERRORS)}][2] = {{\n{rows}\n}};\n"
    )


def doc_records() -> str:
    """The record and enumeration tables of docs/format.md."""
    parts = []
    for r in spec.RECORDS.values():
        parts += [f"### {r.name} ({r.bytes} bytes)", "", r.doc, "", "| offset | type | field | meaning |",
                  "|---:|---|---|---|"]  # fmt: skip
        offset = 0
        for f in r.fields:
            size = spec.field_dtype(f.type).itemsize * f.count
            kind = f.type + (f"[{f.count}]" if f.count > 1 else "")
            parts.append(f"| {offset} | {kind} | `{f.name}` | {f.doc} |")
            offset += size
        parts.append("")
    parts += ["### What operations call the words of their record", "",
              "Words not named are of no meaning; `0xFFFFFFFF` is no tensor.", "",
              "| operation | name | field | range | meaning |", "|---|---|---|---|---|"]  # fmt: skip
    for view, words in spec.VIEWS.items():
        users = ", ".join(o.name for o in spec.OPERATIONS if o.view == view)
        if not users:
            continue
        parts += [f"| {users} | `{w.name}` | `{_field_of(w)}` | {_range(w).removeprefix('; ')} | {w.doc} |"
                  for w in words]  # fmt: skip
    parts += ["", "### Enumerations", "", "Values count from 0.", "", "| name | values |", "|---|---|"]
    parts += [f"| {name} | {', '.join(values)} |" for name, values in spec.ENUMS.items()]
    return "\n".join(parts)


def _field_of(word: spec.Named) -> str:
    """The field of the operation record that a word is in."""
    for field in spec.OP.fields:
        first = _first_word(field.name)
        if first is not None and first <= word.at < first + field.count:
            return f"{field.name}[{word.at - first}]" if field.count > 1 else field.name
    raise ValueError(f"{word.name} is no word of an operation")


def doc_errors() -> str:
    """The error table of docs/guide.md."""
    rows = [f"| {n} | `COLIBRI_{'OK' if name == 'OK' else f'ERR_{name}'}` | {text} |"
            for n, (name, text) in enumerate(spec.ERRORS)]  # fmt: skip
    return "\n".join(["| value | name | meaning and what to do |", "|---:|---|---|", *rows])


def doc_families() -> str:
    """The table of docs/routing.md."""
    lines = ["| family (`model_type`) | experts, k | p | w | chosen by | refused unless | beside the mixture |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for kind, f in FAMILIES.items():
        p = {"softmax": "softmax", "sigmoid": "sigmoid", "sparse_mixer": "sparse mixer"}[f.score]
        least = _told(f.epsilon)
        total = f"max(Σ, {least})" if f.clamped else "Σ" if f.epsilon == 0 else f"(Σ + {least})"
        w = f"the mixer's, ε = {least}" if f.score == "sparse_mixer" else "p"
        w += "" if f.normalized is False else f" / {total}"
        w += f" if {_told(f.normalized)} else p" if isinstance(f.normalized, families.Value) else ""
        if f.scale != 1.0:
            w = (f"({w})" if " if " in w else w) + f" · {_told(f.scale)}"
        w += f" · `{f.expert_scale}`" if f.expert_scale else ""
        w += "; multiplies the expert's input" if f.apply == "input" else ""
        by = "p" if not f.bias else f"p + `{f.bias}`"
        by += "" if f.bias_if is True else f" if {_told(f.bias_if)}"
        if f.groups is not None:
            rule = "largest key" if f.group_rule == "max" else "sum of two largest keys"
            by += f"; {_told(f.kept_groups)} of {_told(f.groups)} groups by their {rule}"
            by += f" if {_told(f.groups_if[0])} is `{f.groups_if[1]}`" if f.groups_if else ""
        by += f"; at most {_told(f.capacity)} tokens an expert" if f.capacity is not None else ""
        only = ", ".join(f"{_names(v)} {' or '.join(f'`{a}`' for a in allowed)}" for v, allowed in f.only)
        sizes = f"{_told(f.experts)}, {_told(f.k)}"
        lines.append(f"| {f.title} (`{kind}`) | {sizes} | {p} | {w} | {by} | {only} | {f.around} |")
    return "\n".join(lines)


def _names(value: families.Value) -> str:
    return ", ".join(f"`{name}`" for name in value.names[:1])


def _told(value: object) -> str:
    """A value of a configuration, with its class's default in brackets."""
    if not isinstance(value, families.Value):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return f"{_names(value)} ({'none' if value.default is None else value.default})"


def generated(root: Path) -> dict[Path, str]:
    """Every generated file under the repository `root`, with the content it should have."""
    whole = {
        "engine/src/format/format.h": c_format(),
        "engine/src/format/operations.h": c_operations(),
        "engine/src/format/error_text.h": c_error_text(),
        "engine/lm/tokenizer_format.h": generate_tokenizer.c_format(),
    }
    parts = [
        ("engine/include/colibri.h", "/*", "*/", "errors", c_errors()),
        ("docs/format.md", "<!--", "-->", "records", doc_records()),
        ("docs/format.md", "<!--", "-->", "tokenizer", generate_tokenizer.doc_records()),
        ("docs/guide.md", "<!--", "-->", "errors", doc_errors()),
        ("docs/routing.md", "<!--", "-->", "families", doc_families()),
    ]
    files = {root / path: text for path, text in whole.items()}
    for path, left, right, name, text in parts:
        begin, end = f"{left} generated: {name} {right}", f"{left} end of {name} {right}"
        old = files.get(root / path) or (root / path).read_text(encoding="utf-8")
        if begin not in old or end not in old:
            raise ValueError(f"{path} lacks the lines {begin!r} and {end!r}")
        pattern = re.compile(re.escape(begin) + r".*?" + r"([ \t]*)" + re.escape(end), re.S)
        body = f"{begin}\n{text}\n"
        files[root / path] = pattern.sub(lambda m, body=body, end=end: f"{body}{m[1]}{end}", old)  # type: ignore[misc]
    files = {p: formatted(text, p) if p.suffix == ".h" else text for p, text in files.items()}
    format_page = root / "docs/format.md"
    for name, version in (("model", spec.FORMAT_VERSION), ("tokenizer", tokenizer_spec.FORMAT_VERSION)):
        said = rf"(`{name}\.bin`, format version )\d+"
        if not re.search(said, files[format_page]):
            raise ValueError(f"{format_page} does not say the format version of `{name}.bin`")
        files[format_page] = re.sub(said, rf"\g<1>{version}", files[format_page])
    return files


def main() -> int:
    """Name, or with `--write` rewrite, the generated files that are out of date."""
    stale = {p: t for p, t in generated(ROOT).items() if not p.exists() or p.read_text(encoding="utf-8") != t}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
    return 0 if not stale or "--write" in sys.argv[1:] else 1


if __name__ == "__main__":
    sys.exit(main())
