"""How rows come in: chunk by chunk between cycles, or riding in them. It changes no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import OracleDrafter, as_target, finish, greedy, make_decoder, make_model, request

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.types import Completion, Sampling

SHARED = 40
TAILS = (1, 3, 12, 2, 7, 1, 16, 5)  # tokens of each prompt behind what all share


class Case:
    """Prompts that share most of what they are, each by its own short end."""

    def __init__(self, name: str) -> None:
        model = make_model(name, 3 if "moe" in name else 0)
        self.target = as_target(model, name)
        random = np.random.default_rng(1)
        shared = random.integers(0, 48, size=SHARED).tolist()
        # The oracle knows a row by its first two tokens, so rows that share them are one text.
        self.prompts = [
            [*shared, *random.integers(0, 48, size=n - 1).tolist(), i] for i, n in enumerate(TAILS)
        ]
        self.budgets = [9 + 3 * i for i in range(len(TAILS))]
        self.expected = [
            greedy(model, p, n) for p, n in zip(self.prompts, self.budgets, strict=True)
        ]


@pytest.fixture(scope="module", params=["qwen3", "gemma4", "qwen3_5"])
def case(request: Any) -> Case:
    return Case(request.param)


def admit_late(case: Case, decoder: Any, **options: Any) -> dict[int, Completion]:
    """The first two rows begin, the others come in beside them."""
    done: dict[int, Completion] = {}
    for i in (0, 1):
        decoder.add(request(i, case.prompts[i], case.budgets[i], **options))
    done |= {c.uid: c for c in decoder.step()}
    for i in range(2, len(TAILS)):
        decoder.add(request(i, case.prompts[i], case.budgets[i], **options))
    return done | finish(decoder)


@pytest.mark.parametrize(("rows", "depth"), [(3, 0), (4, 1), (8, 1)])
def test_rows_that_rode_say_what_they_would_have_said(case: Case, rows: int, depth: int) -> None:
    drafter = Wrong(8)
    decoder = make_decoder(case.target, drafter, max_batch=rows, depth=depth)
    done = admit_late(case, decoder)
    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
    assert [done[i].prefill_tokens for i in range(2, 8)] == list(TAILS[2:])
    assert all(done[i].cached_tokens == SHARED for i in range(2, 8))


def test_without_a_draft_only_one_or_two_tokens_ride(case: Case) -> None:
    decoder = make_decoder(case.target, NoDrafter(), max_batch=4)
    done = admit_late(case, decoder)
    assert {i: list(c.token_ids) for i, c in done.items()} == dict(enumerate(case.expected))
    assert all(c.cycles == len(c.token_ids) - 1 for c in done.values())


@pytest.mark.parametrize("settings", [Sampling(temperature=0.8, seed=5), Sampling()])
def test_drawn_tokens_and_log_probabilities_do_not_tell_who_rode(settings: Sampling) -> None:
    case = Case("qwen3")
    options = {"sampling": settings, "logprobs": 2}
    rode = admit_late(case, make_decoder(case.target, Wrong(8), max_batch=4), **options)
    for i, prompt in enumerate(case.prompts):
        alone = make_decoder(case.target, NoDrafter(), max_batch=1)
        alone.add(request(0, prompt, case.budgets[i], **options))
        wanted = finish(alone)[0]
        assert rode[i].token_ids == wanted.token_ids
        assert rode[i].logprobs == wanted.logprobs


def test_a_penalised_row_does_not_ride() -> None:
    case = Case("qwen3")
    settings = Sampling(temperature=0.7, frequency_penalty=0.5, repetition_penalty=1.2, seed=3)
    rode = admit_late(case, make_decoder(case.target, Wrong(8), max_batch=4), sampling=settings)
    for i, prompt in enumerate(case.prompts):
        alone = make_decoder(case.target, NoDrafter(), max_batch=1)
        alone.add(request(0, prompt, case.budgets[i], sampling=settings))
        assert rode[i].token_ids == finish(alone)[0].token_ids


def test_a_long_prompt_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk outlasts what rows that decode may wait: a cycle comes after every one."""
    monkeypatch.setattr("dflash_batch.decoder.engine.STALL", 0.0)
    monkeypatch.setattr("dflash_batch.decoder.admission.STALL", 1e-9)
    case = Case("qwen3")
    decoder = make_decoder(case.target, NoDrafter(), max_batch=2, depth=0)
    decoder.add(request(0, case.prompts[0], 60))
    decoder.step()
    decoder.add(request(1, list(range(48)) * 8, 2))  # 384 tokens, 64 a chunk
    steps = 0
    while decoder.load().waiting:
        decoder.step()
        steps += 1
    assert steps == 6
    assert finish(decoder)[0].cycles == 59


def test_a_row_cancelled_between_chunks_is_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_batch.decoder.engine.STALL", 0.0)
    monkeypatch.setattr("dflash_batch.decoder.admission.STALL", 1e-9)
    case = Case("qwen3")
    decoder = make_decoder(case.target, NoDrafter(), max_batch=2, depth=0)
    decoder.add(request(0, case.prompts[0], 9))
    decoder.step()
    decoder.add(request(1, list(range(48)) * 8, 2))
    decoder.step()
    assert decoder.load().waiting == 1
    decoder.cancel(1)
    assert decoder.load().waiting == 0
    assert list(finish(decoder)) == [0]


class Wrong(OracleDrafter):
    """Drafts of no worth: the texts must not depend on them."""

    def __init__(self, block: int) -> None:
        super().__init__([], block, 1.0, 0)
