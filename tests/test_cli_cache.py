"""`dflash-batch cache`: what is kept is shown, kept, checked and removed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke
from store_tools import ROOMY, key, put, sound, starts

from dflash_batch.cli import exits
from dflash_batch.decoder.store.store import Store
from dflash_batch.worker.home import prefix_dir


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store in the home, with three entries; the first was used last."""
    store = Store(prefix_dir(tmp_path), ROOMY)
    for start in (1, 2, 3):
        put(store, start)
    assert sound(store, 1)
    yield store
    store.close()


def cache(home: Path, *arguments: object, code: int = exits.OK) -> Any:
    """What `cache … --json` prints."""
    result = invoke("cache", *arguments, "--json", "--home", home)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_stats_say_what_there_is_and_of_what_use_it_was(store: Store, tmp_path: Path) -> None:
    report = cache(tmp_path, "stats", "--cache-size", "3M")
    assert report["entries"] == 3
    assert report["bytes"] == store.bytes == report["written_today"]
    assert report["cap"] == 3 << 20
    assert report["models"] == {"model": {"entries": 3, "tokens": 96, "bytes": store.bytes}}
    assert report["counters"]["written"] == 3
    text = invoke("cache", "stats", "--home", tmp_path).stdout
    assert "entries  3, 0 of them pinned" in text


def test_entries_are_listed_by_use(store: Store, tmp_path: Path) -> None:
    listed = cache(tmp_path, "ls")["entries"]
    assert [entry["key"] for entry in listed] == [key(store, start) for start in (1, 3, 2)]
    assert [entry["uses"] for entry in listed] == [1, 0, 0]
    assert {entry["tokens"] for entry in listed} == {32}
    lines = invoke("cache", "ls", "--home", tmp_path).stdout.splitlines()
    assert lines[0].startswith((key(store, 1) or "")[:12])


def test_what_is_pinned_stays_when_the_rest_is_pruned(store: Store, tmp_path: Path) -> None:
    assert cache(tmp_path, "pin", (key(store, 2) or "")[:8])["pinned"]
    assert cache(tmp_path, "prune", "--to", "9K")["removed"] == 1
    assert starts(store) == {1, 2}
    assert not cache(tmp_path, "pin", key(store, 2), "--off")["pinned"]
    cache(tmp_path, "prune", "--to", "5K")
    assert starts(store) == {1}


def test_verify_finds_damage_and_ends_in_another_code(store: Store, tmp_path: Path) -> None:
    assert cache(tmp_path, "verify") == {"checked": 3, "bad": {}}
    name = key(store, 2)
    (store.folder / "blobs" / str(name)).write_bytes(b"nothing")
    assert cache(tmp_path, "verify", code=exits.SOME_FAILED) == {
        "checked": 3,
        "bad": {name: "it has no header"},
    }
    assert cache(tmp_path, "verify") == {"checked": 2, "bad": {}}


def test_purge_asks_first(store: Store, tmp_path: Path) -> None:
    refused = invoke("cache", "purge", "--home", tmp_path, stdin="n\n")
    assert refused.exit_code == 1
    assert starts(store) == {1, 2, 3}
    assert cache(tmp_path, "purge", "--yes") == {"removed": 3}
    assert starts(store) == set()
    assert list((store.folder / "blobs").iterdir()) == []


def test_a_cache_that_is_not_there_and_a_key_that_is_not_in_it_are_said(
    store: Store, tmp_path: Path
) -> None:
    gone = invoke("cache", "ls", "--home", tmp_path, "--cache-dir", tmp_path / "elsewhere")
    assert gone.exit_code == exits.NOT_FOUND
    assert "nothing has been kept yet" in gone.stderr
    assert not (tmp_path / "elsewhere").exists()
    unknown = invoke("cache", "pin", "zz", "--home", tmp_path)
    assert unknown.exit_code == exits.NOT_FOUND
    assert "no entry of the key zz" in unknown.stderr


@pytest.mark.parametrize("size", ["", "G", "5X", "-1G"])
def test_a_size_is_a_number_and_a_unit(size: str, tmp_path: Path) -> None:
    result = invoke("cache", "stats", "--cache-size", size, "--home", tmp_path)
    assert result.exit_code == exits.USAGE
    assert "is not a size such as 50G" in result.stderr
