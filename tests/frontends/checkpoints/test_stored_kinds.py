"""D1: for every kind a tensor is stored as, in every role: what PyTorch dequantises, or a refusal by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from colibri.errors import ExportError
from colibri.frontends.checkpoints.checkpoint import Checkpoint
from colibri.frontends.tensor_files import BITS, FP8, PLAIN

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
FLOATS = (*PLAIN, *FP8)
FORMS: dict[str | None, dict[str, Any]] = {
    None: {}, "plain": {"scale_fmt": None}, "float": {"scale_fmt": "float"}, "ue8m0": {"scale_fmt": "ue8m0"},
    "packed": {"scale_fmt": "ue8m0_packed"},
}  # fmt: skip


def write(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def random_of(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind in ("F8_E8M0", "U8"):  # as scales: powers of two about one
        codes = torch.randint(120, 134, shape, generator=generator, dtype=torch.uint8)
        return codes if kind == "U8" else codes.view(torch.float8_e8m0fnu)
    return (torch.randn(shape, generator=generator) * 3).to(KINDS[kind])


def read(directory: Path, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return Checkpoint(directory).take(name, shape).read()


@pytest.mark.parametrize(("kind", "shape"), [*itertools.product(KINDS, [(6, 8), (8,)])])
def test_a_tensor_without_scales(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Weights, norms and biases that are stored as they are."""
    stored = random_of(kind, *shape)
    write(tmp_path, {"a": stored})
    if kind in FLOATS:
        assert read(tmp_path, "a", shape).tobytes() == stored.float().numpy().tobytes()
    else:
        with pytest.raises(ExportError, match=f"'a' holds {kind}"):
            read(tmp_path, "a", shape)


def meant(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales as floats; bytes are the exponents of powers of two."""
    return (scales.view(torch.float8_e8m0fnu) if kind == "U8" else scales).float()


@pytest.mark.parametrize(("number", "scale", "form"), [*itertools.product(KINDS, KINDS, FORMS)])
def test_a_tensor_with_scales(number: str, scale: str, form: str | None, tmp_path: Path) -> None:
    shape, block = (7, 10), (3, 4)
    numbers, scales = random_of(number, *shape, seed=1), random_of(scale, 3, 3, seed=2)
    said = {"quant_method": "fp8", "weight_block_size": [*block], **FORMS[form]}
    write(tmp_path, {"w": numbers, "w_scale_inv": scales}, quantization_config=said)
    known = number in FP8 and (scale in (*PLAIN, "F8_E8M0") or (scale == "U8" and form == "ue8m0"))
    if known and form != "packed":
        wide = meant(scales, scale).repeat_interleave(3, 0)[:7].repeat_interleave(4, 1)[:, :10]
        assert read(tmp_path, "w", shape).tobytes() == (numbers.float() * wide).numpy().tobytes()
    else:
        with pytest.raises(ExportError, match="scale_fmt" if form == "packed" else "'w'"):
            read(tmp_path, "w", shape)


@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("form", ["e4m3", "float8_e4m3fn", "e5m2", "float8_e5m2", "e3m4", 8])
def test_the_format_of_fp8_is_what_the_configuration_says(kind: str, form: Any, tmp_path: Path) -> None:
    numbers, said = random_of(kind, 4, 4), {"quant_method": "fp8", "weight_block_size": [4, 4], "fmt": form}
    write(tmp_path, {"w": numbers, "w_scale_inv": torch.full((1, 1), 0.5)}, quantization_config=said)
    if kind.removeprefix("F8_").lower() in str(form):
        assert np.array_equal(read(tmp_path, "w", (4, 4)), numbers.float().numpy() / 2)
    else:
        with pytest.raises(ExportError, match=r"fmt|'w'"):
            read(tmp_path, "w", (4, 4))


@pytest.mark.parametrize(("shape", "scale"), [((6, 5), ()), ((6, 5), (1,)), ((5,), (1,)), ((2, 3, 4), ())])
def test_one_scale_for_a_tensor(shape: tuple[int, ...], scale: tuple[int, ...], tmp_path: Path) -> None:
    numbers, factor = random_of("F8_E4M3", *shape), torch.full(scale, 0.37)
    said = {"quant_method": "fp8", "weight_block_size": None}
    write(tmp_path, {"w": numbers, "w_scale_inv": factor}, quantization_config=said)
    assert read(tmp_path, "w", shape).tobytes() == (numbers.float() * factor).numpy().tobytes()
    write(tmp_path, {"w": numbers, "w_scale_inv": torch.ones(3, 2)}, quantization_config=said)
    with pytest.raises(ExportError, match="weight_block_size"):
        read(tmp_path, "w", shape)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.data())
def test_blocks_of_any_size_and_any_rows(
    high: int, wide: int, rows: int, columns: int, stacked: bool, data: st.DataObject
) -> None:
    """Also of experts stacked in one tensor, and read a few rows at a time."""
    import tempfile

    height, width = data.draw(st.integers(1, high * rows)), data.draw(st.integers(1, wide * columns))
    outer = (3,) if stacked else ()
    grid = (-(-height // high), -(-width // wide))
    numbers, scales = random_of("F8_E4M3", *outer, height, width), random_of("F8_E8M0", *outer, *grid)
    said = {"quant_method": "fp8", "weight_block_size": [high, wide], "scale_fmt": "ue8m0"}
    factor = scales.float().repeat_interleave(high, -2).repeat_interleave(wide, -1)[..., :height, :width]
    want = (numbers.float() * factor).numpy()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"w": numbers, "w_scale_inv": scales}, quantization_config=said)
        stored = Checkpoint(folder).take("w", (*outer, height, width))
        start = data.draw(st.integers(0, len(want) - 1))
        stop = data.draw(st.integers(start + 1, len(want)))
        assert stored.read(start, stop).tobytes() == want[start:stop].tobytes()
        assert stored.read().tobytes() == want.tobytes()


@pytest.mark.parametrize("scale", ["U8", "F8_E8M0"])
def test_mxfp4_with_scales_as_bytes_or_as_powers(scale: str, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 5, 3), generator=generator, dtype=torch.uint8)
    stored = scales if scale == "U8" else scales.view(torch.float8_e8m0fnu)
    write(tmp_path, {"x_blocks": blocks, "x_scales": stored}, quantization_config={"quant_method": "mxfp4"})
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()
    assert np.array_equal(read(tmp_path, "x", (2, 5, 96)), want.numpy())


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "wobble": 1, "zero_point": True},
        {"quant_method": "fp8", "activation_scheme": "static", "expert_dtype": "fp4"},
        {"quant_method": "mxfp4", "fmt": "e2m1", "weight_block_size": [1, 32]},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": ["fp8"]}, {"quant_method": None}, {"bits": 4}, "fp9", 7, [], True,
        {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": 128},
    ],
)  # fmt: skip
def test_what_is_not_understood_of_a_quantization_is_refused_all_at_once(said: Any, tmp_path: Path) -> None:
    for place in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
        write(tmp_path, {"a": torch.ones(2)}, **place)
        with pytest.raises(ExportError, match="quantization_config") as error:
            Checkpoint(tmp_path)
        for word in ("wobble", "zero_point", "activation_scheme", "expert_dtype"):
            assert not isinstance(said, dict) or word not in said or word in str(error.value)


def test_two_quantizations_that_differ(tmp_path: Path) -> None:
    both = {"quantization_config": {"quant_method": "mxfp4"}, "text_config": {"quantization_config": {}}}
    write(tmp_path, {"a": torch.ones(2)}, **both)
    with pytest.raises(ExportError, match="differ"):
        Checkpoint(tmp_path)


def test_every_kind_of_the_format_is_known() -> None:
    assert {*KINDS} < {*BITS}
