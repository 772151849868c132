"""Will each prompt fit the model? Counted with the model's own tokenizer; no weights, no mlx."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dflash_batch.decoder.demo import TARGET_DIR
from dflash_batch.worker.contract import ErrorCode, JobSpec
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.reader import LineError

DEFAULT_CONTEXT = 2048
"""Context of a model whose config does not say, as in the decoder."""

_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class ModelUnusable(UserError):
    """Raised when a model's config or tokenizer cannot be had."""

    code = "model_not_found"


class Misfit(Exception):
    """Raised when a row cannot run on the model."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Fit:
    """What the prompts of a batch need of a model, in tokens; and the lines that ask too much."""

    limit: int  # the model's context
    total: int
    p50: int
    largest: int
    errors: list[LineError] = field(default_factory=list)


class Ruler:
    """Measures rows against one model."""

    def __init__(self, target: str, max_context: int | None = None) -> None:
        """`target` is "demo", a folder, or a Hugging Face id. Raises ModelUnusable."""
        folder = _folder(target)
        config = _config(folder)
        context = int(config.get("max_position_embeddings") or DEFAULT_CONTEXT)
        self.limit = min(context, max_context or context)
        self._vocab: int | None = config.get("vocab_size")
        self._tokenizer = _tokenizer(folder)

    def fit(
        self, rows: Iterable[JobSpec], progress: Callable[[int], None] = lambda done: None
    ) -> Fit:
        """Measure all rows; `progress` is told how many are done."""
        sizes: list[int] = []
        errors: list[LineError] = []
        for done, row in enumerate(rows, 1):
            try:
                sizes += self._sizes(row)
            except Misfit as misfit:
                errors.append(
                    LineError(
                        line=row.line,
                        code=misfit.code,
                        message=str(misfit),
                        param="prompt" if row.messages is None else "messages",
                        custom_id=row.custom_id,
                    )
                )
            if done % 50 == 0:
                progress(done)
        sizes.sort()
        return Fit(
            limit=self.limit,
            total=sum(sizes),
            p50=sizes[math.ceil(len(sizes) / 2) - 1] if sizes else 0,
            largest=sizes[-1] if sizes else 0,
            errors=errors,
        )

    def _sizes(self, row: JobSpec) -> list[int]:
        """Tokens of each prompt of a row. Raises Misfit."""
        sizes = []
        for ids in self.ids(row):
            size, room = len(ids), 1 if row.max_tokens is None else row.max_tokens
            if self._vocab is not None and max(ids, default=0) >= self._vocab:
                message = f"token id {max(ids)} is outside the vocabulary of {self._vocab:,}"
                raise Misfit(ErrorCode.INVALID_VALUE, message)
            if size + room > self.limit:
                message = f"{size:,} tokens + {room:,} > {self.limit:,}"
                raise Misfit(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)
            sizes.append(size)
        return sizes

    def ids(self, row: JobSpec) -> list[list[int]]:
        """The tokens of each prompt of a row. Raises Misfit."""
        if row.messages is not None:
            return [self._chat(row, row.messages)]
        return [self._text(p) if isinstance(p, str) else p for p in row.prompts or []]

    def _chat(self, row: JobSpec, messages: list[dict[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            message = "the model has no chat template; use /v1/completions with a prompt"
            raise Misfit(ErrorCode.CHAT_TEMPLATE_MISSING, message)
        try:
            # Thinking is on unless the row turns it off, as it is in the decoder.
            options: dict[str, Any] = {"add_generation_prompt": True}
            options["enable_thinking"] = _thinks(tokenizer)
            options |= {"tools": row.tools} if row.tools else {}
            ids: list[int] = tokenizer.apply_chat_template(
                messages, **(options | row.template), tokenize=True, return_dict=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            message = f"the model's chat template refused the messages: {error}"
            raise Misfit(ErrorCode.CHAT_TEMPLATE_ERROR, message) from error
        return ids

    def facts(self) -> dict[str, Any]:
        """What the tokenizer says of itself. Raises Misfit."""
        tokenizer = self._need_tokenizer()
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(tokenizer, name, None) for name in names}
        return {"tokenizer_class": type(tokenizer).__name__, **found, "max_model_len": self.limit}

    def text_ids(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text, with the special ones around it or without. Raises Misfit."""
        tokenizer = self._need_tokenizer()
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special)
        return ids

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._need_tokenizer().encode(text)
        return ids

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            message = "the model folder has no tokenizer files; give the prompt as token ids"
            raise Misfit(ErrorCode.TOKENIZER_MISSING, message)
        return self._tokenizer


def _thinks(tokenizer: Any) -> bool:
    """Whether the vocabulary has markers around thoughts: the pairs that mlx-lm knows."""
    vocabulary = tokenizer.get_vocab()
    return any(start in vocabulary and end in vocabulary for start, end in _MARKERS)


_MARKERS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
)


def _folder(target: str) -> Path:
    folder = Path(TARGET_DIR if target == "demo" else target)
    if folder.is_dir():
        return folder
    if target == "demo":
        raise ModelUnusable(f"the bundled model is not in this installation ({folder})")
    try:
        return Path(snapshot_download(target, allow_patterns=_FILES))
    except LocalEntryNotFoundError as error:
        raise ModelUnusable(
            f"{target}: not in the local Hugging Face cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelUnusable(f"{target}: {_first_line(error)}") from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelUnusable(f"{path} not found: this is not a model folder") from error
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelUnusable(f"{path} is not a JSON object")
    return config


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None if it has no files of one."""
    if not any((folder / name).exists() for name in _TOKENIZERS):
        return None
    # It remarks on what we do not need (PyTorch) and on what is ours to report (long prompts).
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer  # takes a second: only when needed

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{folder}: the tokenizer cannot be loaded: {_first_line(error)}"
        raise ModelUnusable(message) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
