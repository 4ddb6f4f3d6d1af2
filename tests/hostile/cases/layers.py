"""MoE layers: the routing descriptor, and the order in which the program runs them."""

from __future__ import annotations

import numpy as np

from colibri.format import spec
from tests.hostile.cases.table import U32, table, values

CASES = [
    *values(
        "top2_shared",
        ("layers.tile", "ROUTING", 0, spec.EXPERT_TILE + 1, 1 << 31),
        ("layers.k", "ROUTING", 0, 6, U32),
        ("layers.experts", "ROUTING", 0, 6),
        ("layers.experts", "EXPERT", 4),
        ("layers.score", "ROUTING", spec.SCORES.index("logit"), len(spec.SCORES), U32),
        ("layers.normalize", "ROUTING", spec.NORMALIZE.index("softmax"), len(spec.NORMALIZE)),
        ("layers.groups", "ROUTING", 0, 2, U32),  # of 5 experts
        ("layers.kept_groups", "ROUTING", 0, 2),
        ("layers.group_rule", "ROUTING", len(spec.ENUMS["group_rule"])),
        ("layers.capacity", "ROUTING", spec.LIMIT + 1),
        ("layers.apply", "ROUTING", len(spec.ENUMS["apply"])),
        ("layers.epsilon", "ROUTING", np.nan, -1.0, np.inf),
        ("layers.scale", "ROUTING", np.nan, np.inf, -np.inf),
        ("layers.first_expert", "ROUTING", 1),
        ("layers.d_in", "ROUTING", 0, spec.LIMIT + 1),
        ("layers.d_out", "ROUTING", 0),
        ("layers.d_out", "PROGRAM", spec.LIMIT),
    ),
    *table(
        "top2_shared",
        ("expert output longer than the layer says", "PROGRAM", {"layers.d_out": 7}),
        ("more experts chosen than the workspace holds", "PROGRAM", {"layers.k": 5}),
    ),
    *table("top1", ("token longer than the layer says", "PROGRAM", {"layers.d_in": 5})),
    *table(
        "deep",
        ("layer run twice", "PROGRAM", {"moe[1].layer": 0}),
        ("layer never run", "PROGRAM", {"moe": lambda e: e["linear"]}),
        ("layers run out of order", "PROGRAM", {"moe.layer": 1, "moe[1].layer": 0}),
    ),
]
