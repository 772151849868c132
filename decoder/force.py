"""Tokens the target did not choose, put into one row's text as if it had.

They close a thinking block whose budget is spent. The row stands still meanwhile: its reach on the
device ends where they begin, so no cycle, in flight or not, moves it, whatever was drafted.

    committed ……… anchor                   before
    committed ……… anchor f1 f2 | f3        after forcing f1 f2 f3: f3 is the new anchor
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from dflash_batch.decoder.cycle import Slots, run
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.targets.base import Target


def force(
    slots: Slots,
    slot: int,
    committed: int,
    anchor: int,
    tokens: Sequence[int],
    target: Target,
    drafter: Drafter,
) -> mx.array:
    """Run a row's anchor and all of `tokens` but the last; the row has its new length then.

    The caller places the row with the last of them as its anchor. Returns the target's logits
    [1, n, V] at the places of the n tokens.
    """
    new = [anchor, *tokens[:-1]]
    one = Slots(1, target, drafter)
    one.arena.load(0, slots.arena.snapshot(slot, committed))
    one.draft.load(0, slots.draft.snapshot(slot, committed))
    one.lens.place(0, committed)
    one.lens.bound = committed
    count = mx.array([len(new)], dtype=mx.int32)
    hidden = run(one, target, drafter, mx.array([new], dtype=mx.int32), count)
    slots.arena.load(slot, one.arena.snapshot(0, committed + len(new)))
    slots.draft.load(slot, one.draft.snapshot(0, committed + len(new)))
    return target.logits(hidden)
