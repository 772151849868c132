"""The plan: unique edges, branch points, and an order that empties a subtree before its parent."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_batch.decoder.prefix import common
from dflash_batch.decoder.trie import PATIENCE, Trie

ids = st.lists(st.integers(0, 2), min_size=1, max_size=7)
prompts = st.lists(ids, max_size=24)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def planted(prompts: list[list[int]]) -> Trie[int]:
    trie = Trie[int]()
    for i, tokens in enumerate(prompts):
        trie.add(array(tokens), i)
    return trie


def prefixes(prompts: list[list[int]]) -> set[tuple[int, ...]]:
    """Every node of the trie but its root, written out."""
    return {tuple(p[:n]) for p in prompts for n in range(1, len(p) + 1)}


@given(prompts)
def test_edges_are_counted_once(prompts: list[list[int]]) -> None:
    trie = planted(prompts)
    trie.check()
    assert trie.ideal == len(prefixes(prompts))
    assert [i for leaf in trie.leaves for _, i in leaf.items] != [] or not prompts
    assert list(trie) == list(range(len(prompts)))


@given(prompts, ids, st.booleans())
def test_branches_are_where_prompts_part(
    prompts: list[list[int]], tokens: list[int], inside: bool
) -> None:
    if inside:
        prompts = [*prompts, tokens]
    others = [p for p in {tuple(p) for p in prompts} if p != tuple(tokens)]
    shared = [min(common(array(tokens), array(list(p))), len(tokens) - 1) for p in others]
    found = planted(prompts).branches(array(tokens))
    assert [b.depth for b in found] == sorted({n for n in shared if n > 0})
    for branch in found:
        assert branch.leaves == 1 + sum(n >= branch.depth for n in shared)


@given(prompts.filter(bool), st.integers(1, 3))
def test_a_subtree_is_empty_before_it_is_left(prompts: list[list[int]], least: int) -> None:
    trie = planted(prompts)
    order = [leaf.tokens for leaf in trie.order(None, least)]
    assert sorted(map(bytes, order)) == sorted(bytes(leaf.tokens) for leaf in trie.leaves)
    for depth in range(least, 8):
        seen: list[tuple[int, ...]] = []
        for tokens in order:
            node = tuple(tokens[:depth].tolist())
            if len(node) == depth and node in seen:
                assert seen[-1] == node, "came back to a subtree that had been left"
            seen.append(node)


@given(prompts.filter(bool), ids, st.integers(1, 3))
def test_what_shares_most_with_the_last_comes_next(
    prompts: list[list[int]], last: list[int], least: int
) -> None:
    trie = planted(prompts)
    first = next(trie.order(array(last), least))
    best = max(common(array(last), leaf.tokens) for leaf in trie.leaves)
    if best >= least:
        assert common(array(last), first.tokens) == best
    else:
        assert first.items[0][1] == 0, "else the oldest"


@given(prompts, ids)
def test_the_nearest_prompt_shares_most(prompts: list[list[int]], tokens: list[int]) -> None:
    shared, leaf = planted(prompts).nearest(array(tokens))
    assert shared == max((common(array(tokens), array(p)) for p in prompts), default=0)
    assert (leaf is None) == (not prompts)
    assert leaf is None or common(array(tokens), leaf.tokens) == shared


def test_unrelated_prompts_keep_their_order() -> None:
    trie = planted([[5, 1], [3, 1], [9, 1], [3, 2], [1, 1]])
    order = [leaf.items[0][1] for leaf in trie.order(None, 1)]
    assert order == [0, 1, 3, 2, 4]


def test_a_row_is_not_passed_over_for_ever() -> None:
    trie, last, taken = Trie[str](), array([7, 7, 0]), 0
    trie.add(array([1, 2, 3]), "alone")
    for i in range(PATIENCE + 10):
        trie.add(array([7, 7, i]), "hot")
        leaf = next(trie.order(last, 2))
        if trie.take(leaf, 1) == ["alone"]:
            break
        taken, last = taken + 1, leaf.tokens
    assert taken == PATIENCE + 1


class Growing(RuleBasedStateMachine):
    """A trie that changes stays the trie of what waits in it."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = Trie[int]()
        self.model: dict[int, list[int]] = {}
        self.next = 0

    @rule(tokens=ids)
    def add(self, tokens: list[int]) -> None:
        self.trie.add(array(tokens), self.next)
        self.model[self.next] = tokens
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), most=st.integers(1, 3))
    def take(self, data: st.DataObject, most: int) -> None:
        leaf = data.draw(st.sampled_from(self.trie.leaves))
        same = [i for i, tokens in self.model.items() if tokens == leaf.tokens.tolist()]
        assert self.trie.take(leaf, most) == same[:most]
        for i in same[:most]:
            del self.model[i]

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = data.draw(st.integers(0, self.next))
        self.trie.discard(item)
        self.model.pop(item, None)

    @invariant()
    def holds(self) -> None:
        self.trie.check()
        assert list(self.trie) == list(self.model)
        assert self.trie.ideal == len(prefixes(list(self.model.values())))


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
