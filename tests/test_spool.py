"""Rows on disk: read back as they were, cut as in memory; ids that repeat are found."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_tools import encode, line
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix import batches, text

from dflash_batch.worker.contract import JobSpec, Shard
from dflash_batch.worker.cut import shard_rows
from dflash_batch.worker.prefix import BLOCK, plan
from dflash_batch.worker.reader import read_lines
from dflash_batch.worker.seen import Seen
from dflash_batch.worker.spool import Spool, SpoolFailed, SpoolPlan, sketch


@contextmanager
def spooled(rows: list[JobSpec]) -> Iterator[SpoolPlan]:
    with Spool() as spool:
        for row in rows:
            spool.append(row)
        yield spool.plan()


@given(batches())
@settings(max_examples=60, deadline=None)
def test_a_spool_is_cut_like_the_plan_in_memory(rows: list[JobSpec]) -> None:
    with spooled(rows) as cut:
        shards = list(cut.packed("batch_a"))
    with spooled(rows) as again:
        assert list(again.packed("batch_a")) == shards
    expected = plan(rows)
    unpacked = [Shard.unpacked(shard.payload) for shard in shards]
    assert Counter(row.index for part in unpacked for row in part) == Counter(range(len(rows)))
    assert all(row == rows[row.index] for part in unpacked for row in part)
    assert [shard.rows for shard in shards] == [len(part) for part in unpacked]
    assert all(len(part) <= shard_rows(len(rows)) for part in unpacked)
    assert (cut.rows, cut.groups) == (expected.rows, expected.groups)
    assert cut.shared_share <= expected.shared_share


def test_sketches_agree_as_far_as_the_texts_do() -> None:
    one, other = b"a" * 2000, b"a" * 1030 + b"b" * 970
    words = [sketch(both) for both in (one, other)]
    assert [len(both) for both in words] == [6 * 4, 6 * 4]
    assert words[0][:20] == words[1][:20], "64, 128, 256, 512 and 1024 bytes"
    assert words[0][20:] != words[1][20:]
    assert sketch(b"a" * 63) == b""


def test_short_prefixes_put_rows_together_too() -> None:
    rows = [text(i, f"system prompt {i % 5} " * 9 + f"question {i}") for i in range(160)]
    with spooled(rows) as cut:
        shards = list(cut.packed("batch_a"))
    for shard in shards:
        kinds = Counter(row.index % 5 for row in Shard.unpacked(shard.payload))
        assert len(kinds) == 1
    assert 0.5 < cut.shared_share <= plan(rows).shared_share


@given(st.lists(st.text(max_size=3), max_size=3000))
@settings(max_examples=30, deadline=None)
def test_the_first_use_of_an_id_is_known(names: list[str]) -> None:
    seen = Seen()
    first: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        assert seen.first_use(name, number) == first.setdefault(name, number)


def test_many_ids_are_told_apart() -> None:
    seen = Seen()
    for number in range(1, 20_001):
        assert seen.first_use(f"id-{number}", number) == number
    assert [seen.first_use(f"id-{number}", 99_999) for number in (1, 7, 20_000)] == [1, 7, 20_000]


LINES = st.lists(
    st.one_of(
        st.builds(
            lambda name, model: encode(line(name, **({"model": model} if model else {}))),
            st.sampled_from("abcdefgh"),
            st.sampled_from(["", "", "m"]),
        ),
        st.sampled_from([b"{", b"", b'{"custom_id": 1}', b"\xff"]),
    ),
    min_size=1,
    max_size=12,
)


@given(LINES, st.sampled_from([None, "m"]))
@settings(max_examples=80, deadline=None)
def test_the_reader_finds_the_same_in_a_spool_as_in_memory(
    lines: list[bytes], model: str | None
) -> None:
    data = b"\n".join([*lines, encode(line("last", model="m"))])
    in_memory = read_lines(io.BytesIO(data), default_model=model)
    with Spool() as spool:
        into_spool = read_lines(io.BytesIO(data), default_model=model, spool=spool)
        assert into_spool.rows is spool
        assert list(spool) == in_memory.rows
        assert spool[-1] == in_memory.rows[-1]
        assert spool[:2] == in_memory.rows[:2]
        shards = list(spool.plan().packed("b"))
    for name in ("errors", "warnings", "digest", "models", "ignored", "lines", "bytes"):
        assert getattr(into_spool, name) == getattr(in_memory, name)
    queued = [row for shard in shards for row in Shard.unpacked(shard.payload)]
    assert sorted(queued, key=lambda row: row.index) == in_memory.rows


def test_an_empty_spool_has_no_shards() -> None:
    with spooled([]) as cut:
        assert (cut.rows, cut.shared_share, list(cut.packed("b"))) == (0, 0.0, [])
    with Spool() as spool, pytest.raises(IndexError):
        spool[0]


def test_a_disk_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpoolFailed, match="TMPDIR"):
        Spool(Path("/nowhere"))
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full.open("wb", buffering=0))
    with Spool() as spool, pytest.raises(SpoolFailed, match="No space left"):
        spool.append(text(0, json.dumps("x" * BLOCK)))
