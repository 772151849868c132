"""Prompt tokens computed against the ideal trie, on public evaluation sets; first and second night.

    DFLASH_BATCH_SHARED=DIR python tests/benchmarks/prefill_plan.py [--rows 200] [--family qwen3]

A tiny random model runs the prompts, two tokens each (after one, rows would take no slots, and the
engine would always empty its window); what is counted does not depend on its size. Text is cut
into words and signs, each a token, since a real tokenizer's pieces are about as long. Rows are
sorted and cut into shards as `submit` does, and at most `--window` rows are in the engine at a
time, as a worker has them. `ideal` is the number of different edges of the trie of all prompts. In
the second night memory is empty, and a new decoder reads what the first one left on SSD. `--pace
measured` lets the machine decide whether reading pays, which for a model this small says nothing
of a real one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import tiny
from mlx.utils import tree_map

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import FAMILIES
from dflash_batch.decoder.ssd import Ssd
from dflash_batch.decoder.store.pace import Judge, Pace
from dflash_batch.decoder.store.store import Limits, Store
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.tiers import Tiers
from dflash_batch.decoder.trie import Trie
from dflash_batch.decoder.types import Request
from dflash_batch.worker.contract import JobSpec
from dflash_batch.worker.prefix import plan

VOCABULARY = 1 << 16
_PIECE = re.compile(r" ?\w+|\s|[^\w\s]")

Texts = list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", default="gsm8k,gsm8k_n10,bbh,nq")
    parser.add_argument("--rows", type=int, default=200, help="different prompts of a set")
    parser.add_argument("--family", default="qwen3", choices=["qwen3", "qwen3_5", "gemma4_text"])
    parser.add_argument("--window", type=int, default=64, help="rows in the engine; 0: all")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--ram", type=int, default=2 << 30, help="bytes of prefixes in memory")
    parser.add_argument("--pace", default="always", choices=["always", "measured"])
    options = parser.parse_args()
    data = Path(os.environ["DFLASH_BATCH_SHARED"]) / "data"
    target = make_target(options.family)
    print(f"{options.family}, {options.rows} prompts a set, window {options.window}")
    print(
        f"{'set':<11}{'night':>6}{'rows':>7}{'tokens':>11}{'ideal':>9}{'computed':>10}"
        f"{'ratio':>7}{'ssd':>11}{'of cached':>10}{'written':>8}{'MB':>7}{'s':>7}"
    )
    for name in options.sets.split(","):
        prompts = ordered(SETS[name](data, options.rows))
        with tempfile.TemporaryDirectory() as folder:
            for night in (1, 2):
                report(name, night, prompts, target, Path(folder), options)


def report(
    name: str, night: int, prompts: list[list[int]], target: Target, folder: Path, options: Any
) -> None:
    """Run a night and print a line."""
    judge: Judge = Pace() if options.pace == "measured" else Always()
    store = Store(folder, Limits(cap=64 << 30, floor=0, daily=1 << 40))
    ssd = Ssd(store, name, options.family, cuttable=target.cuttable, judge=judge)
    decoder = Decoder(
        target,
        NoDrafter(),
        info=tiny.make_info(target, None, 1),
        max_batch=options.max_batch,
        tiers=Tiers(target.cuttable, options.ram, ssd),
    )
    trie = Trie[int]()
    for i, prompt in enumerate(prompts):
        trie.add(np.array(prompt, dtype=np.int32), i)
    begun, done, waiting = time.perf_counter(), [], iter(enumerate(prompts))
    more = True
    while more or any(decoder.load()):
        while more and (not options.window or sum(decoder.load()) < options.window):
            uid, prompt = next(waiting, (-1, []))
            more = uid >= 0
            if more:
                decoder.add(Request(uid, tuple(prompt), max_tokens=2))
        done += decoder.step()
    seconds = time.perf_counter() - begun
    decoder.close()
    tokens = sum(map(len, prompts))
    computed = sum(completion.prefill_tokens for completion in done)
    read = sum(completion.ssd_tokens for completion in done)
    size = sum(path.stat().st_size for path in folder.glob("*/blobs/*")) / 1e6
    print(
        f"{name:<11}{night:>6}{len(done):>7}{tokens:>11,}{trie.ideal:>9,}{computed:>10,}"
        f"{computed / trie.ideal:>7.3f}{read:>11,}{read / max(1, tokens - computed):>10.1%}"
        f"{ssd.counts['written']:>8}{size:>7.1f}{seconds:>7.1f}",
        flush=True,
    )


class Always:
    """Reading and writing are always worth it."""

    def worth(self, tokens: int, size: int) -> bool:
        return True

    def computed(self, tokens: int, seconds: float) -> None: ...
    def read(self, size: int, seconds: float) -> None: ...


def make_target(family: str) -> Target:
    """A tiny model with a vocabulary for words and room for long prompts."""
    layers = {"qwen3": 1, "qwen3_5": 2, "gemma4_text": 3}[family]
    tiny.SHAPE.update(vocab_size=VOCABULARY, max_position_embeddings=1 << 15, hidden_size=16)
    tiny.SHAPES[family] = {**tiny.SHAPES[family], "num_hidden_layers": layers}
    tiny.VOCAB = VOCABULARY
    model = tiny.make_model(family)
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    return FAMILIES[family](model, family, 1 << 15)


def ordered(texts: Texts) -> list[list[int]]:
    """Token ids of prompts in the order in which `submit` puts them into the queue."""
    rows = [
        JobSpec(index=i, custom_id=str(i), line=i + 1, endpoint="/v1/completions", prompts=[text])
        for i, text in enumerate(texts)
    ]
    known: dict[str, int] = {}
    shards = plan(rows).shards("b")
    return [
        [known.setdefault(piece, len(known)) for piece in _PIECE.findall(texts[row.index])]
        for shard in shards
        for row in shard.rows
    ]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def gsm8k(data: Path, rows: int) -> Texts:
    """8 worked examples before each question."""
    shots = list(lines(data / "gsm8k" / "train.jsonl"))[:8]
    head = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots)
    test = list(lines(data / "gsm8k" / "test.jsonl"))[:rows]
    return [f"{head}Question: {t['question']}\nAnswer:" for t in test]


def gsm8k_n10(data: Path, rows: int) -> Texts:
    """The same, ten samples of each."""
    return [text for text in gsm8k(data, rows) for _ in range(10)]


def bbh(data: Path, rows: int) -> Texts:
    """3 worked examples of the task before each question; tasks shuffled."""
    texts = []
    for path in sorted((data / "bbh" / "bbh").glob("*.json")):
        prompt = (data / "bbh" / "cot-prompts" / f"{path.stem}.txt").read_text("utf-8")
        head = prompt.partition("-----\n")[2].strip()
        texts += [
            f"{head}\n\nQ: {example['input']}\nA: Let's think step by step."
            for example in json.loads(path.read_text("utf-8"))["examples"]
        ]
    np.random.default_rng(0).shuffle(texts)
    return texts[:rows]


def nq(data: Path, rows: int) -> Texts:
    """5 answered questions before each question."""
    found = list(lines(data / "nq_open" / "NQ-open.dev.jsonl"))
    head = "".join(f"Q: {q['question']}?\nA: {q['answer'][0]}\n\n" for q in found[:5])
    return [f"{head}Q: {q['question']}?\nA:" for q in found[5 : 5 + rows]]


SETS = {"gsm8k": gsm8k, "gsm8k_n10": gsm8k_n10, "bbh": bbh, "nq": nq}


if __name__ == "__main__":
    main()
