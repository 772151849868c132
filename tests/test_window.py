"""Sliding layers forget what has left the window, and nobody can tell."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import OracleDrafter, finish, greedy, make_decoder, make_model, make_target, request

from dflash_batch.decoder import arena
from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.window import WindowArena

NAMES = ("gemma4_text", "gemma4")
STEP = 8
WINDOW = 6


@pytest.fixture(autouse=True)
def small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in small steps, so that a short text is shifted many times."""
    monkeypatch.setattr(arena, "CPU_STEP", STEP)


def run(target: Any, memory: WindowArena, tokens: mx.array, keep: mx.array) -> mx.array:
    memory.lens.bound = int(memory.lens.offset.max().item())  # type: ignore[arg-type]
    memory.lens.open(tokens.shape[1])
    logits: mx.array = target.logits(target.forward(tokens, memory, ()).hidden)
    memory.commit(keep)
    memory.lens.advance(keep)
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_whole_text_at_every_place(name: str) -> None:
    """Three rows move on by 0 to 5 of 5 tokens a time, the rest of each block being wrong."""
    target: Any = make_target(name)
    random = np.random.default_rng(0)
    texts = random.integers(0, 48, size=(3, 150)).astype(np.int32)
    lens = Lens(3)
    whole = target.new_arena(lens)
    expected = np.array(run(target, whole, mx.array(texts), mx.array([0, 0, 0])))

    memory = target.new_arena(Lens(3))
    at = np.zeros(3, dtype=np.int64)
    widest = 0
    while at.min() < 140:
        keep = np.where(at < 140, random.integers(0, 6, size=3), 0)
        block = random.integers(0, 48, size=(3, 5)).astype(np.int32)
        for row, n in enumerate(keep):
            block[row, :n] = texts[row, at[row] : at[row] + n]
        logits = np.array(run(target, memory, mx.array(block), mx.array(keep.astype(np.int32))))
        for row, n in enumerate(keep):
            assert np.array_equal(logits[row, :n], expected[row, at[row] : at[row] + n])
        at += keep
        widest = max(widest, memory.window.columns)

    assert widest <= WINDOW + 3 * STEP + 5 + STEP
    full, near = memory.layers[target._sliding.index(False)], memory.layers[0]
    assert full.keys.shape[2] >= 140
    assert near.keys.shape[2] == widest


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_holds_the_window_and_goes_on_in_any_row(name: str) -> None:
    target: Any = make_target(name)
    text = np.random.default_rng(1).integers(0, 48, size=(1, 100)).astype(np.int32)
    alone = target.new_arena(Lens(1))
    for start in range(0, 90, 30):
        run(target, alone, mx.array(text[:, start : start + 30]), mx.array([30]))
    snapshot = alone.snapshot(0, 90)
    expected = run(target, alone, mx.array(text[:, 90:]), mx.array([0]))

    memory = target.new_arena(Lens(2))
    for _ in range(30):  # what was in the row before does not matter
        run(target, memory, mx.array([[1, 2], [3, 4]]), mx.array([2, 2]))
    memory.load(1, snapshot)
    memory.lens.place(1, 90)
    memory.lens.place(0, 0)
    got = run(target, memory, mx.array(np.repeat(text[:, 90:], 2, axis=0)), mx.array([0, 0]))
    cold = run(target, target.new_arena(Lens(1)), mx.array(text[:, 90:]), mx.array([0]))

    assert snapshot.layers[0][0].shape[2] <= WINDOW + STEP
    assert mx.array_equal(got[1], expected[0])
    assert mx.array_equal(got[0], cold[0])
    with pytest.raises(AssertionError):
        snapshot.first(89)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_speculative_equals_plain_over_many_windows(name: str, rows: int) -> None:
    model = make_model(name)
    random = np.random.default_rng(2)
    prompts = [[i, *random.integers(0, 48, size=n).tolist()] for i, n in enumerate((2, 50, 20))]
    expected = [greedy(model, prompt, 60) for prompt in prompts]
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    oracle = OracleDrafter(texts, 6, 0.2, seed=0)
    decoder = make_decoder(make_target(name), oracle, max_batch=rows)
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 60))

    done = finish(decoder)

    assert [list(done[i].token_ids) for i in range(3)] == expected
