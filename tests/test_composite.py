"""Lookup and the choice between sources: what is found, who is believed, the law of the text."""

from __future__ import annotations

from typing import Any

import markov
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov import MarkovDrafter, MarkovTarget, bad_tables, fits, text_law
from tiny import OracleDrafter, finish, greedy, make_decoder, make_model, make_target, request

from dflash_batch.decoder.acceptance import Coupled, Rejection, Rule
from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.composite import CompositeDrafter, FinishedTexts, Source
from dflash_batch.decoder.drafters import NoDrafter, Proposal
from dflash_batch.decoder.history import NOTHING, TOGETHER, History
from dflash_batch.decoder.lookup import LONGEST, in_row, in_texts, key_of
from dflash_batch.decoder.marks import Marks, marked, promise
from dflash_batch.decoder.types import Sampling

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def best_match(text: list[int], key: list[int], last: int) -> tuple[int, int]:
    """Column and length of the longest match of `key`'s end up to column `last`, the latest one."""

    def length(at: int) -> int:
        n = 0
        while n < min(LONGEST, len(key)) and at >= n and text[at - n] == key[-1 - n]:
            n += 1
        return n

    return max(((length(at), at) for at in range(last + 1)), default=(0, 0))


# Lookup


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_row_is_continued_as_after_its_longest_latest_match(
    texts: list[list[int]], k: int
) -> None:
    width = max(map(len, texts)) + k
    rows = mx.array([text + [NOTHING] * (width - len(text)) for text in texts], dtype=mx.int32)
    end = mx.array([len(text) - 1 for text in texts], dtype=mx.int32)

    guess = in_row(rows, end, key_of(rows, end), k)

    for row, text in enumerate(texts):
        length, at = best_match(text, text, len(text) - 2)
        assert guess.length[row].item() == length
        assert guess.meant[row].item() == (k if length else 0)
        if length:
            longer = list(text)
            while len(longer) < len(text) + k:  # each token is that of one period before
                longer.append(longer[len(longer) - (len(text) - 1 - at)])
            assert guess.tokens[row].tolist() == longer[len(text) :]


@given(st.lists(TEXTS, max_size=4), st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_other_texts_are_searched_each_by_itself(
    others: list[list[int]], texts: list[list[int]], k: int
) -> None:
    finished = FinishedTexts(256)
    for text in others:
        finished.add(text)
    pool = finished.tokens
    width = max(map(len, texts))
    rows = mx.array([text + [NOTHING] * (width - len(text)) for text in texts], dtype=mx.int32)
    key = key_of(rows, mx.array([len(text) - 1 for text in texts], dtype=mx.int32))

    guess = in_texts(pool, key, k)

    flat: list[int] = np.array(pool).tolist()
    for row, text in enumerate(texts):
        length, at = best_match(flat, text, len(flat) - 1)
        follows = flat[at + 1 : at + 1 + k] if length else []
        follows = [*follows, NOTHING][: [*follows, NOTHING].index(NOTHING)]
        assert guess.length[row].item() == length
        assert guess.meant[row].item() == len(follows)
        assert np.array(guess.tokens)[row, : len(follows)].tolist() == follows
    assert int(guess.tokens.min()) >= 0


def test_finished_texts_keep_the_newest_and_grow_by_doubling() -> None:
    finished = FinishedTexts(600)
    assert finished.tokens.shape == (256,)
    finished.add([1] * 300)
    assert finished.tokens.shape == (512,)
    finished.add([2] * 500)
    kept = np.array(finished.tokens).tolist()
    assert len(kept) == 1024
    assert kept[-600:] == [*[1] * 98, NOTHING, *[2] * 500, NOTHING]
    assert set(kept[:-600]) == {NOTHING}


def test_a_history_moves_with_its_rows_and_holds_what_was_kept() -> None:
    lens = Lens(2, step=4)
    history = History(lens)

    def run(tokens: list[list[int]], keep: list[int]) -> None:
        lens.open(len(tokens[0]))
        history.write(mx.array(tokens, dtype=mx.int32))
        lens.advance(mx.array(keep, dtype=mx.int32))
        lens.bound += max(keep)

    run([[1, 2, 3], [5, 6, 7]], [3, 1])
    run([[4, 0, 0], [8, 9, 0]], [1, 2])
    lens.open(1)
    text = np.array(history.text(mx.array([10, 11], dtype=mx.int32)))
    assert text[:, :5].tolist() == [[1, 2, 3, 4, 10], [5, 8, 9, 11, NOTHING]]
    said = history.snapshot(1, 3)
    assert said.first(2).tokens.tolist() == [5, 8]
    other = History(Lens(1, step=4))
    other.load(0, said)
    assert other.snapshot(0, 3).tokens.tolist() == [5, 8, 9]
    history.select(mx.array([1, 1, 0]))
    assert [history.snapshot(row, 3).tokens.tolist() for row in range(3)] == [
        [5, 8, 9],
        [5, 8, 9],
        [1, 2, 3],
    ]


def test_a_history_nobody_reads_is_computed_all_the_same() -> None:
    lens = Lens(1, step=4)
    history = History(lens)
    for token in range(3 * TOGETHER):
        lens.open(1)
        history.write(mx.array([[token]], dtype=mx.int32))
        lens.advance(mx.array([1], dtype=mx.int32))
        lens.bound += 1
    assert history.snapshot(0, 3 * TOGETHER).tokens.tolist() == list(range(3 * TOGETHER))


# Marks


def test_sources_are_marked_as_far_as_the_text_is_known() -> None:
    drafts = mx.array([[[1, 2, 3], [1, 9, 3], [1, 2, 3], [7, 7, 7]]])
    count = mx.array([[3, 3, 1, 0]])
    truth = mx.array([[1, 2, 5]])
    for known, kept, tried in (
        (3, [2, 1, 1, 0], [3, 2, 1, 0]),
        (2, [2, 1, 1, 0], [2, 2, 1, 0]),
        (0, [0] * 4, [0] * 4),
        (-3, [0] * 4, [0] * 4),  # another text stands in the row now
    ):
        got = marked(drafts, count, truth, mx.array([known]))
        assert [n[0].tolist() for n in got] == [kept, tried]


def test_a_promise_is_the_expected_number_of_drafts_that_stand() -> None:
    got = promise(mx.array([[0.5, 1.0, 0.9]]), mx.array([[3, 2, 0]]), 4)
    assert np.allclose(np.array(got), [[0.5 + 0.25 + 0.125, 2.0, 0.0]])


def test_marks_fade_and_lean_on_what_is_known_elsewhere() -> None:
    marks = Marks(2, 1, 1)
    prior = mx.array([[[0.5]]])
    assert marks.rate(prior, 4.0).tolist() == [[[0.5]], [[0.5]]]
    one = mx.array([[[4.0]], [[0.0]]])
    marks.add(one, mx.full((2, 1, 1), 4.0), 0.5)
    assert np.allclose(np.array(marks.rate(prior, 4.0)).ravel(), [6 / 8, 2 / 8])
    marks.add(mx.zeros((2, 1, 1)), mx.zeros((2, 1, 1)), 0.5)
    assert np.allclose(np.array(marks.rate(prior, 4.0)).ravel(), [4 / 6, 2 / 6])
    marks.select(mx.array([1, 0]))
    marks.clear(1)
    assert np.allclose(np.array(marks.rate(prior, 4.0)).ravel(), [2 / 6, 0.5])


# Choice


def drafted_from(drafter: CompositeDrafter, decoder: Any, tokens: int) -> list[int]:
    """The source of the first row in each cycle."""
    chosen: list[int] = []
    propose = drafter.propose

    def spy(state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        proposal = propose(state, anchor, width, k)
        if state.asked is not None:
            chosen.append(int(state.asked.chosen[0]))
        return proposal

    drafter.propose = spy  # type: ignore[method-assign]
    decoder.add(request(0, [3, 1, 4, 1, 5], tokens))
    finish(decoder)
    return chosen


@pytest.mark.parametrize(("wrong", "source"), [(0.0, Source.MODEL), (1.0, Source.JOB)])
def test_a_row_takes_the_source_that_fares_best(wrong: float, source: Source) -> None:
    """The job's texts hold the answer, and the model knows it too or errs everywhere."""
    model = make_model("llama", 2)
    prompt = [3, 1, 4, 1, 5]
    text = greedy(model, prompt, 48)
    assert len(set(text)) > 8, "the text wanders"
    drafter = CompositeDrafter(OracleDrafter([prompt + text], 6, wrong, 0))
    if wrong:
        drafter.learn(prompt, text)

    chosen = drafted_from(drafter, make_decoder(make_target("llama", 2), drafter, max_batch=1), 48)

    assert chosen.count(source) > 0.7 * len(chosen)


def test_lookup_alone_runs_no_draft_and_drafts_only_what_it_found() -> None:
    drafter = CompositeDrafter(NoDrafter(), 8)
    assert (drafter.spec.kind, drafter.spec.taps, drafter.spec.max_k) == ("ngram", (), 7)
    target = make_target("qwen3", 4)
    prompt = [3, 1, 4, 5, 9, 2, 6]  # no token twice
    done = [
        finish(_with(make_decoder(target, drafter, max_batch=1), prompt, 24))[0] for _ in range(2)
    ]
    assert done[0].token_ids == done[1].token_ids
    assert done[0].drafted_per_cycle is not None
    assert done[0].drafted_per_cycle[0] == (), "nothing was said twice yet"
    # The second time the first one's text is there to be copied.
    assert done[1].cycles < done[0].cycles
    assert done[1].accepted_tokens > 0.8 * done[1].draft_tokens
    assert done[1].cycles <= 6


def _with(decoder: Any, prompt: list[int], tokens: int) -> Any:
    decoder.add(request(0, prompt, tokens, trace=True))
    return decoder


def test_a_state_can_be_taken_out_and_put_back() -> None:
    drafter = CompositeDrafter(NoDrafter(), 4)
    lens = Lens(2)
    state = drafter.new_state(lens)
    lens.open(6)
    drafter.commit(
        state, mx.array([[1, 2, 3, 1, 2, 0], [0] * 6]), None, mx.array([5, 0], dtype=mx.int32)
    )
    lens.advance(mx.array([5, 0], dtype=mx.int32))
    lens.bound = 6
    held = state.snapshot(0, 5)
    state.load(1, held.first(2))
    state.load(0, held)
    lens.place(1, 2)
    anchor, width = mx.array([3, 1], dtype=mx.int32), mx.array([4, 4], dtype=mx.int32)
    proposal = drafter.propose(state, anchor, width, 3)
    assert proposal.tokens.tolist() == [[1, 2, 3], [2, 1, 2]]
    state.select(mx.array([1, 0]))
    lens.select(mx.array([1, 0]))
    proposal = drafter.propose(state, anchor[::-1], width, 3)
    assert proposal.tokens.tolist() == [[2, 1, 2], [1, 2, 3]]


# Sampling


@pytest.mark.parametrize("rule", [Coupled(), Rejection()])
@pytest.mark.parametrize("with_model", [False, True])
def test_the_law_of_sampled_text_is_the_targets(rule: Rule, with_model: bool) -> None:
    logits = markov.make_logits(5)
    target = MarkovTarget(logits)
    model = MarkovDrafter(bad_tables(2, 3)) if with_model else NoDrafter()
    drafter: Any = CompositeDrafter(model, 4)
    prompt, count, length = [1, 0, 1, 2, 1, 0, 1], 1500, 3
    decoder = make_decoder(target, drafter, max_batch=128, sampling=rule, depth=1)
    kinds = set()
    counts = np.zeros(markov.VOCAB**length, dtype=np.int64)
    for c in decoder.run(
        request(i, prompt, length, sampling=Sampling(temperature=1.0, seed=i)) for i in range(count)
    ):
        counts[int(np.ravel_multi_index(c.token_ids, (markov.VOCAB,) * length))] += 1
        kinds.add(c.accepted_tokens)
    assert len(kinds) > 1, "some drafts stood and some did not"
    assert fits(counts, text_law(logits, prompt, length, Sampling(temperature=1.0))) < 4


@pytest.mark.parametrize("with_model", [False, True])
def test_a_seed_gives_its_text_whatever_is_looked_up(with_model: bool) -> None:
    target: Any = MarkovTarget(markov.make_logits(6))
    model = MarkovDrafter(bad_tables(3, 5)) if with_model else NoDrafter()

    def texts(drafter: Any, rows: int) -> dict[int, tuple[int, ...]]:
        decoder = make_decoder(target, drafter, max_batch=rows)
        for i in range(12):
            decoder.add(request(i, [i % 4, 1], 20, sampling=Sampling(temperature=0.8, seed=i)))
        return {uid: c.token_ids for uid, c in finish(decoder).items()}

    assert texts(CompositeDrafter(model, 6), 5) == texts(NoDrafter(), 1)
