"""What leaves the decoder: a row that has ended, as a `Completion`."""

from __future__ import annotations

import math
from typing import Any, Literal

from dflash_batch.decoder.row import Logprob, Row, Words
from dflash_batch.decoder.text import Detokenizer
from dflash_batch.decoder.tools import calls_in
from dflash_batch.decoder.types import Candidate, Completion, Request, TokenLogprob, ToolCall


def answer(
    row: Row,
    tokenizer: Any,
    now: float,
    spec: Literal["on", "off", "auto-off"],
    draft_notice: str | None,
) -> Completion:
    """`now` is of the clock that timed the row; without a tokenizer all texts are empty."""
    request = row.request
    words, calls = _words(row, tokenizer)
    return Completion(
        uid=request.uid,
        token_ids=tuple(row.tokens),
        text=words.text,
        finish_reason="tool_calls" if calls else row.reason or "stop",
        prompt_tokens=len(request.prompt),
        prefill_tokens=row.computed,
        cached_tokens=max(0, len(request.prompt) - row.computed),
        ram_tokens=row.ram,
        ssd_tokens=row.ssd,
        cache_miss=row.miss,
        cycles=row.cycles,
        spec=spec,
        draft_notice=draft_notice,
        draft_tokens=row.drafted,
        accepted_tokens=row.accepted,
        batch_width=row.width,
        wait_ms=1e3 * (row.started - row.added),
        prefill_ms=1e3 * (row.first - row.started),
        ttft_ms=1e3 * (row.first - row.added),
        decode_ms=1e3 * (now - row.first),
        seed=request.sampling.seed if request.sampling.random else None,
        logprobs=_logprobs(row, tokenizer),
        echo=_echo(request, tokenizer),
        reasoning=words.reasoning,
        reasoning_tokens=words.reasoning_tokens,
        tool_calls=calls,
        fault=row.fault,
        emitted_per_cycle=tuple(row.emitted_per_cycle) if request.trace else None,
        drafted_per_cycle=tuple(row.drafted_per_cycle) if request.trace else None,
    )


def _words(row: Row, tokenizer: Any) -> tuple[Words, tuple[ToolCall, ...]]:
    """What the row has said, and of that the tool calls."""
    if tokenizer is None:
        return Words("", None, 0), ()
    if row.request.tools and tokenizer.has_tool_calling and row.reason == "stop":
        # Their markers may be special tokens.
        words = row.words(tokenizer, skip_special=False)
        text, calls = calls_in(words.text, tokenizer, row.request.tools)
        if calls:
            return words._replace(text=text), calls
    return row.words(tokenizer, skip_special=row.request.skip_special_tokens), ()


def piece(tokenizer: Any, token: int) -> str:
    """A token as text; by its number where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token}"
    text: str = tokenizer.decode([token])
    return text


def _echo(request: Request, tokenizer: Any) -> str | None:
    """The prompt as text, if that is wanted."""
    if not request.echo:
        return None
    if tokenizer is None:
        return ""
    skip = request.skip_special_tokens
    text: str = tokenizer.decode(list(request.prompt), skip_special_tokens=skip)
    return text


def _logprobs(row: Row, tokenizer: Any) -> tuple[TokenLogprob, ...] | None:
    """Of each token of the output, and with echo of the prompt before it; None: not asked for."""
    request = row.request
    if request.logprobs is None or row.fault is not None:
        return None
    tokens, known = row.tokens, row.logprobs
    if request.echo:
        first: Logprob = (math.nan, [])
        tokens, known = [*request.prompt, *tokens], [first, *row.prompt_logprobs, *known]
    pieces = None
    if tokenizer is not None:
        pieces = Detokenizer(tokenizer, skip_special=request.skip_special_tokens)
    offset, logprobs = 0, []
    for token, (own, top) in zip(tokens, known, strict=True):
        others = tuple(Candidate(other, piece(tokenizer, other), log) for other, log in top)
        chosen = Candidate(token, piece(tokenizer, token), own)
        logprobs.append(TokenLogprob(chosen, others, offset))
        offset += len(pieces.push(token)) if pieces is not None else 0
    return tuple(logprobs)
