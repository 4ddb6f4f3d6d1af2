"""`colibri.export` and `colibri.load`, as a user calls them: module in, the engine's answer out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import colibri
from colibri.cli import app as cli
from tests.cli.test_cli import colibri_command, succeed
from tests.frontends.recognise import user_moes as moes


def close(ours: Any, theirs: torch.Tensor) -> None:
    expected = theirs.detach().numpy()
    assert ours.shape == expected.shape and ours.dtype == np.float32
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


def command(*args: object) -> Result:
    """`colibri` in this process, which has loaded PyTorch already."""
    return CliRunner().invoke(cli.app, [*map(str, args)])


STYLES = [moes.WhereLoop, moes.BooleanMask, moes.DenseSoft, moes.SharedResidual]


@pytest.mark.parametrize("style", STYLES, ids=lambda s: s.__name__)
def test_export_then_load_answers_as_the_module(style: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, moes.DIM), nn.GELU(), style())
    x = torch.randn(6, 5, 3)
    report = colibri.export(module, x[:4], tmp_path, calibration=[x])
    assert report.error <= 1e-5 and len(report.blocks) == 1 and not report.warnings
    for path in (tmp_path, tmp_path / "model.bin"):
        model = colibri.load(path)
        with torch.no_grad():
            close(model(x.numpy()), module(x))
    assert model.max_batch == 4 and model.num_experts == report.blocks[0].experts
    model.selftest()


def test_the_choices_are_the_modules(tmp_path: Path) -> None:
    torch.manual_seed(2)
    block = moes.BooleanMask()
    x = torch.randn(200, moes.DIM)
    colibri.export(block, x, tmp_path)
    chosen = colibri.load(tmp_path).routes(x.numpy())[0]
    assert np.array_equal(chosen[:, 0, 0], block.router(x).argmax(-1).numpy())


def test_a_path_ending_in_bin_is_the_only_file(tmp_path: Path) -> None:
    colibri.export(nn.Linear(3, 2), torch.randn(1, 3), tmp_path / "deep" / "small.bin", max_batch=7)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["small.bin"]
    assert colibri.load(tmp_path / "deep" / "small.bin").max_batch == 7


def test_a_refusal_writes_nothing_and_keeps_the_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Hardshrink()).train()
    with pytest.raises(colibri.ExportError, match=r"^1: aten\.\w+ is not supported"):
        colibri.export(module, torch.randn(4, 5, 3), tmp_path / "out")
    assert not (tmp_path / "out").exists() and module.training


def test_a_dense_fallback_warns_what_it_costs(tmp_path: Path) -> None:
    class Squared(moes.DenseSoft):
        def forward(self, x: Any) -> Any:
            weights = self.gate(x).softmax(-1).square()
            return (weights.unsqueeze(-1) * torch.stack([e(x) for e in self.experts], -2)).sum(-2)

    with pytest.warns(colibri.ExportWarning, match="multiply-accumulates"):
        colibri.export(Squared(), torch.randn(4, moes.DIM), tmp_path)


def test_register_moe_lets_an_unrecognised_block_through(tmp_path: Path) -> None:
    torch.manual_seed(3)
    block = moes.Unusual()
    x = torch.randn(8, moes.DIM)
    with pytest.raises(colibri.ExportError, match="register_moe"):
        colibri.export(block, x, tmp_path)
    slices = [moes.UnusualSlice(block, n) for n in range(4)]
    colibri.register_moe(block, experts=lambda _: slices, gate="gate", k=2)
    colibri.export(block, x, tmp_path)
    with torch.no_grad():
        close(colibri.load(tmp_path)(x.numpy()), block(x))


def test_a_saved_program_exports_from_the_command_line(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module, x = nn.Sequential(nn.Linear(3, moes.DIM), moes.WhereLoop()), torch.randn(4, 3)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    torch.export.save(program, tmp_path / "net.pt2")
    told = succeed("export", "--model", tmp_path / "net.pt2", "--output", tmp_path / "out")
    assert told["name"] == "net" and told["recognition"]["blocks"][0]["k"] == 2
    with torch.no_grad():
        close(colibri.load(tmp_path / "out")(x.numpy()), module(x))
    assert "graph net" in command("inspect", tmp_path / "net.pt2", "--stage", "graph").stdout


class SquaredWhere(moes.WhereLoop):
    """A block torch.export takes, but no router reproduces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).softmax(-1).square().topk(2)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out[token] += weights[token, slot, None] * expert(tokens[token])
        return out.view(x.shape)


def saved(path: Path, block: nn.Module) -> Path:
    module, x = nn.Sequential(nn.Linear(3, moes.DIM), block), torch.randn(4, 3)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    torch.export.save(program, path)
    return path


def test_explain_prints_what_was_found(tmp_path: Path) -> None:
    source = saved(tmp_path / "net.pt2", moes.WhereLoop())
    told = command("export", "-m", source, "-o", tmp_path / "out", "--explain")
    assert told.exit_code == 0 and "4 experts, top-2 a token" in told.stdout and "made-up logits" in told.stdout


def test_explain_prints_the_nearest_claim_of_a_refused_block(tmp_path: Path) -> None:
    source = saved(tmp_path / "net.pt2", SquaredWhere())
    told = command("export", "-m", source, "-o", tmp_path / "out", "--explain")
    assert told.exit_code == 1 and not (tmp_path / "out").exists()
    assert "1 (SquaredWhere) was not taken for a Mixture of Experts" in told.stdout
    assert "the nearest is top-2 of 4" in told.stdout and "error" in told.stderr
    as_json = command("export", "-m", source, "-o", tmp_path / "out", "--explain", "--json")
    found = json.loads(as_json.stdout)
    assert as_json.exit_code == 1 and found["kind"] == "ExportError" and not found["recognition"]["blocks"]
    (rejected,) = found["recognition"]["rejected"]
    assert rejected["path"] == "1" and "no router reproduces it" in rejected["reason"]


def test_a_broken_program_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_bytes(b"not a program")
    done = colibri_command("export", "--model", tmp_path / "net.pt2", "--output", tmp_path / "out", "--json")
    assert done.returncode == 1 and "net.pt2" in json.loads(done.stdout)["error"] and "Traceback" not in done.stderr


def test_the_door_writes_firmware_as_the_command_does(tmp_path: Path) -> None:
    """B6, B8: prefix and sections for experts; experts without pages of their own."""
    torch.manual_seed(3)
    module, x = moes.BooleanMask(), torch.randn(20, moes.DIM)
    colibri.export(module, x, tmp_path / "plain")
    colibri.export(module, x, tmp_path / "packed", prefix="meter", expert_sections=True, firmware=True)
    header = (tmp_path / "packed/model.h").read_text(encoding="utf-8")
    assert (
        "METER_MODEL_BYTES" in header and "meter_check_flash" in header and (tmp_path / "packed/experts.ld").is_file()
    )
    plain, packed = ((tmp_path / name / "model.bin").stat().st_size for name in ("plain", "packed"))
    assert f"MODEL_FLASH_BYTES {packed}u" in header and packed < plain / 2
    flash = (tmp_path / "plain/model.h").read_text(encoding="utf-8")
    assert f"MODEL_FLASH_BYTES {packed}u" in flash  # of the same model as firmware
    with pytest.raises(colibri.ExportError, match="prefix"):
        colibri.export(module, x, tmp_path / "bad", prefix="a b")
