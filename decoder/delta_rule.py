"""The gated delta rule over a block of tokens, in two forms: step by step, and in one go.

Formulas: arXiv 2412.06464 (Gated Delta Networks), §3; per value head and token, S fp32 [Dv, Dk]:

    S_t = g_t S_{t-1} + d_t k_tᵀ,   d_t = β_t (v_t - g_t S_{t-1} k_t),   y_t = S_t q_t

A form runs a block from a state and leaves a tape, by which the state after any part of the block
is found. `Steps` is the reference, and one kernel per layer on Metal. `Chunk` is a few matrix
products where the steps would be a graph of small operations; it rounds otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

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
    """One form. `state` is fp32 [R, Hv, Dv, Dk], `keep` int32 [R]."""

    def run(
        self, block: Block, state: mx.array, keep: mx.array | None
    ) -> tuple[mx.array, mx.array, Any]:
        """Outputs [R, T, Hv, Dv], the state after the first keep[r] tokens or all, and a tape."""
        ...

    def after(self, tape: Any, state: mx.array, keep: mx.array) -> mx.array:
        """The state after the first keep[r] tokens of the block that left `tape`."""
        ...


class Steps:
    """One token after the other, by mlx-lm. The tape is the block: its first steps run again.

    The same steps in the same order give the same bits.
    """

    def run(
        self, block: Block, state: mx.array, keep: mx.array | None
    ) -> tuple[mx.array, mx.array, Block]:
        rows, width = block.k.shape[:2]
        mask = None
        if keep is not None:
            mask = mx.arange(width, dtype=mx.int32) < keep[:, None]
        elif mx.metal.is_available():
            # Without a mask mlx-lm takes another Metal kernel, which sums in another order: a
            # second run, which needs one, would then not give the state that was verified.
            mask = mx.ones((rows, width), dtype=mx.bool_)
        y, end = gated_delta_update(*block, state, mask)
        # Only the state will be asked for: k stands in for q, which would be one more to keep.
        return y, end, block._replace(q=block.k)

    def after(self, tape: Block, state: mx.array, keep: mx.array) -> mx.array:
        return self.run(tape, state, keep)[1]


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

    def run(
        self, block: Block, state: mx.array, keep: mx.array | None
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

        count = mx.full((k.shape[0],), width, dtype=mx.int32) if keep is None else keep
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
            start = self.after(ChunkTape(k[:, :, piece], d, decay), start, part)
        y = mx.concatenate(outs, axis=2).transpose(0, 2, 1, 3).astype(block.q.dtype)
        tape = ChunkTape(k, mx.concatenate(innovations, axis=2), mx.cumsum(log_g, axis=-1))
        return y, start, tape

    def after(self, tape: ChunkTape, state: mx.array, keep: mx.array) -> mx.array:
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


def choose() -> Rule:
    """The form for the default device: matrix products on a GPU that is not Metal's."""
    if mx.default_device() != mx.gpu or mx.metal.is_available() or not agree():
        return Steps()
    return Chunk()


def agree(tolerance: float = 1e-3) -> bool:
    """Whether both forms give the same on this device, on random numbers of a real shape."""
    rows, width, heads, dim = 2, PIECE, 2, 128
    keys = mx.random.split(mx.random.key(0), 6)
    q, k, v = (mx.random.normal((rows, width, heads, dim), key=keys[i]) for i in range(3))
    a, b = (mx.random.normal((rows, width, heads), key=keys[i]) for i in (3, 4))
    q, k = normalize_qk(q, k, inv_scale=dim**-0.5, eps=1e-6)
    block = Block(q, k, v, a, b, mx.zeros((heads,)), mx.zeros((heads,)))
    state = mx.random.normal((rows, heads, dim, dim), key=keys[5])
    keep = mx.array([5, width], dtype=mx.int32)

    def results(rule: Rule) -> tuple[mx.array, mx.array]:
        y, _, tape = rule.run(block, state, None)
        return y, rule.after(tape, state, keep)

    return all(
        bool((mx.abs(one - other).max() <= tolerance * mx.abs(one).max()).item())
        for one, other in zip(results(Steps()), results(Chunk()), strict=True)
    )
