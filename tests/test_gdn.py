"""GatedDeltaNet rows: the recurrence itself, and what is left after a ragged commit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import (
    OracleDrafter,
    as_target,
    finish,
    greedy,
    make_decoder,
    make_model,
    make_target,
    request,
)

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.delta_rule import Chunk, Rule, Steps
from dflash_batch.decoder.gdn import DeltaLayer

UNITS = Path(__file__).parent / "vectors" / "units"
KEEP = [0, 1, 3, 8, 5]


@pytest.mark.parametrize("rule", [Steps(), Chunk()], ids=["steps", "chunk"])
@pytest.mark.parametrize("name", ["gdn_tiny", "gdn_small"])
def test_outputs_states_and_windows_are_those_expected(name: str, rule: Rule) -> None:
    """Nine rows run the same eight tokens, and row n keeps n of them."""
    unit: Any = mx.load(str(UNITS / f"{name}.safetensors"))
    lens = Lens(9)
    layer = DeltaLayer(unit_module(unit), lens, mx.float32, rule)
    for row in range(9):
        layer.load(row, unit["conv_state0"], unit["state0"])

    out = layer(mx.zeros((9, 8, 1)))
    layer.commit(mx.arange(9, dtype=mx.int32))

    expected = unit["outputs"].reshape(1, 8, -1)
    assert mx.allclose(out, mx.broadcast_to(expected, out.shape), rtol=0, atol=1e-6)
    assert mx.array_equal(layer.state[0], unit["state0"][0])
    assert mx.array_equal(layer.window[0], unit["conv_state0"][0])
    for n in range(1, 9):
        state = unit["states_after_each_step"][0, n - 1]
        assert mx.allclose(layer.state[n], state, rtol=0, atol=1e-6)
        assert mx.array_equal(layer.window[n], unit["conv_state_after_each_step"][0, n - 1])


def unit_module(unit: Any) -> Any:
    """The members of mlx-lm's GatedDeltaNet that the layer reads, with projections given."""
    heads, dim = unit["k_normalised"].shape[-2:]
    value_heads, value_dim = unit["v"].shape[-2:]
    channels, kernel, _ = unit["conv1d_weight"].shape
    conv = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
    conv.weight = unit["conv1d_weight"]

    def given(tensor: mx.array) -> Any:
        return lambda x: mx.broadcast_to(tensor, (x.shape[0], *tensor.shape[1:]))

    return SimpleNamespace(
        num_k_heads=heads,
        head_k_dim=dim,
        key_dim=heads * dim,
        num_v_heads=value_heads,
        head_v_dim=value_dim,
        conv_dim=channels,
        conv_kernel_size=kernel,
        conv1d=conv,
        A_log=unit["A_log"],
        dt_bias=unit["dt_bias"],
        in_proj_qkv=given(unit["qkv_pre_conv"]),
        in_proj_z=lambda x: mx.zeros((*x.shape[:2], value_heads * value_dim)),
        in_proj_a=given(unit["a"]),
        in_proj_b=given(unit["b"]),
        norm=lambda y, z: y,
        out_proj=lambda y: y,
    )


def random_layer(rows: int, dtype: mx.Dtype, rule: Rule | None = None) -> tuple[DeltaLayer, Lens]:
    model = make_model("qwen3_5")
    model.set_dtype(dtype)
    lens = Lens(rows)
    return DeltaLayer(
        model.language_model.model.layers[0].linear_attn, lens, dtype, rule or Steps()
    ), lens


def block(rows: int, width: int, dtype: mx.Dtype, seed: int) -> mx.array:
    x = np.random.default_rng(seed).normal(size=(rows, width, 32))
    return mx.array(x.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_ragged_commit_equals_one_token_after_the_other(dtype: mx.Dtype) -> None:
    layer, _ = random_layer(5, dtype)
    blocks = [block(5, 8, dtype, seed) for seed in range(3)]
    outs = []
    for x in blocks:
        outs.append(layer(x))
        layer.commit(mx.array(KEEP))

    assert layer.state.dtype == mx.float32
    for row, keep in enumerate(KEEP):
        alone, _ = random_layer(1, dtype)
        for x, out in zip(blocks, outs, strict=True):
            for t in range(keep):
                assert mx.array_equal(alone(x[row : row + 1, t : t + 1])[0, 0], out[row, t])
                alone.commit(mx.array([1]))
        assert mx.array_equal(layer.state[row], alone.state[0])
        assert mx.array_equal(layer.window[row], alone.window[0])


@pytest.mark.parametrize("width", [1, 8])
def test_a_commit_known_beforehand_is_the_same(width: int) -> None:
    keep = mx.minimum(mx.array(KEEP), width)
    x = block(5, width, mx.float32, 0)
    after, _ = random_layer(5, mx.float32)
    before, lens = random_layer(5, mx.float32)
    lens.open(width, keep=keep)

    outs = after(x), before(x)
    for layer in (after, before):
        layer.commit(keep)

    assert mx.array_equal(after.state, before.state)
    assert mx.array_equal(after.window, before.window)
    for row, n in enumerate(np.array(keep).tolist()):
        assert mx.array_equal(outs[0][row, :n], outs[1][row, :n])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("width", [1, 2, 7, 16, 37])
def test_the_chunk_form_agrees_with_the_steps(width: int, known: bool) -> None:
    random = np.random.default_rng(width)
    layers = [random_layer(5, mx.float32, rule) for rule in (Steps(), Chunk())]
    for seed in range(3):
        keep = mx.array(random.integers(0, width + 1, size=5).astype(np.int32))
        x = block(5, width, mx.float32, seed)
        outs = []
        for layer, lens in layers:
            lens.open(width, keep=keep if known else None)
            outs.append(layer(x))
            layer.commit(keep)
        for row, n in enumerate(np.array(keep if known else [width] * 5).tolist()):
            assert mx.allclose(outs[0][row, :n], outs[1][row, :n], rtol=1e-4, atol=1e-5)
        states = [layer.state for layer, _ in layers]
        assert mx.allclose(states[0], states[1], rtol=1e-4, atol=1e-5)


def test_the_chunk_form_stands_decays_that_underflow() -> None:
    layers = [random_layer(1, mx.float32, rule)[0] for rule in (Steps(), Chunk())]
    for layer in layers:
        layer._module.A_log = mx.full(layer._module.A_log.shape, 6.0)
        layer(block(1, 16, mx.float32, 0))
        layer.commit(mx.array([9]))
    assert not mx.isnan(layers[1].state).any()
    assert mx.allclose(layers[0].state, layers[1].state, rtol=1e-4, atol=1e-5)


def test_tokens_are_the_same_by_the_chunk_form() -> None:
    model = make_model("qwen3_5")
    target: Any = as_target(model, "qwen3_5")
    target._rule = Chunk()
    prompts = [[i, *range(i, 3 * i + 2)] for i in range(4)]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    decoder = make_decoder(target, OracleDrafter(texts, 8, 0.3, seed=0), max_batch=4)
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 20))
    done = finish(decoder)
    assert [list(done[i].token_ids) for i in range(4)] == expected


def test_a_snapshot_serves_its_own_length_only() -> None:
    target = make_target("qwen3_5")
    lens = Lens(1)
    arena = target.new_arena(lens)
    lens.open(5)
    target.forward(mx.array([[1, 2, 3, 4, 5]]), arena, ())
    arena.commit(mx.array([5]))
    lens.advance(mx.array([5]))

    snapshot = arena.snapshot(0, 5)
    held = [mx.array(a) for a in snapshot.arrays()]
    lens.bound = 5
    lens.open(1)
    target.forward(mx.array([[6]]), arena, ())
    arena.commit(mx.array([1]))

    assert not snapshot.cuttable
    assert snapshot.first(5) is snapshot
    with pytest.raises(AssertionError):
        snapshot.first(4)
    assert all(mx.array_equal(a, b) for a, b in zip(held, snapshot.arrays(), strict=True))
