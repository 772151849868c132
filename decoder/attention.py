"""Attention over the arena, by the way that is quickest where it runs.

`fused` is MLX's own kernel, `folded` two matrix products with the query heads of a group side by
side, so that the keys of a group are read once:

    queries [R, G·g, T, D]  ->  [R, G, g·T, D]        G key heads, g query heads for each
    scores                      [R, G, g·T, S]

Measured on an H200 (MLX 0.32.4, bf16, 36 layers of 32/8 heads, 512 columns): at T = 1 and R = 16
/ 32 / 64 the fused kernel took 7.5 / 9.5 / 14.5 ms, folded 4.2 / 5.0 / 5.7; at T = 16 fused 3.8 /
5.9 / 9.5 with an additive mask and 5.9 / 8.6 / 13.9 with a boolean one, which is made additive
anew in each layer there. From its sources, Metal takes boolean masks as they are and has no fused
kernel for heads wider than 128 beyond a few queries: not run on Metal.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash_batch.decoder.arena import LayerKV

CUDA = mx.cuda.is_available()


def as_mask(seen: mx.array, dtype: mx.Dtype) -> mx.array:
    """A bool mask (true: seen) in the form in which this backend reads it quickest."""
    if mx.default_device() == mx.gpu and CUDA:
        return mx.where(seen, mx.array(0, dtype), mx.array(-mx.inf, dtype))
    return seen


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Attention of queries [R, H, T, D] over keys and values [R, G, S, D] -> [R, H, T, D].

    `mask` [R, 1, T, S] comes from `as_mask`.
    """
    _, heads, width, dim = queries.shape
    if _folds(width, dim, heads // keys.shape[1]):
        return folded(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _folds(width: int, dim: int, group: int) -> bool:
    if mx.default_device() != mx.gpu:
        return False
    if CUDA:
        return width == 1 or dim > 128
    return dim > 128 and (width > 8 or width * group > 32)


def folded(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """`attend` by two matrix products."""
    rows, heads, width, dim = queries.shape
    groups, columns = keys.shape[1], keys.shape[2]
    side_by_side = (queries * scale).reshape(rows, groups, -1, dim)
    scores = side_by_side @ keys.swapaxes(-1, -2)
    if width == 1:
        scores = _masked(scores, mask)  # one query a head: the mask serves the whole group
    else:
        apart = scores.reshape(rows, groups, -1, width, columns)
        scores = _masked(apart, mask[:, :, None]).reshape(scores.shape)
    out = mx.softmax(scores, axis=-1, precise=True) @ values
    return out.reshape(rows, heads, width, dim)


def _masked(scores: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    return scores + mask


def self_attention(module: Any, x: mx.array, mask: mx.array, cache: LayerKV) -> mx.array:
    """The attention of mlx-lm's `llama` and `qwen3` blocks on x [R, T, h], at the arena's columns.

    `module` holds q_proj, k_proj, v_proj, o_proj, rope, scale and, where the family has them,
    q_norm and k_norm.
    """
    queries = heads(module.q_proj(x), module.n_heads, module.get("q_norm"))
    keys = heads(module.k_proj(x), module.n_kv_heads, module.get("k_norm"))
    values = heads(module.v_proj(x), module.n_kv_heads, None)
    out: mx.array = module.o_proj(rotated(module, queries, keys, values, mask, cache))
    return out


def rotated(
    module: Any, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, cache: LayerKV
) -> mx.array:
    """Rotate, write to the arena and attend: [R, H or G, T, D] each -> [R, T, H·D]."""
    queries = module.rope(queries, offset=cache.offset)
    keys = module.rope(keys, offset=cache.offset)
    out = attend(queries, *cache.update_and_fetch(keys, values), module.scale, mask)
    return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)


def heads(x: mx.array, count: int, norm: Any) -> mx.array:
    """[R, T, count·D] -> [R, count, T, D], each head normalised first if there is a norm."""
    apart = x.reshape(*x.shape[:2], count, -1)
    if norm is not None:
        apart = norm(apart)
    return apart.transpose(0, 2, 1, 3)
