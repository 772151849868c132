"""Which models callers may name: those the server was given, and those that workers hold."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import Any

from dflash_batch.worker.contract import ErrorCode, ModelRef
from dflash_batch.worker.gateway.errors import ApiError
from dflash_batch.worker.gateway.pool import Pool

FRESH_S = 1.0
"""How long what workers said is believed."""


class Catalogue:
    """Models by name: the whole target, or its last part. Nothing else is ever loaded for a call.

    A name that a caller makes up would otherwise choose what is fetched and from which folder.
    """

    def __init__(self, given: list[ModelRef], pool: Pool) -> None:
        self._given = given
        self._pool = pool
        self._of_workers: list[ModelRef] = []
        self._looked = float("-inf")

    def models(self) -> dict[str, ModelRef]:
        """By target. Asks the queue now and then; raises redis.RedisError."""
        if time.monotonic() - self._looked > FRESH_S:
            with self._pool.queue() as queue:
                infos = queue.workers()
            self._of_workers = [info.model for info in infos if info.model is not None]
            self._looked = time.monotonic()
        named = {ref.target: ref for ref in reversed([*self._given, *self._of_workers])}
        return dict(sorted(named.items()))

    def find(self, name: str | None, status: int) -> ModelRef:
        """The model of that name; without a name the only one. Raises ApiError with `status`."""
        models = self.models()
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is None:
            code = ErrorCode.MISSING_REQUIRED_PARAMETER
            raise ApiError(400, "model is missing", code=code.value, param="model")
        if name in models:
            return models[name]
        short = [ref for target, ref in models.items() if PurePath(target).name == name]
        if len(short) == 1:
            return short[0]
        known = ", ".join(models) or "none: no worker is up"
        raise ApiError(
            status,
            f"no worker here has the model {name[:200]}. Models here: {known}",
            code=ErrorCode.MODEL_NOT_FOUND.value,
            param="model",
        )

    def shown(self) -> list[dict[str, Any]]:
        """The model objects of the API."""
        return [
            {"id": name, "object": "model", "created": 0, "owned_by": "dflash-batch"}
            for name in self.models()
        ]
