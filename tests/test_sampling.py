"""Sampling: the law of the text is the target's, and a seed gives the same text in any company.

`vectors/units/sampling.json` holds laws after temperature, top_p and top_k, and single steps of
rejection sampling, made elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import markov
import mlx.core as mx
import numpy as np
import pytest
from markov import MarkovDrafter, MarkovTarget, bad_tables, fits, good_tables, text_law
from tiny import (
    OracleDrafter,
    as_target,
    finish,
    greedy,
    make_decoder,
    make_model,
    make_target,
    request,
)

from dflash_batch.decoder.acceptance import Coupled, Rejection, Rule, accepts, residual
from dflash_batch.decoder.drafters import DrafterSpec, NoDrafter, Proposal
from dflash_batch.decoder.sampling import Purpose, Sampler, gumbel, unit
from dflash_batch.decoder.types import Sampling

VECTORS = json.loads((Path(__file__).parent / "vectors" / "units" / "sampling.json").read_text())

MIXED = (
    Sampling(temperature=1.0, seed=1),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.8, seed=2),
    Sampling(temperature=1.3, top_k=5, min_p=0.05, seed=3),
    Sampling(temperature=0.8, repetition_penalty=1.3, seed=4),
    Sampling(presence_penalty=1.0, frequency_penalty=0.5),
    Sampling(temperature=1.0, logit_bias=((3, 4.0), (7, -100.0)), seed=5),
    Sampling(temperature=2.0, frequency_penalty=0.7, top_p=0.9, seed=6, choice=3),
)


def sampler_of(rows: list[Sampling], vocab: int) -> Sampler:
    sampler = Sampler(len(rows), vocab)
    for row, settings in enumerate(rows):
        sampler.place(row, settings, [0], [])
    return sampler


# Scores


@pytest.mark.parametrize("case", VECTORS["processors"])
def test_temperature_top_k_and_top_p_give_the_laws_expected(case: Any) -> None:
    settings = Sampling(
        temperature=case["temperature"], top_p=case["top_p"], top_k=case["top_k"], seed=1
    )
    logits = mx.array(case["logits"])[None]
    sampler = sampler_of([settings], logits.shape[-1])
    got = sampler.probabilities(sampler.scores(logits))
    assert mx.allclose(got[0], mx.array(case["probs"]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [s for s in MIXED if not s.logit_bias])
def test_each_row_of_a_mixed_batch_has_the_law_of_its_own_settings(settings: Sampling) -> None:
    settings = replace(settings, logit_bias=((1, 0.5),))
    logits = markov.make_logits(3)
    prompt, output = [2, 0], [1, 1, 3]
    others = [s for s in MIXED if not s.logit_bias]
    sampler = Sampler(len(others) + 1, markov.VOCAB)
    for row, other in enumerate(others):
        sampler.place(row, other, [0], [row % markov.VOCAB])
    sampler.place(len(others), settings, prompt, output[:1])
    drafts = mx.array([output[1:]] * (len(others) + 1), dtype=mx.int32)
    texts = [output[: n + 1] for n in range(3)]
    z = mx.array(np.stack([logits[text[-1]] for text in texts]).astype(np.float32))
    got = sampler.probabilities(sampler.scores(mx.stack([z] * (len(others) + 1)), drafts))
    for n, text in enumerate(texts):
        assert np.allclose(got[-1, n], markov.next_law(logits, prompt, text, settings), atol=1e-6)


def test_tokens_that_were_emitted_count_and_those_rejected_do_not() -> None:
    settings = Sampling(temperature=1.0, frequency_penalty=1.0)
    sampler = sampler_of([settings, settings], markov.VOCAB)
    sampler.take(mx.array([[1, 2, 2], [3, 3, 0]]), mx.array([2, 0]))
    got = sampler.scores(mx.zeros((2, 1, markov.VOCAB)))
    assert got[:, 0].tolist() == [[0, -1, -1, 0], [0, 0, 0, 0]]
    sampler.select([1, 0])
    assert sampler.scores(mx.zeros((2, 1, markov.VOCAB)))[1, 0].tolist() == [0, -1, -1, 0]


def test_the_most_likely_token_is_never_filtered() -> None:
    sampler = sampler_of([Sampling(temperature=1.0, top_p=0.0, min_p=1.0, top_k=1)], 6)
    got = sampler.scores(mx.array([[[0.0, 1.0, 3.0, 3.0, 2.0, 3.0]]]))
    assert int((got > -mx.inf).sum()) == 1
    assert got[0, 0, 2] == 3.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"below 0|between"):
        Sampling(**wrong)  # type: ignore[arg-type]


# Random numbers


def test_random_numbers_belong_to_seed_choice_position_and_purpose() -> None:
    settings = [Sampling(1.0, seed=s, choice=c) for s in (7, 8, -7) for c in (0, 1)]
    together = sampler_of(settings, 9)
    position = mx.array([[10, 11, 400_000]] * len(settings), dtype=mx.int32)
    numbers = {p: np.array(together._bits(position, p, 9)) for p in Purpose}
    assert len({tuple(r) for n in numbers.values() for r in n.reshape(-1, 9).tolist()}) == 54
    for row, one in enumerate(settings):
        alone = sampler_of([one], 9)
        for purpose in Purpose:
            got = alone._bits(mx.array([[400_000, 10]], dtype=mx.int32), purpose, 9)
            assert np.array_equal(np.array(got)[0], numbers[purpose][row, [2, 0]])


def test_noise_is_finite_and_has_the_moments_of_its_law() -> None:
    ends = mx.array([0, 1, 2**32 - 1], dtype=mx.uint32)
    assert bool(mx.isfinite(gumbel(ends)).all())
    assert unit(ends).tolist() == [0.0, 0.0, 1 - 2**-24]
    bits = sampler_of([Sampling(1.0, seed=5)], 4)._bits(mx.array([[3]]), Purpose.CHOICE, 200_000)
    noise = np.array(gumbel(bits)).ravel()
    assert abs(noise.mean() - 0.577216) < 0.012
    assert abs(noise.var() - np.pi**2 / 6) < 0.03


# Rules


@pytest.mark.parametrize("case", VECTORS["rejection"])
def test_single_steps_of_rejection_sampling(case: Any) -> None:
    p = mx.array(case["target_probs"])[None]
    q = np.zeros((3, 6), dtype=np.float32)
    ids = case["draft_candidate_ids"] or [list(range(6))] * 3
    for row, (tokens, law) in enumerate(zip(ids, case["draft_probs"], strict=True)):
        q[row, tokens] = law
    drafts = mx.array([case["draft_tokens"]])
    stand = accepts(p[:, :3], mx.array(q)[None], drafts, mx.array([case["uniforms"]]))
    accepted = int(mx.cumprod(stand.astype(mx.int32), axis=1).sum())
    assert accepted == case["accepted"]
    last = p[0, 3] if accepted == 3 else residual(p[0, accepted], mx.array(q[accepted]))
    assert mx.allclose(last, mx.array(case["final_token_distribution"]), atol=1e-5)


def test_where_nothing_is_left_of_the_target_its_own_law_is_drawn_from() -> None:
    p = mx.array([0.25, 0.75])
    assert residual(p, p).tolist() == p.tolist()


LAWS = {
    "temperature": Sampling(temperature=1.0),
    "filters": Sampling(temperature=1.4, top_p=0.9, min_p=0.02),
    "penalties": Sampling(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=-0.5
    ),
}
LENGTH = 4
TEXTS = 1200


@pytest.mark.parametrize(
    ("rule", "draft"),
    [
        (Coupled(), "none"),
        (Coupled(), "good"),
        (Rejection(), "good"),
        (Rejection(), "bad"),
        (Rejection(), "sure"),
    ],
    ids=["plain", "coupled-good", "rejection-good", "rejection-bad", "rejection-sure"],
)
@pytest.mark.parametrize("law", LAWS)
def test_the_law_of_the_text_is_the_targets(law: str, rule: Rule, draft: str) -> None:
    logits = markov.make_logits(1)
    drafter = {
        "none": NoDrafter(),
        "good": MarkovDrafter(good_tables(logits, LENGTH)),
        "bad": MarkovDrafter(bad_tables(2, LENGTH)),
        "sure": MarkovDrafter(good_tables(logits, LENGTH), sure=True),
    }[draft]
    decoder = make_decoder(MarkovTarget(logits), drafter, max_batch=256, sampling=rule)
    for uid in range(TEXTS):
        settings = replace(LAWS[law], seed=uid // 2, choice=uid % 2)
        decoder.add(request(uid, [2, 0], LENGTH, sampling=settings))
    done = finish(decoder)
    texts = np.array([done[uid].token_ids for uid in range(TEXTS)])
    cells = texts @ markov.VOCAB ** np.arange(LENGTH)[::-1]
    counts = np.bincount(cells, minlength=markov.VOCAB**LENGTH)
    assert fits(counts, text_law(logits, [2, 0], LENGTH, LAWS[law])) < 3


def test_a_wrong_law_would_be_seen() -> None:
    logits = markov.make_logits(1)
    law = text_law(logits, [2, 0], LENGTH, Sampling(temperature=1.0))
    other = text_law(logits, [2, 0], LENGTH, Sampling(temperature=1.25))
    counts = np.random.default_rng(0).multinomial(TEXTS, other)
    assert fits(counts, law) > 3


def test_a_good_draft_stands_more_often_than_a_bad_one_and_most_by_rejection() -> None:
    logits = markov.make_logits(1)
    share: dict[tuple[str, str], float] = {}
    for rule in (Coupled(), Rejection()):
        for name, tables in (("good", good_tables(logits, 2)), ("bad", bad_tables(2, 2))):
            decoder = make_decoder(
                MarkovTarget(logits), MarkovDrafter(tables), max_batch=64, sampling=rule
            )
            for uid in range(64):
                decoder.add(request(uid, [0], 41, sampling=Sampling(1.0, seed=uid)))
            done = finish(decoder).values()
            key = type(rule).__name__, name
            share[key] = sum(c.accepted_tokens for c in done) / sum(c.draft_tokens for c in done)
    assert share["Rejection", "good"] > share["Coupled", "good"] > share["Coupled", "bad"]


# Laws 1 and 2, to the token


class HeadDrafter(NoDrafter):
    """Drafts by the target's own embedding and head: likely tokens, often wrong."""

    def __init__(self, target: Any, block: int) -> None:
        self.spec = DrafterSpec("head", max_k=block - 1)
        self._target = target

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        logits = self._target.head(self._target.embed(anchor))[:, None] * 0.2
        logits = mx.broadcast_to(logits, (anchor.shape[0], k, logits.shape[-1]))
        return Proposal(mx.argmax(logits, axis=-1).astype(mx.int32), logits)


PROMPTS = [[i, *range(5, 5 + 3 * i)] for i in range(len(MIXED))]
BUDGETS = (20, 9, 25, 13, 18, 22, 7, 16)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target("qwen3")


def run(decoder: Any, rows: list[int]) -> dict[int, list[int]]:
    for i in rows:
        decoder.add(request(i, PROMPTS[i], BUDGETS[i], sampling=MIXED[i]))
    return {uid: list(c.token_ids) for uid, c in finish(decoder).items()}


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[int, list[int]]:
    """Each row alone, without a draft."""
    texts: dict[int, list[int]] = {}
    for i in range(len(MIXED)):
        texts |= run(make_decoder(target, NoDrafter(), max_batch=1), [i])
    return texts


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("block", "depth"), [(1, 1), (4, 0), (8, 1)])
def test_a_seed_gives_one_text_whatever_the_draft_and_the_batch(
    target: Any, plain: dict[int, list[int]], block: int, depth: int, rows: int
) -> None:
    drafter = HeadDrafter(target, block) if block > 1 else NoDrafter()
    decoder = make_decoder(target, drafter, max_batch=rows, depth=depth)
    assert run(decoder, list(range(8))) == plain


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_text"])
def test_rejected_drafts_leave_nothing_behind_in_other_families(family: str) -> None:
    other = make_target(family)
    alone = {i: run(make_decoder(other, NoDrafter(), max_batch=1), [i])[i] for i in (0, 3, 7)}
    assert run(make_decoder(other, HeadDrafter(other, 6), max_batch=3), [0, 3, 7]) == alone


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_by_rejection_a_seed_gives_one_text_whatever_the_batch(target: Any, rows: int) -> None:
    def decoder(rows: int) -> Any:
        return make_decoder(
            target, HeadDrafter(target, 5), max_batch=rows, sampling=Rejection(), depth=rows % 2
        )

    alone = {i: run(decoder(1), [i])[i] for i in range(8)}
    assert run(decoder(rows), list(range(8))) == alone


@pytest.mark.parametrize("seed", range(3))
def test_sampled_rows_join_and_leave_at_any_cycle(
    target: Any, plain: dict[int, list[int]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    decoder = make_decoder(
        target, HeadDrafter(target, 6), max_batch=int(random.integers(2, 6)), depth=seed % 2
    )
    waiting = random.permutation(8).tolist()
    gone = int(waiting[3])
    done: dict[int, Any] = {}
    while waiting or any(decoder.load()):
        if waiting and (random.random() < 0.5 or not any(decoder.load())):
            i = waiting.pop()
            decoder.add(request(i, PROMPTS[i], BUDGETS[i], sampling=MIXED[i]))
        if gone not in waiting and random.random() < 0.2:
            decoder.cancel(gone)
        done |= {c.uid: c for c in decoder.step()}
    assert set(range(8)) - {gone} <= set(done)
    assert all(list(c.token_ids) == plain[i] for i, c in done.items())


def test_choices_and_seeds_give_different_texts(target: Any) -> None:
    decoder = make_decoder(target, NoDrafter(), max_batch=8)
    for uid in range(6):
        settings = Sampling(1.0, seed=uid // 3, choice=uid % 3)
        decoder.add(request(uid, [4, 5], 12, sampling=settings))
    assert len({c.token_ids for c in finish(decoder).values()}) == 6


@pytest.mark.parametrize("rows", [1, 3])
def test_log_probabilities_are_those_of_the_raw_logits(target: Any, rows: int) -> None:
    model = make_model("qwen3")
    decoder = make_decoder(target, HeadDrafter(target, 4), max_batch=rows)
    for i, wanted in enumerate((3, None, 0, 20)):
        settings = Sampling(temperature=1.5, top_k=5, seed=i)
        decoder.add(request(i, PROMPTS[i], 9, sampling=settings, logprobs=wanted))
    done = finish(decoder)
    assert done[1].logprobs is None
    for i, wanted in ((0, 3), (2, 0), (3, 20)):
        told, tokens = done[i].logprobs, list(done[i].token_ids)
        assert told is not None
        z = model(mx.array([PROMPTS[i] + tokens]))[0, len(PROMPTS[i]) - 1 : -1]
        law = np.array(z - mx.logsumexp(z, axis=-1, keepdims=True))
        assert [t.chosen.token for t in told] == tokens
        for place, token in zip(law, told, strict=True):
            assert token.chosen.logprob == pytest.approx(place[token.chosen.token], abs=1e-4)
            assert [c.token for c in token.top] == np.argsort(-place)[:wanted].tolist()
            assert all(c.logprob == pytest.approx(place[c.token], abs=1e-4) for c in token.top)
            assert token.chosen.text == f"token_id:{token.chosen.token}"


# Late tokens


@pytest.mark.parametrize(("drafts", "depth"), [(0, 0), (4, 0), (4, 1)])
def test_what_ends_a_text_is_not_chosen_before_its_time(drafts: int, depth: int) -> None:
    """Against plain decoding with these tokens ruled out, the row beside it left as it is."""
    model = make_model("qwen3")
    prompts, count, least = [[5, 9, 11], [6, 9, 13, 8]], 14, 8
    free = [greedy(model, prompt, count) for prompt in prompts]
    ends = tuple(sorted({free[0][1], free[0][4]}))
    text: list[int] = []
    for _ in range(least):
        logits = model(mx.array([prompts[0] + text]))[0, -1]
        ruled_out = (mx.arange(48)[:, None] == mx.array(ends)).any(axis=1)
        text.append(int(mx.argmax(mx.where(ruled_out, -mx.inf, logits))))
    text += greedy(model, prompts[0] + text, count - least)
    drafter: Any = NoDrafter()
    if drafts:
        whole = [prompts[0] + text, prompts[1] + free[1]]
        drafter = OracleDrafter(whole, block=drafts + 1, wrong=0.3, seed=3)
    decoder = make_decoder(as_target(model, "qwen3"), drafter, depth=depth)
    late = Sampling(late=ends, late_from=len(prompts[0]) + least)
    decoder.add(request(0, prompts[0], count, sampling=late))
    decoder.add(request(1, prompts[1], count))
    done = finish(decoder)
    assert text != free[0]
    assert [list(done[uid].token_ids) for uid in range(2)] == [text, free[1]]
