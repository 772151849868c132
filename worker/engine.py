"""The engine process: loads a model once, runs the rows it is given, reports each as it ends.

It is started by the supervisor, talks over the pipe only, and knows no Redis. The decoder is
imported inside `main`; tests call `serve` with one of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dflash_batch.decoder.errors import LoadError, PromptError, code_of
from dflash_batch.decoder.types import Completion, Fault, LoadSpec, Progress, Request
from dflash_batch.decoder.types import Load as Fill
from dflash_batch.worker import rows
from dflash_batch.worker.contract import ErrorCode, JobSpec, RowResult
from dflash_batch.worker.pipe import (
    Admit,
    AskBack,
    Beat,
    Bye,
    Command,
    Drop,
    EngineEnd,
    Failed,
    Hold,
    Load,
    Loading,
    Narrow,
    PipeClosed,
    Ready,
    Returned,
    RowDone,
    Stop,
)

EXIT_FAILED = 70
"""Exit status after Failed was sent."""

_BEAT_S = 1.0


class DecoderLike(rows.Encoder, Protocol):
    """The decoder, as the engine uses it."""

    def add(self, request: Request) -> None: ...
    def cancel(self, uid: int) -> None: ...
    def narrow(self, rows: int) -> None: ...
    def step(self) -> list[Completion]: ...
    def load(self) -> Fill: ...
    def unstarted(self) -> list[int]: ...
    def close(self) -> None: ...


Loader = Callable[[LoadSpec, Progress], DecoderLike]


def serve(pipe: EngineEnd, load: Loader) -> int:
    """Run until told to stop. Returns the exit status of the process."""
    try:
        order = pipe.first()
        if not isinstance(order, Load):
            return 0  # stopped before it was told what to load
        try:
            decoder = load(_spec(order), lambda phase, share: pipe.send(_loading(phase, share)))
        except LoadError as error:
            pipe.send(Failed(code=error.code, message=str(error)))
            return EXIT_FAILED
        try:
            _Service(pipe, decoder, order.worker).run()
        except Exception as error:  # the one place where any error of the decoder ends up
            traceback.print_exc()
            pipe.send(Failed(code=code_of(error), message=f"{type(error).__name__}: {error}"))
            return EXIT_FAILED
        finally:
            decoder.close()
        pipe.send(Bye())
    except PipeClosed:
        return 0
    return 0


@dataclass(slots=True)
class _Row:
    """A row in the decoder."""

    shard_id: str
    epoch: int
    spec: JobSpec
    prompts: list[tuple[int, ...]]
    where: rows.Circumstances
    ended: dict[int, Completion] = field(default_factory=dict)  # by choice


class _Service:
    """The loop: take commands, decode one step, report what ended."""

    def __init__(self, pipe: EngineEnd, decoder: DecoderLike, worker: str) -> None:
        self._pipe = pipe
        self._decoder = decoder
        self._worker = worker
        self._rows: dict[int, tuple[_Row, int]] = {}  # uid -> row and choice
        self._next_uid = 0
        self._steps = 0
        self._tokens = 0
        self._fill = Fill(0, 0)
        self._stopping = False
        self._held = False
        self._ended = threading.Event()

    def run(self) -> None:
        info = self._decoder.info
        self._pipe.send(
            Ready(
                target=info.target,
                draft=info.draft,
                draft_notice=info.draft_notice,
                block=info.block,
                dtype=info.dtype,
                context_length=info.context_length,
            )
        )
        beats = threading.Thread(target=self._beat, name="beat", daemon=True)
        beats.start()
        try:
            while not self._stopping:
                idle = self._held or not self._rows
                for command in self._pipe.take(None if idle else 0.0):
                    self._obey(command)
                    self._fill = self._decoder.load()
                if self._rows and not self._held and not self._stopping:
                    for completion in self._decoder.step():
                        self._end_choice(completion)
                    self._steps += 1
                    self._fill = self._decoder.load()
        finally:
            self._ended.set()

    def _obey(self, command: Command) -> None:
        match command:
            case Admit():
                since = time.perf_counter()
                for row in command.rows:
                    self._admit(command, row, since)
            case Drop():
                self._drop(command.shard_id)
            case AskBack():
                self._hand_back()
            case Hold():
                self._held = command.on
            case Narrow():
                self._decoder.narrow(command.rows)
            case Stop():
                self._stopping = True

    def _admit(self, command: Admit, row: JobSpec, since: float) -> None:
        where = rows.Circumstances(
            info=self._decoder.info,
            worker=self._worker,
            attempts=command.epoch + command.tried.get(row.index, 0),
            created=int(time.time()),
            waited_ms=(time.perf_counter() - since) * 1000,
        )
        requests: list[Request] = []
        try:
            requests = rows.requests(row, self._decoder, self._next_uid)
            for request in requests:
                self._decoder.add(request)
        except PromptError as error:
            for request in requests:
                self._decoder.cancel(request.uid)
            self._report(command.shard_id, command.epoch, rows.refusal(row, error, where))
            return
        except Exception as error:  # a template or tokenizer may raise anything; the others run
            traceback.print_tb(error.__traceback__)  # where, not what: the text may be the prompt
            code, message = ErrorCode.INTERNAL_ERROR.value, f"{type(error).__name__}: {error}"
            self._report(command.shard_id, command.epoch, rows.failure(row, 500, code, message))
            return
        entry = _Row(command.shard_id, command.epoch, row, [r.prompt for r in requests], where)
        for choice, request in enumerate(requests):
            self._rows[request.uid] = entry, choice
        self._next_uid += len(requests)

    def _drop(self, shard_id: str) -> None:
        for uid in [uid for uid, (row, _) in self._rows.items() if row.shard_id == shard_id]:
            self._decoder.cancel(uid)
            del self._rows[uid]

    def _hand_back(self) -> None:
        """Half of the rows of which no choice is started, the last of them."""
        waiting: dict[int, list[int]] = {}  # uids by row, in the order in which they would start
        for uid in self._decoder.unstarted():
            if uid in self._rows:
                waiting.setdefault(id(self._rows[uid][0]), []).append(uid)
        rows = [(self._rows[uids[0]][0], uids) for uids in waiting.values()]
        idle = [(row, uids) for row, uids in rows if len(uids) == len(row.prompts)]
        returned: dict[tuple[str, int], list[int]] = {}
        for row, uids in idle[len(idle) // 2 :]:
            returned.setdefault((row.shard_id, row.epoch), []).append(row.spec.index)
            for uid in uids:
                self._decoder.cancel(uid)
                del self._rows[uid]
        for (shard_id, epoch), indices in returned.items():
            self._pipe.send(Returned(shard_id=shard_id, epoch=epoch, rows=indices))

    def _end_choice(self, completion: Completion) -> None:
        entry = self._rows.pop(completion.uid, None)
        if entry is None:
            return  # dropped in the step that ended it
        row, choice = entry
        row.ended[choice] = completion
        self._tokens += len(completion.token_ids)
        if completion.fault is not None:
            self._give_up(row, completion.fault)
            return
        if len(row.ended) == len(row.prompts):
            completions = [row.ended[i] for i in range(len(row.prompts))]
            self._report(
                row.shard_id, row.epoch, rows.result(row.spec, row.prompts, completions, row.where)
            )

    def _give_up(self, row: _Row, fault: Fault) -> None:
        """A choice has failed, and its row with it; the other choices are not wanted any more."""
        for uid in [uid for uid, (other, _) in self._rows.items() if other is row]:
            self._decoder.cancel(uid)
            del self._rows[uid]
        ended = list(row.ended.values())
        self._report(row.shard_id, row.epoch, rows.faulty(row.spec, fault, ended, row.where))

    def _report(self, shard_id: str, epoch: int, result: RowResult) -> None:
        self._pipe.send(RowDone(shard_id=shard_id, epoch=epoch, result=result))

    def _beat(self) -> None:
        """Runs in its own thread: the decoder lets go of the interpreter while it computes."""
        while not self._ended.wait(_BEAT_S):
            waiting, active = self._fill
            try:
                self._pipe.send(
                    Beat(steps=self._steps, waiting=waiting, active=active, tokens=self._tokens)
                )
            except PipeClosed:
                return


def open_pipe(descriptor: int) -> EngineEnd:
    """The engine's end on an inherited descriptor. The process ends with its supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor to understand
    return EngineEnd(socket.socket(fileno=descriptor), on_eof=lambda: os._exit(0))


def main() -> int:
    """`python -m dflash_batch.worker.engine DESCRIPTOR`"""
    pipe = open_pipe(int(sys.argv[1]))
    from dflash_batch.decoder.loading import load_decoder

    return serve(pipe, load_decoder)


def _spec(order: Load) -> LoadSpec:
    return LoadSpec(
        target=order.model.target,
        draft=order.model.draft,
        draft_quant=order.model.draft_quant,
        block=order.model.block,
        dtype=order.model.dtype,
        max_batch=order.max_batch,
        max_context=order.max_context,
        spec=order.spec,
        cost_dir=order.cost_dir,
        cache_dir=order.cache_dir,
        cache_bytes=order.cache_bytes,
        memory=order.memory,
        diagnostics=order.diagnostics,
    )


def _loading(phase: str, share: float | None) -> Loading:
    return Loading(phase=phase, share=share)


if __name__ == "__main__":
    sys.exit(main())
