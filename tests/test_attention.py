"""Attention by two matrix products is MLX's own, and stock modules' is ours."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_batch.decoder import attention
from dflash_batch.decoder.attention import as_mask, attend, folded


def _case(rows: int, width: int, dim: int) -> tuple[mx.array, ...]:
    key = mx.random.key(rows * 100 + width)
    q, k, v = (
        mx.random.normal((rows, heads, n, dim), key=part)
        for heads, n, part in zip((6, 2, 2), (width, 40, 40), mx.random.split(key, 3), strict=True)
    )
    lengths = 7 * mx.arange(rows)[:, None, None, None] % 20
    own = lengths + mx.arange(width)[None, None, :, None]
    return q, k, v, mx.arange(40) <= own


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("additive", [False, True])
def test_folded_is_what_the_fused_kernel_gives(rows: int, width: int, additive: bool) -> None:
    q, k, v, seen = _case(rows, width, 16)
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=seen)
    mask = mx.where(seen, mx.array(0.0), mx.array(-mx.inf)) if additive else seen
    assert mx.allclose(folded(q, k, v, 0.25, mask), wanted, rtol=1e-5, atol=1e-6)


def test_the_cpu_takes_the_fused_kernel_and_boolean_masks() -> None:
    q, k, v, seen = _case(2, 3, 256)
    assert as_mask(seen, mx.bfloat16) is seen
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=seen)
    assert mx.array_equal(attend(q, k, v, 0.25, seen), wanted)


@pytest.mark.parametrize(
    ("cuda", "width", "dim", "group", "folds"),
    [
        (True, 1, 128, 4, True),
        (True, 16, 128, 4, False),
        (True, 16, 256, 4, True),
        (False, 1, 128, 4, False),
        (False, 8, 256, 4, False),
        (False, 16, 256, 4, True),
        (False, 8, 256, 8, True),
    ],
)
def test_the_way_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, width: int, dim: int, group: int, folds: bool
) -> None:
    monkeypatch.setattr(attention, "CUDA", cuda)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert attention._folds(width, dim, group) is folds
