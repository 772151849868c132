"""A worker that yields: it rests when the machine is not its own, and beats first after sleep."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke
from queue_tools import (
    FAKE_ENGINE,
    MODEL,
    WorkerProcess,
    all_results,
    assert_settled,
    row,
    submit,
    until,
)

from dflash_batch.worker.citizen import Citizen
from dflash_batch.worker.contract import WorkerInfo
from dflash_batch.worker.private import PrivateWorker
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.service import Supervisor
from dflash_batch.worker.settings import WorkerSettings
from dflash_batch.worker.sleep import SleepWatch, StayAwake


class Owner:
    """Says when rows may run; a test changes its mind."""

    def __init__(self, objection: str = "") -> None:
        self.says = objection

    def objection(self) -> str:
        return self.says


class Hand:
    """A supervisor turned by hand, in this process, with a real engine process."""

    def __init__(
        self, queue: Queue, url: str, citizen: Citizen, step_s: float = 0.05, **settings: Any
    ) -> None:
        chosen: dict[str, Any] = {"model": MODEL, "max_batch": 8, "burst": True}
        self.settings = WorkerSettings(
            redis_url=url,
            engine_command=(*FAKE_ENGINE, "--step-s", str(step_s)),
            **(chosen | settings),
        )
        self.supervisor = Supervisor(self.settings, queue, connect(url, retries=1), citizen)
        self.supervisor._arrive()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def turned() -> bool:
            self.supervisor._turn()
            return condition()

        until(turned, what)

    @property
    def portrait(self) -> WorkerInfo:
        return self.supervisor._portrait()


@pytest.fixture
def take_in_hand(queue: Queue, valkey_url: str) -> Iterator[Callable[..., Hand]]:
    hands: list[Hand] = []

    def take(citizen: Citizen, **settings: Any) -> Hand:
        hands.append(Hand(queue, valkey_url, citizen, **settings))
        return hands[-1]

    yield take
    for hand in hands:
        hand.supervisor._depart()


def leased(queue: Queue) -> int:
    status = queue.status("batch_a")
    assert status is not None
    return status.leased


def test_a_worker_that_may_not_run_loads_and_leases_nothing_and_says_why(
    queue: Queue, take_in_hand: Callable[..., Hand]
) -> None:
    owner = Owner("on battery power")
    hand = take_in_hand(Citizen([owner], look_s=0))
    submit(queue, [row(i) for i in range(8)])
    hand.until(lambda: bool(queue.workers()), "it has said how it is")
    for _ in range(5):
        hand.supervisor._turn()
    (info,) = queue.workers()
    assert info.resting == "on battery power"
    assert info.model is None
    assert leased(queue) == 0
    owner.says = ""
    hand.until(lambda: len(all_results(queue)) == 8, "it works once it may")
    assert_settled(queue)
    assert hand.portrait.resting == ""


def test_rows_in_hand_are_finished_within_the_grace(
    queue: Queue, take_in_hand: Callable[..., Hand]
) -> None:
    owner = Owner()
    hand = take_in_hand(Citizen([owner], look_s=0), max_batch=4)
    submit(queue, [row(i) for i in range(40)], shard_rows=4)
    hand.until(lambda: leased(queue) > 0, "it holds shards")
    owner.says = "somebody uses this machine"
    hand.until(lambda: not hand.supervisor._holdings, "what it held is finished")
    done = len(all_results(queue))
    assert done % 4 == 0
    assert 0 < done < 40
    assert hand.portrait.state == "idle"
    (epochs,) = {entry.metrics.attempts for entry in all_results(queue)}
    assert epochs == 1
    owner.says = ""
    hand.until(lambda: len(all_results(queue)) == 40, "the rest follows")
    assert {entry.metrics.attempts for entry in all_results(queue)} == {1}, "nothing ran twice"


def test_what_the_grace_does_not_cover_goes_back_without_blame_and_memory_too(
    queue: Queue, take_in_hand: Callable[..., Hand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_batch.worker.service._UNLOAD_S", 0.3)
    owner = Owner()
    hand = take_in_hand(Citizen([owner], look_s=0), grace_s=0.1, step_s=0.2)
    submit(queue, [row(i) for i in range(40)], shard_rows=20)
    hand.until(lambda: len(all_results(queue)) > 0, "some rows are recorded")
    owner.says = "outside 22:00-07:00"
    hand.until(lambda: leased(queue) == 0, "the shards went back")
    before = len(all_results(queue))
    assert before < 40, "it was in the middle"
    hand.until(lambda: hand.supervisor._keeper.model is None, "the model is unloaded")
    owner.says = ""
    hand.until(lambda: len(all_results(queue)) == 40, "it goes on where it stopped")
    assert_settled(queue)


class Tape:
    """Notes the order of calls to the queue."""

    def __init__(self, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("beat", "commit", "lease"):
            monkeypatch.setattr(queue, name, self._noted(name, getattr(queue, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return call(*args, **options)

        return noted


def test_after_sleep_it_beats_before_it_commits(
    queue: Queue,
    take_in_hand: Callable[..., Hand],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    apart = [0.0]
    citizen = Citizen(sleep=SleepWatch(lambda: 0.0, lambda: apart[0]))
    hand = take_in_hand(citizen, lease_ttl_s=600.0)  # no beat is due for minutes
    submit(queue, [row(i) for i in range(8)], shard_rows=8)
    hand.until(lambda: bool(hand.supervisor._holdings.running), "rows run")
    hand.until(lambda: hand.supervisor._beaten > 0, "it has beaten")
    tape = Tape(queue, monkeypatch)
    apart[0] = 3600.0
    hand.until(lambda: "commit" in tape.calls, "it commits")
    assert tape.calls[0] == "beat"
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("slept")] == [
        "slept seconds=3600 shards=1"
    ]


def test_the_machine_is_kept_awake_while_rows_run_and_not_longer(
    queue: Queue, take_in_hand: Callable[..., Hand]
) -> None:
    awake = StayAwake(["/bin/sleep", "60"])
    hand = take_in_hand(Citizen(awake=awake), burst=False)
    hand.supervisor._turn()
    assert not awake.held
    submit(queue, [row(i) for i in range(8)])
    hand.until(lambda: awake.held, "rows run")
    hand.until(lambda: not awake.held, "sleep may come")
    assert_settled(queue)


def closed_window() -> str:
    """Hours that begin in two hours."""
    start = datetime.now() + timedelta(hours=2)
    return f"{start:%H:%M}-{start + timedelta(hours=1):%H:%M}"


def test_a_resting_worker_process_shows_in_status_and_can_be_stopped(
    queue: Queue, valkey_url: str, tmp_path: Path
) -> None:
    submit(queue, [row(0)])
    hours = closed_window()
    worker = WorkerProcess(valkey_url, log=tmp_path / "log", only_when=f"{hours},cool")
    try:
        until(lambda: bool(queue.workers()), "it has said how it is")
        shown = invoke("status", "--redis", valkey_url).stdout
        assert "resting" in shown
        assert f"outside {hours}" in shown
        (told,) = json.loads(invoke("status", "--redis", valkey_url, "--json").stdout)["workers"]
        assert (told["resting"], told["state"]) == (f"outside {hours}", "idle")
        assert f'resting reason="outside {hours}"' in worker.says
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        worker.kill()
    assert leased(queue) == 0


def test_a_private_worker_tells_its_command_that_it_rests(
    queue: Queue, valkey_url: str, tmp_path: Path
) -> None:
    submit(queue, [row(0)])
    settings = WorkerSettings(
        redis_url=valkey_url, model=MODEL, engine_command=FAKE_ENGINE, only_when=closed_window()
    )
    worker = PrivateWorker(queue, tmp_path, "batch_a", settings)
    news: list[str] = []

    def told() -> bool:
        said = worker.watch(0)
        news.extend([said] if said else [])
        return bool(news)

    try:
        until(told, "it says something")
    finally:
        worker.stop()
    assert news == [f"the worker rests: outside {settings.only_when}"]


def test_a_condition_with_a_typing_error_is_refused_before_anything_starts() -> None:
    result = invoke("worker", "--only-when", "pluged", "--redis", "redis://127.0.0.1:1")
    assert result.exit_code == 2
    assert "'pluged' is none of plugged, idle" in result.stderr
