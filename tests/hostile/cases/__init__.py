"""Hostile models as tables, one for each record of the format: what someone who knows the engine would try."""

from __future__ import annotations

from tests.hostile.cases import certificate, experts, header, layers, loops, operands, operations, ports, tensors, texts

TABLES = (header, ports, tensors, layers, experts, operands, operations, loops, texts, certificate)
CASES = {case.name: case for module in TABLES for case in module.CASES}
assert len(CASES) == sum(len(module.CASES) for module in TABLES), "two cases have one name"
