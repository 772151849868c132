"""The laws of the decoder, in float32 on the CPU backend: bit-exact tokens.

1. Speculative equals plain: whatever a drafter proposes, the tokens are the target's own.
2. Batched equals alone: a row does not depend on its neighbours, on when it joined, on who left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    OracleDrafter,
    as_target,
    finish,
    greedy,
    make_decoder,
    make_model,
    request,
)

from dflash_batch.decoder.composite import CompositeDrafter
from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.policy import Fixed, Goodput, Plain
from dflash_batch.decoder.types import Request

MODELS = ("llama", "qwen3", "qwen3_moe-4bit", "gemma4", "qwen3_5")  # one of each kind of loop
SEEDS = {"qwen3_moe-4bit": 3}  # of models whose texts would otherwise settle on one token
LENGTHS = (3, 17, 5, 40, 2, 9, 23, 4)  # of prompts
BUDGETS = (20, 7, 33, 12, 25, 1, 16, 30)  # of outputs


class Case:
    """A random target with eight prompts and their plain greedy texts."""

    def __init__(self, name: str, dtype: mx.Dtype = mx.float32) -> None:
        self.model = make_model(name, SEEDS.get(name, 0))
        self.model.set_dtype(dtype)
        self.target = as_target(self.model, name)
        random = np.random.default_rng(7)
        self.prompts = [
            [i, *random.integers(0, 48, size=n - 1).tolist()] for i, n in enumerate(LENGTHS)
        ]
        self.expected = [
            greedy(self.model, p, n) for p, n in zip(self.prompts, BUDGETS, strict=True)
        ]
        self.texts = [p + e for p, e in zip(self.prompts, self.expected, strict=True)]

    def oracle(self, block: int, wrong: float, seed: int = 0) -> OracleDrafter:
        return OracleDrafter(self.texts, block, wrong, seed)


@pytest.fixture(scope="module", params=MODELS)
def case(request: Any) -> Case:
    return Case(request.param)


@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (2, 1), (5, 0), (8, 1)])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_speculative_equals_plain(case: Case, rows: int, wrong: float, depth: int) -> None:
    decoder = make_decoder(case.target, case.oracle(8, wrong), max_batch=rows, depth=depth)
    for i in range(8):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))

    done = finish(decoder)

    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
    assert all(c.finish_reason == "length" for c in done.values())


@pytest.mark.parametrize(("rows", "depth", "wrong"), [(4, 0, 0.3), (5, 1, None)])
def test_lookup_and_composite_drafts_change_no_token(
    case: Case, rows: int, depth: int, wrong: float | None
) -> None:
    model = NoDrafter() if wrong is None else case.oracle(8, wrong)
    drafter = CompositeDrafter(model, 8)
    for again in range(2):  # the second time with all texts among the finished ones
        decoder = make_decoder(
            case.target, drafter, max_batch=rows, depth=depth, policy=Whim(7, again)
        )
        for i in range(8):
            decoder.add(request(i, case.prompts[i], BUDGETS[i]))

        done = finish(decoder)

        assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
        assert any(c.accepted_tokens for c in done.values())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_moe", mx.float32),
        ("gemma4_text", mx.float32),
        ("gemma4_text-experts", mx.float32),
        ("qwen3_5_moe-4bit", mx.float32),
        ("qwen3", mx.bfloat16),
        ("qwen3_moe-4bit", mx.bfloat16),
        ("gemma4", mx.bfloat16),
        ("qwen3_5", mx.bfloat16),
        ("qwen3_5_moe-4bit", mx.bfloat16),
    ],
)
def test_other_models_and_bfloat16_keep_the_law_too(name: str, dtype: mx.Dtype) -> None:
    case = Case(name, dtype)
    decoder = make_decoder(case.target, case.oracle(8, 0.2), max_batch=5)
    for i in range(8):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))

    done = finish(decoder)

    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))


@pytest.mark.parametrize("rows", [1, 5])
def test_no_drafter_is_plain_decoding(case: Case, rows: int) -> None:
    decoder = make_decoder(case.target, NoDrafter(), max_batch=rows)
    for i in range(8):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))

    done = finish(decoder)

    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
    assert all(c.cycles == len(c.token_ids) - 1 for c in done.values())
    assert all(c.draft_tokens == 0 for c in done.values())


@pytest.mark.parametrize("seed", range(4))
def test_rows_join_and_leave_at_any_cycle(case: Case, seed: int) -> None:
    random = np.random.default_rng(seed)
    depth = seed % 2
    decoder = make_decoder(
        case.target, case.oracle(6, 0.4, seed), max_batch=int(random.integers(2, 6)), depth=depth
    )
    waiting = random.permutation(8).tolist()
    gone = int(waiting[3])
    done: dict[int, Any] = {}
    while waiting or any(decoder.load()):
        if waiting and (random.random() < 0.5 or not any(decoder.load())):
            i = waiting.pop()
            decoder.add(request(i, case.prompts[i], BUDGETS[i]))
        if gone not in waiting and random.random() < 0.2:
            decoder.cancel(gone)
        done |= {c.uid: c for c in decoder.step()}

    assert set(range(8)) - {gone} <= set(done)
    assert all(list(c.token_ids) == case.expected[i] for i, c in done.items())


def test_a_perfect_drafter_fills_every_block_and_a_wrong_one_none(case: Case) -> None:
    for wrong in (0.0, 1.0):
        decoder = make_decoder(case.target, case.oracle(8, wrong), max_batch=8)
        for i in range(8):
            decoder.add(request(i, case.prompts[i], BUDGETS[i], trace=True))
        for c in finish(decoder).values():
            left = len(c.token_ids) - 1
            full = [8] * (left // 8) + [left % 8] * (left % 8 > 0)
            assert list(c.emitted_per_cycle or ()) == (full if wrong == 0.0 else [1] * left)
            assert c.cycles == len(c.emitted_per_cycle or ())
            # The last cycle may draft one more than it emits; nothing is drafted past that.
            assert [len(d) for d in c.drafted_per_cycle or ()] == [
                min(8, left + 1 - at) - 1
                for at in np.cumsum([0, *(c.emitted_per_cycle or ())])[:-1].tolist()
            ]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_stop_token_ends_a_row_at_every_block_offset(case: Case, rows: int) -> None:
    text = case.expected[2]
    for offset in range(12):
        stop = text[offset]
        decoder = make_decoder(case.target, case.oracle(5, 0.2, offset), max_batch=rows)
        for i in range(rows):
            decoder.add(
                request(
                    i + 2, case.prompts[i + 2], BUDGETS[i + 2], stop_token_ids=frozenset([stop])
                )
            )
        done = finish(decoder)[2]
        assert list(done.token_ids) == text[: text.index(stop) + 1]
        assert done.finish_reason == "stop"


class Whim(Fixed):
    """Another block length and width each time, by chance."""

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(most, trim=False)
        self.random = np.random.default_rng(seed)
        self.most = most

    def choose(self, rows: Any, width: int, context: int) -> int:
        return int(self.random.integers(0, self.most + 1)) if self.random.random() < 0.7 else 0

    def admit_more(self, live: int, ready: int, context: int) -> int:
        return int(self.random.integers(not live, ready + 1))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_depends_on_the_block_lengths_chosen(case: Case, seed: int, depth: int) -> None:
    decoder = make_decoder(
        case.target, case.oracle(8, 0.3, seed), max_batch=5, depth=depth, policy=Whim(7, seed)
    )
    for i in range(8):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))

    done = finish(decoder)

    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))


@pytest.mark.parametrize("depth", [0, 1])
def test_no_token_depends_on_goodput(case: Case, depth: int) -> None:
    policy = Goodput(CostTable(), 8)
    decoder = make_decoder(
        case.target, case.oracle(8, 0.3), max_batch=5, depth=depth, policy=policy
    )
    for i in range(8):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))

    done = finish(decoder)

    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
    assert not policy.table.empty, "cycles were timed"


def test_plain_leaves_the_drafter_alone(case: Case) -> None:
    decoder = make_decoder(case.target, case.oracle(8, 0.0), max_batch=5, policy=Plain())
    decoder.add(request(2, case.prompts[2], BUDGETS[2]))
    done = finish(decoder)[2]
    assert list(done.token_ids) == case.expected[2]
    assert (done.draft_tokens, done.spec) == (0, "off")


def test_a_shared_prefix_is_computed_once_and_changes_no_token(case: Case) -> None:
    shared = case.prompts[3] * 2
    prompts = [[*shared, i, i + 1, 3] for i in range(6)]
    alone = [greedy(case.model, prompt, 10) for prompt in prompts]
    texts = [p + e for p, e in zip(prompts, alone, strict=True)]
    for rows in (1, 2, 6):
        # All prompts begin alike here, so the oracle cannot tell them apart: plain decoding.
        decoder = make_decoder(case.target, NoDrafter(), max_batch=rows)
        for i, prompt in enumerate(prompts):
            decoder.add(request(i, prompt, 10))
        done = finish(decoder)
        assert [list(done[i].token_ids) for i in range(6)] == alone
        assert sum(c.prefill_tokens for c in done.values()) == len(shared) + 6 * 3
        assert all(c.prefill_tokens + c.cached_tokens == len(shared) + 3 for c in done.values())
    assert len({tuple(t) for t in texts}) == 6


def test_two_interleaved_prefixes_are_each_computed_once_when_sorted(case: Case) -> None:
    a, b = case.prompts[3], case.prompts[6]
    prompts = [[*a, i, 5] for i in range(4)] + [[*b, i, 5] for i in range(4)]
    alone = [greedy(case.model, prompt, 6) for prompt in prompts]
    decoder = make_decoder(case.target, NoDrafter(), max_batch=8)
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 6))
    done = finish(decoder)
    assert [list(done[i].token_ids) for i in range(8)] == alone
    assert sum(c.prefill_tokens for c in done.values()) == len(a) + len(b) + 8 * 2


def test_requests_are_taken_as_room_comes_free(case: Case) -> None:
    decoder = make_decoder(case.target, case.oracle(4, 0.3), max_batch=2)
    taken: list[int] = []

    def requests() -> Iterator[Request]:
        for i in range(8):
            taken.append(i)
            yield request(i, case.prompts[i], BUDGETS[i])

    done = decoder.run(requests())
    first = next(done)
    assert len(taken) < 8
    rest = {c.uid: list(c.token_ids) for c in [first, *done]}
    assert rest == dict(enumerate(case.expected))


def test_leaving_a_run_early_forgets_its_rows(case: Case) -> None:
    decoder = make_decoder(case.target, case.oracle(4, 0.3), max_batch=2)
    for _ in decoder.run(request(i, case.prompts[i], BUDGETS[i]) for i in range(8)):
        break
    assert decoder.step() == []
    assert decoder.load() == (0, 0)


def test_the_width_follows_the_rows_and_is_reported(case: Case) -> None:
    decoder = make_decoder(case.target, case.oracle(4, 0.0), max_batch=4)
    for i in (0, 1, 2):
        decoder.add(request(i, case.prompts[i], BUDGETS[i]))
    done = finish(decoder)
    assert {c.batch_width for c in done.values()} == {3}


def test_float32_arithmetic_is_what_was_tested(case: Case) -> None:
    assert case.target.dtype == mx.float32


def test_rows_without_a_place_are_named_and_may_leave(case: Case) -> None:
    decoder = make_decoder(case.target, NoDrafter(), max_batch=2, depth=0)
    for i in range(8):
        decoder.add(request(i, case.prompts[i], 12))
    assert sorted(decoder.unstarted()) == list(range(8))
    decoder.step()
    waiting = decoder.unstarted()
    assert 0 < len(waiting) <= 6
    for uid in waiting:
        decoder.cancel(uid)
    assert decoder.unstarted() == []
    assert finish(decoder).keys() == set(range(8)) - set(waiting)
