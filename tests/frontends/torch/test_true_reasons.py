"""What a user passes that cannot be exported as it is: the true reason is given, nothing of theirs is changed, and
nothing counts as verified that was not compared."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import colibri  # noqa: E402
from colibri import exporter  # noqa: E402
from colibri.common.compare import compare  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.ir.graph import Graph  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402
from tests.frontends.torch import small_models  # noqa: E402

torch.set_num_threads(1)


class Block(nn.Module):
    """Top-2 of the softmax over a linear gate; with `loss` a balancing loss is returned too."""

    def __init__(self, loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == e)
            y[row] += weight[row, slot, None] * expert(x[row])
        return (y, torch.zeros(len(x), 4).scatter(1, chosen, weight).sum(0).var()) if self.loss else y


def rows(count: int, *shape: int) -> Any:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


# --- E3: nothing is verified on nothing -------------------------------------------------------------------------------


def test_a_comparison_needs_numbers() -> None:
    """E3"""
    nan, inf = np.full((3, 2), np.nan), np.full((3, 2), np.inf)
    one = np.ones((3, 2))
    assert compare(one, one) == (0.0, 3) and compare(one, one).within(0)
    for nothing in (nan, inf, one[:0]):
        assert compare(nothing, nothing).rows == 0 and not compare(nothing, nothing).within(1)
    for other in (nan, inf, -inf, one[:2]):
        assert compare(one, other).error == np.inf and compare(other, one).error == np.inf
    assert compare(inf, -inf).error == np.inf and compare(nan, inf).error == np.inf
    some = np.array([[1.0, np.nan], [np.nan, np.nan]])
    assert compare(some, some) == (0.0, 1)


class Branch(nn.Module):
    """Computes something else while torch.export looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.b(x) if torch.compiler.is_exporting() else self.a(x)


@pytest.mark.parametrize("spike", [float("nan"), float("inf")])
def test_a_missing_reading_in_the_example_hides_nothing(tmp_path: Path, spike: float) -> None:
    """E3: made-up rows are finite, and rows without numbers are not counted."""
    example = rows(1, 4)
    example[0, 2] = spike
    with pytest.raises(colibri.ExportError, match="differs from the module's"):
        from_torch(Branch(), example)
    report = from_torch(nn.Linear(4, 3), example).report
    assert report.rows == 32  # of noise; not the example's


def test_a_module_without_numbers_is_refused() -> None:
    """E3"""

    class Nowhere(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.log(-x.abs() - 1) + x

    with pytest.raises(colibri.ExportError, match="NaN or infinite in every row"):
        from_torch(Nowhere(), rows(4, 3))


def test_calibration_rows_are_finite_and_some(tmp_path: Path) -> None:
    """E3: rows with NaN are left out and counted; none at all are refused."""
    calibration = rows(10, 4)
    calibration[3, 1] = float("nan")
    with pytest.warns(colibri.ExportWarning, match="1 of 10 calibration rows"):
        colibri.export(nn.Linear(4, 3), rows(2, 4), tmp_path, calibration=calibration, dtype="int8")
    graph = Graph()
    graph.outputs = [graph.add("unary", graph.add_input("x", (4,)), func="relu")]
    for given in (np.zeros((0, 4), np.float32), np.zeros((3, 5), np.float32)):
        with pytest.raises(colibri.ExportError, match="calibration has the shapes"):
            exporter.build(graph, calibration=[given])


# --- E6: nothing of the caller's is changed ---------------------------------------------------------------------------


def snapshot(module: nn.Module, *tensors: Any) -> list[Any]:
    state = [(t.detach().numpy().tobytes(), t.requires_grad) for t in (*module.parameters(), *module.buffers())]
    return [state, [m.training for m in module.modules()], [t.numpy().tobytes() for t in tensors],
            torch.get_rng_state().numpy().tobytes()]  # fmt: skip


@pytest.mark.parametrize("kind", small_models.MODELS[::5], ids=lambda m: m.__name__)
def test_an_export_changes_nothing_of_the_callers(kind: Any) -> None:
    """E6"""
    model = small_models.trained(kind).train()
    next(model.parameters()).requires_grad_(False)
    example, calibration = small_models.inputs(model, 4, 0), small_models.inputs(model, 6, 1)
    before = snapshot(model, *example, *calibration)
    from_torch(model, example, calibration)
    assert snapshot(model, *example, *calibration) == before


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.head = nn.Parameter(torch.randn(1, 5)), nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        x += self.position
        return self.head(x)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3)), Position])
def test_a_module_may_write_to_its_input(make: Any) -> None:
    """E6"""
    torch.manual_seed(0)
    model, example, calibration = make().eval(), rows(8, 5), rows(64, 5)
    before = snapshot(model, example, calibration)
    graph = from_torch(model, example, calibration).graph
    assert snapshot(model, example, calibration) == before
    x = torch.randn(9, 5)
    ours = run(graph, [x.numpy()])[0]
    with torch.no_grad():
        np.testing.assert_allclose(ours, model(x.clone()).numpy(), atol=1e-5)


# --- A5: ties ---------------------------------------------------------------------------------------------------------


def test_tied_experts_are_named_and_counted(tmp_path: Path) -> None:
    """A5"""
    block = Block()
    with torch.no_grad():
        block.gate.weight[3], block.gate.bias[3] = block.gate.weight[1], block.gate.bias[1]
    with pytest.warns(colibri.ExportWarning, match=r"experts 1, 3 tie: .* in \d+ of \d+ choices.* lowest number, 1;"):
        report = colibri.export(block, rows(8, 8), tmp_path, calibration=rows(64, 8))
    assert report.ambiguous > 0 and report.rows > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", colibri.ExportWarning)
        colibri.export(Block(), rows(8, 8), tmp_path, calibration=rows(64, 8))


# --- E7: the true reason ----------------------------------------------------------------------------------------------


def zeroed(*names: str) -> Any:
    def change(block: Block) -> None:
        for name, parameter in block.named_parameters():
            if name.startswith(names):
                parameter.zero_()

    return change


def spiked(value: float) -> Any:
    return lambda block: block.experts[1][0].weight[0, 0].fill_(value)


DEGENERATE = [
    (zeroed("gate"), "zeros in gate.weight: a router of zeros makes every choice of experts a tie"),
    (lambda block: (block.gate.weight.fill_(0.5), block.gate.bias.fill_(0)), "all rows of gate.weight are equal.*ties"),
    (zeroed("experts"), "zeros in experts.0.0.weight, .* and 4 more"),
    (spiked(float("nan")), "^parameter 'experts.1.0.weight' holds NaN"),
    (spiked(float("inf")), "infinite values in experts.1.0.weight"),
    (spiked(-float("inf")), "infinite values in experts.1.0.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), DEGENERATE)
def test_degenerate_weights_are_named(change: Any, words: str) -> None:
    """E7"""
    block = Block()
    with torch.no_grad():
        change(block)
    with pytest.raises(colibri.ExportError, match=words) as refused:
        from_torch(block, rows(8, 8), rows(64, 8))
    assert "register_moe" not in str(refused.value)


def test_a_returned_loss_is_what_is_to_be_left_out() -> None:
    """E7"""
    with pytest.raises(colibri.ExportError, match=r"output 1 of the 2 is a second result .* leave it out") as refused:
        from_torch(Block(loss=True), rows(8, 8), rows(64, 8))
    assert "register_moe" not in str(refused.value) and refused.value.report.blocks


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x.to(torch.float64))


NO_MODULES: list[tuple[Any, str]] = [
    (lambda x: x, "is a function: wrap it in a torch.nn.Module"),
    (None, "a NoneType is no module"),
    (nn.Linear(4, 3).state_dict(), "a state_dict holds weights and no program"),
    (nn.Linear, "Linear is a class: pass an instance"),
    (3, "a int is no module"),
    (nn.LazyLinear(3), "has no values yet"),
    (nn.Linear(4, 3, device="meta"), "has no values yet"),
    (Cast().double(), "holds float64, and does not run once converted to float32.*casts"),
    ("model.onnx", "only a .pt2 is read from a file"),
]


@pytest.mark.parametrize(("module", "words"), NO_MODULES)
def test_what_is_no_module_is_named(module: Any, words: str, tmp_path: Path) -> None:
    """E7"""
    with pytest.raises(colibri.ExportError, match=words):
        colibri.export(module, rows(4, 4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


ODD: tuple[Any, ...] = (
    None, 2.5, -1, 0, 5, "", "odd", b"bytes", [], [1], {}, {"a": 1}, object(), True, float("nan"), float("inf"),
    1 << 70, (1, 2), [(0, 1.5)], np.float64(2.5), np.zeros(3), torch.zeros(2), lambda: 0, int,
)  # fmt: skip
OPTIONS = ["path", "calibration", "dtype", "activations", "outlier_share", "budget", "max_error", "scorer", "prune",
           "prune_experts", "max_batch", "name", "expert_align", "stream", "trust"]  # fmt: skip


@pytest.mark.parametrize(("option", "part"), sampled(itertools.product(OPTIONS, range(4)), 3))
def test_no_option_of_a_wrong_type_gives_anything_but_a_colibri_error(option: str, part: int, tmp_path: Path) -> None:
    """E7: or an export, where the value has a meaning."""
    module, x = nn.Linear(4, 3), rows(4, 4)
    for value in ODD[part::4]:
        how: dict[str, Any] = {"path": tmp_path / "out.bin", option: value}
        how |= {"dtype": "int8"} if option in ("scorer", "outlier_share", "activations") and value is not None else {}
        if option == "path" and isinstance(value, str):
            how["path"] = str(tmp_path / value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", colibri.ExportWarning)
                colibri.export(module, x, **how)
        except colibri.ColibriError as error:
            assert "unexpected" not in str(error) and str(error).strip()


@pytest.mark.parametrize("value", ODD)
def test_no_odd_example_gives_anything_but_a_colibri_error(value: Any, tmp_path: Path) -> None:
    """E7"""
    try:
        colibri.export(nn.Linear(4, 3), value, tmp_path)
    except colibri.ColibriError as error:
        assert "unexpected" not in str(error)


@pytest.mark.parametrize(
    ("option", "value"), [("max_batch", 2.5), ("max_batch", 0), ("stream", 5), ("expert_align", 7)]
)
def test_a_number_out_of_range_is_refused_by_name(option: str, value: Any, tmp_path: Path) -> None:
    """E7"""
    with pytest.raises(colibri.ExportError, match=f"{option} is {value}|expert alignment 100"):
        colibri.export(nn.Linear(4, 3), rows(4, 4), tmp_path, **{option: value})


def test_a_copy_of_the_block_exports_all_the_same() -> None:
    """A control: the blocks above are refused for what was done to them."""
    assert from_torch(copy.deepcopy(Block()), rows(8, 8), rows(64, 8)).report.blocks


# --- E5, B7: what quantising says -------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Padded convolutions as experts of whole samples, the last of them rarely chosen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        with torch.no_grad():
            self.gate.bias[2] = -8.0

    def forward(self, x: Any) -> Any:
        weight, chosen = self.gate(x.mean((2, 3))).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row = (chosen == e).nonzero()[:, 0]
            y[row] = weight[row, None, None, None] * expert(x[row])
        return y


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_an_expert_without_calibration_rows_is_quantised_all_the_same(dtype: str, tmp_path: Path) -> None:
    """E5"""
    calibration = rows(32, 4, 6, 6)
    report = colibri.export(Convolutions(), rows(8, 4, 6, 6), tmp_path, calibration=calibration, dtype=dtype)
    assert report.blocks[0].never_chosen == [2] and report.quality.error < 0.3
    colibri.load(tmp_path).selftest()


class Raw(nn.Module):
    """Weights for inputs in raw units: all of them, or beside others of about 1."""

    def __init__(self, of: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 8)
        with torch.no_grad():
            self.a.weight[:, :of] *= 1e-7

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize(("dtype", "most"), [("fp16", 0.002), ("int8", 0.03), ("int4", 0.2)])
def test_weights_for_raw_units_keep_their_precision(dtype: str, most: float, tmp_path: Path) -> None:
    """B7: float16 holds neither weights of 1e-8 nor their scales, so that they are lifted by a power of two."""
    module, x = Raw(64), rows(64, 64) * 1e7
    with warnings.catch_warnings():
        warnings.simplefilter("error", colibri.ExportWarning)
        report = colibri.export(module, x[:4], tmp_path, calibration=x, dtype=dtype)
    assert report.quality.error < most
    with torch.no_grad():
        want = module(x).numpy()
    ours = colibri.load(tmp_path)(x.numpy())
    assert np.linalg.norm(ours - want) / np.linalg.norm(want) < most


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4"])
def test_a_large_error_names_the_matrix_and_what_to_do(dtype: str, tmp_path: Path) -> None:
    """B7"""
    x = rows(64, 64)
    x[:, :32] *= 1e7
    with pytest.warns(colibri.ExportWarning, match=rf"{dtype} moves output .* lost in a.weight.*scale the inputs"):
        report = colibri.export(Raw(32), x[:4], tmp_path, calibration=x, dtype=dtype)
    assert report.quality.error > 0.3
