"""An engine process with a decoder that computes: the text is a pure function of the prompt.

Run by supervisors under test as `python fake_engine.py [options] DESCRIPTOR`. It imports no mlx.
A trouble (`--crash`, `--hang`, `--fail`) befalls the first step with a row that contains the word.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_batch.decoder.errors import LoadError, PromptError
from dflash_batch.decoder.types import (
    Completion,
    Fault,
    Load,
    LoadSpec,
    ModelInfo,
    Progress,
    Request,
)
from dflash_batch.worker.engine import open_pipe, serve

VOCABULARY = 256


def answer(prompt: str) -> str:
    """What the fake model says to a prompt: little, or much that cannot be compressed well."""
    text = f"{zlib.crc32(prompt.encode()):08x}"
    if "verbose" in prompt:
        text += "".join(hashlib.sha256(f"{i} {prompt}".encode()).hexdigest() for i in range(60))
    return text


def chat_text(messages: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


class FakeDecoder:
    """Decodes `width` rows at once; each takes a few steps, by its own length."""

    def __init__(self, spec: LoadSpec, options: argparse.Namespace) -> None:
        self.info = ModelInfo(
            target=spec.target,
            family="fake",
            draft=None,
            draft_notice=None,
            block=1,
            dtype="float32",
            context_length=4096,
            vocab_size=VOCABULARY,
            eos_token_ids=frozenset({0}),
            has_tokenizer=True,
            has_chat_template=True,
        )
        self._options = options
        self._width = spec.max_batch
        self._random = random.Random(options.seed)
        self._waiting: list[Request] = []
        self._leaked: list[bytes] = []
        self._active: dict[int, tuple[Request, int]] = {}  # uid -> request, steps left

    def thinking(self, prompt: Sequence[int], *, continued: bool = False) -> None:
        return None

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode_text(chat_text(messages))

    def encode_text(self, text: str) -> list[int]:
        if "explode" in text:
            raise KeyError("a fault of the tokenizer")
        if "tight" in text and not (self._options.once and Path(self._options.once).exists()):
            if self._options.once:
                Path(self._options.once).touch()
            raise PromptError("no room just now", code="out_of_memory")
        return list(text.encode())

    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        if len(prompt) + (max_tokens or 1) > self.info.context_length:
            raise PromptError(f"prompt has {len(prompt):,} tokens", code="context_length_exceeded")
        return max_tokens or 16

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        if self._options.journal:
            with open(self._options.journal, "ab") as journal:
                journal.write(bytes(request.prompt).replace(b"\n", b" ") + b"\n")

    def cancel(self, uid: int) -> None:
        self._waiting = [request for request in self._waiting if request.uid != uid]
        self._active.pop(uid, None)

    def narrow(self, rows: int) -> None:
        self._width = rows

    def load(self) -> Load:
        return Load(len(self._waiting), len(self._active))

    def unstarted(self) -> list[int]:
        return [request.uid for request in self._waiting]

    def step(self) -> list[Completion]:
        while self._waiting and len(self._active) < self._width:
            request = self._waiting.pop(0)
            self._active[request.uid] = request, self._random.randint(1, 3)
            self._leaked.append(b"x" * self._options.leak)
            self._meet_trouble(bytes(request.prompt).decode())
        if 0 < self._options.wide <= len(self._active):
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        if self._options.step_s:
            time.sleep(self._options.step_s)
        ended = [request for request, left in self._active.values() if left == 1]
        self._active = {
            uid: (request, left - 1) for uid, (request, left) in self._active.items() if left > 1
        }
        return [self._complete(request) for request in ended]

    def close(self) -> None:
        self._active.clear()

    def _complete(self, request: Request) -> Completion:
        text = answer(bytes(request.prompt).decode())
        tokens = tuple(text.encode())[: request.max_tokens]
        return Completion(
            uid=request.uid,
            token_ids=tokens,
            text=bytes(tokens).decode(),
            finish_reason="stop" if len(tokens) == len(text) else "length",
            prompt_tokens=len(request.prompt),
            prefill_tokens=len(request.prompt),
            cached_tokens=0,
            cycles=len(tokens),
            draft_tokens=0,
            accepted_tokens=0,
            batch_width=max(1, len(self._active)),
            wait_ms=1.0,
            prefill_ms=1.0,
            ttft_ms=2.0,
            decode_ms=3.0,
            fault=self._fault(request),
        )

    def _fault(self, request: Request) -> Fault | None:
        """A prompt with the word "overflow" has no numbers in its first choice."""
        ill = b"overflow" in bytes(request.prompt) and request.sampling.choice == 0
        return Fault("numerical_error", "no numbers") if ill else None

    def _meet_trouble(self, prompt: str) -> None:
        options = self._options
        if options.once and Path(options.once).exists():
            return
        troubles = {
            options.crash: "crash",
            options.hang: "hang",
            options.seize: "seize",
            options.fail: "fail",
        }
        trouble = next((kind for word, kind in troubles.items() if word and word in prompt), None)
        if trouble is None:
            return
        if options.once:
            Path(options.once).touch()
        if trouble == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "hang":
            time.sleep(3600)
        if trouble == "seize":  # in C, with the interpreter locked: not even its beats go on
            ctypes.PyDLL(None).sleep(3600)
        raise RuntimeError("the fake decoder was told to fail")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crash", default="")
    parser.add_argument("--hang", default="")
    parser.add_argument("--seize", default="", help="as --hang, and no thread runs")
    parser.add_argument("--wide", type=int, default=0, help="rows at once that exceed the memory")
    parser.add_argument("--leak", type=int, default=0, help="bytes kept of each row")
    parser.add_argument("--fail", default="")
    parser.add_argument("--once", default="", help="file that is made at the first trouble")
    parser.add_argument("--journal", default="", help="file to which each prompt is appended")
    parser.add_argument("--no-model", action="store_true", help="the load fails")
    parser.add_argument("descriptor", type=int)
    options = parser.parse_args()

    def load(spec: LoadSpec, progress: Progress) -> FakeDecoder:
        progress("weights", 0.5)
        if options.no_model or spec.target == "missing":
            raise LoadError(f"there is no model {spec.target}")
        return FakeDecoder(spec, options)

    return serve(open_pipe(options.descriptor), load)


if __name__ == "__main__":
    sys.exit(main())
