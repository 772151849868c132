"""The prefix cache of a pair that was loaded: its share of memory, and whose files it reads."""

from __future__ import annotations

import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.ssd import Ssd
from dflash_batch.decoder.store.blob import checksum
from dflash_batch.decoder.store.errors import StoreError
from dflash_batch.decoder.store.fingerprint import Memory, fingerprint, weights_digest
from dflash_batch.decoder.store.index import CACHE_ERRORS
from dflash_batch.decoder.store.store import Limits, Store
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.tiers import GiB, Tiers
from dflash_batch.decoder.types import LoadSpec

FORMAT = 1
"""Of what the engine leaves in a snapshot. To be raised by a change that alters it."""

RAM_SHARE = 16
"""Prefixes in memory take at most one part in so many of the machine's."""

MOST_RAM = 8 * GiB

_log = logging.getLogger("dflash_batch")


def tiers_for(
    spec: LoadSpec, folder: Path, config: dict[str, Any], target: Target, drafter: Drafter
) -> Tiers:
    """The tiers of a target from `folder` and its draft. An SSD tier that fails is left out."""
    ssd = None
    if spec.cache_dir is not None:
        try:
            ssd = _open(spec, folder, config, target, drafter)
        except (StoreError, *CACHE_ERRORS) as error:
            _log.warning("prefix_store_unusable folder=%s reason=%s", spec.cache_dir, error)
    return Tiers(target.cuttable, ram_bytes(), ssd)


def ram_bytes() -> int:
    """Most bytes of prefixes to hold in memory on this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MOST_RAM, memory // RAM_SHARE)


def _open(
    spec: LoadSpec, folder: Path, config: dict[str, Any], target: Target, drafter: Drafter
) -> Ssd:
    assert spec.cache_dir is not None
    limits = Limits() if spec.cache_bytes is None else Limits(cap=spec.cache_bytes)
    store = Store(Path(spec.cache_dir), limits)
    try:
        name = model_fingerprint(folder, config, target, drafter, store.index)
    except BaseException:
        store.close()
        raise
    return Ssd(store, name, spec.target, cuttable=target.cuttable)


def model_fingerprint(
    folder: Path, config: dict[str, Any], target: Target, drafter: Drafter, memory: Memory
) -> str:
    """All that decides the bits of a snapshot of this pair here, as 32 hex digits.

    Not the tokenizer: states depend on token ids alone, and those are compared.
    """
    engine = [FORMAT, version("dflash-batch"), version("mlx"), platform.machine()]
    device = str(mx.default_device().type)
    weights = weights_digest(folder, memory)
    draft = [drafter.spec.kind, list(drafter.spec.taps), draft_digest(drafter)]
    return fingerprint([engine, device, config, weights, str(target.dtype), draft])


def draft_digest(drafter: Drafter) -> str | None:
    """Checksum of the weights of a draft as they are in memory, cast and quantised."""
    model = getattr(drafter, "model", None)
    if not isinstance(model, nn.Module):
        return None
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    flat = [mx.contiguous(weights[name]).reshape(-1) for name in sorted(weights)]
    mx.eval(flat)
    return checksum([np.array(array.view(mx.uint8), copy=False) for array in flat])
