"""`dflash-batch status`: workers and batches, or one batch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click

from dflash_batch.cli.common import Common, common_options, pass_common, printable
from dflash_batch.cli.queueing import find_batch, open_queue
from dflash_batch.cli.summary import duration
from dflash_batch.worker.contract import BatchStatus, WorkerInfo


@click.command("status")
@click.argument("batch", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@common_options
@pass_common
def command(common: Common, batch: str | None, as_json: bool) -> None:
    """Show workers and batches, or one batch.

    ID may be shortened; @last is the newest batch.

    \b
    Example: dflash-batch status @last
    """
    with open_queue(common) as queue:
        if batch is not None:
            status = find_batch(queue, batch)
            if as_json:
                click.echo(json.dumps(batch_report(status), ensure_ascii=False))
                return
            for line in _one_batch(status):
                click.echo(line)
            return
        workers, batches, paused = queue.workers(), queue.batches(), queue.paused
    if as_json:
        report = {
            "queue_paused": paused,
            "workers": [worker.model_dump(mode="json") for worker in workers],
            "batches": [batch_report(status) for status in batches],
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    if paused:
        click.echo("queue    paused: no worker is given anything until dflash-batch resume --queue")
    for line in _overview(workers, batches):
        click.echo(line)


def batch_report(status: BatchStatus) -> dict[str, Any]:
    """A batch as --json shows it. Times are Unix seconds."""
    return {
        "batch": status.batch.id,
        "name": status.batch.name,
        "state": status.state.value,
        "model": status.batch.model.model_dump(mode="json"),
        "total": status.total,
        "done": status.total - status.left,
        "left": status.left,
        "ok": status.ok,
        "failed": status.failed,
        "shards": status.shards,
        "shards_leased": status.leased,
        "priority": status.priority,
        "weight": status.weight,
        "created": status.batch.created,
        "sealed": status.sealed,
        "started": status.started,
        "finished": status.finished,
    }


def _overview(workers: list[WorkerInfo], batches: list[BatchStatus]) -> Iterator[str]:
    yield f"workers  {len(workers)} up" if workers else "workers  none"
    for worker in workers:
        yield "  " + worker_line(worker)
    yield f"batches  {len(batches)}" if batches else "batches  none"
    for status in batches:
        yield "  " + batch_line(status)


def worker_line(worker: WorkerInfo) -> str:
    """A worker on one line, for people."""
    # a name is "<host>-<uuid>": a few digits tell two of one host apart
    name = f"{worker.host}-{worker.name.removeprefix(worker.host + '-')[:6]}"
    model = worker.model.target if worker.model else "any model"
    state = "resting" if worker.resting else worker.state
    said = worker.resting or worker.note
    note = f"   {said}" if said else ""
    return printable(
        f"{name:<24} {state:<9} {model}   rows {worker.rows_done:,}   "
        f"active {worker.active}   {worker.tokens_per_s:,.0f} tok/s{note}"
    )


def batch_line(status: BatchStatus) -> str:
    """A batch on one line, for people."""
    first = f"   priority {status.priority}" if status.priority else ""
    return printable(
        f"{status.batch.id}   {status.state.value:<9} {_counts(status)}{first}   "
        f"{status.batch.name}"
    )


def _one_batch(status: BatchStatus) -> Iterator[str]:
    model = status.batch.model
    yield printable(f"{status.batch.id}   {status.state.value}   {status.batch.name}")
    yield f"  rows     {_counts(status)}"
    draft = f" · block {model.block}" if model.block else ""
    yield printable(f"  model    {model.target} · draft {model.draft}{draft} · {model.dtype}")
    yield f"  shards   {status.shards:,}, {status.leased:,} in workers' hands"
    yield f"  turn     priority {status.priority} · weight {status.weight:g}"
    yield f"  times    {_times(status)}"


def _counts(status: BatchStatus) -> str:
    done = status.total - status.left
    share = f" {done / status.total:.0%}" if status.total else ""
    return f"{done:,}/{status.total:,}{share}   ok {status.ok:,}   failed {status.failed:,}"


def _times(status: BatchStatus) -> str:
    text = f"queued {datetime.fromtimestamp(status.batch.created):%d %b %H:%M}"
    if status.started is None:
        return f"{text} · not started"
    end = status.finished if status.finished is not None else time.time()
    verb = "took" if status.finished is not None else "running for"
    return f"{text} · {verb} {duration(max(0.0, end - status.started))}"
