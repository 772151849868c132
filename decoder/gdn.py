"""A GatedDeltaNet layer for many rows, of which each may be rolled back on its own.

The layer remembers of a row a state S, fp32 [Hv, Dv, Dk], and the last Kc - 1 inputs of its
convolution. Formulas: arXiv 2412.06464 (Gated Delta Networks), §3; per value head and token:

    S_t = g_t S_{t-1} + β_t (v_t - g_t S_{t-1} k_t) k_tᵀ,   y_t = S_t q_t

Neither can be cut back, so a forward starts at the committed state, throws the end away and keeps
a tape of its inputs. `commit(keep)` runs the first keep[r] steps of the tape again:

    tape        x0 x1 x2 x3 x4 x5 x6 x7       one forward, T = 8
    keep[r]=3   S → S → S → S                 steps 3 … 7 leave the row's state as it is
    window      the Kc - 1 inputs before x3   a gather

The same steps in the same order give the same bits, so a rejected tail leaves no trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from dflash_batch.decoder.arena import Lens


class Tape(NamedTuple):
    """What one forward of T tokens read, from which any shorter one can be run again."""

    window: mx.array  # [R, Kc-1+T, C] the convolution's inputs, the committed ones first
    k: mx.array  # [R, T, Hk, Dk] normalised
    v: mx.array  # [R, T, Hv, Dv]
    a: mx.array  # [R, T, Hv] the decay before its gate
    b: mx.array  # [R, T, Hv] β before its sigmoid
    end: mx.array  # fp32 [R, Hv, Dv, Dk] the state after the forward


class DeltaLayer:
    """One mlx-lm GatedDeltaNet module with the states of the rows of `lens`."""

    def __init__(self, module: Any, lens: Lens, dtype: mx.Dtype) -> None:
        self._module = module
        self._lens = lens
        self._tape: Tape | None = None
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

        y, end = self._steps(q, k, v, a, b, self._lens.keep)
        self._tape = Tape(window, k, v, a, b, end)
        out: mx.array = m.out_proj(m.norm(y, z).reshape(rows, width, -1))
        return out

    def commit(self, keep: mx.array) -> None:
        """Move each row's state past the first keep[r] (int32 [R]) tokens of the last forward."""
        assert self._tape is not None
        tape, self._tape = self._tape, None
        if self._lens.keep is not None:
            self.state = tape.end  # the forward took no more than these
        elif tape.k.shape[1] == 1:
            self.state = mx.where((keep > 0)[:, None, None, None], tape.end, self.state)
        else:
            # Only the state is asked for: k stands in for q, which would be one more to keep.
            _, self.state = self._steps(tape.k, tape.k, tape.v, tape.a, tape.b, keep)
        last = keep[:, None] + mx.arange(self.window.shape[1], dtype=mx.int32)
        self.window = mx.take_along_axis(tape.window, last[:, :, None], axis=1)

    def _steps(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        keep: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """The recurrence over T tokens, of which the state takes in the first keep[r] or all."""
        rows, width = k.shape[:2]
        mask = None
        if keep is not None:
            mask = mx.arange(width, dtype=mx.int32) < keep[:, None]
        elif mx.metal.is_available():
            # Without a mask mlx-lm takes another Metal kernel, which sums in another order: a
            # replay, which needs one, would then not give the state that was verified.
            mask = mx.ones((rows, width), dtype=mx.bool_)
        m = self._module
        y, state = gated_delta_update(q, k, v, a, b, m.A_log, m.dt_bias, self.state, mask)
        return y, state

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
