"""The queue at full size: a million rows in and out, workers of unequal speed, a batch in a hurry.

    python tests/benchmarks/queue_scale.py [--rows 1000000] [--only size,stock,share,hurry]

size   `submit` of a file as a process of its own (rate, memory), bytes queued, four processes that
       lease and commit as fast as they can while a client takes the results (rate, lease times),
       and what is left when all is drained.
stock  The same rows as one RQ job each: enqueued and run by RQ's own worker, at a smaller count.
share  5,000 rows on 2, 4 and 8 real workers with engines of unequal speed: the time it takes over
       the time it would take were all busy to the end at the speed they show in mid-run.
hurry  A small batch of high priority behind many rows: its time over its time on an empty queue.

Each part starts a server of its own. Engines are fake: a step sleeps, and a row takes 1-3 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from queue_cost import make_rows, result, server_cpu, used  # type: ignore[import-not-found]  # beside this file
from queue_tools import MODEL, LocalServer, WorkerProcess, row, until

from dflash_batch.worker.contract import CHAT, Key, ModelRef
from dflash_batch.worker.mirror import JSONSerializer, RqQueue
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.submit import submit

DRAINERS = 4
STOCK_ROWS = 20_000
STOCK_RUN = 2_000
SHARE_ROWS = 5_000
HURRY_ROWS = 160
WIDTH = 8  # rows that a fake engine decodes at once
STEPS_S = (0.1, 0.2, 0.1, 0.4, 0.2, 0.1, 0.4, 0.2)  # of the workers of `share`


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--behind", type=int, default=100_000, help="rows before the hurried batch")
    parser.add_argument("--only", default="size,stock,share,hurry")
    parser.add_argument("--drain", help=argparse.SUPPRESS)  # one of the processes of `size`
    options = parser.parse_args()
    if options.drain:
        drain(options.drain)
        return
    parts: dict[str, Callable[[], None]] = {
        "size": lambda: size(options.rows),
        "stock": stock,
        "share": share,
        "hurry": lambda: hurry(options.behind),
    }
    for name in options.only.split(","):
        print(f"--- {name}", flush=True)
        parts[name]()


# --- size: a million rows in and out


def size(rows: int) -> None:
    with server() as (url, folder):
        source = folder / "in.jsonl"
        length = write_input(source, rows)
        client = connect(url)
        empty = used(client)
        start = time.perf_counter()
        command = [sys.executable, "-m", "dflash_batch.cli.main", "submit", str(source)]
        child = subprocess.Popen([*command, "-m", "demo", "-q", "--redis", url])
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        assert status == 0
        source.unlink()
        cpu = usage.ru_utime + usage.ru_stime
        unit = 1 if sys.platform == "darwin" else 1024
        print(f"rows        {rows:>10,} of {length / rows:.0f} bytes")
        print(
            f"submit      {rows / seconds:>10,.0f} rows/s ({1e6 * cpu / rows:.0f} µs of CPU a row, "
            f"{usage.ru_maxrss * unit / 1e6:.0f} MB at most)"
        )
        print(f"queued      {(used(client) - empty) / rows:>10,.0f} bytes a row", flush=True)
        run_drainers(url, rows)
        queue = Queue(client)
        (batch,) = queue.batches()
        assert queue.mirror is not None
        parts: Any = client.smembers(Key.shards(batch.batch.id))
        queue.mirror.end([part.decode() for part in parts])
        assert (batch.ok, batch.left) == (rows, 0)
        print(
            f"drained     {(used(client) - empty) / rows:>10,.2f} bytes a row, most of them "
            "in RQ's view for an hour",
            flush=True,
        )
        queue.forget(batch.batch.id)
        print(f"forgotten   {(used(client) - empty) / rows:>10,.2f} bytes a row", flush=True)


def run_drainers(url: str, rows: int) -> None:
    """Processes that lease and commit; this one takes and acknowledges what they record."""
    client = connect(url)
    queue = Queue(client)
    (batch,) = queue.batches()
    start, busy = time.perf_counter(), server_cpu(client)
    command = [sys.executable, __file__, "--drain", url]
    drainers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(DRAINERS)]
    taken, after, most = 0, "0-0", 0
    while taken < rows:
        # as the raw stream: unpacking records is the client's cost, not the queue's
        key = Key.results(batch.batch.id)
        answer: Any = client.xread({key: after}, count=2000, block=1000)
        entries = answer[0][1] if answer else []
        if entries:
            taken += len(entries)
            after = entries[-1][0].decode()
            queue.acknowledge(batch.batch.id, after)
            most = max(most, client.xlen(key))
    seconds = time.perf_counter() - start
    theirs = server_cpu(client) - busy
    times: list[float] = []
    for drainer in drainers:
        times += json.loads(drainer.communicate()[0])
    times.sort()
    print(
        f"commit      {rows / seconds:>10,.0f} rows/s by {DRAINERS} processes "
        f"({1e6 * theirs / rows:.0f} µs of the server's CPU a row, at most {most:,} results kept)"
    )
    print(
        f"lease       {1000 * times[len(times) // 2]:>10.1f} ms median, "
        f"{1000 * times[len(times) * 99 // 100]:.1f} ms p99, of {len(times):,}",
        flush=True,
    )


def drain(url: str) -> None:
    """Lease eight shards at a time and commit them, until there is nothing."""
    queue = Queue(connect(url))
    name = f"bench-{os.getpid()}"
    times: list[float] = []
    record = result(row(0)).packed()
    key = ModelRef(target="demo").key
    while True:
        start = time.perf_counter()
        leases = queue.lease(name, key, 60_000, 8)
        times.append(time.perf_counter() - start)
        if not leases:
            break
        for lease in leases:
            rows = [part for spec in lease.shard.rows for part in (spec.index, "", record)]
            queue._run("commit", lease.shard.id, lease.epoch, name, *rows)
    print(json.dumps(times))


# --- stock: one RQ job a row


def stock() -> None:
    rows = make_rows(STOCK_ROWS)
    texts = [spec.dump() for spec in rows]
    with server() as (url, _):
        client = connect(url)
        queue = RqQueue("stock", connection=client, serializer=JSONSerializer)
        empty = used(client)
        start, cpu = time.perf_counter(), time.process_time()
        for begin in range(0, len(texts), 1000):
            with client.pipeline(transaction=False) as pipe:
                jobs = [
                    RqQueue.prepare_data("builtins.len", args=(text,), timeout=-1)
                    for text in texts[begin : begin + 1000]
                ]
                queue.enqueue_many(jobs, pipeline=pipe)
                pipe.execute()
        seconds = time.perf_counter() - start
        cpu = 1e6 * (time.process_time() - cpu) / STOCK_ROWS
        print(f"rows        {STOCK_ROWS:>10,} (a million would take {seconds * 50:,.0f} s)")
        print(f"enqueue     {STOCK_ROWS / seconds:>10,.0f} rows/s ({cpu:.0f} µs of CPU a row)")
        print(f"queued      {(used(client) - empty) / STOCK_ROWS:>10,.0f} bytes a row", flush=True)
        from rq import SimpleWorker

        worker = SimpleWorker([queue], connection=client, serializer=JSONSerializer)
        start = time.perf_counter()
        worker.work(burst=True, max_jobs=STOCK_RUN, logging_level="ERROR")
        seconds = time.perf_counter() - start
        print(f"run         {STOCK_RUN / seconds:>10,.0f} rows/s by 1 SimpleWorker", flush=True)


# --- share: workers of unequal speed


def share() -> None:
    rows = [row(index) for index in range(SHARE_ROWS)]
    for count in (2, 4, 8):
        with server() as (url, folder), workers(url, folder, STEPS_S[:count]):
            client = connect(url)
            queue = Queue(client)
            until(lambda: ready(queue) == count, "all workers are ready", 60)  # noqa: B023
            submit(queue, rows, MODEL, batch_id="batch_a", name="share")
            ended = records(queue, "batch_a")
            sealed = queue.status("batch_a")
            assert sealed is not None
            assert sealed.sealed is not None
            whole = ended[-1][0] - sealed.sealed
            ideal = SHARE_ROWS / sum(rates(ended, sealed.sealed).values())
            parts = Counter(worker for _, worker in ended)
            print(
                f"{count} workers   {whole:>10.1f} s, ideal {ideal:.1f} s: {whole / ideal:.3f}  "
                f"(rows each {sorted(parts.values(), reverse=True)}, shards {sealed.shards})",
                flush=True,
            )


def rates(ended: Sequence[tuple[float, str]], start: float) -> dict[str, float]:
    """Rows a second of each worker, while none was short of rows."""
    whole = ended[-1][0] - start
    begin, end = start + 0.1 * whole, start + 0.8 * whole
    counts = Counter(worker for when, worker in ended if begin <= when < end)
    return {worker: count / (end - begin) for worker, count in counts.items()}


# --- hurry: a small batch of high priority behind many rows


def hurry(behind: int) -> None:
    small = [row(index) for index in range(HURRY_ROWS)]
    with server() as (url, folder), workers(url, folder, (0.1, 0.1, 0.1, 0.1)):
        queue = Queue(connect(url))
        until(lambda: ready(queue) == 4, "all workers are ready", 60)
        submit(queue, small, MODEL, batch_id="batch_alone", name="alone")
        alone = span(queue, "batch_alone")
        many = [row(index) for index in range(behind)]
        submit(queue, many, MODEL, batch_id="batch_many", name="many")
        until(lambda: busy(queue) == 4, "all workers are busy")
        submit(queue, small, MODEL, batch_id="batch_small", name="small", priority=5)
        hurried = span(queue, "batch_small")
        print(
            f"hurried     {hurried:>10.1f} s behind {behind:,} rows, {alone:.1f} s alone: "
            f"{hurried / alone:.2f}",
            flush=True,
        )


def span(queue: Queue, batch_id: str) -> float:
    """Seconds from the seal to the last record."""
    ended = records(queue, batch_id)
    status = queue.status(batch_id)
    assert status is not None
    assert status.sealed is not None
    return ended[-1][0] - status.sealed


# --- what the parts share


@contextmanager
def server() -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        local = LocalServer(Path(folder))
        local.start()
        try:
            yield local.url, Path(folder)
        finally:
            local.kill()


@contextmanager
def workers(url: str, folder: Path, steps_s: Sequence[float]) -> Iterator[None]:
    """Real workers with fake engines, a step of which takes so long."""
    started = [
        WorkerProcess(
            url,
            "--step-s",
            str(step_s),
            "--seed",
            str(number),
            log=folder / f"worker-{number}.log",
            max_batch=WIDTH,
            lease_ttl_s=30.0,
        )
        for number, step_s in enumerate(steps_s)
    ]
    try:
        yield
    finally:
        for worker in started:
            worker.kill()


def ready(queue: Queue) -> int:
    return sum(info.state in ("idle", "busy") and bool(info.model_key) for info in queue.workers())


def busy(queue: Queue) -> int:
    return sum(info.active > 0 for info in queue.workers())


def records(queue: Queue, batch_id: str) -> list[tuple[float, str]]:
    """(Unix seconds, worker) of each record, when the batch is over. Times are the server's."""
    while not (status := queue.status(batch_id)) or not status.done:
        time.sleep(0.2)
    entries: Any = queue.client.xrange(Key.results(batch_id))
    return [(int(entry.split(b"-")[0]) / 1000, fields[b"w"].decode()) for entry, fields in entries]


def write_input(path: Path, rows: int) -> int:
    """Chat lines of about 550 bytes behind fifty system prompts. Returns their length.

    Of 4,096 made-up words, so that the text is no easier to compress than English is.
    """
    dice = random.Random(0)
    sounds = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
    words = ["".join(dice.choices(sounds, k=dice.randint(1, 4))) for _ in range(4096)]
    systems = ["You answer " + " ".join(dice.choices(words, k=28)) for _ in range(50)]
    with path.open("w", encoding="utf-8") as file:
        for index in range(rows):
            messages = [
                {"role": "system", "content": systems[index % 50]},
                {"role": "user", "content": " ".join(dice.choices(words, k=30))},
            ]
            body = {"messages": messages, "max_tokens": 64}
            line = {"custom_id": f"row-{index:07d}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")
    return path.stat().st_size


if __name__ == "__main__":
    main()
