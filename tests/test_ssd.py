"""Law 3: cached equals cold. A hit changes speed, never a token; trouble on the disk is a miss."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from store_tools import ROOMY, FullDisk
from tiny import OracleDrafter, finish, make_decoder, make_target, request

from dflash_batch.decoder.caching import model_fingerprint
from dflash_batch.decoder.drafters import NoDrafter, Nothing
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.ssd import MOST_FAILURES, Ssd
from dflash_batch.decoder.store import codec
from dflash_batch.decoder.store.pace import Pace
from dflash_batch.decoder.store.store import Store
from dflash_batch.decoder.tiers import Tiers
from dflash_batch.decoder.types import Completion, LoadSpec

VECTORS = Path(__file__).parent / "vectors"
FAMILIES = ("qwen3", "gemma4", "qwen35")


class Always:
    """Reading and writing are always worth it."""

    def worth(self, tokens: int, size: int) -> bool:
        return True

    def computed(self, tokens: int, seconds: float) -> None: ...
    def read(self, size: int, seconds: float) -> None: ...


class Machine:
    """A pair, and a store for it: each `decoder` is a new process in all but name."""

    def __init__(self, folder: Path, target: str, draft: str) -> None:
        self.folder = folder
        self.spec = LoadSpec(target=target, draft=draft, dtype="float32")
        self.pair: Any = None

    def decoder(self, *, ssd: bool = True, files: Any = None, judge: Any = None) -> Any:
        """A decoder with an empty memory."""
        if self.pair is None:
            self.pair = load_decoder(self.spec).pair
        target, drafter = self.pair
        self.ssd = None
        if ssd:
            store = Store(self.folder, ROOMY, files)
            folder = Path(self.spec.target)
            config = json.loads((folder / "config.json").read_text())
            name = model_fingerprint(folder, config, target, drafter, store.index)
            self.ssd = Ssd(store, name, "tiny", cuttable=target.cuttable, judge=judge or Always())
        return make_decoder(
            target, drafter, max_batch=2, tiers=Tiers(target.cuttable, ssd=self.ssd)
        )

    def night(
        self, prompts: Sequence[list[int]], budget: int = 4, **options: Any
    ) -> dict[int, Completion]:
        """All prompts through a new decoder."""
        decoder = self.decoder(**options)
        for i, prompt in enumerate(prompts):
            decoder.add(request(i, prompt, budget))
        done = finish(decoder)
        decoder.close()
        return done


def texts(done: dict[int, Completion]) -> list[tuple[tuple[int, ...], int]]:
    """What rows said, and how many drafts stood: the draft's memory must be the same too."""
    return [(done[i].token_ids, done[i].accepted_tokens) for i in sorted(done)]


def shared(rows: int, length: int = 40, seed: int = 3) -> list[list[int]]:
    """Prompts with a common prefix and an end of their own."""
    random = np.random.default_rng(seed)
    prefix = random.integers(0, 40, size=length).tolist()
    return [[*prefix, i, *random.integers(0, 40, size=3).tolist()] for i in range(rows)]


@pytest.fixture(params=FAMILIES)
def machine(request: Any, tmp_path: Path) -> Machine:
    pair = VECTORS / f"dflash-{request.param}-tiny"
    return Machine(tmp_path / "cache", str(pair / "target"), str(pair / "draft-b8"))


@pytest.fixture
def qwen3(tmp_path: Path) -> Machine:
    pair = VECTORS / "dflash-qwen3-tiny"
    for part in ("target", "draft-b8"):
        shutil.copytree(pair / part, tmp_path / part)
    return Machine(tmp_path / "cache", str(tmp_path / "target"), str(tmp_path / "draft-b8"))


def test_a_second_night_reads_what_the_first_computed(machine: Machine) -> None:
    prompts = shared(5)
    cold = machine.night(prompts, ssd=False)
    first = machine.night(prompts)
    assert machine.ssd is not None
    assert machine.ssd.counts["written"] == 1
    second = machine.night(prompts)
    assert texts(first) == texts(second) == texts(cold)
    assert sum(c.ssd_tokens for c in first.values()) == 0
    assert all(c.ssd_tokens == 40 for c in second.values())
    assert sum(c.prefill_tokens for c in second.values()) == 5 * 4
    assert {c.cache_miss for c in first.values()} == {"empty", None}  # later: it is in memory
    assert {c.cache_miss for c in second.values()} == {None}


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe-4bit", "gemma4_text-experts", "qwen3_5_moe-4bit"]
)
def test_the_other_families_come_back_too(name: str, tmp_path: Path) -> None:
    target, prompts = make_target(name, 3), shared(3)
    said = []
    for _ in range(3):
        ssd = Ssd(Store(tmp_path, ROOMY), name, name, cuttable=target.cuttable, judge=Always())
        tiers = Tiers(target.cuttable, ssd=ssd)
        decoder = make_decoder(target, NoDrafter(), max_batch=3, tiers=tiers)
        for i, prompt in enumerate(prompts):
            decoder.add(request(i, prompt, 4))
        done = finish(decoder)
        said.append(texts(done))
        decoder.close()
    assert said == said[:1] * 3
    cold = make_decoder(target, NoDrafter(), max_batch=3)
    for i, prompt in enumerate(prompts):
        cold.add(request(i, prompt, 4))
    assert texts(finish(cold)) == said[0]
    assert {c.ssd_tokens for c in done.values()} == {40}


@pytest.mark.parametrize("part", ["1", "N/2", "N-1", "N"])
def test_any_hit_length_gives_the_tokens_of_a_cold_start(machine: Machine, part: str) -> None:
    prompt = shared(1, length=36)[0]
    n = len(prompt)
    hit = {"1": 1, "N/2": n // 2, "N-1": n - 1, "N": n}[part]
    cold = machine.night([prompt], ssd=False)
    # What is stored is the beginning of prompts that part from this one behind `hit`.
    last = prompt[hit] if hit < n else 0
    others = [[*prompt[:hit], i] for i in range(20 if hit == 1 else 5) if i != last]
    machine.night(others, 1)
    assert machine.ssd is not None
    warm = machine.night([prompt])
    assert texts(warm) == texts(cold)
    cuttable = "qwen3-" in machine.spec.target
    wanted = min(hit, n - 1) if cuttable or hit < n else 0
    assert warm[0].ssd_tokens == wanted
    assert warm[0].prefill_tokens == n - wanted


def test_a_longer_prefix_gives_a_shorter_one_where_it_can_be_cut(qwen3: Machine) -> None:
    prompts = shared(5)
    qwen3.night(prompts)
    other = [*prompts[0][:25], 47, 3, 1]
    warm = qwen3.night([other])
    assert warm[0].ssd_tokens == 25
    assert texts(warm) == texts(qwen3.night([other], ssd=False))


def test_recurrent_states_say_why_they_do_not_serve(tmp_path: Path) -> None:
    pair = VECTORS / "dflash-qwen35-tiny"
    machine = Machine(tmp_path, str(pair / "target"), str(pair / "draft-b8"))
    prompts = shared(5)
    machine.night(prompts)
    done = machine.night([[*prompts[0][:25], 47, 3, 1], [46, 1, 2]])
    assert [done[i].cache_miss for i in (0, 1)] == ["no_snapshot_before:25", "no_common_prefix"]


def test_a_miss_names_the_first_token_that_differs(qwen3: Machine) -> None:
    prompts = shared(5)
    qwen3.night(prompts)

    class Never(Always):
        def worth(self, tokens: int, size: int) -> bool:
            return False

    done = qwen3.night([[*prompts[0][:25], 47, 3, 1], prompts[0]], judge=Never())
    assert [done[i].cache_miss for i in (0, 1)] == ["diverges_at:25", "below_break_even:40"]


def test_weights_changed_under_the_same_path_never_hit(qwen3: Machine) -> None:
    prompts = shared(5)
    qwen3.night(prompts)
    path = Path(qwen3.spec.target) / "model.safetensors"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(0.25).tobytes()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    qwen3.pair = None
    other = qwen3.night(prompts)
    assert sum(c.ssd_tokens for c in other.values()) == 0
    assert texts(other) == texts(qwen3.night(prompts, ssd=False))


def test_another_draft_does_not_hit(qwen3: Machine) -> None:
    prompts = shared(5)
    qwen3.night(prompts)
    qwen3.spec, qwen3.pair = LoadSpec(target=qwen3.spec.target, draft="none"), None
    assert sum(c.ssd_tokens for c in qwen3.night(prompts).values()) == 0


@pytest.mark.parametrize("harm", ["flipped", "zeroed", "truncated", "gone"])
def test_a_damaged_entry_costs_time_and_no_token(qwen3: Machine, harm: str) -> None:
    machine = qwen3
    prompts = shared(5)
    cold = texts(machine.night(prompts, ssd=False))
    machine.night(prompts)
    for path in machine.folder.glob("*/blobs/*"):
        data = bytearray(path.read_bytes())
        match harm:
            case "flipped":
                data[len(data) // 2] ^= 4
            case "zeroed":
                data[-64:] = bytes(64)
            case "truncated":
                data = data[:-1]
        path.write_bytes(data) if harm != "gone" else path.unlink()
    done = machine.night(prompts)
    assert machine.ssd is not None
    assert texts(done) == cold
    assert machine.ssd.counts["damaged"] == 1
    assert sum(c.ssd_tokens for c in done.values()) == 0
    again = machine.night(prompts)
    assert texts(again) == cold
    assert all(c.ssd_tokens == 40 for c in again.values())


def test_a_full_disk_fails_no_row(qwen3: Machine) -> None:
    prompts = shared(5)
    done = qwen3.night(prompts, files=FullDisk(100))
    assert texts(done) == texts(qwen3.night(prompts, ssd=False))


def test_a_disk_that_always_fails_is_left_alone(qwen3: Machine) -> None:
    prompts = [row[:20] for seed in range(6) for row in shared(5, 17, seed)]
    decoder = qwen3.decoder()
    ssd = qwen3.ssd
    assert ssd is not None

    def broken(*_: object, **__: object) -> Iterator[None]:
        raise sqlite3.OperationalError("disk I/O error")

    ssd._store.put = broken  # type: ignore[assignment, method-assign]
    ssd._store.entries = broken  # type: ignore[assignment, method-assign]
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 1))
    done = finish(decoder)
    assert texts(done) == texts(qwen3.night(prompts, 1, ssd=False))
    assert not ssd.on
    assert sum(n for name, n in ssd.counts.items() if name.startswith("error.")) >= MOST_FAILURES
    decoder.close()


def test_a_drafter_without_a_form_on_disk_is_not_stored_and_no_trouble(tmp_path: Path) -> None:
    target = make_target("qwen3")
    prompts = shared(5)
    ssd = Ssd(Store(tmp_path, ROOMY), "x", "tiny", cuttable=True, judge=Always())
    drafter = OracleDrafter([], 4, 1.0, 0)
    decoder = make_decoder(target, drafter, tiers=Tiers(True, ssd=ssd), max_batch=4)
    plain = make_decoder(target, NoDrafter(), max_batch=4)
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 4))
        plain.add(request(i, prompt, 4))
    assert [c for c, _ in texts(finish(decoder))] == [c for c, _ in texts(finish(plain))]
    assert ssd.counts["error.unstorable"] >= 1
    decoder.close()


def test_a_prefix_of_few_rows_is_stored_when_it_comes_again(qwen3: Machine) -> None:
    """One group a night: the first time it is met, the second time stored, the third time read."""
    prompts = shared(2)
    for expected in (0, 0, 40):
        done = qwen3.night(prompts)
        assert {c.ssd_tokens for c in done.values()} == {expected}


def test_what_is_nearly_stored_is_not_stored_again(qwen3: Machine) -> None:
    """Groups behind one prompt after the other, all with the same long beginning: one entry."""
    random = np.random.default_rng(5)
    prefix = random.integers(0, 40, size=60).tolist()
    questions = random.integers(0, 40, size=(4, 9)).tolist()
    prompts = [[*prefix, *q, i, 1] for q in questions for i in range(5)]
    qwen3.night(prompts, 1)
    assert qwen3.ssd is not None
    assert qwen3.ssd.counts["written"] == 1


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_snapshots_come_back_bit_for_bit(dtype: mx.Dtype) -> None:
    from dflash_batch.decoder.arena import Snapshot
    from dflash_batch.decoder.hybrid import HybridSnapshot
    from dflash_batch.decoder.window import WindowSnapshot

    def kv(columns: int) -> tuple[mx.array, mx.array]:
        both = mx.random.normal((2, 1, 2, columns + 3, 4)).astype(dtype)
        return both[0, :, :, :columns], both[1, :, :, :columns]

    attention = Snapshot(5, (kv(5), kv(5)))
    hybrid = HybridSnapshot(attention, ((mx.zeros((1, 0, 3)), mx.ones((1, 2, 2))),))
    window = WindowSnapshot(7, 4, (kv(7), kv(3)))
    for before in ((attention, Nothing()), (hybrid, attention), (window, Nothing())):
        tensors, tree = codec.encode(before)
        after = codec.decode(tensors, tree)
        assert codec.encode(after)[1] == tree
        assert after[0].length == before[0].length
        for a, b in zip(before[0].arrays(), after[0].arrays(), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert bool(mx.array_equal(a, b))


def test_the_break_even_length_is_found_by_measuring() -> None:
    pace = Pace()
    assert not pace.worth(10_000, 1), "nothing is known of computing yet"
    for _ in range(60):
        pace.computed(512, 0.512)  # 1 ms a token
        pace.computed(3, 10.0)  # too short to tell
        pace.read(4096, 0.004)
        pace.read(100_000_000, 0.104)  # 1 ns a byte behind the start
    per_token = 100_000
    length = pace.break_even(per_token)
    assert length == pytest.approx(0.004 / (1e-3 - 1e-4), rel=0.02)
    assert not pace.worth(int(length) - 1, int(length - 1) * per_token)
    assert pace.worth(int(length) + 1, int(length + 1) * per_token)
    assert pace.break_even(2_000_000) == float("inf"), (
        "reading a token takes longer than running it"
    )
    assert Pace.restored(pace.dump()) == pace
    assert Pace.restored({"token_s": "no", "byte_s": -1.0}) == Pace()


def test_what_a_process_measured_the_next_one_knows(tmp_path: Path) -> None:
    ssd = Ssd(Store(tmp_path, ROOMY), "x", "tiny", cuttable=True)
    ssd.computed(100, 0.3)
    ssd.close()
    again = Ssd(Store(tmp_path, ROOMY), "x", "tiny", cuttable=True)
    assert again._judge == Pace(token_s=0.003)
    again.close()
