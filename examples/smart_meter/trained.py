"""What the other examples share of the trained model: an export of it, and the digest they compare outputs by."""

from __future__ import annotations

from pathlib import Path

import data

from colibri import exporter
from colibri.frontends.architecture import from_architecture

CHECKPOINT = Path(__file__).with_name("checkpoint.safetensors")


def export(dtype: str) -> exporter.Export:
    """The trained model in a format, calibrated on the validation week, its experts packed as for flash."""
    rows = data.split(data.load(), data.VALIDATION).features
    how = exporter.Quantization(dtype)
    return exporter.build(from_architecture(CHECKPOINT), quantization=how, calibration=[rows], expert_align=64)


def fnv1a(content: bytes) -> int:
    """The 32-bit digest, as the examples also compute it in C and JavaScript."""
    digest = 2166136261
    for byte in content:
        digest = (digest ^ byte) * 16777619 & 0xFFFFFFFF
    return digest
