"""`draft train`: the target's own texts, batches, and a run that goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cli_tools import invoke, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from test_loading import save
from test_vectors import FOLDER
from tiny import finish, greedy, make_decoder, make_model, make_target, request

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.errors import DecoderError
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.training import objective
from dflash_batch.decoder.training.batches import LENGTHS, Batches
from dflash_batch.decoder.training.choices import default_taps
from dflash_batch.decoder.training.draft import DraftConfig, load_draft
from dflash_batch.decoder.training.features import FrozenTarget, TappedTarget
from dflash_batch.decoder.training.fit import FitSettings, Fitting
from dflash_batch.decoder.training.order import Order
from dflash_batch.decoder.training.replies import TEMPERATURE, Wish, replies
from dflash_batch.decoder.training.texts import Prompt, Text, TextFile, without_loop
from dflash_batch.decoder.training.train import train
from dflash_batch.decoder.types import LoadSpec, Sampling

PAIR = FOLDER / "dflash-qwen3-tiny"
TARGET, DRAFT = PAIR / "target", PAIR / "draft-b8"
SMALL: dict[str, Any] = {
    "width": 8,
    "max_tokens": 24,
    "batch_tokens": 256,
    "dtype": "float32",
    "layers": 1,
    "block": 4,
}


def some_prompts(count: int, vocab: int = 48, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count).tolist()
    return [Prompt(i, rng.integers(1, vocab, n).tolist(), None, None) for i, n in enumerate(sizes)]


def prompt_file(folder: Path, count: int = 24) -> Path:
    lines = [
        {"prompt": prompt.tokens, "kind": "ab"[prompt.name % 2]} for prompt in some_prompts(count)
    ]
    return write_lines(folder / "prompts.jsonl", lines)


# Texts


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "qwen3_5"])
def test_replies_are_the_targets_greedy_ones_whatever_the_wave(name: str) -> None:
    model, target, prompts = make_model(name), make_target(name), some_prompts(7)
    wish = Wish(max_tokens=18, width=3, seed=1)

    found = [t for texts in replies(target, prompts, frozenset(), wish, set()) for t in texts]

    assert sorted(text.name for text in found) == list(range(7))
    for text in found:
        assert text.reply == greedy(model, text.prompt, 18)


def test_replies_end_with_their_first_stop_token_and_those_at_hand_are_not_made_again() -> None:
    model, target, prompts = make_model("llama"), make_target("llama"), some_prompts(12)
    whole = {p.name: greedy(model, p.tokens, 30) for p in prompts}
    stops = frozenset(whole[0][4:6] + whole[1][:1])
    wish = Wish(max_tokens=30, width=12, seed=0)

    found = [t for texts in replies(target, prompts, stops, wish, {(3, 0)}) for t in texts]

    assert {text.name for text in found} == set(range(12)) - {3}
    for text in found:
        tokens = whole[text.name]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), 30)
        assert text.reply == tokens[:end]


def test_further_replies_are_drawn_as_the_engine_draws_them() -> None:
    target, prompts = make_target("llama"), some_prompts(3)
    wish = Wish(max_tokens=12, width=2, seed=5, samples=2)
    found = [t for texts in replies(target, prompts, frozenset(), wish, set()) for t in texts]
    decoder = make_decoder(target, NoDrafter())
    for p in prompts:
        drawn = Sampling(TEMPERATURE, seed=5 + p.name, choice=1)
        decoder.add(request(p.name, p.tokens, 12, sampling=drawn))

    engine = finish(decoder)

    drawn_texts = [text for text in found if text.sample == 1]
    assert len(drawn_texts) == 3
    for text in drawn_texts:
        assert tuple(text.reply) == engine[text.name].token_ids


def test_a_line_cut_off_by_a_kill_is_dropped_and_the_file_goes_on(tmp_path: Path) -> None:
    file, a, b = TextFile(tmp_path / "t.jsonl"), Text(0, 0, [1], [2, 3]), Text(1, 0, [4], [5], "k")
    file.add([a])
    with file.path.open("ab") as raw:
        raw.write(b'{"name": 7, "sam')

    again = TextFile(file.path)
    again.add([b])

    assert again.texts == TextFile(file.path).texts == [a, b]
    assert again.done == {(0, 0), (1, 0)}
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_loop_is_cut_where_it_has_been_seen_often_enough() -> None:
    loop = [1, 2, 3, 4, 5, 6, 7, 8]

    assert without_loop([9, *loop * 6]) == [9, *loop * 4]
    assert without_loop(list(range(100))) == list(range(100))


# Batches


@given(
    sizes=st.lists(st.tuples(st.integers(1, 700), st.integers(2, 500)), min_size=1, max_size=40),
    tokens=st.integers(64, 4096),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_a_pass_has_every_text_in_batches_of_few_shapes(
    sizes: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    texts = [Text(i, 0, [i + 1] * p, [i + 1] * r) for i, (p, r) in enumerate(sizes)]
    batches, again = Batches(texts, tokens, seed), Batches(texts, tokens, seed)
    seen: set[int] = set()

    for step in range(batches.per_epoch):
        batch = batches.at(step)
        rows, length = batch.tokens.shape
        assert length in LENGTHS
        assert rows == 1 or rows * length <= tokens
        seen |= set(batch.tokens[:, 0].tolist())
        places = np.take_along_axis(batch.supervised, batch.anchors, axis=1)
        assert places[batch.real].all()
    last = batches.per_epoch - 1

    assert seen == {i + 1 for i in range(len(texts))}
    for ours, theirs in zip(batches.at(last), again.at(last), strict=True):
        assert (ours == theirs).all()


def test_the_loss_in_pieces_is_cross_entropy_and_has_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objective, "PIECE", 5)
    mx.random.seed(0)
    head = nn.Linear(6, 11)
    hidden, weights = mx.random.normal((13, 6)), mx.random.uniform(shape=(13,))
    labels = mx.random.randint(0, 11, (13,))

    def whole(x: mx.array) -> mx.array:
        return (nn.losses.cross_entropy(head(x), labels) * weights).sum()

    def pieces(x: mx.array) -> mx.array:
        return objective.cross_entropy(head, mx.tanh(x), labels, weights)

    value, gradient = mx.value_and_grad(pieces)(hidden)
    expected, slope = mx.value_and_grad(lambda x: whole(mx.tanh(x)))(hidden)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(np.array(gradient), np.array(slope), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_features_by_the_decoders_forward_are_those_of_mlx_lm(name: str) -> None:
    tokens = mx.random.randint(1, 48, (2, 9))
    ours = TappedTarget(make_target(name), (0, 2)).features(tokens)
    theirs = FrozenTarget(make_model(name), (0, 2)).features(tokens)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4, rtol=1e-4)


def test_masters_stay_float32_when_the_loss_is_computed_in_bfloat16() -> None:
    model = nn.Linear(4, 4)
    seen: list[mx.Dtype] = []

    def loss(x: mx.array) -> mx.array:
        seen.append(model.weight.dtype)
        return model(x).astype(mx.float32).square().sum()

    fitting = Fitting(model, loss, FitSettings(steps=1), mx.bfloat16)
    before = np.array(model.weight)
    fitting.step(1e-4, mx.ones((2, 4), mx.bfloat16))

    assert seen == [mx.bfloat16]
    assert model.weight.dtype == mx.float32
    change = np.abs(np.array(model.weight) - before)
    assert 0 < change.max() < 2e-4  # too little for bfloat16 to show at weights like these


def test_default_taps_lie_inside_the_target() -> None:
    assert default_taps(30) == (1, 8, 14, 20, 27)
    assert default_taps(36) == (1, 9, 17, 25, 33)
    for layers in range(1, 12):
        taps = default_taps(layers)
        assert list(taps) == sorted(set(taps))
        assert taps[0] >= 0
        assert taps[-1] < layers


# Whole runs


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "qwen3_moe-4bit"])
def test_a_draft_of_any_family_is_trained_and_loads(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    save(make_model(name), name, folder)
    order = Order(
        str(folder), str(prompt_file(tmp_path, 6)), str(tmp_path / "out"), steps=2, **SMALL
    )

    word = train(order, lambda word: None, lambda: True)

    assert word["result"]["steps"] == 2
    spec = LoadSpec(str(folder), draft=str(tmp_path / "out"), dtype="float32")
    decoder = load_decoder(spec)
    decoder.add(request(0, [1, 2, 3], 8))
    plain = load_decoder(LoadSpec(str(folder), draft="none", dtype="float32"))
    plain.add(request(0, [1, 2, 3], 8))
    assert finish(decoder)[0].token_ids == finish(plain)[0].token_ids
    assert decoder.info.block == 4


def begin(order: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_batch.decoder.training.train"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return process


def words(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    last = list(words(process))[-1]
    assert process.wait(60) == 0
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    return last


def test_a_killed_run_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    def order(out: str) -> dict[str, Any]:
        folder = str(tmp_path / out)
        values = {"target": str(TARGET), "prompts": str(prompts), "out": folder, **SMALL}
        return {**values, "steps": 12, "checkpoint_s": 0.0}

    prompts = prompt_file(tmp_path)
    process = begin(order("killed"))
    for word in words(process):
        if word.get("checkpoint", 0) >= 4:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    assert not (tmp_path / "killed" / "model.safetensors").exists()

    second = begin(order("killed"))
    first = next(word["checkpoint"] for word in words(second) if "checkpoint" in word)
    went_on = end(second)
    whole = train(Order(**order("whole")), lambda word: None, lambda: True)

    assert first >= 5
    assert went_on["result"]["steps"] == 12
    assert went_on["result"]["tau"] == whole["result"]["tau"]
    ours, theirs = (
        (tmp_path / out / "model.safetensors").read_bytes() for out in ("killed", "whole")
    )
    assert ours == theirs


def test_a_run_ends_with_a_checkpoint_when_whoever_asked_is_gone(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path)
    values = {"target": str(TARGET), "prompts": str(prompts), "out": str(tmp_path / "out")}
    process = begin({**values, **SMALL, "steps": 100_000})
    assert process.stdin is not None
    for word in words(process):
        if word.get("phase") == "training":
            process.stdin.close()
            break

    last = list(words(process))[-1]

    assert process.wait(60) == 0
    assert last["stopped"]["phase"] == "training"
    assert (tmp_path / "out" / "work" / "checkpoint.safetensors").exists()
    assert process.stdout is not None
    process.stdout.close()


def test_train_from_a_public_draft_by_the_command_line(tmp_path: Path) -> None:
    prompts, out = prompt_file(tmp_path), tmp_path / "out"
    options = ["--dtype", "float32", "--max-tokens", 24, "--batch-tokens", 256]
    command = ["draft", "train", "-m", TARGET, "--prompts", prompts, "-o", out, *options]

    result = invoke(*command, "--init", DRAFT, "--steps", 30, "--lr", "2e-3", "--json")

    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["block"] == 8
    assert facts["steps"] == 30
    _, config = load_draft(out)
    assert config == DraftConfig.load(DRAFT)
    card = (out / "README.md").read_text()
    assert f"{facts['tau']:.2f} (before: {facts['first_tau']:.2f})" in card
    assert facts["texts_sha256"] in card


def test_trained_on_some_texts_a_draft_gets_better_at_them(tmp_path: Path) -> None:
    """Eight prompts, repeated, so that the held-out ones are like the others."""
    lines = [{"prompt": prompt.tokens} for prompt in some_prompts(4)] * 6
    prompts = write_lines(tmp_path / "p.jsonl", lines)
    order = Order(
        str(TARGET),
        str(prompts),
        str(tmp_path / "out"),
        init=str(DRAFT),
        steps=60,
        lr=3e-3,
        **{**SMALL, "layers": None, "block": None},
    )

    facts = train(order, lambda word: None, lambda: True)["result"]

    assert facts["tau"] > facts["first_tau"] + 0.5


def test_ctrl_c_keeps_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dflash_batch.cli.main", "draft", "train", "-m", str(TARGET)),
            *("--prompts", str(prompts), "-o", str(tmp_path / "out"), "--steps", "100000"),
            *("--max-tokens", "24", "--batch-tokens", "256", "--dtype", "float32"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "training" in line:
            process.send_signal(signal.SIGINT)
            break

    rest = process.stderr.read()

    assert process.wait(60) == 130
    assert "The same command goes on" in rest
    assert (tmp_path / "out" / "work" / "checkpoint.safetensors").exists()
    process.stderr.close()


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path, 4)
    bad = write_lines(tmp_path / "bad.jsonl", ["{", {"prompt": "x", "tools": []}])
    base = ["draft", "train", "-m", TARGET, "-o"]

    spoiled = invoke(*base, tmp_path / "a", "--prompts", bad)
    missing = invoke(*base, tmp_path / "a", "--prompts", tmp_path / "none.jsonl")
    model = invoke(*base, DRAFT, "--prompts", prompts)

    assert spoiled.exit_code == 3
    assert "line 1" in spoiled.stderr
    assert missing.exit_code == 4
    assert model.exit_code == 2
    assert "holds a model already" in model.stderr


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    prompts, out = str(prompt_file(tmp_path, 4)), str(tmp_path / "out")
    plain = Order(str(TARGET), prompts, out, steps=1, **{**SMALL, "layers": None, "block": None})

    def trouble(**changes: Any) -> str:
        with pytest.raises(DecoderError) as caught:
            train(replace(plain, **changes), lambda word: None, lambda: True)
        return str(caught.value)

    assert "sliding layers" in trouble(init=str(PAIR / "draft-b8-swa"), out=out + "1")
    assert "has block 8; it cannot become 4" in trouble(init=str(DRAFT), block=4, out=out + "2")
    assert "mask token 64 is outside" in trouble(mask_token=64, out=out + "3")
    train(plain, lambda word: None, lambda: True)
    assert "was begun with another seed (0, now 7)" in trouble(seed=7)
