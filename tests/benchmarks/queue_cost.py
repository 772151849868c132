"""What the queue costs: rows a second into it, bytes a queued row, time a row to lease and commit.

    python tests/benchmarks/queue_cost.py [--rows 100000] [--no-mirror]

It starts a server of its own. Rows are chat lines of about 500 bytes behind a few shared prefixes;
results are chat completions of about 800 bytes. Leases and commits run in this process, against a
decoder that costs nothing: 8 shards in hand, commits of up to 32 rows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_batch.worker.contract import (
    CHAT,
    JobSpec,
    ModelRef,
    RowMetrics,
    RowResult,
    RowStatus,
)
from dflash_batch.worker.prefix import plan
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.server import open_server
from dflash_batch.worker.submit import submit

TEXT = (
    "the a of to in and for with on at from by about into over after apple river stone cloud "
    "train window letter garden paper music number winter summer street bridge answer question"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--no-mirror", action="store_true", help="without the view for `rq info`")
    options = parser.parse_args()
    rows = make_rows(options.rows)
    size = sum(len(row.dump()) for row in rows) / len(rows)
    with tempfile.TemporaryDirectory(prefix="dfb-") as home, open_server(Path(home)) as server:
        client = connect(server.url)
        queue = Queue(client, mirror=not options.no_mirror)
        model = ModelRef(target="none")

        empty = used(client)
        start, cpu = time.perf_counter(), time.process_time()
        planned = plan(rows)
        planning = time.perf_counter() - start
        submit(queue, rows, model, batch_id="batch_cost", name="cost", planned=planned)
        seconds, ours = time.perf_counter() - start, time.process_time() - cpu
        print(f"{len(rows):,} rows of {size:.0f} bytes, shared {planned.shared_share:.0%}")
        print(f"submit      {len(rows) / seconds:>10,.0f} rows/s ({1e6 * ours / len(rows):.0f} µs "
              f"of our CPU a row, planning {planning / seconds:.0%})")  # fmt: skip
        print(f"queued      {(used(client) - empty) / len(rows):>10,.0f} bytes a row")

        before = server_cpu(client)
        start, cpu = time.perf_counter(), time.process_time()
        done = drain(queue, model)
        seconds, ours = time.perf_counter() - start, time.process_time() - cpu
        theirs = server_cpu(client) - before
        print(
            f"lease+commit{1e6 * seconds / done:>10,.0f} µs a row ({1e6 * ours / done:.0f} of our "
            f"CPU, {1e6 * theirs / done:.0f} of the server's)"
        )


def make_rows(count: int) -> list[JobSpec]:
    dice, words = random.Random(0), TEXT.split()
    system = ["You answer " + " ".join(dice.choices(words, k=30)) for _ in range(50)]
    return [
        JobSpec(
            index=i,
            line=i + 1,
            custom_id=f"row-{i:07d}",
            endpoint=CHAT,
            messages=[
                {"role": "system", "content": system[i % 50]},
                {"role": "user", "content": " ".join(dice.choices(words, k=22))},
            ],
            max_tokens=64,
        )
        for i in range(count)
    ]


def drain(queue: Queue, model: ModelRef) -> int:
    done = 0
    while leases := queue.lease("bench", model.key, 60_000, 8):
        for lease in leases:
            results = [result(row) for row in lease.shard.rows]
            committed = queue.commit(lease, results)
            assert committed.shard_done
            done += committed.accepted
    return done


def result(row: JobSpec) -> RowResult:
    body = {
        "id": f"chatcmpl-{row.index}",
        "object": "chat.completion",
        "created": 0,
        "model": "none",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "words " * 60}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 60, "total_tokens": 160},
    }
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=RowStatus.OK,
        response={"status_code": 200, "request_id": "req", "body": body},
        metrics=RowMetrics(worker="bench"),
    )


def used(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def server_cpu(client: Any) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


if __name__ == "__main__":
    main()
