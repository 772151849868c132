"""The costs of this machine with this pair: which table is theirs, and who uses it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_batch.decoder.cost import CostKey, CostTable, load_table
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.guard import Guarded
from dflash_batch.decoder.policy import Fixed, Goodput, Plain, Policy
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.types import LoadSpec

_log = logging.getLogger("dflash_batch")


def policy_for(spec: LoadSpec, drafter: Drafter, key: CostKey) -> Policy:
    """The policy that `spec.spec` names: "auto" with the costs measured before, "on", or "off"."""
    most = drafter.spec.max_k
    if spec.spec == "off" or not most:
        return Plain()
    if spec.spec == "on":
        # No row needs a block longer than its budget. A GPU keeps one shape all the same: a
        # smaller block saves it nothing, and each new shape is planned anew.
        fixed = Fixed(most, trim=mx.default_device() != mx.gpu)
        return Guarded(fixed, lambda notice: _log.warning("drafts_parked %s", notice))
    if spec.cost_dir is None:
        return Goodput(CostTable(), most + 1)
    folder = Path(spec.cost_dir)
    table, notice = load_table(folder, key)
    if notice:
        _log.warning("cost_table_ignored %s", notice)
    return Goodput(table, most + 1, keep=lambda learned: keep_table(learned, folder, key))


def keep_table(table: CostTable, folder: Path, key: CostKey) -> Path | None:
    """Save a table; a folder that cannot be written costs the next start some measuring."""
    try:
        return table.save(folder, key)
    except OSError as error:
        _log.warning("cost_table_not_saved folder=%s reason=%s", folder, error.strerror or error)
        return None


def cost_key(folder: Path, config: dict[str, Any], target: Target, drafter: Drafter) -> CostKey:
    """The key of a target in `folder` with `drafter`, on this machine."""
    weights = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    draft = [drafter.spec.kind, drafter.spec.max_k, repr(getattr(drafter, "config", None))]
    text = json.dumps([config, weights, str(target.dtype), draft], sort_keys=True)
    return CostKey(
        machine=_machine(),
        mlx=version("mlx"),
        model=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def _machine() -> str:
    info = mx.device_info(mx.default_device())
    chip = info.get("device_name") or info.get("architecture") or platform.machine()
    return f"{platform.node()}, {chip}, {os.cpu_count()} cores, {mx.default_device()}"
