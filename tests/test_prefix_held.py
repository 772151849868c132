"""Which prompts are prefilled together, and what the shared prefix saves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_target

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.prefill import MOST_ROWS, Prefiller, Staged
from dflash_batch.decoder.prefix import (
    MOST_HELD,
    WORTH,
    best_shared,
    branches,
    common,
    saving,
    usable,
)

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(
    lambda ids: np.array(ids, dtype=np.int32)
)


@given(tokens, tokens)
def test_common_is_the_longest_common_prefix(a: np.ndarray, b: np.ndarray) -> None:
    n = common(a, b)
    assert a[:n].tolist() == b[:n].tolist()
    assert n in (len(a), len(b)) or a[n] != b[n]
    assert usable(a, b) == min(n, len(a) - 1)
    assert best_shared(a, [b, a]) == len(a) - 1


@given(tokens, tokens)
def test_what_cannot_be_cut_saves_all_or_nothing(prompt: np.ndarray, held: np.ndarray) -> None:
    whole = common(prompt, held) == len(held) < len(prompt)
    assert saving(prompt, held, cuttable=False) == (len(held) if whole else 0)
    assert saving(prompt, held, cuttable=True) == usable(prompt, held)


@given(st.lists(st.integers(0, 200), max_size=12))
def test_branches_are_few_and_apart_and_hold_the_longest(lengths: list[int]) -> None:
    prompt = np.zeros(201, dtype=np.int32)
    points = branches(prompt, [np.array([0] * n + [1], dtype=np.int32) for n in lengths])
    assert len(points) <= MOST_HELD
    assert set(points) <= set(lengths)
    assert all(b - a >= WORTH for a, b in zip([0, *points], points, strict=False))
    assert points[-1:] == [n for n in [max(lengths, default=0)] if n >= WORTH]


def prompts(*groups: tuple[int, int]) -> list[np.ndarray]:
    """(shared length, how many) each: rows that share a prefix and differ in the last token."""
    return [
        np.array([100 + g] + [g] * shared + [i], dtype=np.int32)
        for g, (shared, count) in enumerate(groups)
        for i in range(count)
    ]


def run(prefiller: Prefiller, *args: list[np.ndarray]) -> Staged:
    """All chunks of a prefill."""
    chunks = prefiller.run(*args)
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            staged: Staged = end.value
            return staged


def test_a_group_ends_where_another_prefix_would_serve_better() -> None:
    prefiller = Prefiller(make_target("qwen3"), NoDrafter())
    assert prefiller.group(prompts((30, 3), (30, 3)), most=8) == 3
    assert prefiller.group(prompts((30, 3), (4, 3)), most=8) == 6
    assert prefiller.group(prompts((30, 20)), most=20) == MOST_ROWS
    assert prefiller.group(prompts((30, 20)), most=2) == 2
    assert prefiller.group(prompts((30, 1)), most=8) == 1


def test_identical_prompts_run_their_last_token_only() -> None:
    prefiller = Prefiller(make_target("qwen3"), NoDrafter())
    same = [np.arange(40, dtype=np.int32)] * 3
    staged = run(prefiller, same)
    assert staged.computed == [40, 1, 1]
    assert bool((staged.logits == staged.logits[:1]).all())
    again = run(prefiller, same[:1])
    assert again.computed == [1]
    assert bool((again.logits[0] == staged.logits[0]).all())
    prefiller.forget()
    assert run(prefiller, same[:1]).computed == [40]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_nested_prefixes_are_each_computed_once(family: str) -> None:
    """A system prompt of 40, under it three questions of 20, of each two rows of 3 more."""
    random = np.random.default_rng(0)
    system = random.integers(0, 48, size=40)
    rows = [
        np.concatenate([system, [i], question, [j, 5, 6]]).astype(np.int32)
        for i, question in enumerate(random.integers(0, 48, size=(3, 19)))
        for j in range(2)
    ]
    prefiller = Prefiller(make_target(family), NoDrafter())
    first: list[int] = []
    computed = 0
    left = list(rows)
    while left:
        n = prefiller.group(left, most=8)
        staged = run(prefiller, left[:n], left[n:])
        first += np.array(staged.logits).argmax(axis=-1).tolist()
        computed += sum(staged.computed)
        left = left[n:]

    assert computed == 40 + 3 * 20 + 6 * 3
    for row, token in zip(rows, first, strict=True):
        cold = Prefiller(make_target(family), NoDrafter())
        assert np.array(run(cold, [row]).logits).argmax(axis=-1).tolist() == [token]
