"""C8, C10, C12: folders, headers, names and numbers of checkpoints that are not what they should be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import colibri
from colibri.cli.app import app
from colibri.common import strict_json
from colibri.common.folder import Folder
from colibri.common.names import check_port, port_names, printable
from colibri.common.npz import save
from colibri.emit.model_bin import _ports
from colibri.errors import ColibriError, ExportError, ModelError
from colibri.exporter import build, export_lm
from colibri.format import spec
from colibri.frontends.checkpoints.checkpoint import Checkpoint
from colibri.frontends.checkpoints.config_fields import FIELDS, ROPE_FIELDS, Field, problem_of
from colibri.frontends.checkpoints.language_families import ADAPTERS
from colibri.frontends.checkpoints.language_models import load_checkpoint
from colibri.frontends.checkpoints.rotary import ALLOWED, COMMON, NEEDED
from colibri.frontends.tensor_files import HEADER_BYTES, read_header
from colibri.ir.graph import Graph
from colibri.text.tokenizer import copy_files
from tests.frontends.checkpoints.test_checkpoints import edit, refuses, retensor
from tests.frontends.checkpoints.variants import make

# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"), ("", "not JSON"), ("{} {}", "not JSON"), ('{"a": NaN}', "NaN"), ("[-Infinity]", "Infinity"),
        ("1e999", "large"), ("-1e999", "large"), ("9" * 65, "digits"), ('{"a": 1, "b": 2, "a": 1}', "'a' twice"),
        ("[" * 65 + "]" * 65, "deep"), ('{"a":' * 100_000 + "1" + "}" * 100_000, "deep"), ("[" * 10**6, "deep"),
        ('"\\ud800"', "surrogate"), ('{"\\uDC00": 1}', "surrogate"), ('[{"a": ["\\ud83d"]}]', "surrogate"),
    ],
)  # fmt: skip
def test_json_is_strict(text: str, word: str) -> None:
    with pytest.raises(strict_json.JsonError, match=word):
        strict_json.loads(text.encode())


@pytest.mark.parametrize("value", [{"a": [1, -0.5, 10**30, "\ud83d\ude00", None, True]}, [], "x", 0, {"": {}}])
def test_json_that_is_sound_is_read(value: Any) -> None:
    assert strict_json.loads(json.dumps(value).encode("utf-8", "surrogatepass")) == json.loads(json.dumps(value))
    deep: Any = 1
    for _ in range(strict_json.DEPTH - 1):
        deep = [deep]
    assert strict_json.loads(json.dumps(deep).encode()) == deep


# --- folders ----------------------------------------------------------------------------------------------------------


def hub_cache(root: Path) -> tuple[Path, Path]:
    """A snapshot of the Hugging Face cache and its blobs."""
    snapshot, blobs = root / "models--a--b/snapshots/0f3c", root / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    return snapshot, blobs


def test_a_snapshot_of_the_hub_s_cache_is_links(tmp_path: Path) -> None:
    """C8: what the hub's own library lays out goes on working, templates in a folder too."""
    snapshot, blobs = hub_cache(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    make("mixtral", source, {})
    (source / "tokenizer.json").write_text("{}")
    for n, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / f"{n:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{n:040x}")
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "ab").write_text("template")
    (snapshot / "additional_chat_templates/tool_use.jinja").symlink_to("../../../blobs/ab")
    assert load_checkpoint(snapshot).outputs == ["logits"]
    (tmp_path / "link").symlink_to(snapshot)
    assert load_checkpoint(tmp_path / "link").outputs == ["logits"]
    copy_files(snapshot, tmp_path / "out")
    copied = tmp_path / "out/additional_chat_templates/tool_use.jinja"
    assert copied.read_text() == "template" and not copied.is_symlink()
    assert not (tmp_path / "out/config.json").is_symlink()


OUTSIDE = ["config.json", "model.safetensors", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja",
           "generation_config.json", "additional_chat_templates", "additional_chat_templates/x.jinja"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    """C8: a private file is never copied into an export, whichever file points at it."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    make("mixtral", source, {})
    (source / "tokenizer.json").write_text("{}")
    private = tmp_path / "private"
    path = source / name
    if name == "additional_chat_templates":
        private.mkdir()
        (private / "x.jinja").write_text("secret")
    elif path.exists():
        path.rename(private)
    else:
        private.write_text('{"secret": 1}')
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(private)
    with pytest.raises(ColibriError, match=f"{name}.* is a link"):
        export_lm(load_checkpoint(source), out, dtype="fp32", workers=1, tokenizer=source)
    assert not out.exists() or not [*out.iterdir()]


def test_a_link_within_the_folder_is_a_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "b.json").symlink_to("a.json")
    assert Folder(tmp_path).json("b.json") == {"a": 1}


def test_links_to_nowhere_beside_the_model_do_not_matter(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    source = tmp_path / "source"
    source.mkdir()
    make("mixtral", source, {})
    (source / "nowhere.safetensors").symlink_to("missing")
    (source / "itself.safetensors").symlink_to("itself.safetensors")
    done = CliRunner().invoke(app, ["export", "-m", str(source), "-o", str(tmp_path / "out"), "--workers", "1"])
    assert done.exit_code == 0, done.output


def test_what_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    """Only what a folder holds is distrusted, not what a command is given."""
    from colibri.frontends.architecture import read_tensors

    save_file({"w": torch.full((2, 2), 3.0)}, tmp_path / "away.safetensors")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/w.safetensors").symlink_to(tmp_path / "away.safetensors")
    assert read_tensors(tmp_path / "in/w.safetensors")["w"].tolist() == [[3, 3], [3, 3]]


def test_blobs_are_only_those_beside_the_snapshot(tmp_path: Path) -> None:
    snapshot, _ = hub_cache(tmp_path)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/x").write_text("{}")
    (snapshot / "config.json").symlink_to(tmp_path / "blobs/x")
    with pytest.raises(ExportError, match="link"):
        Folder(snapshot).json("config.json")


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refuses(tmp_path, "config.json", "regular file")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    refuses(tmp_path, "config.json", "regular file")
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    refuses(tmp_path, "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("config.json")
    refuses(tmp_path, "config.json")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "\x1b[1m", "x" * 600])
def test_a_name_is_that_of_a_file_in_the_folder(name: str, tmp_path: Path) -> None:
    for method in ("has", "read", "json", "text", "file"):
        with pytest.raises(ExportError):
            getattr(Folder(tmp_path), method)(name)


def test_an_index_names_files_of_the_folder_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make("mixtral", source, {})
    (source / "model.safetensors").rename(tmp_path / "away.safetensors")
    for file in ("../away.safetensors", str(tmp_path / "away.safetensors"), "\0", ""):
        index = {"weight_map": {"lm_head.weight": file}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        refuses(source, str(source))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_claims_gigabytes_is_not_read(name: str, tmp_path: Path) -> None:
    """C10: a hole of many gigabytes takes no disk."""
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 36)
    refuses(tmp_path, name, "bytes")


# --- headers of tensors -----------------------------------------------------------------------------------------------


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int, shape: Any = None, kind: Any = "F32", **more: Any) -> dict[str, Any]:
    return {
        "dtype": kind,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
        **more,
    }


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": entry(0, 16), "b": entry(8, 24)}, "overlaps"), ({"a": entry(0, 16), "b": entry(0, 16)}, "overlaps"),
        ({"a": entry(0, 8), "b": entry(16, 24)}, "gap"), ({"a": entry(8, 24)}, "gap"), ({"a": entry(0, 16)}, "behind"),
        ({}, "behind"), ({"a": entry(0, 32)}, "cut short"), ({"a": entry(16, 8)}, "'a'"),
        ({"a": entry(-8, 16)}, "'a'"), ({"a": entry(0, 24, [5])}, "24 bytes"),
        ({"a": entry(0, 24, [6], "F16")}, "24 bytes"), ({"a": entry(0, 24, [1 << 47, 1 << 47])}, "24 bytes"),
        ({"a": entry(0, 1 << 62, [1 << 60])}, "'a'"),
        ({"a": entry(0, 24, [-2, -3])}, "shape"), ({"a": entry(0, 24, [6.0])}, "shape"),
        ({"a": entry(0, 24, [True, 6])}, "shape"), ({"a": entry(0, 24, 6)}, "shape"),
        ({"a": entry(0, 24, [6] + [1] * 8)}, "shape"), ({"a": entry(0, 24, kind="Q4_0")}, "Q4_0"),
        ({"a": entry(0, 24, kind=None)}, "None"), ({"a": entry(0, 24, kind=["F32"])}, "stored"),
        ({"a": entry(0, 24, wobble=1)}, "described"), ({"a": {"dtype": "F32"}}, "described"), ({"a": 3}, "described"),
        ({"\x1b[2J": entry(0, 24)}, "called"), ({"": entry(0, 24)}, "called"), ([], "no object"), (b"{", "damaged"),
        (b'{"a": 1, "a": 1}', "twice"), (b"[" * 100_000, "deep"), (b"\xff" * 10, "damaged"), (b"null", "no object"),
    ],
)  # fmt: skip
def test_a_header_that_does_not_describe_the_file(header: Any, word: str, tmp_path: Path) -> None:
    """C12: every byte of the data belongs to one tensor, and each to sizes that fit."""
    raw(tmp_path / "model.safetensors", header, bytes(24))
    with pytest.raises(ExportError, match=word):
        read_header(Folder(tmp_path), "model.safetensors")


def test_tensors_may_be_listed_in_any_order_and_be_empty(tmp_path: Path) -> None:
    header = {"b": entry(8, 24), "__metadata__": {"format": "pt"}, "e": entry(8, 8), "a": entry(0, 8)}
    raw(tmp_path / "model.safetensors", header, np.arange(6, dtype="<f4").tobytes())
    found = {t.name: t for t in read_header(Folder(tmp_path), "model.safetensors")}
    assert found["b"].read().tolist() == [2, 3, 4, 5] and found["e"].shape == (0,)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES + 1, 1 << 35, 1 << 62, (1 << 64) - 1])
def test_a_header_s_length_is_not_believed(length: int, tmp_path: Path) -> None:
    """C10: a sparse file that claims gigabytes of header is refused before they are read."""
    path = raw(tmp_path / "model.safetensors", {"a": entry(0, 24)}, bytes(24), length)
    for size in (None, 1 << 36):
        if size is not None:
            os.truncate(path, size)
        with pytest.raises(ExportError, match=r"model\.safetensors"):
            read_header(Folder(tmp_path), "model.safetensors")


# --- fields -----------------------------------------------------------------------------------------------------------


def test_every_field_of_every_family_has_a_kind_and_a_range() -> None:
    """C12: what a class says by default lies in it."""
    for family, adapter in ADAPTERS.items():
        for name, default in adapter.defaults.items():
            assert name in FIELDS, (family, name)
            assert default is None or not problem_of(name, default), (family, name)
    for kind in NEEDED:
        assert {*COMMON, *NEEDED[kind], *ALLOWED[kind]} <= {*ROPE_FIELDS}


def wrong(field: Field) -> list[Any]:
    """Values of every other kind, and on both sides of the range."""
    values: list[Any] = [{}, "\x1b", [{}], 1 << 63, -(1 << 63), 1e308, -1e308]
    values += [] if field.kind == "text" else ["1"]
    values += [] if field.kind == "flag" or field.also is int else [True]
    values += [] if field.lists else [[1], []]
    values += [field.least - 1, field.most * 2 + 1] if field.kind == "count" else []
    values += [field.most * 2, -1.0, 0] if field.kind == "number" and field.least > 0 else []
    return [v for v in values if not (field.kind == "text" and isinstance(v, str)) and type(v) is not field.also]


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_outside_its_kind_or_range_is_refused_by_name(name: str) -> None:
    for value in wrong(FIELDS[name]):
        if FIELDS[name].lists == "either" and value == [1]:
            continue
        assert problem_of(name, value).startswith(name), value


@pytest.mark.parametrize("kind", NEEDED)
def test_every_number_of_positions_has_a_range(kind: str, tmp_path: Path) -> None:
    """C12: `{"rope_type": "linear", "factor": 0}` gave NaN for all logits."""
    make("mixtral", tmp_path, {})
    sound = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0}  # fmt: skip
    base = {"rope_type": kind, **{name: sound[name] for name in NEEDED[kind]}}
    base |= {"factor": 2.0} if kind == "dynamic" else {}
    edit(tmp_path, rope_parameters=base)
    load_checkpoint(tmp_path)
    for name in (*NEEDED[kind], *ALLOWED[kind], "rope_theta", "partial_rotary_factor"):
        for value in wrong(ROPE_FIELDS[name]):
            edit(tmp_path, rope_parameters={**base, name: value})
            refuses(tmp_path, name)


def test_unknown_fields_are_named_all_at_once(tmp_path: Path) -> None:
    """D7: fields that change nothing need not be found one by one."""
    make("mixtral", tmp_path, {})
    edit(tmp_path, attention_wobble=0.5, rotary_gain=2, expert_flavour="x" * 5000)
    refuses(tmp_path, "attention_wobble = 0.5", "rotary_gain = 2", "expert_flavour")
    edit(tmp_path, attention_wobble=None, rotary_gain=None, expert_flavour=None,
         rope_parameters={"rope_type": "default", "wobble": 1, "gain": 2})  # fmt: skip
    refuses(tmp_path, "wobble = 1", "gain = 2")


def test_logits_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    """C12: the last defence, whatever a configuration and its tensors say."""
    make("mixtral", tmp_path, {"tie_word_embeddings": False})
    retensor(tmp_path, lambda tensors: tensors["lm_head.weight"].fill_(3e38))
    out = tmp_path / "out"
    with pytest.raises(ExportError, match="logits are not finite"):
        export_lm(load_checkpoint(tmp_path), out, dtype="fp32", workers=1)
    assert not (out / "model.bin").exists() and not (out / "model.bin.partial").exists()


# --- names ------------------------------------------------------------------------------------------------------------

BAD = ["", "../../x", "a/b", "a\\b", "..", ".x", "x.", "c:x", "\x1b[31mx", "a\nb", "a\0", "x" * 513, "\u202ex", " x"]


@pytest.mark.parametrize("name", BAD)
def test_a_port_s_name_is_printable_and_no_path(name: str, tmp_path: Path) -> None:
    """C12: where a graph is made, and where an archive of arrays is written."""
    with pytest.raises(ExportError, match="called"):
        check_port(name, "an input")
    graph = Graph("g")
    graph.outputs = [graph.add("unary", graph.add_input(name, (1,)), output="y", func="exp")]
    with pytest.raises(ExportError, match="called"):
        graph.validate()
    with pytest.raises(ColibriError, match="called"):
        save(tmp_path / "x.npz", {name: np.ones(1)})


@pytest.mark.parametrize("name", ["file", "allow_pickle", "arr_0", "kwds", "x.npy", "größe", "a b"])
def test_any_other_name_is_kept_in_an_archive(name: str, tmp_path: Path) -> None:
    """C12: `file` and `allow_pickle` are what numpy.savez calls its own arguments."""
    from typer.testing import CliRunner

    graph = Graph("g")
    graph.outputs = [graph.add("unary", graph.add_input("x", (2,)), output=name, func="abs")]
    rows = np.array([[1, -2], [-3, 4]], np.float32)
    (tmp_path / "model.bin").write_bytes(build(graph, calibration=[rows]).image)
    np.save(tmp_path / "rows.npy", rows)
    given = [str(tmp_path / part) for part in ("model.bin", "rows.npy", "out")]
    done = CliRunner().invoke(app, ["run", given[0], "-i", given[1], "-o", given[2]])
    assert done.exit_code == 0, done.output
    with np.load(tmp_path / "out.npz") as found:
        assert found.files == [name] and np.array_equal(found[name], np.abs(rows))


def test_names_that_are_cut_stay_apart() -> None:
    names = ["o" * 40, "o" * 41, "o" * 29 + "é", "o" * 30 + "é", "x"]
    found = port_names(names, 31)
    assert len({*found}) == len(names) and all(len(n) <= 31 and n.decode() for n in found)
    ports = _ports([(name, (1,)) for name in names])
    assert len({bytes(p["name"]) for p in ports}) == len(names)


@pytest.mark.parametrize(
    "info",
    [b'{"name": "\\u001b[2J"}', b'{"dtype": "\\u009bx"}', b'{"start": "abc"}', b'{"start": -1}', b'{"name": 3}',
     b'{"pruned": {"x": [1]}}', b'{"pruned": [1]}', b'{"latency": 3}', b"[]", b"{", b"[" * 4000, b'{"a": NaN}'],
)  # fmt: skip
def test_the_information_text_of_a_model_is_of_its_kind(info: bytes, tmp_path: Path) -> None:
    """C12: neither escape sequences nor a text for a number reach what shows or uses them."""
    from colibri.format.package import _information

    with pytest.raises(ModelError) as error:
        _information("model.bin", info)
    assert error.value.code == spec.error_code("HEADER") and str(error.value).isprintable()


def test_a_name_from_outside_is_printable_in_an_export(tmp_path: Path) -> None:
    source = tmp_path / "so\x1b[31murce"
    source.mkdir()
    make("mixtral", source, {})
    summary = export_lm(load_checkpoint(source), tmp_path / "out", dtype="fp32", workers=1)
    assert summary["name"] == "so\\x1b[31murce" == printable("so\x1b[31murce")
    colibri.load(tmp_path / "out").selftest()


def test_a_tensor_file_beside_an_architecture_is_read_as_strictly(tmp_path: Path) -> None:
    from colibri.frontends.architecture import from_architecture

    raw(tmp_path / "w.safetensors", {"a": entry(0, 16), "b": entry(8, 24)}, bytes(24))
    (tmp_path / "architecture.json").write_text("[" * 5000)
    with pytest.raises(ExportError, match=r"overlaps|deep"):
        from_architecture(tmp_path / "w.safetensors")
    save_file({"w": torch.ones(1, 1)}, tmp_path / "w.safetensors")
    with pytest.raises(ExportError, match="deep"):
        from_architecture(tmp_path / "w.safetensors")


def test_a_checkpoint_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    raw(tmp_path / "model.safetensors", {})
    assert not Checkpoint(tmp_path).tensors
    refuses(tmp_path, "missing")


def test_a_message_that_quotes_a_file_has_an_end() -> None:
    assert len(str(ModelError("x" * 100_000))) == 8000 and str(ModelError("x")) == "x"


def test_an_error_that_nobody_foresaw_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """C12: no traceback from the command, but for who asks with --debug; tests see what was raised."""
    from colibri.cli.terminal import UNEXPECTED, guarded

    def fail() -> None:
        raise RecursionError("\x1b[2J")

    with pytest.raises(SystemExit) as ended:
        guarded(fail)
    said = capsys.readouterr().err
    assert ended.value.code == UNEXPECTED and "RecursionError" in said and "--debug" in said
    assert "Traceback" not in said and "\x1b" not in said
