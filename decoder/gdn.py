"""A GatedDeltaNet layer for many rows, of which each may be rolled back on its own.

The layer remembers of a row a state S, fp32 [Hv, Dv, Dk], and the last Kc - 1 inputs of its
convolution. Neither can be cut back, so a forward starts at the committed state and keeps a tape,
by which `commit(keep)` then finds the state after the first keep[r] tokens (`delta_rule`; a prefill
says beforehand what it will keep, and needs none):

    tape        x0 x1 x2 x3 x4 x5 x6 x7       one forward, T = 8
    keep[r]=3   S → S → S → S                 steps 3 … 7 leave the row's state as it is
    window      the Kc - 1 inputs before x3   a gather

A rejected tail leaves no trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.delta_rule import Block, Rule


class _Forward(NamedTuple):
    """What the last forward left behind, until it is committed."""

    window: mx.array  # [R, Kc-1+T, C] the convolution's inputs, the committed ones first
    end: mx.array | None  # the state after it, if it was told what will be kept
    tape: Any  # else the rule's own


class DeltaLayer:
    """One mlx-lm GatedDeltaNet module with the states of the rows of `lens`."""

    def __init__(self, module: Any, lens: Lens, dtype: mx.Dtype, rule: Rule) -> None:
        self._module = module
        self._lens = lens
        self._rule = rule
        self._last: _Forward | None = None
        window = (lens.rows, module.conv_kernel_size - 1, module.conv_dim)
        state = (lens.rows, module.num_v_heads, module.head_v_dim, module.head_k_dim)
        self.window = mx.zeros(window, dtype=dtype)
        self.state = mx.zeros(state, dtype=mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        """Run x [R, T, h] from the committed states, and commit nothing."""
        m, (rows, width, _) = self._module, x.shape
        window = mx.concatenate([self.window, m.in_proj_qkv(x)], axis=1)
        z = m.in_proj_z(x).reshape(rows, width, m.num_v_heads, m.head_v_dim)
        a, b = m.in_proj_a(x), m.in_proj_b(x)

        q, k, v = mx.split(nn.silu(m.conv1d(window)), [m.key_dim, 2 * m.key_dim], axis=-1)
        q = q.reshape(rows, width, m.num_k_heads, m.head_k_dim)
        k = k.reshape(rows, width, m.num_k_heads, m.head_k_dim)
        v = v.reshape(rows, width, m.num_v_heads, m.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=m.head_k_dim**-0.5, eps=1e-6)

        block = Block(q, k, v, a, b, m.A_log, m.dt_bias)
        if self._lens.keep is None:
            y, tape = self._rule.verify(block, self.state)
            self._last = _Forward(window, None, tape)
        else:
            y, end = self._rule.advance(block, self.state, self._lens.keep)
            self._last = _Forward(window, end, None)
        out: mx.array = m.out_proj(m.norm(y, z).reshape(rows, width, -1))
        return out

    def commit(self, keep: mx.array) -> None:
        """Move each row's state past the first keep[r] (int32 [R]) tokens of the last forward."""
        assert self._last is not None
        (window, end, tape), self._last = self._last, None
        self.state = self._rule.replay(tape, self.state, keep) if end is None else end
        kept = self.window.shape[1]
        last = keep[:, None] + mx.arange(kept, dtype=mx.int32)
        self.window = mx.take_along_axis(window, last[:, :, None], axis=1)

    def read(self, row: int) -> tuple[mx.array, mx.array]:
        """One row's window and state, [1, Kc-1, C] and [1, Hv, Dv, Dk]."""
        return self.window[row : row + 1], self.state[row : row + 1]

    def load(self, row: int, window: mx.array, state: mx.array) -> None:
        """Put one row's window and state into row `row`."""
        start = mx.array([row], dtype=mx.int32)
        self.window = mx.slice_update(self.window, window, start, axes=[0])
        self.state = mx.slice_update(self.state, state, start, axes=[0])

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows`, in that order."""
        self.window, self.state = self.window[rows], self.state[rows]
