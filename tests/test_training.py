"""The trainers: blocks see what they may, early rows weigh more, and losses go down."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from dflash_batch.decoder.training.corpus import Rows, Turn, pad_turns
from dflash_batch.decoder.training.draft import (
    Draft,
    DraftConfig,
    context_mask,
    load_draft,
    rotate,
    save_draft,
)
from dflash_batch.decoder.training.features import FrozenTarget
from dflash_batch.decoder.training.fit import FitSettings
from dflash_batch.decoder.training.measure import dflash_greedy, plain_greedy, tokens_per_cycle
from dflash_batch.decoder.training.objective import (
    block_labels,
    draw_anchors,
    row_weights,
    train_draft,
)
from dflash_batch.decoder.training.target import (
    build_target,
    own_replies,
    target_config,
    train_target,
)

END, MASK, VOCAB = 2, 3, 32
BLOCK = 6


def small_target(seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """A random three-layer target whose argmax is decided."""
    mx.random.seed(seed)
    config = target_config(
        VOCAB,
        END,
        0,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
    )
    model: Any = build_target(config)
    model.load_weights(
        [
            (k, mx.random.normal(v.shape) * 0.3)
            for k, v in dict(tree_flatten(model.parameters())).items()
        ]
    )
    return model, config


def small_draft(config: dict[str, Any], seed: int = 1) -> tuple[Draft, DraftConfig]:
    mx.random.seed(seed)
    draft_config = DraftConfig.for_target(
        config, layers=2, taps=(0, 2), mask_token_id=MASK, block_size=BLOCK
    )
    return Draft(draft_config), draft_config


def test_a_block_sees_the_context_strictly_before_its_anchor() -> None:
    anchors = [[0, 1, 7], [3, 3, 9]]

    mask = np.array(context_mask(mx.array(anchors), 10))

    for row, of_row in enumerate(anchors):
        for block, anchor in enumerate(of_row):
            assert mask[row, block].tolist() == [place < anchor for place in range(10)]


def test_many_blocks_at_once_equal_each_block_alone_behind_a_cut_context() -> None:
    """The mask of training is the situation of decoding: no later feature, no other block."""
    _, config = small_target()
    draft, _ = small_draft(config)
    blocks = mx.random.normal((2, 3, BLOCK, 32))
    features = mx.random.normal((2, 12, 64))
    anchors = [[1, 4, 9], [2, 3, 11]]

    together = np.array(draft(blocks, mx.array(anchors), features))

    for row, of_row in enumerate(anchors):
        for block, anchor in enumerate(of_row):
            alone = draft(
                blocks[row : row + 1, block : block + 1],
                mx.array([[anchor]]),
                features[row : row + 1, :anchor],
            )
            np.testing.assert_allclose(together[row, block], np.array(alone)[0, 0], atol=2e-5)


def test_every_row_of_a_block_sees_the_whole_block() -> None:
    _, config = small_target()
    draft, _ = small_draft(config)
    blocks = mx.random.normal((1, 1, BLOCK, 32))
    features, anchors = mx.random.normal((1, 5, 64)), mx.array([[4]])
    before = np.array(draft(blocks, anchors, features))

    blocks[0, 0, -1] = mx.random.normal((32,))

    assert (np.abs(np.array(draft(blocks, anchors, features)) - before).max(axis=-1) > 1e-6).all()


def test_rotation_is_that_of_mlx_at_any_position() -> None:
    x = mx.random.normal((1, 5, 2, 8))

    ours = rotate(x, mx.arange(5)[None] + 13, 10000.0)
    theirs = mx.fast.rope(
        x.swapaxes(1, 2), 8, traditional=False, base=10000.0, scale=1.0, offset=13
    ).swapaxes(1, 2)

    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-5)


@given(
    marks=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4),
    count=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_anchors_are_drawn_from_where_two_tokens_are_supervised(
    marks: list[list[bool]], count: int, seed: int
) -> None:
    anchors, real = draw_anchors(np.array(marks), count, np.random.default_rng(seed))

    for row, of_row in enumerate(marks):
        possible = {i for i in range(8) if of_row[i] and of_row[i + 1]}
        drawn = anchors[row][real[row]].tolist()
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= possible
        assert len(drawn) == min(count, len(possible))


def test_labels_are_the_tokens_at_the_rows_own_places() -> None:
    rng = np.random.default_rng(0)
    tokens, supervised = rng.integers(0, VOCAB, (2, 9)), rng.random((2, 9)) < 0.7
    anchors, real = np.array([[0, 5], [3, 8]]), np.array([[True, True], [False, True]])

    labels, counts = block_labels(
        mx.array(tokens), mx.array(supervised), mx.array(anchors), mx.array(real), block=4
    )

    for row, block, o in np.ndindex(2, 2, 4):
        place = anchors[row, block] + o
        expected = place < 9 and o > 0 and real[row, block] and supervised[row, place]
        assert counts[row, block, o].item() == bool(expected)
        if place < 9:
            assert labels[row, block, o].item() == tokens[row, place]


def test_weights_fall_from_the_first_drafted_row() -> None:
    weights = np.array(row_weights(5, 4.0))

    np.testing.assert_allclose(weights, [0, *(math.exp(-o / 4) for o in range(4))], rtol=1e-6)


def test_taps_are_what_leaves_the_layers() -> None:
    model, _ = small_target()
    tokens = mx.array([[5, 9, 4, 7]])
    tapped = FrozenTarget(model, (0, 2)).tap(tokens)

    first = model.model.layers[0](model.model.embed_tokens(tokens), "causal", None)
    np.testing.assert_allclose(
        np.array(tapped.features[..., :32]), np.array(first), atol=1e-4, rtol=1e-4
    )
    hidden = model.model.norm(tapped.features[..., 32:])
    np.testing.assert_allclose(np.array(hidden), np.array(tapped.hidden), atol=1e-5)


def test_own_replies_are_the_greedy_ones() -> None:
    model, _ = small_target(3)
    rng = np.random.default_rng(1)
    turns = [
        Turn(rng.integers(4, VOCAB, 5).astype(np.int32), rng.integers(4, VOCAB, 6).astype(np.int32))
        for _ in range(6)
    ]

    own, settled = own_replies(model, pad_turns(turns, 24), END, rounds=24)

    for turn, tokens, supervised, done in zip(
        turns, own.tokens, own.supervised, settled, strict=True
    ):
        plain = plain_greedy(model, turn.asked.tolist(), END, 19)
        assert tokens[supervised].tolist() == plain
        assert done == (END in plain)


def test_a_small_target_learns_to_copy() -> None:
    _, config = small_target()
    mx.random.seed(4)
    model = build_target(config)

    losses = train_target(model, copying(8), quick(48), report=quiet)

    assert losses[-1] < 0.9 * losses[0]


def test_a_draft_learns_its_targets_text_and_changes_no_token(tmp_path: Path) -> None:
    model, config = small_target(3)
    draft, draft_config = small_draft(config)
    rng = np.random.default_rng(0)
    asked = rng.integers(4, VOCAB, (4, 5)).astype(np.int32)
    turns = [Turn(a, np.array(plain_greedy(model, a.tolist(), END, 19), np.int32)) for a in asked]
    rows, target = pad_turns(turns, 24), FrozenTarget(model, (0, 2))
    fresh = tokens_per_cycle(draft, target, draft_config, rows)

    losses = train_draft(
        draft, draft_config, target, forever(rows), quick(100), anchors_per_token=0.5, report=quiet
    )
    save_draft(draft, draft_config, tmp_path)
    read, read_config = load_draft(tmp_path)

    assert losses[-1] < 0.7 * losses[0]
    walked = tokens_per_cycle(read, target, read_config, rows)
    assert walked > fresh
    assert read_config == draft_config
    cycles = emitted = 0
    for turn in turns:
        run = dflash_greedy(model, read, read_config, turn.asked.tolist(), END, len(turn.reply))
        assert run.tokens == turn.reply.tolist()
        cycles, emitted = cycles + run.cycles, emitted + len(run.tokens) - 1
    assert emitted / cycles == pytest.approx(walked, rel=0.15)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    plan = FitSettings(steps=100, peak_rate=1.0, warm_up=0.1)

    assert plan.rate(0.05) == pytest.approx(0.5)
    assert plan.rate(0.1) == pytest.approx(1.0)
    assert plan.rate(1.0) == pytest.approx(0.0)
    assert plan.rate(1.5) == pytest.approx(0.0)


def quick(steps: int) -> FitSettings:
    return FitSettings(steps=steps, peak_rate=5e-3, report_every=steps // 4)


def quiet(line: str) -> None:
    assert "loss=" in line


def forever(rows: Rows) -> Iterator[Rows]:
    while True:
        yield rows


def copying(rows: int) -> Iterator[tuple[mx.array, ...]]:
    """Rows whose second half repeats the first."""
    rng = np.random.default_rng(2)
    half: NDArray[np.int32] = rng.integers(4, 12, (rows, 6)).astype(np.int32)
    supervised = np.arange(12) >= 6
    while True:
        tokens = np.concatenate((half, half), axis=1)
        yield mx.array(tokens), mx.array(np.broadcast_to(supervised, tokens.shape))
