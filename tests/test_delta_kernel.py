"""The delta kernel as far as a CPU shows it: its launches, and how a form of the rule is chosen.

A stand-in for the GPU gets each launch as MLX would, and fills its outputs by the formulas.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import OracleDrafter, as_target, finish, greedy, make_decoder, make_model, request

from dflash_batch.decoder.delta_choice import Form, Heads, choose, difference, forms, sample
from dflash_batch.decoder.delta_kernel import (
    BODY,
    CUDA,
    METAL,
    Dialect,
    Kernel,
    Tile,
    extent,
    tile_for,
)
from dflash_batch.decoder.delta_rule import Chunk, Steps
from dflash_batch.decoder.drafters import NoDrafter

HEADS = Heads(key=2, value=6, key_dim=32, value_dim=16)

Outputs = list[mx.array]


class StandIn:
    """Builds kernels as `mx.fast.cuda_kernel` does, and computes them step by step in plain ops."""

    def __init__(self, spoil: Callable[[str, Outputs], Outputs] = lambda name, outputs: outputs):
        self.spoil = spoil
        self.launches: list[tuple[str, dict[str, Any]]] = []

    @property
    def dialect(self) -> Dialect:
        return CUDA._replace(build=self.build)

    def build(self, name: str, input_names: list[str], output_names: list[str], **text: str) -> Any:
        assert text["source"].endswith(BODY)

        def launch(inputs: Outputs, **how: Any) -> Outputs:
            self.launches.append((name, how))
            named = dict(zip(input_names, inputs, strict=True))
            if "count" in named:
                assert named["count"].dtype == mx.int32
            assert named["state"].dtype == named["g"].dtype == mx.float32
            made = computed(named, how["output_shapes"], how["output_dtypes"])
            return self.spoil(name, [made[output] for output in output_names])

        return launch


def computed(named: dict[str, mx.array], shapes: Any, dtypes: Any) -> dict[str, mx.array]:
    """Everything a launch can be asked for, of which it gives the shapes and dtypes it was told."""
    state, k = named["state"], mx.repeat(named["k"], named["g"].shape[2] // named["k"].shape[2], 2)
    rows, width = k.shape[:2]
    count = named.get("count", mx.full((rows,), width))
    ys, ds = [], []
    for t in range(width):
        key = k[:, t, :, None].astype(mx.float32)
        decayed = named["g"][:, t, :, None, None] * state
        if "d" in named:
            d = named["d"][:, t]
        else:
            missing = named["v"][:, t] - (decayed * key).sum(-1)
            d = named["beta"][:, t, :, None] * missing
            query = mx.repeat(named["q"][:, t], k.shape[2] // named["q"].shape[2], 1)
            after = decayed + d[..., None] * key
            ys.append((after * query[:, :, None]).sum(-1))
        ds.append(d)
        on = (t < count)[:, None, None, None]
        state = mx.where(on, decayed + d[..., None] * key, state)
    made = {"end": state, "d": mx.stack(ds, 1)}
    if ys:
        inside = (mx.arange(width) < count[:, None])[..., None, None]
        made["y"] = mx.where(inside, mx.stack(ys, 1), 0.0).astype(dtypes[0])
        assert made["y"].shape == shapes[0]
    else:
        assert (state.shape, state.dtype) == (shapes[0], dtypes[0])
    return made


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_kernel_form_gives_what_the_steps_give(dtype: mx.Dtype) -> None:
    rule = Kernel(StandIn().dialect)
    assert difference(rule, HEADS, dtype) is None
    block, state, keep = sample(HEADS, dtype, rows=5, width=8)
    assert keep.tolist() == [0, 2, 4, 6, 8]

    y, tape = rule.verify(block, state)
    end = rule.replay(tape, state, keep)
    settled, same = rule.advance(block, state, keep)

    assert y.dtype == settled.dtype == dtype
    assert mx.array_equal(end, same)
    assert mx.array_equal(end[0], state[0])
    for row, n in enumerate(np.array(keep).tolist()):
        assert mx.array_equal(settled[row, :n], y[row, :n])
        assert not settled[row, n:].any()


def test_tokens_are_the_same_by_the_kernel_form() -> None:
    device = StandIn()
    model = make_model("qwen3_5")
    target: Any = as_target(model, "qwen3_5")
    target._rule = Kernel(device.dialect)
    prompts = [[i, *range(i, 3 * i + 2)] for i in range(4)]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    decoder = make_decoder(target, OracleDrafter(texts, 8, 0.3, seed=0), max_batch=4)
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 20))
    done = finish(decoder)

    assert [list(done[i].token_ids) for i in range(4)] == expected
    names = [name for name, _ in device.launches]
    layers = len(target._deltas)
    assert names[:layers] == ["gated_delta_advance"] * layers  # the prefill knows what it keeps
    assert names.count("gated_delta_verify") == names.count("gated_delta_replay") > layers


def test_plain_decoding_is_one_launch_a_layer() -> None:
    device = StandIn()
    model = make_model("qwen3_5")
    target: Any = as_target(model, "qwen3_5")
    target._rule = Kernel(device.dialect)
    decoder = make_decoder(target, NoDrafter(), max_batch=2)
    prompts = [[1, 2, 3], [4, 5]]
    for i, prompt in enumerate(prompts):
        decoder.add(request(i, prompt, 6 + i))
    done = finish(decoder)
    assert [list(done[i].token_ids) for i in (0, 1)] == [
        greedy(model, prompt, 6 + i) for i, prompt in enumerate(prompts)
    ]
    assert {name for name, _ in device.launches} == {"gated_delta_advance"}


def test_a_launch_is_told_its_grid_and_constants() -> None:
    device = StandIn()
    rule = Kernel(device.dialect)
    block, state, keep = sample(HEADS, mx.bfloat16, rows=9, width=3)
    _, tape = rule.verify(block, state)
    rule.replay(tape, state, keep)
    rule.advance(block, state, keep)

    tile = tile_for(32, 16, CUDA.held)
    assert tile == Tile(lanes=8, rows=4)
    for _, how in device.launches:
        assert how["grid"] == (32, 1, 9 * 6)
        assert how["threadgroup"] == (32, 1, 1)
        assert dict(how["template"]) == {
            "InT": mx.bfloat16,
            "Hk": 2,
            "Hv": 6,
            "Dk": 32,
            "Dv": 16,
            "LANES": 8,
            "ROWS": 4,
            "FEW": False,
        }
    assert [how["output_dtypes"] for _, how in device.launches] == [
        [mx.bfloat16, mx.float32],
        [mx.float32],
        [mx.bfloat16, mx.float32],
    ]


@given(
    key_dim=st.sampled_from([8, 32, 96, 128, 256]),
    value_dim=st.sampled_from([4, 16, 24, 128]),
    held=st.sampled_from([METAL.held, CUDA.held]),
    rows=st.integers(1, 64),
    heads=st.integers(1, 48),
)
def test_every_state_element_has_one_lane(
    key_dim: int, value_dim: int, held: int, rows: int, heads: int
) -> None:
    tile = tile_for(key_dim, value_dim, held)
    assert key_dim // tile.lanes * tile.rows <= held
    grid, threadgroup = extent(rows, heads, value_dim, tile)
    assert all(threads % group == 0 for threads, group in zip(grid, threadgroup, strict=True))
    assert grid[0] == threadgroup[0] == 32

    each, pack = key_dim // tile.lanes, 32 // tile.lanes
    held_by = [
        (
            group * pack * tile.rows + lane // tile.lanes + j * pack,
            lane % tile.lanes + i * tile.lanes,
        )
        for group in range(grid[1])
        for lane in range(32)
        for j in range(tile.rows)
        for i in range(each)
    ]
    assert sorted(held_by) == [(v, k) for v in range(value_dim) for k in range(key_dim)]


def test_a_state_that_no_tile_divides_is_refused() -> None:
    with pytest.raises(ValueError, match="16 x 100"):
        tile_for(100, 16, CUDA.held)


@pytest.mark.parametrize("dialect", [METAL, CUDA], ids=["metal", "cuda"])
def test_both_languages_get_all_that_the_body_uses(dialect: Dialect) -> None:
    for name in ("lane", "group", "n"):
        assert re.search(rf"const int {name} = ", dialect.entry)
    for macro in ("OF_LANE_XOR", "MULTIPLY_ADD"):
        assert macro in BODY
        assert f"#define {macro}(" in dialect.header
    # Where MLX would take it for the wish to pass an input's shape, strides or rank.
    assert set(re.findall(r"\b\w+_(?:shape|strides|ndim)\b", BODY)) == {"k_shape"}


def test_a_cpu_runs_the_steps_and_tries_nothing() -> None:
    assert mx.default_device() == mx.cpu
    assert forms() == []
    assert isinstance(as_target(make_model("qwen3_5"), "qwen3_5")._rule, Steps)  # type: ignore[attr-defined]


def test_the_first_form_that_agrees_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Form("kernel", lambda: Kernel(StandIn().dialect))
    assert isinstance(choose([kernel, Form("chunk", Chunk)], HEADS, mx.bfloat16), Kernel)
    assert isinstance(choose([Form("chunk", Chunk)], HEADS, mx.float32), Chunk)
    assert isinstance(choose([], HEADS, mx.float32), Steps)
    assert not caplog.records


def spoilt(kernel: str, output: int, change: Callable[[mx.array], mx.array]) -> Form:
    """The kernel form on a device that gets one output of one kernel wrong."""

    def spoil(name: str, outputs: Outputs) -> Outputs:
        if name == f"gated_delta_{kernel}":
            outputs[output] = change(outputs[output])
        return outputs

    return Form("kernel", lambda: Kernel(StandIn(spoil).dialect))


def one_number(array: mx.array, value: float) -> mx.array:
    """The array with its first number, of the row that keeps nothing, made another."""
    return mx.concatenate([mx.array([value], array.dtype), array.flatten()[1:]]).reshape(
        array.shape
    )


BROKEN = {
    "verify is off": spoilt("verify", 0, lambda y: y * 1.05),
    "replay is off": spoilt("verify", 1, lambda d: d * 1.01),
    "replay is off by nan": spoilt("replay", 0, lambda end: one_number(end, float("nan"))),
    "advance is off by nan": spoilt("advance", 0, lambda y: one_number(y, float("nan"))),
    "end is off": spoilt("advance", 1, lambda end: end + 0.1),
    "verify gives": spoilt("verify", 0, lambda y: y.astype(mx.float32)),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_form_that_differs_is_passed_over(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    rule = choose([BROKEN[reason], Form("chunk", Chunk)], HEADS, mx.bfloat16)
    assert isinstance(rule, Chunk)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"delta_form_refused form=kernel {reason}")


@pytest.mark.parametrize("dialect", [METAL, CUDA], ids=["metal", "cuda"])
def test_a_device_without_its_language_runs_the_steps(
    dialect: Dialect, caplog: pytest.LogCaptureFixture
) -> None:
    """Really asks MLX, which has neither back end here."""
    assert isinstance(choose([Form("kernel", lambda: Kernel(dialect))], HEADS, mx.float32), Steps)
    assert "back-end" in caplog.text


def test_an_error_that_is_not_the_device_s_is_not_hidden() -> None:
    def spoil(name: str, outputs: Outputs) -> Outputs:
        raise TypeError(name)

    with pytest.raises(TypeError):
        choose([Form("kernel", lambda: Kernel(StandIn(spoil).dialect))], HEADS, mx.float32)
