"""The decoder's nouns: what goes in, what comes out. Plain data, no mlx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Progress = Callable[[str, float | None], None]
"""Called with a phase ("weights", "draft", …) and a share 0..1, or None when unknown."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class LoadSpec:
    """What to load and how to run it."""

    target: str  # Hugging Face id or folder
    draft: str = "auto"  # "auto" | "none" | folder | Hugging Face id
    block: int | None = None  # tokens of a block (anchor included); None: as trained
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch: int = 16  # rows decoded together
    max_context: int | None = None  # tokens of prompt + output of a row; None: the model's
    spec: Literal["auto", "on", "off"] = "on"  # draft where it pays, always, or never
    cost_dir: str | None = None  # folder of measured cycle costs; None: they are not kept


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded: the effective settings, for results and for people."""

    target: str
    family: str  # "llama", "qwen3_moe", …
    draft: str | None  # None: plain decoding
    draft_notice: str | None  # why there is no draft, when one was looked for
    block: int  # 1 without a draft
    dtype: str
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    has_chat_template: bool


@dataclass(frozen=True)
class Request:
    """One row to decode greedily. `uid` is the caller's name for it, unique while it is in."""

    uid: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("an empty prompt cannot be decoded")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")


@dataclass(frozen=True)
class Completion:
    """One finished row."""

    uid: int
    token_ids: tuple[int, ...]  # the stop token included
    text: str  # without stop token and stop string; "" when there is no tokenizer
    finish_reason: FinishReason
    prompt_tokens: int
    prefill_tokens: int  # computed for this row
    cached_tokens: int  # taken from a prefix shared with other rows
    cycles: int
    draft_tokens: int
    accepted_tokens: int
    batch_width: int  # most rows decoded together while it ran
    wait_ms: float  # admission to first forward
    prefill_ms: float
    ttft_ms: float  # admission to first token
    decode_ms: float
    spec: Literal["on", "off", "auto-off"] = "on"  # "auto-off": for most cycles drafts did not pay
    emitted_per_cycle: tuple[int, ...] | None = field(default=None)  # with trace only
    drafted_per_cycle: tuple[tuple[int, ...], ...] | None = field(default=None)


class Load(NamedTuple):
    """How full the decoder is."""

    waiting: int
    active: int
