"""`draft eval`: τ by the engine equals τ by running the draft along the greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cli_tools import invoke, write_lines
from mlx_lm.utils import load_model
from test_vectors import FOLDER
from tiny import greedy

from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.training.draft import load_draft
from dflash_batch.decoder.training.evaluate import Tally, predicted
from dflash_batch.decoder.training.features import FrozenTarget
from dflash_batch.decoder.types import Completion

PAIR = FOLDER / "dflash-qwen3-tiny"
TARGET, DRAFT = PAIR / "target", PAIR / "draft-b8"
LENGTH = 40
STOP = 62  # of the target


def seen_prompts() -> list[list[int]]:
    """Prompts like those the tiny draft was trained on, and others."""
    cases = json.loads((DRAFT / "expected" / "cases.json").read_text())
    return [list(case["prompt"]) for case in cases][:4]


def along_the_text(prompts: list[list[int]]) -> tuple[float, list[float]]:
    """τ and how often drafts stand by position, cycle by cycle: nothing here is the engine's."""
    model: Any = load_model(TARGET)[0]
    model.set_dtype(mx.float32)
    draft, config = load_draft(DRAFT)
    target = FrozenTarget(model, config.target_layer_ids)
    block, emitted, cycles = config.block_size, 0, 0
    tried, stood = np.zeros(block - 1), np.zeros(block - 1)
    for prompt in prompts:
        reply = greedy(model, prompt, LENGTH)
        text = prompt + (reply[: reply.index(STOP) + 1] if STOP in reply else reply)
        features = target.features(mx.array([text]))
        anchor = len(prompt)
        while anchor < len(text) - 1:
            left = len(text) - 1 - anchor
            # A block is no longer than what a row may still emit; it does not know where it ends.
            size = min(block, len(prompt) + LENGTH - anchor)
            tokens = mx.array([[[text[anchor]] + [config.mask_token_id] * (size - 1)]])
            place = mx.array([[anchor]])
            hidden = draft(target.embed(tokens), place, features[:, :anchor])
            drafts = np.array(mx.argmax(target.head(hidden[0, 0, 1:]), axis=-1)).tolist()
            right = np.cumprod([d == t for d, t in zip(drafts, text[anchor + 1 :], strict=False)])
            tried[: len(right)] += 1
            stood[: len(right)] += right
            step = min(int(right.sum()) + 1, left)
            anchor, emitted, cycles = anchor + step, emitted + step, cycles + 1
    return emitted / cycles, (stood / tried).tolist()


def test_tau_by_the_engine_is_tau_along_the_greedy_text(tmp_path: Path) -> None:
    prompts = seen_prompts()
    lines = [
        {"prompt": prompts[0], "kind": "even"},
        {"custom_id": "b", "body": {"prompt": prompts[1]}, "category": "odd"},
        {"custom_id": "c", "body": {"prompt": prompts[2]}, "metadata": {"kind": "even"}},
        {"prompt": prompts[3], "category": "odd"},
    ]
    file = write_lines(tmp_path / "p.jsonl", lines)
    options = ["--dtype", "float32", "--max-tokens", LENGTH, "--json", "--home", tmp_path / "home"]

    result = invoke("draft", "eval", "-m", TARGET, "--draft", DRAFT, "--prompts", file, *options)

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    tau, stands = along_the_text(prompts)
    assert tau > 1.2
    assert report["tau"] == pytest.approx(tau, rel=0.02)
    assert report["stands_by_position"] == pytest.approx(stands, abs=0.02)
    assert report["rows"] == len(prompts)
    assert {kind: part["rows"] for kind, part in report["kinds"].items()} == {"even": 2, "odd": 2}
    assert sum(part["cycles"] for part in report["kinds"].values()) == report["cycles"]
    assert report["speedups"] == []


def test_a_screen_for_people(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": seen_prompts()[0], "kind": "one"}])
    options = ["--dtype", "float32", "--max-tokens", 12, "--home", tmp_path / "home", "-q"]

    result = invoke("draft", "eval", "-m", TARGET, "--draft", DRAFT, "--prompts", file, *options)

    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    heads, whole, kind = (line.split() for line in result.stdout.splitlines()[1:4])
    assert heads[:4] == ["prompts", "tokens", "cycles", "τ"]
    assert kind[0] == "one"
    assert kind[1:] == whole[1:]
    assert "dflash-batch bench" in result.stdout


def test_positions_behind_the_end_of_a_text_are_not_counted() -> None:
    tally = Tally()
    tally.add(done([9, 1, 2, 3, 4], [(1, 2, 8), (4, 5, 6)], [3, 1]))

    report = tally.report()

    assert (report["tokens"], report["cycles"], report["tau"]) == (4, 2, 2.0)
    # first cycle: 1 2 right, 8 wrong; second: 4 right, and there the text ends
    assert report["stands_by_position"] == [1.0, 1.0, 0.0]
    assert tally.tried == [2, 1, 1]


def test_the_gain_is_what_the_costs_say() -> None:
    table = CostTable()
    assert predicted(table, 8, 3.0, 128) == []
    for rows in (1, 4):
        table.forward.put(rows, 1, 128, 1e-3)
        table.forward.put(rows, 8, 128, 1.5e-3 * rows)
        table.draft.put(rows, 8, 128, 0.5e-3)

    gains = {gain["rows"]: gain["speedup"] for gain in predicted(table, 8, 3.0, 128)}

    assert gains[1] == pytest.approx(3.0 / 2.0, rel=0.02)
    assert gains[4] == pytest.approx(3.0 / 6.5, rel=0.02)


def test_no_draft_is_an_error(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": [1, 2]}])

    result = invoke("draft", "eval", "-m", TARGET, "--draft", "none", "--prompts", file, "-q")

    assert result.exit_code == 4
    assert "no draft to measure" in result.stderr


def done(tokens: list[int], drafts: list[tuple[int, ...]], emitted: list[int]) -> Completion:
    """A finished row of these cycles."""
    return Completion(
        uid=0,
        token_ids=tuple(tokens),
        text="",
        finish_reason="length",
        prompt_tokens=1,
        prefill_tokens=1,
        cached_tokens=0,
        cycles=len(drafts),
        draft_tokens=0,
        accepted_tokens=0,
        batch_width=1,
        wait_ms=0.0,
        prefill_ms=0.0,
        ttft_ms=0.0,
        decode_ms=0.0,
        emitted_per_cycle=tuple(emitted),
        drafted_per_cycle=tuple(drafts),
    )
