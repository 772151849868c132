"""Shared prefixes: rows are put together by them, and every row is in exactly one shard."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, takewhile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_batch.worker.contract import CHAT, SHARD_ROWS, TEXT, JobSpec
from dflash_batch.worker.cut import GROUP_ROWS, shard_rows
from dflash_batch.worker.prefix import BLOCK, Plan, canonical, plan, prefix_chain


def chat(index: int, *messages: tuple[str, Any]) -> JobSpec:
    return JobSpec(
        index=index,
        line=index + 1,
        custom_id=f"q-{index}",
        endpoint=CHAT,
        messages=[{"role": role, "content": content} for role, content in messages],
    )


def text(index: int, prompt: str | list[int]) -> JobSpec:
    return JobSpec(
        index=index, line=index + 1, custom_id=f"q-{index}", endpoint=TEXT, prompts=[prompt]
    )


def sizes(cut: Plan) -> list[int]:
    return [len(piece.rows) for piece in cut.pieces]


def common(first: bytes, second: bytes) -> int:
    """Length of the common prefix, byte by byte."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


@st.composite
def batches(draw: st.DrawFn) -> list[JobSpec]:
    """Rows behind a few prefixes of zero to three blocks, in any order."""
    stems = draw(st.lists(st.text("ab", max_size=3), min_size=1, max_size=4))
    picks = draw(
        st.lists(st.tuples(st.sampled_from(stems), st.text("xy", max_size=3)), max_size=90)
    )
    return [
        text(index, "".join(letter * BLOCK for letter in stem) + tail)
        for index, (stem, tail) in enumerate(picks)
    ]


@given(batches())
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_shard_and_groups_are_what_they_say(rows: list[JobSpec]) -> None:
    cut = plan(rows)

    assert Counter(row.index for piece in cut.pieces for row in piece.rows) == Counter(
        range(len(rows))
    )
    assert all(1 <= size <= shard_rows(len(rows)) <= SHARD_ROWS for size in sizes(cut))
    for piece in cut.pieces:
        chains = [[block.hex() for block in prefix_chain(row)] for row in piece.rows]
        assert all(piece.group in chain for chain in chains) or piece.group == ""
        texts = [canonical(row) for row in piece.rows]
        assert texts == sorted(texts)
    assert plan(list(reversed(rows))) == cut


@given(batches())
@settings(max_examples=60, deadline=None)
def test_what_is_shared_is_what_a_prefix_tree_would_save(rows: list[JobSpec]) -> None:
    cut = plan(rows)
    texts = sorted(canonical(row) for row in rows)
    saved = sum(common(*pair) for pair in pairwise(texts))
    assert cut.chars == sum(map(len, texts))
    assert cut.shared == saved
    assert 0 <= cut.shared_share < 1


@given(batches())
@settings(max_examples=60, deadline=None)
def test_a_large_group_is_never_mixed_with_others(rows: list[JobSpec]) -> None:
    """The deepest block shared by GROUP_ROWS rows, found here by counting hashes."""
    chains = {row.index: [block.hex() for block in prefix_chain(row)] for row in rows}
    users = Counter(block for chain in chains.values() for block in chain)
    group = {
        index: next((block for block in reversed(chain) if users[block] >= GROUP_ROWS), "")
        for index, chain in chains.items()
    }
    members = Counter(group.values())
    cut = plan(rows)
    assert cut.groups == len(set(group.values()) - {""})
    for piece in cut.pieces:
        found = {group[row.index] for row in piece.rows}
        large = {name for name in found if name and 2 * members[name] >= shard_rows(len(rows))}
        assert not large or (found == large == {piece.group})


def test_few_shot_rows_stay_together_and_their_order_in_the_file_does_not_matter() -> None:
    shots = {name: f"{name} " + name * 3 * BLOCK for name in "pqr"}
    rows = [
        chat(index, ("user", shots["pqr"[index % 3]] + f" question {index}"))
        for index in range(3 * 40)
    ]
    cut = plan(rows)
    assert cut.groups == 3
    assert cut.shared_share > 0.95
    assert sizes(cut) == [20] * 6
    assert len({piece.group for piece in cut.pieces}) == 3


def test_shards_are_even_and_small_batches_leave_some_for_a_second_worker() -> None:
    assert [shard_rows(count) for count in (0, 1, 20, 64, 128, 10**6)] == [8, 8, 8, 16, 32, 32]
    shared = "s" * BLOCK
    assert sizes(plan([text(index, f"{shared}{index}") for index in range(129)])) == [
        25,
        26,
        26,
        26,
        26,
    ]


def test_a_batch_with_nothing_in_common_is_packed_full() -> None:
    assert sizes(plan([text(index, f"{index:05}") for index in range(129)])) == [32] * 4 + [1]


def test_no_rows_no_shards() -> None:
    cut = plan([])
    assert (cut.pieces, cut.rows, cut.shared_share) == ((), 0, 0.0)


def test_kinds_of_prompts_do_not_mix_and_parts_of_a_message_read_as_its_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert canonical(chat(0, ("user", parts))) == canonical(chat(0, ("user", "ab")))
    assert canonical(chat(0, ("user", "ab"))) != canonical(chat(0, ("system", "ab")))
    named = JobSpec(
        index=0,
        line=1,
        custom_id="q",
        endpoint=CHAT,
        messages=[{"role": "user", "content": "ab", "name": "n"}],
    )
    assert canonical(named) != canonical(chat(0, ("user", "ab")))
    assert canonical(text(0, [97])) != canonical(text(0, "a"))


def test_token_ids_share_prefixes_too() -> None:
    rows = [text(index, [7] * 400 + [index]) for index in range(10)]
    cut = plan(rows)
    assert cut.groups == 1
    assert len(prefix_chain(rows[0])) == 401 * 4 // BLOCK
