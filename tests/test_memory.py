"""Rows are admitted only as far as memory reaches."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import finish, make_decoder, make_target, request

from dflash_batch.decoder.cycle import Slots, prefill
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.memory import SLACK, Budget, limit_here

MODELS = ("llama", "qwen3", "gemma4", "qwen3_5")


@pytest.mark.parametrize("name", MODELS)
def test_a_row_takes_what_is_foreseen(name: str) -> None:
    target = make_target(name)
    slots = Slots(3, target, NoDrafter())
    budget = Budget(target, NoDrafter(), None)
    for done in range(0, 150, 50):
        slots.lens.bound = done
        prefill(slots, target, NoDrafter(), mx.zeros((3, 50), mx.int32), mx.full((3,), 50))
    columns = budget.columns(150)
    held = sum(a.nbytes for a in slots.arena.arrays()) // 3
    scores = target.vocab_size * 2 * target.dtype.size
    foreseen = budget.row_bytes(columns) - scores
    assert held <= foreseen <= 2 * held


def test_no_limit_means_any_number() -> None:
    budget = Budget(make_target("qwen3"), NoDrafter(), None)
    assert budget.rows(1 << 20) is None
    assert limit_here() is None  # the CPU


def decoder_with_room_for(rows: int, tokens: int, width: int = 8) -> Decoder:
    target = make_target("qwen3")
    budget = Budget(target, NoDrafter(), None)
    room = rows * budget.row_bytes(budget.columns(tokens)) * SLACK
    memory = int(room) + mx.get_active_memory() + 4096
    return make_decoder(target, NoDrafter(), max_batch=width, memory=memory)


def test_a_batch_is_as_wide_as_memory_allows_and_all_rows_are_answered() -> None:
    decoder = decoder_with_room_for(3, 60)
    for i in range(7):
        decoder.add(request(i, [i, 1, 2], 57))
    done = finish(decoder)
    assert len(done) == 7
    assert max(c.batch_width for c in done.values()) == 3


def test_a_row_that_can_never_fit_is_refused_by_name() -> None:
    decoder = decoder_with_room_for(1, 60)
    decoder.add(request(0, [1, 2], 50))
    with pytest.raises(PromptError, match="do not fit in memory") as refused:
        decoder.add(request(1, [1, 2], 500))
    assert refused.value.code == "out_of_memory"
    assert len(finish(decoder)) == 1


def test_a_decoder_that_is_narrowed_answers_all_rows_the_same() -> None:
    target = make_target("llama")

    def run(narrow_to: int | None) -> dict[int, tuple[int, ...]]:
        decoder = make_decoder(target, NoDrafter(), max_batch=4)
        for uid in range(6):
            decoder.add(request(uid, [1 + uid, 2, 3], 8))
        done = {one.uid: one for one in decoder.step()}
        if narrow_to is not None:
            decoder.narrow(narrow_to)
            decoder.narrow(16)  # never wider than it was loaded for
        done |= finish(decoder)
        widths = [done[uid].batch_width for uid in (4, 5)]  # taken in after the change
        assert max(widths) <= (narrow_to or 4)
        return {uid: one.token_ids for uid, one in done.items()}

    assert run(1) == run(None)
