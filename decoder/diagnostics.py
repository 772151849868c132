"""Diagnostics: what each cycle and each row took, as JSON lines in a folder. Off unless asked for.

    manifest.json    what ran, where, with which versions and settings
    cycles.jsonl     a line a cycle: width, block, parts in milliseconds, accepted drafts, memory
    jobs.jsonl       a line a row: tokens, cycles, times. No text: a prompt or an answer is nobody's
                     business here

A part is timed by waiting for it, so the host no longer works while the device does: on a GPU a
run with diagnostics is slower than one without.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Protocol

import mlx.core as mx

from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.types import Completion, ModelInfo

SCHEMA = 1

JOB = (
    "uid",
    "finish_reason",
    "prompt_tokens",
    "prefill_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "cycles",
    "draft_tokens",
    "accepted_tokens",
    "batch_width",
    "wait_ms",
    "prefill_ms",
    "ttft_ms",
    "decode_ms",
    "spec",
    "emitted_per_cycle",
)
"""What is written of a row: numbers."""


@dataclass(frozen=True)
class CycleFacts:
    """A cycle that was read."""

    width: int  # rows of the arena
    live: int  # rows that decoded in it
    riding: int  # rows whose prompt rode in it
    block: int  # tokens per row
    context: int  # visible columns
    accepted: list[int]  # drafts that stood, of each live row
    emitted: int
    parts_ms: dict[str, float]


class Watch(Protocol):
    """Is told what happens in the decoder."""

    def begin(self) -> None:
        """A cycle is about to be launched."""
        ...

    def part(self, part: str, *ends: mx.array) -> None:
        """The `Timer` of the cycle."""
        ...

    def parts(self) -> dict[str, float]:
        """Milliseconds of the parts since `begin`."""
        ...

    def cycle(self, facts: CycleFacts) -> None: ...
    def job(self, completion: Completion) -> None: ...
    def close(self) -> None: ...


class Parts:
    """Times the parts of cycles by waiting for each."""

    def __init__(self) -> None:
        self._since = 0.0
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        self._since, self._parts = time.perf_counter(), {}

    def part(self, part: str, *ends: mx.array) -> None:
        mx.eval(*ends)
        now = time.perf_counter()
        self._parts[part] = 1e3 * (now - self._since)
        self._since = now

    def parts(self) -> dict[str, float]:
        return self._parts


class Diagnostics(Parts):
    """Writes the three files, into a folder of this process in the one that was named."""

    def __init__(self, folder: Path, info: ModelInfo, settings: dict[str, Any]) -> None:
        """Raises LoadError if the folder cannot be used."""
        super().__init__()
        folder = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self._start = time.perf_counter()
        self._last = self._start
        manifest = {
            "schema": SCHEMA,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "versions": {name: version(name) for name in ("dflash-batch", "mlx", "mlx-lm")},
            "device": {"name": str(mx.default_device()), **mx.device_info(mx.default_device())},
            "model": asdict(info),
            "settings": settings,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._open(folder / "manifest.json") as file:
                file.write(json.dumps(manifest, indent=1, default=sorted) + "\n")  # sets
            self._cycles = self._open(folder / "cycles.jsonl")
            self._jobs = self._open(folder / "jobs.jsonl")
        except OSError as e:
            raise LoadError(
                f"diagnostics cannot be written to {folder}: {e.strerror or e}: name another",
                code="invalid_value",
                param="diagnostics",
            ) from e

    def cycle(self, facts: CycleFacts) -> None:
        now = time.perf_counter()
        line = asdict(facts)
        line["parts_ms"] = {part: round(ms, 3) for part, ms in facts.parts_ms.items()}
        line["at_s"] = round(now - self._start, 4)
        # From the last cycle's end to this one's, less its parts: the host, and prompts.
        line["other_ms"] = round(1e3 * (now - self._last) - sum(facts.parts_ms.values()), 3)
        line["active_bytes"], line["peak_bytes"] = mx.get_active_memory(), mx.get_peak_memory()
        self._last = now
        self._cycles.write(json.dumps(line) + "\n")

    def job(self, completion: Completion) -> None:
        facts: dict[str, Any] = {name: getattr(completion, name) for name in JOB}
        facts["output_tokens"] = len(completion.token_ids)
        facts["at_s"] = round(time.perf_counter() - self._start, 4)
        self._jobs.write(json.dumps(facts) + "\n")

    def close(self) -> None:
        self._cycles.close()
        self._jobs.close()

    @staticmethod
    def _open(path: Path) -> IO[str]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
