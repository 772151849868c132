"""Which prompts are prefilled together, and what the shared prefix saves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import make_target

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.prefill import MOST_ROWS, Prefiller
from dflash_batch.decoder.prefix import best_shared, common, usable

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


def prompts(*groups: tuple[int, int]) -> list[np.ndarray]:
    """(shared length, how many) each: rows that share a prefix and differ in the last token."""
    return [
        np.array([100 + g] + [g] * shared + [i], dtype=np.int32)
        for g, (shared, count) in enumerate(groups)
        for i in range(count)
    ]


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
    staged = prefiller.run(same)
    assert staged.computed == [40, 1, 1]
    assert bool((staged.logits == staged.logits[:1]).all())
    again = prefiller.run(same[:1])
    assert again.computed == [1]
    assert bool((again.logits[0] == staged.logits[0]).all())
    prefiller.forget()
    assert prefiller.run(same[:1]).computed == [40]
