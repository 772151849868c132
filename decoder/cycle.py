"""The decoder's cycle: draft, verify, accept, commit, for all rows in one go.

Nothing here waits for the device. Invariant at the top of a cycle, per row: N tokens are
committed in the target's arena and in the drafter's state, and the anchor, the newest emitted
token, sits at position N.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx

from dflash_batch.decoder.acceptance import Rule, accept
from dflash_batch.decoder.arena import Lens, RowState
from dflash_batch.decoder.drafters import Drafter, DrafterState
from dflash_batch.decoder.sampling import Sampler
from dflash_batch.decoder.targets.base import Target


class Timer(Protocol):
    """Told when a part of the cycle has been built, with what it ends in."""

    def __call__(self, part: str, *ends: mx.array) -> None: ...


def untimed(part: str, *ends: mx.array) -> None:
    """Waits for nothing."""


class Slots:
    """Rows on the device: lengths, caches, anchors, and how much each may still emit."""

    def __init__(self, rows: int, target: Target, drafter: Drafter) -> None:
        self.lens = Lens(rows)
        self.arena: RowState = target.new_arena(self.lens)
        self.draft: DrafterState = drafter.new_state(self.lens)
        self.sampler = Sampler(rows, target.vocab_size)
        self.anchor = mx.zeros((rows,), dtype=mx.int32)
        self.remaining = mx.zeros((rows,), dtype=mx.int32)  # 0: the row is idle

    @property
    def rows(self) -> int:
        return self.lens.rows

    def place(self, row: int, length: int, anchor: int, remaining: int) -> None:
        """Make a loaded row live, or with remaining = 0 an idle one."""
        here = mx.arange(self.rows, dtype=mx.int32) == row
        self.lens.place(row, length)
        self.anchor = mx.where(here, mx.array(anchor, dtype=mx.int32), self.anchor)
        self.remaining = mx.where(here, mx.array(remaining, dtype=mx.int32), self.remaining)

    def allow(self, row: int, more: int) -> None:
        """Let a row emit `more` tokens beyond what it may now, cycles in flight included."""
        here = mx.arange(self.rows, dtype=mx.int32) == row
        self.remaining = self.remaining + mx.where(here, mx.array(more, dtype=mx.int32), 0)

    def select(self, rows: list[int]) -> None:
        """Keep the rows named, in that order."""
        index = mx.array(rows, dtype=mx.int32)
        self.lens.select(index)
        self.arena.select(index)
        self.draft.select(index)
        self.sampler.select(rows)
        self.anchor, self.remaining = self.anchor[index], self.remaining[index]


class Ride(NamedTuple):
    """Ends of prompts that go through a cycle in place of anchors and drafts.

    decoding    anchor x1 x2 x3       emits what stands
    riding      p5 p6 p7 p8           emits nothing: the prompt goes on
    riding      p9 p10 .  .           width 2, ends: emits the token after p10
    """

    tokens: mx.array  # int32 [R, k+1]
    width: mx.array  # int32 [R]: how many of them; 0: the row decodes
    ends: mx.array  # int32 [R]; 1: the prompt's last token is among them


class Verdict(NamedTuple):
    """What a cycle brought, int32, on the device until somebody reads it."""

    chosen: mx.array  # [R, k+1]; of these, emitted[r] from first[r] on are row r's new tokens
    first: mx.array  # [R]
    emitted: mx.array  # [R]
    accepted: mx.array  # [R] drafts that stand
    width: mx.array  # [R] the row's block length
    drafts: mx.array  # [R, k]; the first width[r]-1 are row r's
    sound: mx.array  # bool [R]: the logits at the row's tokens are numbers


def cycle(
    slots: Slots,
    target: Target,
    drafter: Drafter,
    k: int,
    rule: Rule,
    ride: Ride | None = None,
    timer: Timer = untimed,
) -> tuple[Verdict, mx.array]:
    """Draft up to k tokens for every row, verify them in one forward, keep what stands.

    Returns also the target's logits [R, k+1, V], for those who show them.
    """
    # A row never drafts past its budget: its block is as short as what it may still emit.
    width = mx.minimum(slots.remaining + 1, k + 1)
    anchor, most = slots.anchor, slots.remaining
    if ride is not None:
        rides = ride.width > 0
        anchor, width = mx.where(rides, ride.tokens[:, 0], anchor), mx.where(rides, 1, width)
    proposal = drafter.propose(slots.draft, anchor, width, k)
    if proposal.meant is not None:
        width = mx.minimum(width, proposal.meant + 1)
    drafts = rule.draft(proposal, slots.sampler, slots.lens.offset)
    if ride is not None:
        given = mx.where(rides[:, None], ride.tokens[:, 1:], drafts.tokens)
        drafts = drafts._replace(tokens=given)
        width, most = mx.where(rides, ride.width, width), mx.where(rides, ride.width, most)
    timer("draft", drafts.tokens)

    block = mx.concatenate([anchor[:, None], drafts.tokens], axis=1)
    # Without drafts what stays is known beforehand: one token of each live row.
    slots.lens.open(k + 1, keep=None if k else mx.minimum(most, 1))
    seen = target.forward(block, slots.arena, drafter.spec.taps)
    logits = target.logits(seen.hidden)
    timer("verify", logits)

    chosen, stands = rule.judge(logits, drafts, width, slots.sampler, slots.lens.offset)
    if ride is not None:
        stands = stands | rides[:, None]
    keep, accepted = accept(stands, width, most)
    timer("accept", chosen, keep)

    drafter.commit(slots.draft, block, seen.features, keep)
    slots.arena.commit(keep)
    slots.lens.advance(keep)
    slots.sampler.take(chosen, keep)
    newest = mx.take_along_axis(chosen, mx.maximum(keep - 1, 0)[:, None], axis=1)[:, 0]
    slots.anchor = mx.where(keep > 0, newest, slots.anchor)
    first, emitted = mx.zeros_like(keep), keep
    if ride is not None:
        first = mx.where(rides, keep - 1, first)
        emitted = mx.where(rides, ride.ends, keep)
    fit = sound(logits, mx.arange(k + 1, dtype=mx.int32)[None] < keep[:, None])
    slots.remaining = mx.where(fit, slots.remaining - emitted, 0)
    timer("commit", slots.anchor, *slots.arena.arrays())
    return Verdict(chosen, first, emitted, accepted, width, drafts.tokens, fit), logits


def sound(logits: mx.array, used: mx.array) -> mx.array:
    """Bool [R]: no NaN or +inf in the logits [R, T, V] of the positions `used` (bool [R, T]).

    -inf alone is a token ruled out. The largest logit tells: it is NaN where any is.
    """
    return (mx.isfinite(mx.max(logits, axis=-1)) | ~used).all(axis=1)


def prefill(
    slots: Slots, target: Target, drafter: Drafter, tokens: mx.array, count: mx.array
) -> mx.array:
    """Run one chunk of prompt tokens, int32 [R, T], of which the first count[r] are row r's.

    Returns the target's logits after the last of them, [R, V] (of no meaning where count is 0).
    """
    hidden = run(slots, target, drafter, tokens, count)
    last = mx.maximum(count - 1, 0)[:, None, None]
    return target.logits(mx.take_along_axis(hidden, last, axis=1))[:, 0]


def run(
    slots: Slots, target: Target, drafter: Drafter, tokens: mx.array, count: mx.array
) -> mx.array:
    """Run and commit tokens int32 [R, T] that are given, of which the first count[r] are row r's.

    Returns the target's hidden states [R, T, h], before its final norm.
    """
    slots.lens.open(tokens.shape[1], keep=count)
    seen = target.forward(tokens, slots.arena, drafter.spec.taps)
    drafter.commit(slots.draft, tokens, seen.features, count)
    slots.arena.commit(count)
    slots.lens.advance(count)
    return seen.hidden
