"""A soak: batches run while workers, engines, clients and the server are killed at random.

    python tests/benchmarks/soak.py --minutes 5

Prints what was killed, and what was lost, written twice, or condemned without being poison: the
three must be 0. Ends with status 1 if they are not. Runs against a real server and real processes;
only the decoder is a fake one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import client_tools
from chaos_tools import RUN_VARIABLE, end_processes
from client_tools import lines_of, options
from queue_tools import LocalServer, WorkerProcess

ENGINE = ("--step-s", "0.03", "--crash", "poison")
ROWS, POISON, WORKERS = 600, (77, 301), 2


class Soak:
    """A server, two shared workers, a client; one of them is killed every few seconds."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = Random(seed)
        self.killed: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.server = LocalServer(folder)
        self.server.start()
        self.workers = [self._worker() for _ in range(WORKERS)]
        self._clients = 0

    def batch(self) -> None:
        """One batch, from its start until all of it is written."""
        place = self.folder / uuid.uuid4().hex[:8]
        place.mkdir()
        client = self._client(place)
        next_kill = self._soon()
        while True:
            if (status := client.poll()) is not None:
                said, _ = client.communicate()
                if status == 0:
                    break
                if status != -signal.SIGKILL:
                    print(f"  the client ended with {status}: {said.splitlines()[-1:]}")
                client = self._client(place)
            if time.monotonic() > next_kill:
                next_kill = self._soon()
                self._kill_something(client)
            self.workers = [w if w.is_running else self._worker() for w in self.workers]
            time.sleep(0.05)
        self._count(place)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.server.kill()

    def _kill_something(self, client: subprocess.Popen[str]) -> None:
        what = self.random.choice(["worker", "worker", "engine", "engine", "client", "server"])
        worker = self.random.choice(self.workers)
        if what == "client":
            client.kill()
        elif what == "server":
            self.server.kill()
            time.sleep(self.random.uniform(0.0, 3.0))
            self.server.start()
        elif what == "worker":
            worker.kill()
        elif "engine_ready" in worker.says:
            with suppress(ProcessLookupError):
                os.kill(worker.engine_pid(), signal.SIGKILL)
        self.killed[what] += 1

    def _soon(self) -> float:
        return time.monotonic() + self.random.uniform(1.0, 5.0)

    def _worker(self) -> WorkerProcess:
        log = self.folder / f"{uuid.uuid4().hex[:8]}.log"
        pending = str(self.folder / "pending")
        return WorkerProcess(self.server.url, *ENGINE, log=log, pending_dir=pending)

    def _client(self, place: Path) -> subprocess.Popen[str]:
        self._clients += 1
        more = {"redis": self.server.url, "lease_ttl_s": 2.0, "digest": place.name}
        facts = {"folder": str(place), "rows": ROWS, "poison": POISON, "engine": ENGINE}
        return subprocess.Popen(
            [sys.executable, client_tools.__file__, json.dumps({**facts, "options": more})],
            stdout=subprocess.PIPE,
            text=True,
        )

    def _count(self, place: Path) -> None:
        chosen = options(place)
        good = [line["custom_id"] for line in lines_of(chosen.output)]
        bad = [line["custom_id"] for line in lines_of(chosen.errors)]
        counts = Counter(good + bad)
        poison = {f"q-{index}" for index in POISON}
        self.found["batches"] += 1
        self.found["rows"] += ROWS
        self.found["lost"] += ROWS - len(counts)
        self.found["twice"] += sum(count - 1 for count in counts.values())
        self.found["poison condemned"] += len(poison & set(bad))
        self.found["condemned wrongly"] += len(set(bad) - poison)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    os.environ[RUN_VARIABLE] = run = uuid.uuid4().hex
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dfb-") as folder:
        soak = Soak(Path(folder), chosen.seed)
        try:
            while time.monotonic() < began + 60 * chosen.minutes:
                soak.batch()
                print(f"{time.monotonic() - began:5.0f} s  {dict(soak.found)}", flush=True)
        finally:
            soak.close()
            left = end_processes(run)
    print(f"killed: {dict(soak.killed)}, {sum(soak.killed.values())} in all")
    print(f"processes left behind: {len(left)}")
    wrong = soak.found["lost"] + soak.found["twice"] + soak.found["condemned wrongly"] + len(left)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
