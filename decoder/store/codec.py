"""Snapshots as tensors of a blob, and back. Array for array, bit for bit.

A snapshot is a tree of the classes in KINDS; the tree goes into a fact of the blob, as JSON, with
names in the place of arrays. A drafter whose memory is none of these cannot be stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.arena import Snapshot
from dflash_batch.decoder.drafters import Nothing
from dflash_batch.decoder.hybrid import HybridSnapshot
from dflash_batch.decoder.store.blob import Tensor
from dflash_batch.decoder.store.errors import StoreError
from dflash_batch.decoder.window import WindowSnapshot

KINDS: dict[str, Any] = {
    "attention": Snapshot,
    "hybrid": HybridSnapshot,
    "window": WindowSnapshot,
}
"""Named tuples by the name they have in a blob."""

_NAMES = {kind: name for name, kind in KINDS.items()}

_DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "I32": mx.int32,
    "U32": mx.uint32,
    "U8": mx.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Unstorable(StoreError):
    """Raised for a snapshot of which some part has no form on disk."""


def encode(snapshots: Any) -> tuple[dict[str, Tensor], str]:
    """The tensors of snapshots, whose data are views of MLX's own memory, and their tree.

    Raises Unstorable. Waits for the device.
    """
    arrays: list[mx.array] = []
    tree = _tree(snapshots, arrays)
    flat = [mx.contiguous(array).reshape(-1) for array in arrays]
    mx.eval(flat)
    tensors = {
        f"{i}": Tensor(
            _DTYPE_NAMES[array.dtype],
            tuple(array.shape),
            np.array(data.view(mx.uint8), copy=False),
        )
        for i, (array, data) in enumerate(zip(arrays, flat, strict=True))
    }
    return tensors, json.dumps(tree, separators=(",", ":"))


def decode(tensors: Mapping[str, Tensor], tree: str) -> Any:
    """Inverse of `encode`. Raises KeyError, TypeError or ValueError for what it did not make."""
    return _grown(json.loads(tree), tensors)


def size(snapshots: Any) -> int:
    """Bytes of the arrays. Raises Unstorable."""
    arrays: list[mx.array] = []
    _tree(snapshots, arrays)
    return sum(array.nbytes for array in arrays)


def _tree(value: Any, arrays: list[mx.array]) -> Any:
    """JSON for a snapshot: [kind, field, …] for one of KINDS, {"": n} for array n, and so on."""
    if isinstance(value, mx.array):
        if value.dtype not in _DTYPE_NAMES:
            raise Unstorable(f"an array of {value.dtype}")
        arrays.append(value)
        return {"": len(arrays) - 1}
    if isinstance(value, int):
        return value
    if isinstance(value, Nothing):
        return None
    if type(value) in _NAMES:
        return [_NAMES[type(value)], *(_tree(field, arrays) for field in value)]
    if type(value) is tuple:
        return ["", *(_tree(field, arrays) for field in value)]
    raise Unstorable(f"a {type(value).__name__}")


def _grown(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if tree is None:
        return Nothing()
    if isinstance(tree, int):
        return tree
    if isinstance(tree, dict):
        return _array(tensors[f"{tree['']}"])
    fields = [_grown(field, tensors) for field in tree[1:]]
    return KINDS[tree[0]](*fields) if tree[0] else tuple(fields)


def _array(tensor: Tensor) -> mx.array:
    if not tensor.data.size:
        return mx.zeros(tensor.shape, dtype=_DTYPES[tensor.dtype])
    return mx.array(tensor.data).view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
