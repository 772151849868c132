"""A draft that is not asked keeps its context current, so that it can be asked again."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_vectors import load
from tiny import finish, make_decoder, request

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.policy import Fixed


class Script(Fixed):
    """Block lengths by the number of the cycle."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(0, trim=False)
        self.lengths = list(lengths)

    def choose(self, rows: object, width: int, context: int) -> int:
        return self.lengths.pop(0)


@pytest.mark.parametrize("cycles", [1, 5, 16, 23])
@pytest.mark.parametrize("draft", ["draft-b8", "draft-b8-swa", "draft2-b8"])
def test_features_taken_in_late_give_the_same_drafts(draft: str, cycles: int) -> None:
    drafter = load(f"dflash-qwen3-tiny/{draft}", None, 1)._drafter
    taps = len(drafter.spec.taps)
    hidden = drafter.model.norm.weight.shape[0]
    mx.random.seed(1)
    features = mx.random.normal((2, 6 + cycles, taps * hidden))
    start = mx.array([6, 3], dtype=mx.int32)
    anchor, width = mx.array([5, 9]), mx.array([8, 8])

    logits = []
    for plain in (False, True):
        lens = Lens(2)
        state = drafter.new_state(lens)
        lens.open(6)
        drafter.commit(state, mx.zeros((2, 6), mx.int32), features[:, :6], start)
        lens.advance(start)
        for i in range(cycles):
            lens.bound = 6 + i
            if plain:
                assert drafter.propose(state, anchor, mx.ones((2,)), 0).tokens.shape == (2, 0)
            lens.open(1)
            one = mx.ones((2,), dtype=mx.int32)
            drafter.commit(state, mx.zeros((2, 1), mx.int32), features[:, 6 + i : 7 + i], one)
            lens.advance(one)
        lens.bound = 6 + cycles
        logits.append(np.array(drafter.draft(state, anchor, width, 7).logits))

    assert np.abs(logits[0] - logits[1]).max() < 1e-4


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", ["qwen3", "qwen35", "gemma4"])
def test_rows_that_leave_and_join_while_parked_keep_their_tokens(family: str, depth: int) -> None:
    pair = load(f"dflash-{family}-tiny/draft-b8", None, 4)
    prompts = [[1, 2, 3, 4], [7, 8, 9], [5, 4, 3, 2, 1], [11, 3], [20, 21, 22], [9, 9, 8]]
    budgets = [30, 4, 22, 9, 40, 3]

    def run(drafter: Any, policy: Fixed | None = None) -> dict[int, tuple[int, ...]]:
        decoder = make_decoder(pair._target, drafter, max_batch=4, depth=depth, policy=policy)
        for uid, prompt in enumerate(prompts):
            decoder.add(request(uid, prompt, budgets[uid]))
        return {uid: c.token_ids for uid, c in finish(decoder).items()}

    expected = run(NoDrafter())
    assert run(pair._drafter, Script([0] * 9 + [7] * 200)) == expected
    assert run(pair._drafter, Script(([0] * 3 + [7] + [0] * 18 + [3]) * 20)) == expected
