"""The service loop of a worker: lease, decode, commit, beat; and what to do when a part fails.

The supervisor is an RQ worker to the outside (`rq info`, `rq suspend`, shutdown command). It never
forks and never imports mlx: rows run in the engine process, which the keeper minds. Who owns a
shard is decided by the scripts alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Literal
from uuid import uuid4

import redis

from dflash_batch.worker.citizen import Citizen, Verdict
from dflash_batch.worker.contract import PASSING, SHARD_ROWS, Lease, WorkerInfo
from dflash_batch.worker.holdings import Care, Held, Holdings
from dflash_batch.worker.home import HomeError
from dflash_batch.worker.keeper import PARKED_S, Died, Keeper
from dflash_batch.worker.link import Link
from dflash_batch.worker.log import say, warn
from dflash_batch.worker.parting import ASK_S, Parting
from dflash_batch.worker.pending import Pending, deliver, open_pending
from dflash_batch.worker.pipe import Beat, Loading, Ready, Returned, RowDone
from dflash_batch.worker.queue import COMMIT_ROWS, Queue
from dflash_batch.worker.rq_face import RqFace
from dflash_batch.worker.settings import WorkerSettings
from dflash_batch.worker.speed import Speed

EXIT_OK = 0
EXIT_MODEL = 4

TICK_S = 0.1
COMMIT_S = 0.25
_LOOK_S = 1.0  # between looks at commands, suspension, our parent
_IDLE_LOOK_S = 0.25  # between looks for work, when there was none
_REPAIR_S = 60.0
_UNLOAD_S = 300.0  # of rest, after which the model's memory is given back too
_DOUBLE_SIGNAL_S = 1.0  # a terminal and a parent may both send the first one

State = Literal["starting", "loading", "idle", "busy", "parked", "draining"]


class Supervisor(RqFace):
    """One worker: its leases, its engine, its word to the world."""

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        rq_client: redis.Redis,
        citizen: Citizen | None = None,
    ) -> None:
        name = settings.name or f"{socket.gethostname()}-{uuid4().hex[:12]}"
        super().__init__(name, rq_client)
        self._settings = settings
        self._queue = queue
        self._keeper = Keeper(settings, name)
        # what has no room here may have room elsewhere; a private batch has no elsewhere
        self._holdings = Holdings(PASSING if settings.batch_id is None else ())
        self._parting = Parting(queue, self._keeper, self._holdings)
        self._link = Link()
        self._citizen = citizen or Citizen()
        self._verdict = Verdict()
        self._resting_since = 0.0  # monotonic; of a verdict against us
        self._info = WorkerInfo(
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("dflash-batch"),
            started=time.time(),
        )
        self._exit: int | None = None
        self._stop_at: float | None = None  # drain until then, then release
        self._drain_s: float | None = None  # what `drain` asked for last
        self._signalled: float | None = None
        self._suspended = False
        self._pending: Pending | None = None
        self._beaten = self._renewed = 0.0
        self._next_beat = self._next_look = self._next_lease = self._next_repair = 0.0
        self._next_delivery = 0.0
        self._refused: dict[str, float] = {}  # model key -> not before (monotonic)
        self._is_child = os.getppid() == settings.parent_pid
        self._rows_done = 0
        self._speed = Speed()
        self.note = ""  # last trouble, for people

    def run(self) -> int:
        """Work until there is a reason to end. Returns the exit status."""
        with self._signals(), self._disk():
            self._arrive()
            try:
                while self._exit is None:
                    self._turn()
            finally:
                self._depart()
        return self._exit

    def _turn(self) -> None:
        self._hear_engine()
        self._mind_the_machine()
        if self._link.up:
            with self._link:
                self._look_around()
                self._deliver()
                self._beat()
                self._commit()
                self._part()
                self._give_back()
                self._lease()
        self._keep()
        self._admit()
        self._mind_the_end()

    # --- the steps, in their order -----------------------------------------------------------

    def _hear_engine(self) -> None:
        for report in self._keeper.listen(TICK_S, busy=self._holdings.running):
            match report:
                case RowDone(shard_id=shard_id, epoch=epoch, result=result):
                    if self._holdings.record(shard_id, epoch, result):
                        self._rows_done += 1
                case Returned(shard_id=shard_id, epoch=epoch, rows=rows):
                    self._holdings.hand_back(shard_id, epoch, rows)
                    self._next_lease = time.monotonic() + ASK_S  # or we would take them again
                case Loading(phase=phase, share=share):
                    self._notice("loading", phase=phase, share=share)
                case Ready():
                    say("engine_ready", **report.model_dump(exclude={"kind"}))
                    self._notice("ready", **report.model_dump(exclude={"kind"}))
                    self._next_beat = 0.0
                case Beat(tokens=tokens):
                    self._speed.update(tokens)
                case Died():
                    self._engine_died(report)
                case _:
                    pass

    def _mind_the_machine(self) -> None:
        """See whether it slept and whether rows may run; keep it awake while they do."""
        if slept := self._citizen.slept_s():
            warn("slept", seconds=slept, shards=len(self._holdings))
            # the clock these go by stood still
            self._beaten = self._next_beat = self._next_look = 0.0
        self._citizen.keep_awake(self._holdings.running)
        self._hear_verdict(self._citizen.may_run())
        if self._verdict.may:
            return
        rested_s = time.monotonic() - self._resting_since
        if rested_s >= self._settings.grace_s:
            self._holdings.give_back_all()
        if rested_s >= max(self._settings.grace_s, _UNLOAD_S) and not self._holdings:
            self._keeper.want(None)  # the next look for work chooses again

    def _look_around(self) -> None:
        """Once a second: say how we are; RQ's commands and suspension, its list, its view."""
        if not _due(self._next_look):
            return
        self._next_look = time.monotonic() + _LOOK_S
        heard = self._queue.announce(self._portrait(), int(self._settings.lease_ttl_s) + 15)
        if heard.hungry:
            self._parting.feed()
        if heard.drain_s not in (None, self._drain_s):
            self._drain_s = heard.drain_s
            self._stop_at = time.monotonic() + heard.drain_s
            say("draining", grace_s=heard.drain_s)
        suspended = self.hear_rq()
        if suspended != self._suspended:
            say("suspended" if suspended else "resumed")
        self._suspended = suspended
        if _due(self._next_repair):
            self._next_repair = time.monotonic() + _REPAIR_S
            self._tidy_up()

    def _tidy_up(self) -> None:
        if self._queue.mirror:
            self._queue.mirror.repair(self._queue.shard_states)
        for batch_id in self._queue.sweep():
            warn("upload_abandoned", batch=batch_id)
            self._queue.forget(batch_id)

    def _deliver(self) -> None:
        """Record what a worker of this home had decoded when it died with the queue away."""
        if self._pending is None or not _due(self._next_delivery):
            return
        deliver(self._pending, self._queue, self._settings.lease_ttl_ms)
        self._next_delivery = time.monotonic() + _REPAIR_S

    def _beat(self) -> None:
        """Renew the leases; always before the first commit after an outage."""
        if self._link.lost:
            self._next_beat = 0.0
        if not _due(self._next_beat):
            return
        self._beaten = time.monotonic()
        verdicts = self._queue.beat(self.name, self._settings.lease_ttl_ms, self._holdings.leases)
        self._renewed = self._beaten
        self._next_beat = time.monotonic() + self._settings.lease_ttl_s / 4
        for shard_id, verdict in verdicts.items():
            if verdict != "ok":
                self._lose(shard_id, verdict)

    def _commit(self) -> None:
        count = self._holdings.uncommitted
        if not count or not (
            count >= COMMIT_ROWS
            or self._holdings.uncommitted_s >= COMMIT_S
            or not self._holdings.open_rows
        ):
            return
        for held in self._holdings:
            if held.finished:
                self._commit_shard(held)

    def _commit_shard(self, held: Held) -> None:
        shard_id = held.lease.shard.id
        committed = self._queue.commit(held.lease, held.finished)
        say(
            "committed", shard=shard_id, rows=committed.accepted, twice=committed.duplicates or None
        )
        if committed.fenced:
            self._next_beat = 0.0  # the beat tells whether it is lost, or comes back to us
            return
        self._holdings.committed(held)
        if committed.hungry:
            self._parting.feed()
        if committed.shard_done:
            self._end_shard(shard_id)
        if committed.batch_done:
            say("batch_done", batch=held.lease.shard.batch_id)

    def _part(self) -> None:
        """Rows that are to leave their shard get one of their own."""
        ended, lost = self._parting.settle()
        for shard_id in ended:
            self._end_shard(shard_id)
        if lost:
            self._next_beat = 0.0

    def _end_shard(self, shard_id: str) -> None:
        self._holdings.let_go(shard_id)
        if self._queue.mirror:
            self._queue.mirror.finish(self, shard_id)

    def _give_back(self) -> None:
        for held in self._holdings:
            if held.leaving and not held.finished:
                shard_id = held.lease.shard.id
                self._keeper.drop(shard_id)
                if held.crashed:
                    self._queue.note_crash(shard_id, held.crash(self.note))
                released = self._queue.release(held.lease, crashed=held.crashed)
                self._holdings.let_go(shard_id)
                say("released", shard=shard_id, rows=held.open_rows, crashed=held.crashed or None)
                if self._queue.mirror:
                    self._queue.mirror.leave(self, [shard_id], requeue=released)

    def _lease(self) -> None:
        """Keep as many rows waiting as decode together, and no more."""
        if not self._can_take() or not _due(self._next_lease):
            return
        if self._keeper.ready is None:
            self._next_lease = time.monotonic() + _IDLE_LOOK_S
            self._choose_model()
            return
        while self._can_take():
            leases = self._lease_some()
            for lease in leases:
                self._take(lease)
            if not leases:
                self._next_lease = time.monotonic() + _IDLE_LOOK_S
                break
        if not self._holdings:
            self._choose_model()

    def _keep(self) -> None:
        """Sit out an outage: records go to disk, and decoding stops when the leases have run out.

        Who has those rows by then would do them a second time, or we would for them.
        """
        waiting = [held for held in self._holdings if held.finished]
        if self._pending is not None:
            self._pending.follow(waiting, away=self._link.lost)
        late = time.monotonic() - self._renewed > self._settings.lease_ttl_s
        self._keeper.hold(late and self._link.lost and bool(self._holdings))

    def _admit(self) -> None:
        if self._keeper.ready is not None and not self._keeper.spent:
            for lease, rows in self._holdings.to_admit():
                self._keeper.admit(lease, rows)

    def _mind_the_end(self) -> None:
        """Decide whether there is a reason to end."""
        if self._orphaned():
            say("parent_gone")
            self._stop_at = time.monotonic()
        if self._stop_at is not None:
            if _due(self._stop_at) and self._holdings.open_rows:
                self._holdings.give_back_all()
            if not self._holdings:
                self._exit = EXIT_OK
            elif _due(self._stop_at) and self._link.lost:
                warn("left_behind", shards=len(self._holdings))  # their leases will run out
                self._exit = EXIT_OK

    # --- what the steps lean on --------------------------------------------------------------

    def _can_take(self) -> bool:
        # who slept since the beat beats first: a lease puts back what ran out, ours too
        slept = time.monotonic() - self._beaten > self._settings.lease_ttl_s / 2
        return (
            not slept
            and self._stop_at is None
            and not self._suspended
            and self._verdict.may
            and not self._keeper.spent
            and not self._holdings.alone
            and self._holdings.open_rows < 2 * self._settings.max_batch
        )

    def _hear_verdict(self, verdict: Verdict) -> None:
        if verdict == self._verdict:
            return
        if self._verdict.may:
            self._resting_since = time.monotonic()
        self._verdict = verdict
        if verdict.may:
            say("works_again")
        else:
            say("resting", reason=verdict.reason)
        self._notice("resting", reason=verdict.reason)
        self._next_look = 0.0  # `status` is to know

    def _lease_some(self) -> list[Lease]:
        assert self._keeper.model is not None
        short = 2 * self._settings.max_batch - self._holdings.open_rows
        return self._queue.lease(
            self.name,
            self._keeper.model.key,
            self._settings.lease_ttl_ms,
            -(-short // SHARD_ROWS),
            batch_id=self._settings.batch_id or "",
            hot=self._holdings.hot,
        )

    def _take(self, lease: Lease) -> None:
        if self._holdings.let_go(lease.shard.id):
            self._keeper.drop(lease.shard.id)  # it ran out while we slept, and came back to us
        crash = self._queue.last_crash(lease.shard.id) if lease.deaths else None
        held = self._holdings.take(lease, crash)
        say(
            "leased",
            shard=lease.shard.id,
            rows=len(lease.pending),
            epoch=lease.epoch,
            care=held.care.name.lower() if held.care > Care.TOGETHER else None,
        )
        if self._queue.mirror:
            self._queue.mirror.start(self, lease.shard.id, again=lease.epoch > 1)

    def _lose(self, shard_id: str, why: str) -> None:
        """A shard is not ours any more: its rows leave the decoder and are not recorded."""
        warn("lost", shard=shard_id, why=why)
        self._holdings.let_go(shard_id)
        self._keeper.drop(shard_id)
        if self._queue.mirror:
            self._queue.mirror.leave(self, [shard_id], requeue=False)

    def _choose_model(self) -> None:
        """Nothing is held: end if there is nothing to come, else have the right model loaded."""
        if self._nothing_to_come():
            self._exit = EXIT_OK
            return
        if self._settings.model is not None:
            self._keeper.want(self._settings.model)
            return
        wanted = [
            model for model in self._queue.wanted() if _due(self._refused.get(model.key, 0.0))
        ]
        if wanted and self._keeper.model not in wanted:
            self._keeper.want(wanted[0])

    def _nothing_to_come(self) -> bool:
        if self._settings.batch_id is not None:
            status = self._queue.status(self._settings.batch_id)
            return status is None or status.done
        if not self._settings.burst:
            return False
        model = self._settings.model
        return not any(
            model is None or status.batch.model.key == model.key
            for status in self._queue.unfinished()
        )

    def _engine_died(self, died: Died) -> None:
        """Its rows go back to the queue; blame only where rows were running."""
        self._holdings.engine_died(blame=not (died.loading or died.too_wide))
        self.note = died.reason
        self._speed.reset()
        self._next_beat = 0.0
        self._notice("engine_died", reason=died.reason, code=died.code, hopeless=died.hopeless)
        if not died.hopeless:
            return
        if self._settings.leaves_when_done:
            warn("model_failed", code=died.code, reason=died.reason)
            self._exit = EXIT_MODEL
            return
        warn("parked", reason=died.reason, again_in_s=PARKED_S)
        if self._settings.model is None and self._keeper.model is not None:
            self._refused[self._keeper.model.key] = time.monotonic() + PARKED_S
            self._keeper.want(None)

    def _orphaned(self) -> bool:
        parent = self._settings.parent_pid
        if parent is None or self._stop_at is not None:
            return False
        # a dead parent may linger as a zombie; only its children can tell for sure
        return os.getppid() != parent if self._is_child else not _alive(parent)

    def _portrait(self) -> WorkerInfo:
        model = self._keeper.model
        return self._info.model_copy(
            update={
                "model": model,
                "model_key": model.key if model else "",
                "state": self._state_word(),
                "rows_done": self._rows_done,
                "active": self._keeper.load.active,
                "tokens_per_s": self._speed.tokens_per_s,
                "hot": self._holdings.hot,
                "note": self.note,
                "resting": self._verdict.reason,
            }
        )

    def _state_word(self) -> State:
        if self._stop_at is not None:
            return "draining"
        if self._keeper.parked:
            return "parked"
        if self._keeper.model is None:
            return "idle"
        if self._keeper.ready is None:
            return "loading"
        return "busy" if self._holdings else "idle"

    def _notice(self, event: str, **facts: object) -> None:
        """Tell whoever started us."""
        if self._settings.notices is not None:
            with open(self._settings.notices, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **facts}) + "\n")

    # --- coming and going --------------------------------------------------------------------

    def _arrive(self) -> None:
        say("worker_started", name=self.name, pid=os.getpid())
        self._hear_verdict(self._citizen.may_run())
        if self._verdict.may:
            self._keeper.want(self._settings.model)
        with self._link:
            self.appear_in_rq()

    def _depart(self) -> None:
        """Whatever the reason: what is held goes back and the engine is stopped."""
        out_of_time = self._stop_at is not None and _due(self._stop_at)
        at_once = out_of_time or self._holdings.running or self._keeper.ready is None
        self._citizen.keep_awake(False)
        self._holdings.give_back_all()
        with self._link:
            for held in self._holdings:
                if held.finished:
                    self._commit_shard(held)
            self._give_back()
        self._keeper.stop(at_once=at_once)
        with self._link:
            self._queue.retire(self.name)
            self.teardown()
        self._keep()
        say("worker_ended", name=self.name, rows=self._rows_done)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """The place for records while the queue is away, if there is one."""
        folder = self._settings.pending_dir
        with ExitStack() as stack:
            if folder is not None:
                place = open_pending(Path(folder), self._settings.redis_url, self.name)
                try:
                    self._pending = stack.enter_context(place)
                except HomeError as error:
                    warn("not_kept", error=error)  # records wait in memory then
            yield

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, self.request_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: finish the rows in hand, within the grace. Second: release them now."""
        now = time.monotonic()
        if self._signalled is None:
            self._signalled = now
            self._stop_at = now + self._settings.grace_s
        elif now - self._signalled > _DOUBLE_SIGNAL_S:
            self._stop_at = now


def _due(moment: float) -> bool:
    return time.monotonic() >= moment


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
