"""Which prompts are prefilled together, what is held for them, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_target

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.prefill import MOST_ROWS, Copies, Prefiller, Staged
from dflash_batch.decoder.prefix import Held, Tokens, common, saving
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.tiers import Tiers
from dflash_batch.decoder.trie import Trie

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(
    lambda ids: np.array(ids, dtype=np.int32)
)


@given(tokens, tokens)
def test_common_is_the_longest_common_prefix(a: np.ndarray, b: np.ndarray) -> None:
    n = common(a, b)
    assert a[:n].tolist() == b[:n].tolist()
    assert n in (len(a), len(b)) or a[n] != b[n]


@given(tokens, tokens)
def test_what_cannot_be_cut_saves_all_or_nothing(prompt: np.ndarray, held: np.ndarray) -> None:
    whole = common(prompt, held) == len(held) < len(prompt)
    assert saving(prompt, held, cuttable=False) == (len(held) if whole else 0)
    assert saving(prompt, held, cuttable=True) == min(common(prompt, held), len(prompt) - 1)


def waiting(prompts: Sequence[Tokens]) -> Trie[int]:
    trie = Trie[int]()
    for i, prompt in enumerate(prompts):
        trie.add(prompt, i)
    return trie


def run(prefiller: Prefiller, trie: Trie[int], most: int = 8) -> tuple[list[int], Staged]:
    """The next group, and what came of it."""
    group = prefiller.group(trie, None, most)
    depths = prefiller.depths(group[0][0].tokens, trie)
    copies = [Copies(leaf.tokens, n, n < len(leaf.items)) for leaf, n in group]
    rows = [row for leaf, n in group for row in trie.take(leaf, n)]
    chunks = prefiller.run(copies, depths)
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            staged: Staged = end.value
            assert staged.slots.rows == len(rows) == len(staged.logits) == len(staged.origins)
            return rows, staged


def drain(prefiller: Prefiller, prompts: Sequence[Tokens], most: int = 8) -> tuple[int, list[int]]:
    """Run all; the tokens that were computed, and the first token of each prompt."""
    trie, computed, first = waiting(prompts), 0, [-1] * len(prompts)
    while len(trie):
        rows, staged = run(prefiller, trie, most)
        computed += sum(origin.computed for origin in staged.origins)
        for row, token in zip(rows, np.array(staged.logits).argmax(axis=-1), strict=True):
            first[row] = int(token)
    return computed, first


def prompts(*groups: tuple[int, int]) -> list[np.ndarray]:
    """(shared length, how many) each: rows that share a prefix and differ in the last token."""
    return [
        np.array([100 + g] + [g] * shared + [i], dtype=np.int32)
        for g, (shared, count) in enumerate(groups)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("rows", "most", "taken"),
    [
        (prompts((30, 3), (30, 3)), 8, 3),
        (prompts((30, 3), (4, 3)), 8, 6),
        (prompts((30, 20)), 20, MOST_ROWS),
        (prompts((30, 20)), 2, 2),
        (prompts((30, 1)), 8, 1),
    ],
)
def test_a_group_ends_where_another_prefix_would_serve_better(
    rows: list[np.ndarray], most: int, taken: int
) -> None:
    prefiller = Prefiller(make_target("qwen3"), NoDrafter())
    assert len(prefiller.group(waiting(rows), None, most)) == taken


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_copies_of_a_prompt_are_computed_once(family: str, most: int) -> None:
    target = make_target(family)
    same = [np.arange(40, dtype=np.int32) % 48] * 5
    computed, first = drain(Prefiller(target, NoDrafter()), same, most)
    assert computed == 40
    cold = drain(Prefiller(target, NoDrafter()), same[:1])
    assert first == cold[1] * 5


def nested() -> list[np.ndarray]:
    """A system prompt of 40, under it three questions of 20, of each two rows of 3 more."""
    random = np.random.default_rng(0)
    system = random.integers(0, 48, size=40)
    return [
        np.concatenate([system, [i], question, [j, 5, 6]]).astype(np.int32)
        for i, question in enumerate(random.integers(0, 48, size=(3, 19)))
        for j in range(2)
    ]


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_nested_prefixes_are_each_computed_once(family: str, shuffled: bool) -> None:
    target = make_target(family)
    rows = nested()
    if shuffled:
        np.random.default_rng(1).shuffle(rows)
    computed, first = drain(Prefiller(target, NoDrafter()), rows)
    assert computed == waiting(rows).ideal == 40 + 3 * 20 + 6 * 3
    assert first == [drain(Prefiller(target, NoDrafter()), [row])[1][0] for row in rows]


def one(target: Target, length: int) -> int:
    """Bytes of a snapshot of `length` tokens."""
    prefiller = Prefiller(target, NoDrafter())
    drain(prefiller, prompts((length - 1, 2)))
    return prefiller.tiers.bytes


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_parent_stays_while_its_subtree_drains(family: str) -> None:
    """Memory for the path and no more: what is drained goes, nothing is computed twice."""
    target = make_target(family)
    bound = one(target, 40) + one(target, 60)
    prefiller = Prefiller(target, NoDrafter(), Tiers(target.cuttable, ram=bound))
    most = 0
    trie, computed = waiting(nested()), 0
    while len(trie):
        _, staged = run(prefiller, trie)
        computed += sum(origin.computed for origin in staged.origins)
        most = max(most, prefiller.tiers.bytes)
    assert computed == 40 + 3 * 20 + 6 * 3
    assert 0 < most <= bound


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3_5"])
def test_without_memory_for_prefixes_all_is_computed(family: str) -> None:
    target = make_target(family)
    rows = nested()
    prefiller = Prefiller(target, NoDrafter(), Tiers(target.cuttable, ram=1))
    computed, first = drain(prefiller, rows)
    assert prefiller.tiers.held == []
    assert computed >= sum(map(len, rows))
    assert first == drain(Prefiller(target, NoDrafter()), rows)[1]


def test_what_was_used_least_recently_goes_first() -> None:
    def held(start: int) -> Held:
        return Held(np.arange(start, start + 8, dtype=np.int32), None, None, 10)  # type: ignore[arg-type]

    tiers = Tiers(cuttable=True, ram=30)
    for start in (0, 100, 200):
        tiers.add(held(start))
    tiers.use([tiers.start(np.arange(0, 9, dtype=np.int32))])
    tiers.add(held(300))
    assert [int(h.tokens[0]) for h in tiers.held] == [200, 0, 300]
    tiers.add(Held(np.zeros(50, dtype=np.int32), None, None, 31))  # type: ignore[arg-type]
    assert len(tiers.held) == 3, "what does not fit at all drives nothing out"
    assert tiers.longest == 49
