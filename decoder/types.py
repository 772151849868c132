"""The decoder's nouns: what goes in, what comes out. Plain data, no mlx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Progress = Callable[[str, float | None], None]
"""Called with a phase ("weights", "draft", …) and a share 0..1, or None when unknown."""

FinishReason = Literal["stop", "length", "tool_calls"]
DraftQuant = Literal["none", "w4", "w8"]


@dataclass(frozen=True)
class LoadSpec:
    """What to load and how to run it."""

    target: str  # Hugging Face id or folder
    draft: str = "auto"  # "auto" | "none" | "ngram" | folder | Hugging Face id, + "+ngram"
    block: int | None = None  # tokens of a block (anchor included); None: as trained
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch: int = 16  # rows decoded together
    max_context: int | None = None  # tokens of prompt + output of a row; None: the model's
    spec: Literal["auto", "on", "off"] = "on"  # draft where it pays, always, or never
    cost_dir: str | None = None  # folder of measured cycle costs; None: they are not kept
    draft_quant: DraftQuant = "none"  # what the draft's weights are quantised to when loaded
    cache_dir: str | None = None  # folder of prefixes on SSD; None: they are not kept
    memory: int | None = None  # bytes on the device, weights included; None: most of what it has
    diagnostics: str | None = None  # folder for what each cycle and row took; None: not noted
    cache_bytes: int | None = None  # most bytes in it; None: 50 GiB


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
    calls_tools: bool = False  # the form of the model's tool calls is known
    template_names: frozenset[str] | None = None  # variables the chat template reads, if known
    draft_quant: DraftQuant = "none"


@dataclass(frozen=True)
class Sampling:
    """How a row chooses its tokens; the defaults are greedy. `sampling.py` says what each does."""

    temperature: float = 0.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    late: tuple[int, ...] = ()  # token ids that end a text, and must not be chosen before
    late_from: int = 0  # this position of prompt and output
    seed: int = 0
    choice: int = 0  # which of several answers of one seed: each has its own random numbers

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.repetition_penalty > 0 and self.top_k >= 0):
            raise ValueError("temperature or top_k below 0, or a repetition penalty not above 0")
        if not (0 <= self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError("top_p and min_p lie between 0 and 1")

    @property
    def random(self) -> bool:
        """Whether tokens are drawn at all."""
        return self.temperature > 0

    @property
    def penalised(self) -> bool:
        """Whether tokens depend on how often they have come before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def filtered(self) -> bool:
        """Whether unlikely tokens are never drawn."""
        return self.random and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def plain(self) -> bool:
        """Whether each token is simply the target's most likely one."""
        return not (self.random or self.penalised or self.logit_bias or self.late)


@dataclass(frozen=True)
class Thinking:
    """The thinking block that may come before a chat's answer. `thinking.py` follows it."""

    start: tuple[int, ...]  # token ids of the markers
    end: tuple[int, ...]
    open: bool = False  # the prompt ends inside the block
    budget: int | None = None  # most tokens between the markers; None: as many as it takes

    def __post_init__(self) -> None:
        if not self.start or not self.end or (self.budget is not None and self.budget < 0):
            raise ValueError("an empty marker, or a thinking budget below 0")
        if self.open and self.budget == 0:
            raise ValueError("a block without room has to be closed in the prompt")


@dataclass(frozen=True)
class Request:
    """One row to decode. `uid` is the caller's name for it, unique while it is in."""

    uid: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    trace: bool = False
    sampling: Sampling = Sampling()
    logprobs: int | None = None  # alternatives wanted with each token's log p; None: no log p
    min_tokens: int = 0  # stop strings are looked for behind these
    skip_special_tokens: bool = True  # leave them out of the text
    thinking: Thinking | None = None  # None: the text is one piece
    tools: tuple[dict[str, Any], ...] = ()  # on offer in the prompt: their calls are looked for
    echo: bool = False  # with logprobs: those of the prompt's tokens too

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("an empty prompt cannot be decoded")
        if self.max_tokens < (0 if self.echo else 1):
            raise ValueError("max_tokens must be at least 1, or 0 with echo")

    @property
    def scored(self) -> bool:
        """Whether log probabilities of the prompt are wanted."""
        return self.echo and self.logprobs is not None


class Candidate(NamedTuple):
    """A token that could stand at a place."""

    token: int
    text: str  # of the token alone
    logprob: float


class TokenLogprob(NamedTuple):
    """A token of the text, and what else was likely at its place."""

    chosen: Candidate  # log p NaN: it is the first of an echoed prompt, and nothing was likely
    top: tuple[Candidate, ...]  # the most likely first
    offset: int  # characters of text before it


class ToolCall(NamedTuple):
    """A function the model wants called."""

    name: str
    arguments: str  # JSON


class Fault(NamedTuple):
    """Why a row has no answer, though nothing is wrong with its request."""

    code: str  # one of the contract's error codes
    message: str


@dataclass(frozen=True)
class Completion:
    """One finished row."""

    uid: int
    token_ids: tuple[int, ...]  # the stop token included
    text: str  # the answer, without stop token and stop string; "" when there is no tokenizer
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
    ram_tokens: int = 0  # of cached_tokens: in memory before the row came
    ssd_tokens: int = 0  # of cached_tokens: read from SSD
    cache_miss: str | None = None  # why nothing on SSD served it, where there is an SSD tier
    seed: int | None = None  # of its sampling, if tokens were drawn
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each token, if asked for
    echo: str | None = None  # the prompt as text; then the logprobs begin with the prompt's
    reasoning: str | None = None  # text of the thinking block, if there was one
    reasoning_tokens: int = 0  # of token_ids: up to the end of that block
    tool_calls: tuple[ToolCall, ...] = ()  # what `text` had of them is not in it any more
    fault: Fault | None = None  # then what the row said is of no meaning
    spec: Literal["on", "off", "auto-off"] = "on"  # "auto-off": for most cycles drafts did not pay
    emitted_per_cycle: tuple[int, ...] | None = field(default=None)  # with trace only
    drafted_per_cycle: tuple[tuple[int, ...], ...] | None = field(default=None)
    draft_notice: str | None = None  # why drafts are off or hardly used


class Load(NamedTuple):
    """How full the decoder is."""

    waiting: int
    active: int
