"""Which form of the gated delta rule a device runs: the fastest that gives what the steps give.

A form is tried once, at load, with the model's own heads and dtype on random numbers, ragged counts
among them. One that cannot be built, raises or differs is passed over with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import normalize_qk

from dflash_batch.decoder.delta_kernel import CUDA, METAL, Kernel
from dflash_batch.decoder.delta_rule import PIECE, Block, Chunk, Rule, Steps

_log = logging.getLogger("dflash_batch")

TOLERANCE = 1e-3
"""Largest difference of a state, relative to its largest number: a GPU's matrix products may round
their inputs to TF32. Outputs may also differ by two steps of their own dtype."""


class Heads(NamedTuple):
    """A layer's heads and what they hold."""

    key: int
    value: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, module: Any) -> Heads:
        """Those of an mlx-lm GatedDeltaNet."""
        return cls(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)


class Form(NamedTuple):
    """A form that may serve, by its name in the log."""

    name: str
    make: Callable[[], Rule]


def forms() -> list[Form]:
    """The forms for the default device, best first. On the CPU the steps stay: they are exact."""
    if mx.default_device() != mx.gpu:
        return []
    if mx.metal.is_available():
        return [Form("kernel", lambda: Kernel(METAL))]
    return [Form("kernel", lambda: Kernel(CUDA)), Form("chunk", Chunk)]


def choose(candidates: Sequence[Form], heads: Heads, dtype: mx.Dtype) -> Rule:
    """The first candidate that gives what `Steps` gives; `Steps` if there is none."""
    for name, make in candidates:
        try:
            rule = make()
            reason = difference(rule, heads, dtype)
        except (RuntimeError, ValueError) as e:  # what MLX raises: no compiler, a body it refuses
            reason = " ".join(str(e).split())[:500]
        if reason is None:
            return rule
        _log.warning("delta_form_refused form=%s %s", name, reason)
    return Steps()


def difference(rule: Rule, heads: Heads, dtype: mx.Dtype) -> str | None:
    """How a form differs from the steps on this device, or None."""
    block, state, keep = sample(heads, dtype, rows=3, width=PIECE + 2)
    expected, got = _results(Steps(), block, state, keep), _results(rule, block, state, keep)
    for what, one, other in zip(("verify", "advance", "replay", "end"), expected, got, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{what} gives {other.shape} {other.dtype}, not {one.shape} {one.dtype}"
        one, other = one.astype(mx.float32), other.astype(mx.float32)
        off = float(np.array(mx.abs(one - other).max() / mx.abs(one).max()))
        most = max(TOLERANCE, 2 * float(mx.finfo(dtype).eps) if what in _OUTPUTS else 0.0)
        if not off <= most:  # so that NaN counts
            return f"{what} is off by {off:.1e} of its largest number, and {most:.1e} is allowed"
    return None


_OUTPUTS = ("verify", "advance")


def _results(
    rule: Rule, block: Block, state: mx.array, keep: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Outputs of a verify and of an advance as far as rows count, and the states behind them."""
    y, tape = rule.verify(block, state)
    settled, end = rule.advance(block, state, keep)
    inside = (mx.arange(y.shape[1], dtype=mx.int32) < keep[:, None])[..., None, None]
    # Not a product: what is outside may be anything but must be a number, which `end` cannot show.
    settled = mx.where(inside | ~mx.isfinite(settled), settled, mx.zeros_like(settled))
    results = y, settled, rule.replay(tape, state, keep), end
    mx.eval(results)
    return results


def sample(
    heads: Heads, dtype: mx.Dtype, rows: int, width: int
) -> tuple[Block, mx.array, mx.array]:
    """A random block, state and ragged counts (the first row keeps none, the last all)."""
    keys = iter(mx.random.split(mx.random.key(0), 6))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)).astype(dtype)

    q, k = (normal(rows, width, heads.key, heads.key_dim) for _ in range(2))
    q, k = normalize_qk(q, k, inv_scale=heads.key_dim**-0.5, eps=1e-6)
    v = normal(rows, width, heads.value, heads.value_dim)
    a, b = (normal(rows, width, heads.value) for _ in range(2))
    block = Block(q, k, v, a, b, mx.zeros((heads.value,)), mx.zeros((heads.value,)))
    state = normal(rows, heads.value, heads.value_dim, heads.key_dim).astype(mx.float32)
    keep = mx.array([row * width // max(rows - 1, 1) for row in range(rows)], dtype=mx.int32)
    return block, state, keep
