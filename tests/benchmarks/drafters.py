"""Drafters side by side: plain, DFlash, lookup, and both together, on several kinds of prompts.

    python tests/benchmarks/drafters.py [PROMPTS.jsonl …] -m TARGET [--draft DRAFT] [--width 8]
    python tests/benchmarks/drafters.py --spec-bench FOLDER -m TARGET --limit 20

PROMPTS.jsonl is a batch file of chat lines; each file is a kind. Without one, three small kinds are
made up: extraction to JSON and code edits, which repeat what was said, and chat, which does not.
FOLDER holds Spec-Bench's question.jsonl, whose categories become the kinds.

Greedy. With `--spec on` whole blocks in every cycle, with `auto` what pays by costs that the first
run learns. Each system runs twice per kind and the second run counts; what was said in other runs
is not there to be looked up.
`tau` is tokens per cycle, `stood` the share of drafts that stood, `same` how many texts equal those
of plain decoding (bit for bit in float32 on the CPU; on a GPU up to near-ties).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_batch.decoder.composite import CompositeDrafter
from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.drafters import Drafter, NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import LOOKUP_BLOCK, load_decoder
from dflash_batch.decoder.policy import Fixed, Goodput, Policy
from dflash_batch.decoder.types import Completion, LoadSpec, Request

Chat = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--draft-quant", default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block", type=int)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--spec", choices=["on", "auto"], default="on")
    parser.add_argument("--limit", type=int, default=80, help="prompts of each kind")
    parser.add_argument("--spec-bench", nargs="?", const="", metavar="FOLDER")
    options = parser.parse_args()
    decoder = load_decoder(
        LoadSpec(
            target=options.model,
            draft=options.draft,
            block=options.block,
            dtype=options.dtype,
            draft_quant=options.draft_quant,
            max_batch=options.width,
        )
    )
    kinds = kinds_of(options.prompts, options.spec_bench)
    print(f"{decoder.info.target}, draft {decoder.info.draft}, on {mx.default_device()}")
    print(f"{'kind':<16}{'drafter':<14}{'tok/s':>8}{'ratio':>7}{'tau':>7}{'stood':>7}{'same':>9}")
    for kind, chats in kinds.items():
        compare(kind, decoder, [decoder.encode_chat(c) for c in chats[: options.limit]], options)
    print(f"peak memory {mx.get_peak_memory() / 2**30:.2f} GiB")


class Run(NamedTuple):
    """What one system made of the prompts."""

    done: dict[int, Completion]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.done.values())

    def total(self, name: str) -> int:
        return sum(getattr(c, name) for c in self.done.values())


def compare(kind: str, decoder: Decoder, prompts: list[list[int]], options: Any) -> None:
    """One line for each drafter."""
    _, model = decoder.pair
    makers: dict[str, Callable[[], Drafter]] = {
        "plain": NoDrafter,
        "ngram": lambda: CompositeDrafter(NoDrafter(), options.block or LOOKUP_BLOCK),
    }
    if model.spec.max_k:
        makers["dflash"] = lambda: model
        makers["dflash+ngram"] = lambda: CompositeDrafter(model)
    plain: Run | None = None
    for name, make in makers.items():
        table = CostTable()
        for _ in range(2):  # the first run holds compiling and planning
            run = decode(decoder, make(), prompts, options, table)
        plain = plain or run
        same = sum(run.done[i].token_ids == c.token_ids for i, c in plain.done.items())
        speed = run.tokens / run.seconds
        ratio = speed / (plain.tokens / plain.seconds)
        tau = (run.tokens - len(prompts)) / max(1, run.total("cycles"))
        stood = run.total("accepted_tokens") / max(1, run.total("draft_tokens"))
        print(
            f"{kind:<16}{name:<14}{speed:>8.1f}{ratio:>7.2f}{tau:>7.2f}{stood:>7.0%}"
            f"{same:>5}/{len(prompts):<3}",
            flush=True,
        )


def decode(
    loaded: Decoder, drafter: Drafter, prompts: list[list[int]], options: Any, table: CostTable
) -> Run:
    """All prompts, by a decoder of their own."""
    target, _ = loaded.pair
    most = drafter.spec.max_k
    policy: Policy = Fixed(most, trim=mx.default_device() != mx.gpu)
    if options.spec == "auto" and most:
        policy = Goodput(table, most + 1)
    decoder = Decoder(target, drafter, info=loaded.info, max_batch=options.width, policy=policy)
    start = time.perf_counter()
    requests = (Request(i, tuple(p), options.max_tokens) for i, p in enumerate(prompts))
    done = {c.uid: c for c in decoder.run(requests)}
    seconds = time.perf_counter() - start
    decoder.close()
    return Run(done, seconds)


def kinds_of(files: list[str], spec_bench: str | None) -> dict[str, list[Chat]]:
    """Chats by kind."""
    if spec_bench is not None:
        shared = os.environ.get("DFLASH_BATCH_SHARED", ".")
        folder = Path(spec_bench or f"{shared}/data/spec_bench")
        found: dict[str, list[Chat]] = {}
        for line in (folder / "question.jsonl").read_text("utf-8").splitlines():
            question = json.loads(line)
            chat = [{"role": "user", "content": question["turns"][0]}]
            found.setdefault(SPEC_BENCH.get(question["category"], "mt_bench"), []).append(chat)
        return found
    if files:
        return {Path(file).stem[:15]: chats_in(Path(file)) for file in files}
    return {"extraction": extractions(), "code edit": edits(), "chat": conversations()}


SPEC_BENCH = {
    name: name for name in ("translation", "summarization", "qa", "math_reasoning", "rag")
}
"""Categories that are kinds; all others are MT-bench's."""


def chats_in(file: Path) -> list[Chat]:
    return [json.loads(line)["body"]["messages"] for line in file.read_text("utf-8").splitlines()]


def extractions() -> list[Chat]:
    """Orders to be copied into JSON."""
    people = ("Ada Merrow", "Ben Okoro", "Chen Liu", "Dora Falk", "Emil Strand", "Farah Nasser")
    goods = ("copper kettles", "oak shelves", "wool blankets", "desk lamps")
    chats = []
    for i in range(12):
        person, good = people[i % len(people)], goods[i % len(goods)]
        note = (
            f"Order {4100 + 37 * i}: {person}, {3 + i} Mill Lane, Porthaven, wants {2 + i} {good} "
            f"by {1 + i} March. Pay on delivery. Call {555_0100 + i} before you come."
        )
        ask = (
            'Copy the order into JSON: {"order": number, "name": text, "street": text, "town": '
            'text, "quantity": number, "article": text, "date": text, "phone": number}. '
            f"Answer with the JSON alone.\n\n{note}"
        )
        chats.append([{"role": "user", "content": ask}])
    return chats


def edits() -> list[Chat]:
    """Functions to be written out again with one name changed."""
    chats = []
    for i in range(12):
        names = ("total", "amount", "balance", "count")
        name = names[i % 4]
        code = (
            f"def {name}_of(items, start={i}):\n    {name} = start\n    for item in items:\n"
            f"        if item.price > {i + 1}:\n            {name} += item.price\n"
            f"        else:\n            {name} += {i + 1}\n    return {name}\n"
        )
        ask = f"Rename {name} to result everywhere and write the whole code again:\n\n{code}"
        chats.append([{"role": "user", "content": ask}])
    return chats


def conversations() -> list[Chat]:
    """Questions whose answers repeat nothing."""
    asks = (
        "Why is the sky blue?",
        "How do I start with running at forty?",
        "Tell me a story about a lighthouse.",
        "What should I look at when I buy a used bicycle?",
        "Explain compound interest to a child.",
        "Write a toast for my sister's wedding.",
        "How does bread rise?",
        "Give me three ideas for a rainy Sunday.",
        "What makes a good teacher?",
        "Why do cats purr?",
        "How do I ask my boss for a rise?",
        "Describe the sea to someone who has never seen it.",
    )
    return [[{"role": "user", "content": ask}] for ask in asks]


if __name__ == "__main__":
    main()
