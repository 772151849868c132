"""The SSD tier under torture: whatever happens to its files, it serves what was put in or none."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import diskcache
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_tools import MODEL, ROOMY, FullDisk, key, put, sound, starts, tensors, tokens

from dflash_batch.decoder.store.errors import StoreUnusable
from dflash_batch.decoder.store.files import Files
from dflash_batch.decoder.store.fingerprint import file_digest, fingerprint, weights_digest
from dflash_batch.decoder.store.store import LAYOUT, MOST_ASIDE, Limits, Put, Store

BLOB = 4096  # payload of one, roughly its size


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, ROOMY)
    yield store
    store.close()


def child(code: str, *args: object) -> subprocess.Popen[str]:
    """A process that runs `code` with the tools and `args` at hand."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom store_tools import *\n" + code
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, here, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status and what it said."""
    with process:
        said, _ = process.communicate(timeout=60)
    return process.returncode, said


def blob_path(store: Store, start: int) -> Path:
    name = key(store, start)
    assert name is not None
    return store.folder / "blobs" / name


def test_what_was_put_in_comes_out(store: Store, tmp_path: Path) -> None:
    assert put(store, 1) is Put.WRITTEN
    assert put(store, 1) is Put.PRESENT
    assert sound(store, 1)
    stored = store.get(key(store, 1) or "")
    assert stored is not None
    assert stored.facts["kind"] == "test"
    again = Store(tmp_path, ROOMY)
    assert sound(again, 1)
    again.close()


def test_folders_and_files_are_ours_alone(store: Store, tmp_path: Path) -> None:
    put(store, 1)
    modes = {path.stat().st_mode & 0o077 for path in store.folder.iterdir() if path.is_dir()}
    assert modes | {store.folder.stat().st_mode & 0o077} == {0}
    assert blob_path(store, 1).stat().st_mode & 0o777 == 0o600
    store.folder.chmod(0o755)
    Store(tmp_path, ROOMY).close()
    assert store.folder.stat().st_mode & 0o077 == 0


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_flipped_bit_is_a_miss_and_is_set_aside(store: Store, at: float, bit: int) -> None:
    put(store, 1)
    path = blob_path(store, 1)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    assert not sound(store, 1)
    assert starts(store) == set()
    assert (store.folder / "aside" / path.name).exists()
    assert put(store, 1) is Put.WRITTEN
    assert sound(store, 1)
    store.purge()


@pytest.mark.parametrize("harm", ["truncated", "zeroed", "longer", "empty", "gone", "exchanged"])
def test_a_damaged_file_is_a_miss_and_the_others_stay(store: Store, harm: str) -> None:
    put(store, 1)
    put(store, 2)
    path, size = blob_path(store, 1), blob_path(store, 1).stat().st_size
    if harm == "gone":
        path.unlink()
    elif harm == "exchanged":
        path.write_bytes(blob_path(store, 2).read_bytes())
    else:
        with path.open("r+b") as file:
            match harm:
                case "truncated":
                    file.truncate(size - 1)
                case "zeroed":
                    file.truncate(size - 1000)
                    file.truncate(size)
                case "longer":
                    file.truncate(size + 1)
                case "empty":
                    file.truncate(0)
    found = {int(entry.tokens[0]): wrong for entry, wrong in store.verify()}
    assert found[2] is None
    assert found[1] is not None
    assert not sound(store, 1)
    assert sound(store, 2)
    assert store.index.counter("set_aside") == 1


def test_blobs_set_aside_do_not_pile_up(store: Store) -> None:
    for start in range(MOST_ASIDE + 3):
        put(store, start)
        blob_path(store, start).write_bytes(b"nothing")
        assert not sound(store, start)
    store.tidy()
    assert len(list((store.folder / "aside").iterdir())) == MOST_ASIDE


@pytest.mark.parametrize("after", [False, True])
def test_death_around_the_rename_leaves_an_orphan_that_goes(tmp_path: Path, after: bool) -> None:
    code = "put(Store(Path(sys.argv[2]), ROOMY, Dying(sys.argv[3] == 'True')), 1)"
    assert ended(child(code, tmp_path, after)) == (-9, "")
    store = Store(tmp_path, ROOMY)
    assert len(list((store.folder / "blobs").iterdir())) == 1
    assert starts(store) == set()
    assert store.tidy() == 1
    assert list((store.folder / "blobs").iterdir()) == []
    assert put(store, 1) is Put.WRITTEN
    assert sound(store, 1)
    store.close()


@pytest.mark.parametrize("room", [0, 1, 100, BLOB])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, room: int) -> None:
    store = Store(tmp_path, ROOMY, FullDisk(room))
    with pytest.raises(OSError, match="No space left"):
        put(store, 1)
    assert list((store.folder / "blobs").iterdir()) == []
    assert starts(store) == set()
    store.close()


def test_a_real_limit_on_files_is_survived_too(tmp_path: Path) -> None:
    """The kernel refuses to write past 1 MiB: an error of a real write, not of a stand-in."""
    code = (
        "import resource\n"
        "store = Store(Path(sys.argv[2]), ROOMY)\n"
        "put(store, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "try:\n    put(store, 2, 1 << 21)\n"
        "except OSError as error:\n    print(error.errno)\n"
        "print(starts(store), sound(store, 1), len(list((store.folder / 'blobs').iterdir())))"
    )
    status, said = ended(child(code, tmp_path))
    assert status == 0
    assert said.splitlines() == [str(errno.EFBIG), "{1} True 1"]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path, Limits(cap=4 * BLOB, floor=0))
    for start in (1, 2, 3):
        assert put(store, start) is Put.WRITTEN
    assert sound(store, 1)
    put(store, 4)
    assert starts(store) == {1, 3, 4}
    store.pin(key(store, 3) or "")
    put(store, 5)
    put(store, 6)
    assert starts(store) == {3, 5, 6}
    assert store.bytes <= store.limits.cap
    assert put(store, 7, size=16 * BLOB) is Put.TOO_LARGE
    assert starts(store) == {3, 5, 6}
    store.close()


def test_a_cap_lowered_between_runs_holds_from_the_start(tmp_path: Path) -> None:
    store = Store(tmp_path, ROOMY)
    for start in range(6):
        put(store, start)
    store.close()
    store = Store(tmp_path, Limits(cap=3 * BLOB, floor=0))
    store.tidy()
    assert store.bytes <= 3 * BLOB
    assert starts(store) == {4, 5}
    store.close()


class Small(Files):
    """A disk of which `left` bytes are free, less what lies in `folder`."""

    def __init__(self, left: int, folder: Path) -> None:
        self._left, self._folder = left, folder

    def free(self, folder: Path) -> int:
        return self._left - sum(p.stat().st_size for p in self._folder.glob("*/blobs/*"))


def test_the_floor_of_free_space_holds_at_the_start_and_before_each_write(tmp_path: Path) -> None:
    disk = Small(10 * BLOB, tmp_path)
    store = Store(tmp_path, Limits(cap=1 << 30, floor=6 * BLOB), disk)
    for start in range(5):
        put(store, start)
        assert disk.free(tmp_path) >= 6 * BLOB
    assert starts(store) == {2, 3, 4}
    disk._left = 8 * BLOB
    store.tidy()
    assert starts(store) == {4}
    disk._left = 6 * BLOB
    assert put(store, 9) is Put.NO_ROOM
    assert starts(store) == {4}, "nothing goes in vain"
    store.close()


def test_a_day_has_a_budget_of_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, Limits(cap=1 << 30, floor=0, daily=int(2.5 * BLOB)))
    assert [put(store, start) for start in (1, 2, 3)] == [Put.WRITTEN, Put.WRITTEN, Put.BUDGET]
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert put(store, 3) is Put.WRITTEN
    store.close()


def test_a_clock_set_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, Limits(cap=4 * BLOB, floor=0))
    for start in (1, 2):
        put(store, start)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert sound(store, 1)
    put(store, 3)
    put(store, 4)
    assert starts(store) == {1, 3, 4}, "by use, not by the clock"
    assert sound(store, 1)
    store.close()
    again = Store(tmp_path, Limits(cap=4 * BLOB, floor=0))
    again.tidy()
    assert starts(again) == {1, 3, 4}
    again.close()


def test_two_processes_share_a_store(tmp_path: Path) -> None:
    cap = 20 * BLOB
    code = (
        "store = Store(Path(sys.argv[2]), Limits(cap=int(sys.argv[3]), floor=0))\n"
        "store.tidy()\n"
        "for start in map(int, sys.argv[4:]):\n"
        "    put(store, start)\n"
        "    sound(store, start - 1)\n"
        "    assert store.bytes <= store.limits.cap"
    )
    children = [
        child(code, tmp_path, cap, *range(0, 24)),
        child(code, tmp_path, cap, *range(12, 36)),
    ]
    assert [ended(process) for process in children] == [(0, "")] * 2
    store = Store(tmp_path, Limits(cap=cap, floor=0))
    assert store.tidy() == 0
    assert len(starts(store)) >= 15
    assert all(wrong is None for _, wrong in store.verify())
    assert all(sound(store, start) for start in starts(store))
    store.close()


def test_what_one_process_adds_the_other_sees(store: Store, tmp_path: Path) -> None:
    put(store, 1)
    assert ended(child("put(Store(Path(sys.argv[2]), ROOMY), 2)", tmp_path)) == (0, "")
    assert starts(store) == {1, 2}
    assert sound(store, 2)


@pytest.mark.parametrize("harm", [b"", b"this is no database" * 1000])
def test_a_broken_index_is_begun_anew(tmp_path: Path, harm: bytes) -> None:
    store = Store(tmp_path, ROOMY)
    put(store, 1)
    store.close()
    for path in (tmp_path / LAYOUT / "index").glob("cache.db*"):
        path.write_bytes(harm) if path.name == "cache.db" else path.unlink()
    store = Store(tmp_path, ROOMY)
    assert starts(store) == set()
    store.tidy()
    assert put(store, 1) is Put.WRITTEN
    assert sound(store, 1)
    store.close()


def test_a_foreign_entry_is_dropped(store: Store) -> None:
    put(store, 1)
    store.index._db.set("entry:abc", {"tokens": "AAAA", "from": "elsewhere"})
    store.index._db.set("entry:def", "nonsense")
    store.index.count("generation")
    assert starts(store) == {1}
    assert store.index.counter("set_aside") == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file"):
        Store(tmp_path / "file")


def test_an_index_out_of_reach_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, ROOMY)
    put(store, 1)

    def locked(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(diskcache.Cache, "get", locked)
        with pytest.raises(StoreUnusable, match="locked"):
            Store(tmp_path, ROOMY)
    assert starts(store) == {1}
    store.close()


def test_pins_keep_and_purge_does_not_ask(store: Store) -> None:
    put(store, 1)
    store.pin(key(store, 1) or "")
    assert store.uses()[key(store, 1) or ""].pinned
    assert store.purge() == 1
    assert starts(store) == set()
    assert list((store.folder / "blobs").iterdir()) == []


def test_a_prefix_is_of_its_model_alone(store: Store) -> None:
    put(store, 1)
    store.put("another model", "other", tokens(1), tensors(9), {})
    assert len(store.entries()) == 2
    assert {entry.fingerprint for entry in store.entries().values()} == {MODEL, "another model"}


def test_weights_are_known_by_content(store: Store, tmp_path: Path) -> None:
    """Same path, same size, same modification time: other weights all the same."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 100)
    before, first = path.stat(), weights_digest(tmp_path, store.index)
    assert weights_digest(tmp_path, store.index) == first
    path.write_bytes(b"b" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    second = weights_digest(tmp_path, store.index)
    assert second != first
    path.write_bytes(b"a" * 100)
    assert weights_digest(tmp_path, store.index) == first
    assert fingerprint([first, "float32"]) != fingerprint([second, "float32"])


def test_large_files_are_hashed_whole(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    data = np.random.default_rng(0).bytes((9 << 20) + 5)
    path.write_bytes(data)
    first = file_digest(path, store.index)
    for at in (0, 5 << 20, len(data) - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1]))
        assert file_digest(path, store.index) != first
        path.write_bytes(data)
        assert file_digest(path, store.index) == first
