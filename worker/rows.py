"""A row on its way in and out of the decoder: JobSpec -> Requests -> RowResult. Pure.

A chat row is one request, a completions row one for each of its prompts; each is a choice.
The result's response is what the OpenAI API would have answered, with our own facts under
`body.dflash`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from uuid import uuid4

from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.types import Completion, ModelInfo, Request
from dflash_batch.worker.contract import (
    CHAT,
    ErrorCode,
    JobSpec,
    RowMetrics,
    RowResult,
    RowStatus,
)


class Encoder(Protocol):
    """What of a decoder is needed to make requests. All raise PromptError."""

    info: ModelInfo

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]: ...
    def encode_text(self, text: str) -> list[int]: ...
    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int: ...


@dataclass(frozen=True)
class Circumstances:
    """What a row's result says about where and when it ran."""

    info: ModelInfo
    worker: str
    attempts: int
    created: int  # Unix seconds
    waited_ms: float  # from the lease to the decoder


def requests(row: JobSpec, encoder: Encoder, first_uid: int) -> list[Request]:
    """One request for each choice of the row, with uids from `first_uid` on.

    Raises PromptError, its `param` set, when a prompt cannot be used.
    """
    try:
        prompts = [_checked(prompt, encoder.info) for prompt in _prompts(row, encoder)]
        return [
            Request(
                uid=uid,
                prompt=tuple(prompt),
                max_tokens=encoder.room(prompt, row.max_tokens),
                stop=tuple(row.stop),
                stop_token_ids=frozenset(row.stop_token_ids),
                ignore_eos=row.ignore_eos,
                trace=row.trace,
            )
            for uid, prompt in enumerate(prompts, first_uid)
        ]
    except PromptError as error:
        error.param = error.param or ("messages" if row.endpoint == CHAT else "prompt")
        raise


def result(
    row: JobSpec,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    where: Circumstances,
) -> RowResult:
    """The record of a row whose choices have all ended; `prompts` are their token ids."""
    metrics = _metrics(completions, where)
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=RowStatus.OK,
        response={
            "status_code": 200,
            "request_id": _name("req_"),
            "body": _body(row, prompts, completions, where, metrics),
        },
        metrics=metrics,
        metadata=row.metadata,
    )


def refusal(row: JobSpec, error: PromptError, where: Circumstances) -> RowResult:
    """The record of a row whose prompt cannot be used."""
    return failure(row, 400, error.code, str(error), param=error.param, metrics=_metrics([], where))


def failure(
    row: JobSpec,
    status_code: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    metrics: RowMetrics | None = None,
    status: RowStatus = RowStatus.ERROR,
) -> RowResult:
    """The record of a row that was tried and failed."""
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=status,
        response={
            "status_code": status_code,
            "request_id": _name("req_"),
            "body": {
                "error": {
                    "message": message,
                    "type": "invalid_request_error" if status_code < 500 else "server_error",
                    "param": param,
                    "code": code,
                }
            },
        },
        metrics=metrics or RowMetrics(),
        metadata=row.metadata,
    )


def poison(row: JobSpec, worker: str, attempts: int) -> RowResult:
    """The record of a row on which engine after engine has died."""
    return failure(
        row,
        500,
        ErrorCode.WORKER_LOST.value,
        f"the engine died {attempts} times while this row was in it; it is not tried again",
        metrics=RowMetrics(worker=worker, attempts=attempts),
        status=RowStatus.POISON,
    )


def _prompts(row: JobSpec, encoder: Encoder) -> list[list[int]]:
    if row.messages is not None:
        return [encoder.encode_chat(row.messages)]
    return [
        encoder.encode_text(prompt) if isinstance(prompt, str) else prompt
        for prompt in row.prompts or []
    ]


def _checked(prompt: list[int], info: ModelInfo) -> list[int]:
    if not prompt:
        raise PromptError("the prompt is empty", code=ErrorCode.INVALID_VALUE.value)
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < info.vocab_size)
        raise PromptError(
            f"token id {wrong} is outside the vocabulary of {info.vocab_size:,}",
            code=ErrorCode.INVALID_VALUE.value,
        )
    return prompt


def _metrics(completions: Sequence[Completion], where: Circumstances) -> RowMetrics:
    """Sums over the choices; times and width are those of the slowest and widest choice."""
    info = where.info

    def total(name: str) -> int:
        return sum(getattr(completion, name) for completion in completions)

    def most(name: str) -> float:
        return max((getattr(completion, name) for completion in completions), default=0)

    cached = total("cached_tokens")
    traced = [
        (completion.emitted_per_cycle, completion.drafted_per_cycle)
        for completion in completions
        if completion.emitted_per_cycle is not None
    ]
    return RowMetrics(
        worker=where.worker,
        attempts=where.attempts,
        queue_ms=round(where.waited_ms + most("wait_ms"), 3),
        prefill_ms=round(most("prefill_ms"), 3),
        decode_ms=round(most("decode_ms"), 3),
        ttft_ms=round(most("ttft_ms"), 3),
        batch_width=int(most("batch_width")),
        cycles=total("cycles"),
        prompt_tokens=total("prompt_tokens"),
        prefill_tokens=total("prefill_tokens"),
        cached_tokens=cached,
        completion_tokens=sum(len(completion.token_ids) for completion in completions),
        draft_tokens=total("draft_tokens"),
        accepted_tokens=total("accepted_tokens"),
        spec=_spec(completions, where),
        cache_source="batch" if cached else "none",
        draft=info.draft,
        block=info.block,
        dtype=info.dtype,
        emitted_per_cycle=[list(emitted or ()) for emitted, _ in traced] or None,
        drafted_per_cycle=[[list(block) for block in drafted or ()] for _, drafted in traced]
        or None,
    )


def _spec(
    completions: Sequence[Completion], where: Circumstances
) -> Literal["on", "off", "auto-off"]:
    """Whether drafts were used; "auto-off" if that was left to us and they did not pay."""
    if where.info.draft is None:
        return "off"
    kinds = {completion.spec for completion in completions}
    return "auto-off" if kinds == {"auto-off"} else "on"


def _body(
    row: JobSpec,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    where: Circumstances,
    metrics: RowMetrics,
) -> dict[str, Any]:
    chat = row.endpoint == CHAT
    body: dict[str, Any] = {
        "id": _name("chatcmpl-" if chat else "cmpl-"),
        "object": "chat.completion" if chat else "text_completion",
        "created": where.created,
        "model": row.model or where.info.target,
        "system_fingerprint": fingerprint(where.info),
        "choices": [
            _choice(row, index, prompt, completion)
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ],
        "usage": {
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.completion_tokens,
            "total_tokens": metrics.prompt_tokens + metrics.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": metrics.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "dflash": facts(metrics),
    }
    if chat and row.return_token_ids:
        body["prompt_token_ids"] = list(prompts[0])
    return body


def _choice(
    row: JobSpec, index: int, prompt: Sequence[int], completion: Completion
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if row.endpoint == CHAT:
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
    else:
        choice["text"] = completion.text
    choice["logprobs"] = None
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
        if row.endpoint != CHAT:
            choice["prompt_token_ids"] = list(prompt)
    return choice


def facts(metrics: RowMetrics) -> dict[str, Any]:
    """`body.dflash`: what the row cost, less what `usage` says already.

    With `dflash_trace`: `emitted_per_cycle`, the tokens each cycle gave, and `drafted_per_cycle`,
    the tokens proposed in each. For one choice a list over its cycles ([int], [[int]]); for
    several choices one such list for each, in their order.
    """
    shown = metrics.model_dump(exclude={"prompt_tokens", "completion_tokens"})
    for name in ("emitted_per_cycle", "drafted_per_cycle"):
        trace = shown.pop(name)
        if trace is not None:
            shown[name] = trace[0] if len(trace) == 1 else trace
    return shown


def fingerprint(info: ModelInfo) -> str:
    """Changes when the model or a setting that could change the text does."""
    settings = f"{info.target}\n{info.draft}\n{info.block}\n{info.dtype}"
    return "dfb-" + hashlib.sha256(settings.encode()).hexdigest()[:8]


def _name(prefix: str) -> str:
    return prefix + uuid4().hex[:24]
