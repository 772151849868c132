"""The gated delta rule over a block of tokens: what a form of it does, and two forms in plain ops.

Formulas: arXiv 2412.06464 (Gated Delta Networks), §3; per value head and token, S fp32 [Dv, Dk]:

    S_t = g_t S_{t-1} + d_t k_tᵀ,   d_t = β_t (v_t - g_t S_{t-1} k_t),   y_t = S_t q_t

A form runs a block from a state. Either it is told beforehand how much of each row counts, or it
leaves a tape, by which the state after any part of the block is found. `Steps` is the reference,
and one kernel per layer on Metal. `Chunk` is a few matrix products where the steps would be a graph
of small operations; it rounds otherwise. The third form is `delta_kernel`; `delta_choice` chooses.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update

PIECE = 16
"""Most tokens that `Chunk` solves for at once."""


class Block(NamedTuple):
    """What the rule reads of T tokens, q and k normalised and q scaled."""

    q: mx.array  # [R, T, Hk, Dk]
    k: mx.array  # [R, T, Hk, Dk]
    v: mx.array  # [R, T, Hv, Dv]
    a: mx.array  # [R, T, Hv] the decay before its gate
    b: mx.array  # [R, T, Hv] β before its sigmoid
    A_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]


class Rule(Protocol):
    """One form. `state` is fp32 [R, Hv, Dv, Dk], `keep` int32 [R]; outputs are [R, T, Hv, Dv]."""

    def verify(self, block: Block, state: mx.array) -> tuple[mx.array, Any]:
        """Outputs of all tokens, and a tape."""
        ...

    def replay(self, tape: Any, state: mx.array, keep: mx.array) -> mx.array:
        """The state after the first keep[r] tokens of the block that left `tape`."""
        ...

    def advance(self, block: Block, state: mx.array, keep: mx.array) -> tuple[mx.array, mx.array]:
        """Outputs of the first keep[r] tokens, some numbers behind them, and the state there."""
        ...


class StepsTape(NamedTuple):
    """The block, to run its first steps again, and the state after all of them."""

    block: Block  # only its state will be asked for: k stands in for q, which is let go
    end: mx.array


class Steps:
    """One token after the other, by mlx-lm. The same steps in the same order give the same bits."""

    def verify(self, block: Block, state: mx.array) -> tuple[mx.array, StepsTape]:
        mask = None
        if mx.metal.is_available():
            # Without a mask mlx-lm takes another Metal kernel, which sums in another order: a
            # second run, which needs one, would then not give the state that was verified.
            mask = mx.ones(block.k.shape[:2], dtype=mx.bool_)
        y, end = gated_delta_update(*block, state, mask)
        return y, StepsTape(block._replace(q=block.k), end)

    def replay(self, tape: StepsTape, state: mx.array, keep: mx.array) -> mx.array:
        if tape.block.k.shape[1] == 1:
            return mx.where((keep > 0)[:, None, None, None], tape.end, state)
        return self.advance(tape.block, state, keep)[1]

    def advance(self, block: Block, state: mx.array, keep: mx.array) -> tuple[mx.array, mx.array]:
        mask = mx.arange(block.k.shape[1], dtype=mx.int32) < keep[:, None]
        y, end = gated_delta_update(*block, state, mask)
        return y, end


class ChunkTape(NamedTuple):
    """What turns S into any later state: S_n = γ_n S + Σ_{s≤n} (γ_n / γ_s) d_s k_sᵀ."""

    k: mx.array  # fp32 [R, Hv, T, Dk]
    d: mx.array  # fp32 [R, Hv, T, Dv] the innovations
    decay: mx.array  # fp32 [R, Hv, T] log γ, γ_t = g_1 … g_t


class Chunk:
    """All tokens of a piece by matrix products, in fp32.

    With D_ts = γ_t / γ_s for s ≤ t, and A_ts = β_t D_ts (k_t·k_s) for s < t:

        (I + A) d = β (v - γ S k),   y_t = γ_t S q_t + Σ_{s≤t} D_ts (k_s·q_t) d_s
    """

    def verify(self, block: Block, state: mx.array) -> tuple[mx.array, ChunkTape]:
        rows, width = block.k.shape[:2]
        y, _, tape = self._run(block, state, mx.full((rows,), width, dtype=mx.int32))
        return y, tape

    def advance(self, block: Block, state: mx.array, keep: mx.array) -> tuple[mx.array, mx.array]:
        return self._run(block, state, keep)[:2]

    def _run(
        self, block: Block, state: mx.array, count: mx.array
    ) -> tuple[mx.array, mx.array, ChunkTape]:
        width, heads = block.v.shape[1:3]
        each = heads // block.k.shape[2]
        q, k, v = (
            x.astype(mx.float32).transpose(0, 2, 1, 3)
            for x in (mx.repeat(block.q, each, 2), mx.repeat(block.k, each, 2), block.v)
        )
        beta = mx.sigmoid(block.b.astype(mx.float32)).transpose(0, 2, 1)
        # The logarithm of g as such: taken of a g that has underflowed it would be lost.
        rate = nn.softplus(block.a + block.dt_bias).astype(mx.float32)
        log_g = (-mx.exp(block.A_log.astype(mx.float32)) * rate).transpose(0, 2, 1)

        start, outs, innovations = state, [], []
        for at in range(0, width, PIECE):
            piece = slice(at, at + PIECE)
            decay = mx.cumsum(log_g[..., piece], axis=-1)
            y, d = _solve(
                q[:, :, piece], k[:, :, piece], v[:, :, piece], decay, beta[..., piece], start
            )
            outs.append(y)
            innovations.append(d)
            part = mx.clip(count - at, 0, decay.shape[-1])
            start = self.replay(ChunkTape(k[:, :, piece], d, decay), start, part)
        y = mx.concatenate(outs, axis=2).transpose(0, 2, 1, 3).astype(block.q.dtype)
        tape = ChunkTape(k, mx.concatenate(innovations, axis=2), mx.cumsum(log_g, axis=-1))
        return y, start, tape

    def replay(self, tape: ChunkTape, state: mx.array, keep: mx.array) -> mx.array:
        last = mx.maximum(keep - 1, 0)[:, None, None]
        until = mx.take_along_axis(tape.decay, last, axis=-1)
        until = mx.where(keep[:, None, None] > 0, until, 0.0)
        inside = mx.arange(tape.d.shape[2], dtype=mx.int32) < keep[:, None, None]
        weight = mx.where(inside, mx.exp(mx.where(inside, until - tape.decay, 0.0)), 0.0)
        added = (tape.d * weight[..., None]).swapaxes(-1, -2) @ tape.k
        return mx.exp(until)[..., None] * state + added


def _solve(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs and innovations [R, Hv, T, Dv] of one piece; all [R, Hv, T, …] in fp32."""
    width = decay.shape[-1]
    place = mx.arange(width)
    lower = place[:, None] >= place
    ratio = mx.where(lower, decay[..., :, None] - decay[..., None, :], 0.0)
    ratio = mx.where(lower, mx.exp(ratio), 0.0)  # D
    gamma = mx.exp(decay)[..., None]

    keys = k.swapaxes(-1, -2)
    a = mx.where(place[:, None] > place, beta[..., None] * ratio * (k @ keys), 0.0)
    d = beta[..., None] * (v - gamma * (k @ state.swapaxes(-1, -2)))
    # (I + A)⁻¹ = (I - A)(I + A²)(I + A⁴) …, which ends: A to the power T is zero.
    d = d - a @ d
    reach = 2
    while reach < width:
        a = a @ a
        d = d + a @ d
        reach *= 2
    return gamma * (q @ state.swapaxes(-1, -2)) + (ratio * (q @ keys)) @ d, d
