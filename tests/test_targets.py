"""Our layer loops against the models they are made of: bit-equal in float32 on the CPU backend."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from tiny import MODELS, as_target, make_model, make_target

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.cycle import Slots
from dflash_batch.decoder.drafters import NoDrafter


@pytest.mark.parametrize("name", MODELS)
def test_own_loop_equals_the_model(name: str) -> None:
    model = make_model(name)
    target = as_target(model, name)
    tokens = mx.array(np.random.default_rng(0).integers(0, 48, size=(3, 21)).astype(np.int32))
    lens = Lens(3)
    arena = target.new_arena(lens)

    lens.open(21)
    ours = target.logits(target.forward(tokens, arena, ()).hidden)

    assert mx.array_equal(ours, model(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_taps_are_the_residual_stream_leaving_a_layer(name: str) -> None:
    model = make_model(name)
    target = as_target(model, name)
    tokens = mx.array([[5, 6, 7, 8]])
    slots = Slots(1, target, NoDrafter())
    slots.lens.open(4)

    seen = target.forward(tokens, slots.arena, (target.layers - 1, 1))

    # The stream leaving the last layer is what the final norm reads; the others come from a
    # model cut off behind them.
    assert seen.features is not None
    assert mx.array_equal(seen.features[..., :32], seen.hidden)
    stack = getattr(model, "language_model", model).model
    stack.layers = stack.layers[:2]
    stack.norm.weight = mx.ones(32)
    cut = mx.fast.rms_norm(seen.features[..., 32:], mx.ones(32), 1e-6)
    assert mx.array_equal(cut, stack(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_equal_each_row_alone(name: str) -> None:
    target = make_target(name)
    random = np.random.default_rng(1)
    lengths = [1, 30, 7]
    texts = [random.integers(0, 48, size=n + 6).astype(np.int32) for n in lengths]

    together = Slots(3, target, NoDrafter())
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        alone = Slots(1, target, NoDrafter())
        alone.lens.open(n)
        target.forward(mx.array(text[None, :n]), alone.arena, ())
        alone.arena.commit(mx.array([n]))
        together.arena.load(row, alone.arena.snapshot(0, n))
        together.lens.place(row, n)
    together.lens.bound = 30
    together.lens.open(6)
    blocks = mx.array(np.stack([text[-6:] for text in texts]))
    ours = target.logits(target.forward(blocks, together.arena, ()).hidden)

    for row, text in enumerate(texts):
        alone = Slots(1, target, NoDrafter())
        for at, token in enumerate(text.tolist()):
            alone.lens.bound = at
            alone.lens.open(1)
            logits = target.logits(target.forward(mx.array([[token]]), alone.arena, ()).hidden)
            alone.arena.commit(mx.array([1]))
            alone.lens.advance(mx.array([1]))
            if at >= lengths[row]:
                assert mx.array_equal(logits[0, 0], ours[row, at - lengths[row]])
