"""Quantising a draft in memory. Acceptance may fall; greedy text cannot change."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from dflash_batch.decoder.errors import LoadError

BITS = {"none": None, "w4": 4, "w8": 8}
"""Names of what a draft's weights can be quantised to."""

GROUPS = (64, 32)
"""Weights that share a scale: the most that divide a layer's input."""


def quantise(model: nn.Module, name: str) -> int:
    """Quantise every linear layer of `model` whose input GROUPS divide; return how many.

    Norms, convolution kernels and code books keep their arithmetic. Raises LoadError for a name
    that is not known, and when no layer fits.
    """
    if name not in BITS:
        raise LoadError(f"draft quantisation {name} is not known; choose {', '.join(BITS)}")
    bits = BITS[name]
    if bits is None:
        return 0
    count = 0

    def settings(_: str, module: Any) -> bool | dict[str, Any]:
        nonlocal count
        if not isinstance(module, nn.Linear):
            return False
        group = next((g for g in GROUPS if module.weight.shape[1] % g == 0), None)
        if group is None:
            return False
        count += 1
        return {"group_size": group, "bits": bits}

    nn.quantize(model, class_predicate=settings)
    if not count:
        raise LoadError(
            f"no layer of this draft can be quantised: none has an input of {GROUPS[1]}·n"
        )
    return count
