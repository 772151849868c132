"""A row on its way in and out of the decoder: JobSpec -> Requests -> RowResult. Pure.

A chat row has one prompt, a completions row one or more; each becomes `n` requests, and each
request is a choice. Choices are numbered through all prompts, and each draws its own random
numbers from the row's seed and its own number.
The result's response is what the OpenAI API would have answered, with our own facts under
`body.dflash`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol
from uuid import uuid4

from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.types import (
    Candidate,
    Completion,
    Fault,
    ModelInfo,
    Request,
    Sampling,
    Thinking,
    TokenLogprob,
)
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

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]: ...
    def encode_text(self, text: str) -> list[int]: ...
    def thinking(self, prompt: Sequence[int], *, continued: bool = False) -> Thinking | None: ...
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
        _check_tools(row, encoder.info)
        sampling = _sampling(row, encoder.info)
        prompts = [_checked(prompt, encoder.info) for prompt in _prompts(row, encoder)]
        thinking = _thinking(row, prompts, encoder)
        choices = [prompt for prompt in prompts for _ in range(row.n)]
        return [
            Request(
                uid=first_uid + choice,
                prompt=tuple(prompt),
                max_tokens=encoder.room(prompt, row.max_tokens),
                stop=tuple(row.stop),
                stop_token_ids=frozenset(row.stop_token_ids),
                ignore_eos=row.ignore_eos,
                trace=row.trace,
                sampling=_for_choice(sampling, row, choice, len(prompt)),
                logprobs=row.logprobs,
                min_tokens=row.min_tokens,
                skip_special_tokens=row.skip_special_tokens,
                thinking=thinking,
                tools=tuple(row.tools),
                echo=row.echo,
            )
            for choice, prompt in enumerate(choices)
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
    """The record of a row whose choices have all ended; `prompts` are the token ids of each."""
    metrics = _metrics(completions, where, row.n)
    metrics = metrics.model_copy(update=_effective(row, where.info))
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


def _effective(row: JobSpec, info: ModelInfo) -> dict[str, Any]:
    """Settings of the template and of the thinking, and which of them the model cannot know."""
    known = info.template_names
    odd = [] if known is None else [name for name in row.template if name not in known | _ALWAYS]
    return {
        "template": row.template or None,
        "thinking_token_budget": row.thinking_token_budget,
        "warnings": [f"the chat template does not read {name}" for name in odd] or None,
    }


_ALWAYS = frozenset({"add_generation_prompt", "continue_final_message"})
"""Settings that do not depend on what the template reads."""


def faulty(
    row: JobSpec, fault: Fault, completions: Sequence[Completion], where: Circumstances
) -> RowResult:
    """The record of a row of which a choice has failed in the decoder."""
    return failure(row, 500, fault.code, fault.message, metrics=_metrics(completions, where))


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


def poison(row: JobSpec, worker: str, attempts: int, last_words: str = "") -> RowResult:
    """The record of a row on which engine after engine has died; the last one's words are in it."""
    how = f" ({last_words})" if last_words else ""
    return failure(
        row,
        500,
        ErrorCode.WORKER_LOST.value,
        f"the engine died {attempts} times while this row was in it{how}; it is not tried again",
        metrics=RowMetrics(worker=worker, attempts=attempts),
        status=RowStatus.POISON,
    )


def _check_tools(row: JobSpec, info: ModelInfo) -> None:
    """Raises PromptError when tools are on offer to a model that knows none."""
    unread = info.template_names is not None and "tools" not in info.template_names
    if row.tools and (unread or not info.calls_tools):
        why = "does not read tools" if unread else "has no form of tool calls that is known here"
        raise PromptError(
            f"the model's chat template {why}",
            code=ErrorCode.UNSUPPORTED_PARAMETER.value,
            param="tools",
        )


def _thinking(row: JobSpec, prompts: list[list[int]], encoder: Encoder) -> Thinking | None:
    """The thinking block of a chat. One that the prompt opens and that has no budget is closed
    there, which is the same as what the decoder does later."""
    budget = row.thinking_token_budget
    if row.endpoint != CHAT:
        return None
    continued = bool(row.template.get("continue_final_message"))
    found = encoder.thinking(prompts[0], continued=continued)
    if budget is None:
        return found
    if found is None:
        raise PromptError(
            "thinking_token_budget needs a model that has markers around its thinking",
            code=ErrorCode.UNSUPPORTED_PARAMETER.value,
            param="thinking_token_budget",
        )
    if found.open and budget == 0:
        prompts[0] += found.end
        return replace(found, open=False, budget=0)
    return replace(found, budget=budget)


def _for_choice(sampling: Sampling, row: JobSpec, choice: int, prompt: int) -> Sampling:
    """The sampling of one choice, behind a prompt of so many tokens."""
    late_from = prompt + row.min_tokens if sampling.late else 0
    return replace(sampling, choice=choice, late_from=late_from)


def _sampling(row: JobSpec, info: ModelInfo) -> Sampling:
    """How the row's first choice is to be sampled."""
    wrong = next((token for token in row.logit_bias if not 0 <= token < info.vocab_size), None)
    if wrong is not None:
        raise PromptError(
            f"logit_bias names token id {wrong}, outside the vocabulary of {info.vocab_size:,}",
            code=ErrorCode.INVALID_VALUE.value,
            param="logit_bias",
        )
    ends = set(row.stop_token_ids) | (set() if row.ignore_eos else info.eos_token_ids)
    late = sorted(end for end in ends if end < info.vocab_size) if row.min_tokens else []
    # 53 bits: any JSON reader can hand the number back unchanged.
    seed = secrets.randbits(53) if row.seed is None else row.seed
    return Sampling(
        temperature=row.temperature,
        top_p=row.top_p,
        top_k=row.top_k,
        min_p=row.min_p,
        repetition_penalty=row.repetition_penalty,
        presence_penalty=row.presence_penalty,
        frequency_penalty=row.frequency_penalty,
        logit_bias=tuple(row.logit_bias.items()),
        late=tuple(late),
        seed=seed,
    )


def _prompts(row: JobSpec, encoder: Encoder) -> list[list[int]]:
    if row.messages is not None:
        tools = {"tools": row.tools} if row.tools else {}
        return [encoder.encode_chat(row.messages, **row.template, **tools)]
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


def _metrics(completions: Sequence[Completion], where: Circumstances, n: int = 1) -> RowMetrics:
    """Sums over the choices; times and width are those of the slowest and widest choice.

    A prompt counts once for its n choices. What they took from one another is no saving: only
    tokens of the prompt that were computed for none of them came from elsewhere.
    """
    info = where.info

    def total(name: str) -> int:
        return sum(getattr(completion, name) for completion in completions)

    def most(name: str) -> float:
        return max((getattr(completion, name) for completion in completions), default=0)

    prompt_tokens = total("prompt_tokens") // n
    cached = max(0, prompt_tokens - total("prefill_tokens"))
    ssd = min(cached, total("ssd_tokens") // n)
    ram = min(cached - ssd, total("ram_tokens") // n)
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
        prompt_tokens=prompt_tokens,
        prefill_tokens=total("prefill_tokens"),
        cached_tokens=cached,
        completion_tokens=sum(len(completion.token_ids) for completion in completions),
        reasoning_tokens=total("reasoning_tokens"),
        draft_tokens=total("draft_tokens"),
        accepted_tokens=total("accepted_tokens"),
        spec=_spec(completions, where),
        cache_source=_source(cached, ram, ssd),
        cached_ram_tokens=ram,
        cached_ssd_tokens=ssd,
        cache_miss=completions[0].cache_miss if completions else None,
        draft=info.draft,
        draft_quant=info.draft_quant,
        draft_notice=next((c.draft_notice for c in completions if c.draft_notice), None),
        block=info.block,
        dtype=info.dtype,
        seed=completions[0].seed if completions else None,
        emitted_per_cycle=[list(emitted or ()) for emitted, _ in traced] or None,
        drafted_per_cycle=[[list(block) for block in drafted or ()] for _, drafted in traced]
        or None,
    )


def _source(cached: int, ram: int, ssd: int) -> Literal["none", "batch", "ram", "ssd"]:
    """Where most of the cached tokens came from; "batch" are rows that came beside this one."""
    if not cached:
        return "none"
    if ssd >= max(ram, cached - ram - ssd):
        return "ssd"
    return "ram" if ram >= cached - ram - ssd else "batch"


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
            "completion_tokens_details": {"reasoning_tokens": metrics.reasoning_tokens},
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
        choice["message"] = _message(completion)
    else:
        choice["text"] = _echoed(row, index, completion) + completion.text
    choice["logprobs"] = _logprobs(row, completion.logprobs)
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
        if row.endpoint != CHAT:
            choice["prompt_token_ids"] = list(prompt)
    return choice


def _message(completion: Completion) -> dict[str, Any]:
    """The answer; thinking under both names that clients know it by."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
    if completion.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = completion.reasoning
    if completion.tool_calls:
        message["content"] = completion.text or None
        message["tool_calls"] = [
            {"id": _name("call_"), "type": "function", "function": call._asdict()}
            for call in completion.tool_calls
        ]
    return message


def _echoed(row: JobSpec, index: int, completion: Completion) -> str:
    """The prompt of a choice as text, as it was given if it was text."""
    if not row.echo:
        return ""
    prompt = (row.prompts or [])[index // row.n]
    return prompt if isinstance(prompt, str) else completion.echo or ""


def _logprobs(row: JobSpec, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Log probabilities in the endpoint's own shape, one entry for each token of `token_ids`."""
    if tokens is None:
        return None
    if row.endpoint == CHAT:
        content = [
            {**_candidate(token.chosen), "top_logprobs": [_candidate(c) for c in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [_finite(t.chosen.logprob) if _known(t) else None for t in tokens],
        "top_logprobs": [_by_text(token) if _known(token) else None for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _known(token: TokenLogprob) -> bool:
    """Whether the token has a log p: the first of an echoed prompt has none."""
    return not math.isnan(token.chosen.logprob)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    # A token that is part of a character only has no text of its own, and so no bytes we know.
    text = candidate.text
    known = "\ufffd" not in text and not text.startswith("token_id:")
    return {
        "token": text,
        "logprob": _finite(candidate.logprob),
        "bytes": list(text.encode()) if known else None,
    }


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The likely tokens, and the chosen one with them; of two with one text, the likelier."""
    found: dict[str, float] = {}
    for candidate in (*token.top, token.chosen):
        found.setdefault(candidate.text, _finite(candidate.logprob))
    return found


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 stands for it, as it does in the OpenAI API."""
    return max(-9999.0, logprob)


def facts(metrics: RowMetrics) -> dict[str, Any]:
    """`body.dflash`: what the row cost, less what `usage` says already.

    Of a sampled row, `seed`: the request with this seed gives the same text again. `template` is
    what the chat template was told, `warnings` what of that it does not read. Where there was no
    draft or hardly any draft stood, `draft_notice`.
    With `dflash_trace`: `emitted_per_cycle`, the tokens each cycle gave, and `drafted_per_cycle`,
    the tokens proposed in each. For one choice a list over its cycles ([int], [[int]]); for
    several choices one such list for each, in their order.
    """
    shown = metrics.model_dump(exclude={"prompt_tokens", "completion_tokens", "reasoning_tokens"})
    for name in (
        "seed",
        "draft_notice",
        "template",
        "thinking_token_budget",
        "warnings",
        "cache_miss",
    ):
        if shown[name] is None:
            del shown[name]
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
