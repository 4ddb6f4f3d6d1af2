"""The thirteen kinds of small models export, match PyTorch, and give the same bits in C, batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from colibri import exporter  # noqa: E402
from colibri.frontends.torch.export import from_torch  # noqa: E402
from colibri.reference.interpreter import run  # noqa: E402
from colibri.runtime import engine  # noqa: E402
from tests.frontends.sampling import sampled  # noqa: E402
from tests.frontends.torch import small_models  # noqa: E402

torch.set_num_threads(1)


def arrays(rows: Any) -> list[Any]:
    return [x.to(torch.float32).numpy() for x in rows]


KINDS: list[Any] = [("fp32", kind) for kind in small_models.MODELS]
KINDS += sampled([("int8", kind) for kind in small_models.MODELS], 4)


@pytest.mark.parametrize(("dtype", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", value))
def test_small_model_matches_pytorch_and_its_engine_the_reference(dtype: str, kind: Any) -> None:
    model = small_models.trained(kind)
    example = small_models.inputs(model, 4, 0)
    imported = from_torch(model, example, calibration=[small_models.inputs(model, 6, n) for n in (1, 2)])
    assert imported.report.blocks and all(b.error <= 2e-5 for b in imported.report.blocks)
    quantization = exporter.Quantization(dtype)
    export = exporter.build(imported.graph, quantization=quantization, max_batch=3, calibration=imported.rows)
    fresh = small_models.inputs(model, 8, 7)
    with torch.no_grad():
        expected = model(*fresh).numpy()
    (reference,) = run(export.graph, arrays(fresh))
    if dtype == "fp32":
        np.testing.assert_allclose(reference, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for kernels in engine.KERNELS:
        assert engine.load(export.image, kernels=kernels)(*arrays(fresh)).tobytes() == reference.tobytes()
