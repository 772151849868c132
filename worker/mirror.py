"""RQ's view of the queue: one RQ job per shard, so that `rq info`, suspend and shutdown work.

The view never decides anything: the scripts own the truth, and `repair` makes the view follow it
after a crash between the two. Nothing outside this file and service.py knows RQ. Import RQ's names
from here: its key prefix must be in the environment before its first import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from dflash_batch.worker.contract import Key
from dflash_batch.worker.log import warn

os.environ["RQ_KEY_PREFIX"] = Key.RQ_PREFIX

import rq.defaults
from rq import Queue as RqQueue
from rq.exceptions import NoSuchJobError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import is_suspended
from rq.utils import as_text, now
from rq.worker import BaseWorker, WorkerStatus

__all__ = ["BaseWorker", "JSONSerializer", "Mirror", "RqQueue", "WorkerStatus", "is_suspended"]

if rq.defaults.RQ_KEY_PREFIX != Key.RQ_PREFIX:
    raise ImportError("rq was imported before dflash_batch.worker.mirror could set RQ_KEY_PREFIX")

FINISHED_TTL_S = 3600
FAILED_TTL_S = 86400
_STUB = "dflash_batch.worker.mirror.not_for_rq_workers"
_CHUNK = 500


def not_for_rq_workers(shard_id: str) -> None:
    """Raised into the face of an RQ worker that takes one of our jobs: it cannot decode it."""
    raise RuntimeError(f"shard {shard_id} is for `dflash-batch worker`, not for an RQ worker")


@contextmanager
def _observing(step: str) -> Iterator[None]:
    """A view that fails is logged and never stops a job; `repair` catches up later.

    Not so when the server is away: each call would wait for its timeout, and beats would be late.
    """
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError):
        raise
    except (redis.RedisError, NoSuchJobError, ValueError) as error:
        warn("view_failed", step=step, error=error)


class _Running(NamedTuple):
    """A shard that our worker holds, as RQ sees it."""

    job: Job
    execution: Execution
    again: bool  # it was held before


class Mirror:
    """Writes the state of shards into RQ's list and registries. Job ids are shard ids."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.queue = RqQueue(
            Key.QUEUE, connection=client, serializer=JSONSerializer, default_timeout=-1
        )
        self._running: dict[str, _Running] = {}

    @property
    def waiting_list(self) -> str:
        """Key of RQ's list of waiting jobs; the lease takes a shard out of it."""
        return str(self.queue.key)

    def enqueue(self, shard_ids: Sequence[str]) -> None:
        """Make the jobs of new shards; those that exist are left alone."""
        with self._client.pipeline(transaction=False) as pipe:
            for shard_id in shard_ids:
                pipe.exists(Job.key_for(shard_id))
            known = pipe.execute()
        fresh = [s for s, exists in zip(shard_ids, known, strict=True) if not exists]
        self.queue.enqueue_many(
            [
                RqQueue.prepare_data(
                    _STUB,
                    args=(shard_id,),
                    job_id=shard_id,
                    timeout=-1,
                    result_ttl=FINISHED_TTL_S,
                    failure_ttl=FAILED_TTL_S,
                    description=shard_id,
                )
                for shard_id in fresh
            ]
        )

    @_observing("start")
    def start(self, worker: BaseWorker, shard_id: str, *, again: bool) -> None:
        """The worker holds the shard; `again`: it was held before."""
        job = self._fetch(shard_id)
        if again:
            self._drop_executions(job)
        execution = worker.prepare_execution(job)
        worker.prepare_job_execution(job)
        self._running[shard_id] = _Running(job, execution, again)

    @_observing("finish")
    def finish(self, worker: BaseWorker, shard_id: str) -> None:
        """All rows of the shard are recorded, by this worker."""
        running = self._running.pop(shard_id, None)
        if running is None:
            self._end(shard_id)
        else:
            job, execution, again = running
            job.ended_at = now()
            worker.handle_job_success(job, self.queue, self.queue.started_job_registry, execution)
            if again:  # who held it before may have shown it as waiting after we took it
                self.queue.remove(job)
        self._idle_if_free(worker)

    @_observing("leave")
    def leave(self, worker: BaseWorker, shard_ids: Iterable[str], *, requeue: bool) -> None:
        """The worker no longer holds the shards; with `requeue` they wait again, at the front."""
        for shard_id in shard_ids:
            running = self._running.pop(shard_id, None)
            if running is not None:
                worker.executions.pop(running.execution.id, None)
            if requeue:
                self._requeue(shard_id)
            elif running is not None:
                with self._client.pipeline() as pipe:
                    running.execution.delete(job=running.job, pipeline=pipe)
                    pipe.execute()
        self._idle_if_free(worker)

    @_observing("requeue")
    def requeue(self, shard_ids: Iterable[str]) -> None:
        """Nobody holds the shards any more: their lease ran out."""
        for shard_id in shard_ids:
            self._requeue(shard_id)

    @_observing("end")
    def end(self, shard_ids: Iterable[str]) -> None:
        """The shards are over, whoever ended them."""
        for shard_id in shard_ids:
            self._end(shard_id)

    @_observing("forget")
    def forget(self, shard_ids: Sequence[str]) -> None:
        """Delete the jobs and all that RQ keeps of them."""
        gone = set(shard_ids)
        started = self.queue.started_job_registry
        members = [
            as_text(member)  # type: ignore[arg-type]  # redis-py leaves open what a member is
            for member in self._client.zrange(started.key, 0, -1)
        ]
        registries = [ExecutionRegistry(s, connection=self._client) for s in shard_ids]
        with self._client.pipeline(transaction=False) as pipe:
            for registry in registries:
                pipe.zrange(registry.key, 0, -1)
            held = pipe.execute()
        with self._client.pipeline(transaction=False) as pipe:
            for member in members:
                if started.parse_job_id(member) in gone:
                    pipe.zrem(started.key, member)
            for shard_id, registry, executions in zip(shard_ids, registries, held, strict=True):
                for execution in executions:  # of a holder that died
                    found = Execution(as_text(execution), shard_id, connection=self._client)
                    pipe.delete(found.key)
                self.queue.remove(shard_id, pipeline=pipe)
                self.queue.finished_job_registry.remove(shard_id, pipeline=pipe)
                pipe.delete(Job.key_for(shard_id), Result.get_key(shard_id), registry.key)
            pipe.execute()

    @_observing("repair")
    def repair(self, states: Callable[[Sequence[str]], Mapping[str, str | None]]) -> None:
        """Put right what RQ shows as started and the queue knows better.

        `states` gives the state of shards ("ready", "leased", "done", None: unknown).
        """
        registry = self.queue.started_job_registry
        members = self._client.zrange(registry.key, 0, _CHUNK - 1)
        shown = sorted({registry.parse_job_id(member) for member in members})
        for shard_id, state in states(shown).items():
            if state == "ready":
                self._requeue(shard_id)
            elif state != "leased":
                self._end(shard_id)

    def _fetch(self, shard_id: str) -> Job:
        return Job.fetch(shard_id, connection=self._client, serializer=JSONSerializer)

    def _requeue(self, shard_id: str) -> None:
        job = self._fetch(shard_id)
        self._drop_executions(job)
        with self._client.pipeline() as pipe:
            job.set_status(JobStatus.QUEUED, pipeline=pipe)
            self.queue.remove(job, pipeline=pipe)
            self.queue.push_job_id(shard_id, pipeline=pipe, at_front=True)
            pipe.execute()

    def _end(self, shard_id: str) -> None:
        try:
            job = self._fetch(shard_id)
        except NoSuchJobError:
            _drop_entries(self.queue.started_job_registry, self._client, shard_id)
            return
        self._drop_executions(job)
        with self._client.pipeline() as pipe:
            job.set_status(JobStatus.FINISHED, pipeline=pipe)
            self.queue.remove(job, pipeline=pipe)
            self.queue.finished_job_registry.add(job, FINISHED_TTL_S, pipeline=pipe)
            job.cleanup(FINISHED_TTL_S, pipeline=pipe, remove_from_queue=False)
            pipe.execute()

    def _drop_executions(self, job: Job) -> None:
        """Remove what a dead or replaced holder left in RQ's registries."""
        registry = job.execution_registry
        with self._client.pipeline() as pipe:
            for execution_id in registry.get_execution_ids():
                execution = Execution(execution_id, job.id, connection=self._client)
                execution.delete(job=job, pipeline=pipe)
            pipe.execute()
        _drop_entries(self.queue.started_job_registry, self._client, job.id)

    def _idle_if_free(self, worker: BaseWorker) -> None:
        if not self._running:
            worker.set_state(WorkerStatus.IDLE)


def _drop_entries(registry: StartedJobRegistry, client: redis.Redis, shard_id: str) -> None:
    """Remove entries whose execution is gone; at most one or two, or none."""
    stale: list[Any] = [
        member for member, _ in client.zscan_iter(registry.key, match=f"{shard_id}:*", count=_CHUNK)
    ]
    if stale:
        client.zrem(registry.key, *stale)
