"""Writer of what follows from `colibri.format` and other tables of the package: C headers, tables in the documents.

python tools/generate.py          # names the files that are out of date
python tools/generate.py --write  # and rewrites them
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from pathlib import Path

from colibri.format import spec, tokenizer_spec
from colibri.frontends.checkpoints import families
from colibri.frontends.checkpoints.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tools import generate_tokenizer  # noqa: E402

_C_TYPES = {"u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float"}


def c_format() -> str:
    """The content of engine/src/format.h."""
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
        line = f"enum clb_{enum} {{ {', '.join(entries)} }};"
        filled = textwrap.wrap(", ".join(entries), 120, initial_indent="    ", subsequent_indent="    ")
        lines += ["", *([line] if len(line) <= 120 else [f"enum clb_{enum} {{", *filled, "};"])]
    for r in spec.RECORDS.values():
        lines += ["", f"/* {r.doc} */", "typedef struct {"]
        for kind, fields in itertools.groupby(r.fields, lambda f: _C_TYPES.get(f.type, f"clb_{f.type}")):
            names = ", ".join(f"{f.name}[{f.count}]" if f.count > 1 else f.name for f in fields)
            lines += textwrap.wrap(f"{kind} {names};", 120, initial_indent="    ", subsequent_indent="        ")
        lines += [f"}} CLB_ALIAS clb_{r.name};", f'_Static_assert(sizeof(clb_{r.name}) == {r.bytes}, "no padding");']
    return "\n".join([*lines, "", "#endif", ""])


def c_errors() -> str:
    """The enumeration of colibri.h."""
    return "\n".join(
        f"    COLIBRI_{'OK' if name == 'OK' else f'ERR_{name}'} = {n},".ljust(34) + f"/* {text} */"
        for n, (name, text) in enumerate(spec.ERRORS)
    )


def c_error_text() -> str:
    """The content of engine/src/error_text.h."""
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
    parts += ["### Enumerations", "", "Values count from 0.", "", "| name | values |", "|---|---|"]
    parts += [f"| {name} | {', '.join(values)} |" for name, values in spec.ENUMS.items()]
    return "\n".join(parts)


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
    whole = {"engine/src/format.h": c_format(), "engine/src/error_text.h": c_error_text()}
    whole["engine/lm/tokenizer_format.h"] = generate_tokenizer.c_format()
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
