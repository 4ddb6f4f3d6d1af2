"""Programs saved by torch.export: any batch size, with the oldest and the newest PyTorch, and nothing in them runs.

CI runs this file once more with the newest PyTorch (`make test-newest-torch`).
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

import colibri  # noqa: E402
from colibri.cli import app as cli  # noqa: E402
from colibri.errors import ExportError  # noqa: E402
from colibri.frontends.torch import archive as torch_archive  # noqa: E402
from colibri.frontends.torch.export import from_pt2, from_torch  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.recognise import user_moes as moes  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402

torch.set_num_threads(1)

Records = dict[str, bytes]
AUTO, DIM = torch.export.Dim.AUTO, torch.export.Dim


def saved(path: Path, model: Any, x: Any, dims: Any = None) -> Path:
    torch.export.save(torch.export.export(model.eval(), (x,), dynamic_shapes=dims), path)
    return path


DIMS: dict[str, Any] = {
    "fixed": None,
    "automatic": ({0: AUTO},),
    "bounded": ({0: DIM("batch", min=1, max=64)},),
    "named": ({0: DIM("batch")},),
}


@pytest.mark.parametrize(("dims", "block"), sampled(itertools.product(DIMS, [moes.WhereLoop, moes.DenseSoft]), 3))
def test_a_program_saved_with_any_kind_of_batch_is_accepted(tmp_path: Path, block: Any, dims: str) -> None:
    """E11"""
    torch.manual_seed(0)
    model = moes.Host(block(), 5) if block is moes.DenseSoft else moes.Host(block())
    graph, report, *_ = from_pt2(saved(tmp_path / "model.pt2", model, torch.randn(4, 6, 3), DIMS[dims]))
    assert [found.path for found in report.blocks] == ["moe"]
    x = torch.randn(5, 6, 3)
    with torch.no_grad():
        np.testing.assert_allclose(run(graph, [x.numpy()])[0], model(x).numpy(), atol=1e-5)


def test_a_program_for_some_batch_sizes_only_is_refused(tmp_path: Path) -> None:
    """E11: a guard of the program is kept in mind, though it is not run."""

    class Apart(nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.shape[0] == 40 else 2 * x

    with pytest.raises(ExportError, match="only works for some batch sizes"):
        from_pt2(saved(tmp_path / "model.pt2", Apart(), torch.randn(4, 6), ({0: AUTO},)))
    with pytest.raises(ExportError, match="only works for some batch sizes"):
        from_pt2(saved(tmp_path / "even.pt2", nn.Linear(6, 2), torch.randn(4, 6), ({0: 2 * DIM("half")},)))


def test_an_exported_program_in_memory_is_exported(tmp_path: Path) -> None:
    """E7"""
    torch.manual_seed(0)
    model, x = moes.Host(moes.WhereLoop()).eval(), torch.randn(4, 6, 3)
    program = torch.export.export(model, (x,))
    before = str(program.graph)
    graph, report, *_ = from_torch(program, x)
    assert report.blocks and str(program.graph) == before
    with torch.no_grad():
        np.testing.assert_allclose(run(graph, [x.numpy()])[0], model(x).numpy(), atol=1e-5)


# --- C6: what a program could run -------------------------------------------------------------------------------------


class Evil:
    """Unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def changed(path: Path, change: Callable[[Records], None]) -> Path:
    """The archive at `path` with its records, named below its folder, changed."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in records.items():
        if not name.startswith(".data/") and name != "byteorder":
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    assert root
    return path


def pickled(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    return buffer.getvalue()


def in_model(replace: Callable[[Any, str], None]) -> Callable[[Records, Path], None]:
    def change(records: Records, mark: Path) -> None:
        program = json.loads(records["models/model.json"])
        replace(program, f"__import__('pathlib').Path({str(mark)!r}).touch()")
        records["models/model.json"] = json.dumps(program).encode()

    return change


def weights(records: Records, mark: Path) -> None:
    config = json.loads(records["data/weights/model_weights_config.json"])
    entry = next(iter(config["config"].values()))
    entry["use_pickle"] = True
    records["data/weights/" + entry["path_name"]] = pickled(mark)
    records["data/weights/model_weights_config.json"] = json.dumps(config).encode()


def constants(records: Records, mark: Path) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    records["data/constants/opaque_obj_0"] = pickle.dumps(Evil(mark))
    records["data/constants/model_constants_config.json"] = json.dumps({"config": {"c": entry}}).encode()


def sample_inputs(records: Records, mark: Path) -> None:
    records["data/sample_inputs/model.pt"] = pickled(mark)


def old_weights(records: Records, mark: Path) -> None:
    records["data/weights/model.pt"] = pickled(mark)


def compiled(records: Records, mark: Path) -> None:
    records["data/aotinductor/model/model.so"] = b"\x7fELF"


def expression(program: Any, code: str) -> None:
    values = program["graph_module"]["graph"]["tensor_values"]
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": code, "hint": {"as_int": 4}}}


def guard(program: Any, code: str) -> None:
    program["guards_code"] = [f"{code} is None"]


def operator_call(program: Any, code: str) -> None:
    node = program["graph_module"]["graph"]["nodes"][0]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "", "arg": {"as_string": f'python3 -c "{code}"'}, "kind": 1}]


def caller(program: Any, code: str) -> None:
    node = program["graph_module"]["graph"]["nodes"][0]
    node["target"] = "_operator.call"
    node["inputs"] = [{"name": "", "arg": {"as_operator": "torch.os.system"}, "kind": 1}]


def reads_a_file(program: Any, code: str) -> None:
    program["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.aten.from_file.default"


def imported_tree(program: Any, code: str) -> None:
    tree = [
        1,
        {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "antigravity:x"}]', "children_spec": []},
    ]
    program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(tree)


VECTORS: dict[str, tuple[Callable[[Records, Path], None], str]] = {
    "pickled weight": (weights, "is stored as a pickled object"),
    "pickled constant": (constants, "no part of a program of tensors"),
    "pickled example": (sample_inputs, "example inputs are pickled objects"),
    "weights of an old kind": (old_weights, "no part of a program of tensors"),
    "compiled code": (compiled, "no part of a program of tensors"),
    "expression": (in_model(expression), "which is no size"),
    "guard": (in_model(guard), "no comparison of sizes"),
    "operator": (in_model(operator_call), "'torch.os.system'.* no operation on tensors"),
    "operator of an operator": (in_model(caller), "'_operator.call'.* no operation on tensors"),
    "operator on files": (in_model(reads_a_file), "no operation on tensors"),
    "import by a tree": (in_model(imported_tree), "held in a builtins.dict"),
}


def colibri_command(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, args)])


@pytest.mark.parametrize("name", VECTORS)
def test_nothing_in_a_saved_program_runs(tmp_path: Path, name: str) -> None:
    """C6"""
    change, words = VECTORS[name]
    mark = tmp_path / "it_ran"
    source = saved(tmp_path / "evil.pt2", nn.Linear(3, 2), torch.randn(4, 3), ({0: AUTO},))
    changed(source, lambda records: change(records, mark))
    with pytest.raises(ExportError, match=words) as refused:
        from_pt2(source)
    assert not mark.exists() and "evil.pt2" in str(refused.value)


@pytest.mark.parametrize("name", ["pickled weight", "pickled example", "expression"])
def test_trusted_programs_go_to_the_loader_as_they_are(tmp_path: Path, name: str) -> None:
    """C6: the files above are no empty threat."""
    mark = tmp_path / "it_ran"
    source = saved(tmp_path / "evil.pt2", nn.Linear(3, 2), torch.randn(4, 3), ({0: AUTO},))
    changed(source, lambda records: VECTORS[name][0](records, mark))
    with pytest.raises(ExportError):
        from_pt2(source, trust=True)
    assert mark.exists()


def test_the_command_refuses_evil_programs_and_trusts_on_request(tmp_path: Path) -> None:
    """C6: export and inspect."""
    mark = tmp_path / "it_ran"
    source = saved(tmp_path / "evil.pt2", nn.Linear(3, 2), torch.randn(4, 3), ({0: AUTO},))
    changed(source, lambda records: weights(records, mark))
    for command in (("export", "-m", source, "-o", tmp_path / "out"), ("inspect", source, "--stage", "graph")):
        told = colibri_command(*command)
        assert told.exit_code == 1 and "--trust" in told.stderr and isinstance(told.exception, SystemExit)
    assert not mark.exists()
    honest = saved(tmp_path / "honest.pt2", nn.Linear(3, 2), torch.randn(4, 3))
    assert colibri_command("export", "-m", honest, "-o", tmp_path / "out", "--trust").exit_code == 0


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_plain_pickles_are_refused_before_anything_is_loaded(tmp_path: Path, suffix: str) -> None:
    """C6"""
    from colibri.cli.app import _source

    mark, path = tmp_path / "it_ran", tmp_path / f"model{suffix}"
    path.write_bytes(pickled(mark))
    with pytest.raises(ExportError, match="unknown kind"):
        _source(path, None)
    path.rename(tmp_path / "model.pt2")
    with pytest.raises(ExportError, match="no part of a program"):
        from_pt2(tmp_path / "model.pt2")
    assert not mark.exists()


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    """C6: two readers of zip files may take different ones."""
    source = saved(tmp_path / "twice.pt2", nn.Linear(3, 2), torch.randn(4, 3))
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr(archive.namelist()[0].upper(), b"")
    with pytest.raises(ExportError, match=r"two records|one folder"):
        from_pt2(source)


@pytest.mark.parametrize(
    "text", ["s0", "2*s0 + 1", "Mul(Integer(6), FloorDiv(Symbol('s77', positive=True, integer=True), Integer(2)))"]
)
def test_sizes_are_sizes(text: str) -> None:
    torch_archive.check_size(text)


NO_SIZES = [
    "s0.__class__", "exec('x')", "9**9**9", "Pow(Integer(9), Integer(99))", "Symbol('os')", "[s0]", "s0 if 1 else 2",
    "lambda: 0", "f'{s0}'", "Symbol(exec('x'))", "s0!", "(" * 3000, "+s0" * 3000, "E", "Integer('9')", None, "Max(*s0)",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused(text: Any) -> None:
    """C6"""
    with pytest.raises(ExportError, match="no size"):
        torch_archive.check_size(text)


def test_a_saved_program_exports_to_files(tmp_path: Path) -> None:
    source = saved(tmp_path / "net.pt2", nn.Linear(3, 2), torch.randn(4, 3), ({0: AUTO},))
    colibri.export(source, None, tmp_path / "out")
    assert colibri.load(tmp_path / "out")(np.zeros((2, 3), np.float32)).shape == (2, 2)
