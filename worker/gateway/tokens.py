"""Prompts as tokens, by the model's own tokenizer; nothing is loaded before somebody asks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dflash_batch.worker.contract import CHAT, TEXT, ErrorCode
from dflash_batch.worker.gateway.bodies import asked_row
from dflash_batch.worker.gateway.errors import ApiError

if TYPE_CHECKING:
    from dflash_batch.worker.fit import Ruler


class Rulers:
    """One tokenizer a model, read when it is first needed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[str, Ruler] = {}
        self._lock = threading.Lock()

    def tokenize(self, target: str, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens of `prompt` or `messages`, as {count, tokens, max_model_len}. Raises ApiError."""
        from dflash_batch.worker.fit import Misfit  # brings huggingface_hub with it

        special = body.pop("add_special_tokens", True)
        if not isinstance(special, bool):
            code = ErrorCode.INVALID_VALUE.value
            message = "add_special_tokens must be a boolean"
            raise ApiError(400, message, code=code, param="add_special_tokens")
        row = asked_row(body, CHAT if body.get("messages") is not None else TEXT)
        if len(row.prompts or [""]) != 1:
            code = ErrorCode.INVALID_VALUE.value
            raise ApiError(400, "prompt must be one prompt", code=code, param="prompt")
        with self._lock:
            ruler = self._ruler(target)
            try:
                prompt = row.prompts[0] if row.prompts else None
                if isinstance(prompt, str):
                    ids = ruler.text_ids(prompt, special=special)
                else:
                    ids = ruler.ids(row)[0]
            except Misfit as misfit:
                raise ApiError(400, str(misfit), code=misfit.code.value) from misfit
        return {"count": len(ids), "max_model_len": ruler.limit, "tokens": ids}

    def facts(self, target: str) -> dict[str, Any]:
        """What the tokenizer says of itself. Raises ApiError."""
        from dflash_batch.worker.fit import Misfit

        with self._lock:
            try:
                return self._ruler(target).facts()
            except Misfit as misfit:
                raise ApiError(400, str(misfit), code=misfit.code.value) from misfit

    def _ruler(self, target: str) -> Ruler:
        from dflash_batch.worker.fit import ModelUnusable, Ruler

        if target not in self._known:
            try:
                self._known[target] = Ruler(target)
            except ModelUnusable as error:
                code = ErrorCode.TOKENIZER_MISSING.value
                raise ApiError(404, str(error), code=code, param="model") from error
        return self._known[target]
