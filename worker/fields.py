"""What each field of a request body means here: one table, and the checks behind it.

A field is honoured, ignored because it cannot change the text, or refused by name. Nothing that
could change the text is dropped in silence. The reader calls `parse_body`; nobody else needs more.
How a value is read is in values.py, and in messages.py for a chat's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_batch.worker import messages
from dflash_batch.worker import values as parse
from dflash_batch.worker.contract import CHAT, TEXT, Endpoint, ErrorCode
from dflash_batch.worker.values import MAX_PROMPTS, FieldError, invalid, kind_of, unsupported


class BodyError(Exception):
    """Raised when a body cannot be honoured; `problems` holds every reason, at least one."""

    def __init__(self, problems: list[FieldError]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


class Body(NamedTuple):
    """A body understood: values by `JobSpec` field, and the fields that were ignored."""

    values: dict[str, Any]
    ignored: list[str]


def parse_body(body: dict[str, Any], endpoint: Endpoint) -> Body:
    """Reads all fields of a body. null is the same as absent. Raises BodyError."""
    values: dict[str, Any] = {}
    ignored: list[str] = []
    problems = _wrong_input(body, endpoint)
    named = {problem.param for problem in problems}
    for name, value in body.items():
        if value is None or name in named:
            continue
        rule = FIELDS.get(name)
        try:
            if isinstance(rule, Honoured):
                parsed = rule.parse(value)
                if rule.neutral is None or parsed != rule.neutral:
                    _check_place(rule, endpoint)
                    values[rule.into] = parsed
            elif isinstance(rule, Ignored):
                ignored.append(name)
            elif rule is None:
                raise unsupported("is not known here")
            else:
                rule.check(value)
        except FieldError as error:
            joint = "" if error.message.startswith("[") else " "
            problems.append(FieldError(error.code, f"{name}{joint}{error.message}", name))
    problems += _wrong_together(values, endpoint)
    if problems:
        raise BodyError(problems)
    limit = values.pop("max_completion_tokens", None)
    if limit is not None:
        values["max_tokens"] = limit
    values.pop("best_of", None)
    _settle_logprobs(values)
    _settle_template(values)
    if values.pop("tool_choice", "auto") == "none":
        values.pop("tools", None)
    if values.pop("parallel_tool_calls", None) is not None:
        ignored.append("parallel_tool_calls")
    if not values.get("temperature"):
        ignored += [name for name in values if name in _OF_SAMPLING]
    return Body(values, ignored)


_OF_SAMPLING = ("top_p", "top_k", "min_p", "seed")
"""Fields that cannot change greedy text."""


def _settle_logprobs(values: dict[str, Any]) -> None:
    """One number of alternatives, or nothing."""
    wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", 0)
    if wanted is not False:
        values["logprobs"] = top if wanted is True else wanted


def _settle_template(values: dict[str, Any]) -> None:
    """All that the chat template is told under one name.

    Effort "none" is thinking turned off. A message that is gone on with needs no beginning of an
    answer behind it.
    """
    told = values.pop("template", {})
    if "enable_thinking" in values:
        told = told | {"enable_thinking": values.pop("enable_thinking")}
    effort = values.pop("reasoning_effort", None)
    if effort == "none":
        told = told | {"enable_thinking": False}
    elif effort is not None:
        told = told | {"reasoning_effort": effort}
    begin = values.pop("add_generation_prompt", True)
    if values.pop("continue_final_message", False):
        told = told | {"add_generation_prompt": False, "continue_final_message": True}
    elif not begin:
        told = told | {"add_generation_prompt": False}
    if told:
        values["template"] = told


def _check_place(rule: Honoured, endpoint: Endpoint) -> None:
    """Raises FieldError for a field that means nothing at the endpoint."""
    if rule.only is not None and rule.only != endpoint:
        raise unsupported(f"is for {rule.only}")


def _wrong_together(values: dict[str, Any], endpoint: Endpoint) -> list[FieldError]:
    """What is wrong with fields that are each right."""
    checks = (_wrong_counts, _wrong_lengths, _wrong_template)
    problems = [problem for check in checks for problem in check(values)]
    return problems or _wrong_logprobs(values, endpoint)


def _wrong_lengths(values: dict[str, Any]) -> list[FieldError]:
    name = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    most, least = values.get(name), values.get("min_tokens", 0)
    if most == 0 and not values.get("echo"):
        return [FieldError(ErrorCode.INVALID_VALUE, f"{name} must be at least 1, or echo", name)]
    if most is not None and least > most:
        message = f"min_tokens is {least}, but {name} is {most}"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "min_tokens")]
    return []


def _wrong_template(values: dict[str, Any]) -> list[FieldError]:
    told = values.get("template", {})
    names = {
        "enable_thinking": ("enable_thinking", values.get("enable_thinking")),
        "reasoning_effort": ("reasoning_effort", values.get("reasoning_effort")),
    }
    if values.get("reasoning_effort") == "none":
        names["reasoning_effort"] = ("enable_thinking", False)
        if values.get("enable_thinking"):
            message = 'reasoning_effort "none" contradicts enable_thinking'
            return [FieldError(ErrorCode.INVALID_VALUE, message, "reasoning_effort")]
    for name, (key, value) in names.items():
        if value is not None and key in told and told[key] != value:
            message = f"{name} contradicts chat_template_kwargs"
            return [FieldError(ErrorCode.INVALID_VALUE, message, name)]
    if values.get("continue_final_message"):
        if values.get("add_generation_prompt"):
            message = "continue_final_message leaves no place for add_generation_prompt"
            return [FieldError(ErrorCode.INVALID_VALUE, message, "continue_final_message")]
        if "messages" in values and values["messages"][-1]["role"] != "assistant":
            message = "continue_final_message needs a last message of the assistant"
            return [FieldError(ErrorCode.INVALID_VALUE, message, "continue_final_message")]
    return []


def _wrong_counts(values: dict[str, Any]) -> list[FieldError]:
    n, best_of = values.get("n", 1), values.get("best_of")
    prompts = len(values.get("prompts", ()))
    if values.get("tools") and values.get("parallel_tool_calls") is False:
        message = "parallel_tool_calls cannot be kept from the model"
        return [FieldError(ErrorCode.UNSUPPORTED_PARAMETER, message, "parallel_tool_calls")]
    if best_of is not None and best_of > n:
        message = f"best_of above n is not supported: {n} of {best_of} answers would be chosen"
        return [FieldError(ErrorCode.UNSUPPORTED_PARAMETER, message, "best_of")]
    if best_of is not None and best_of < n:
        message = f"best_of is {best_of}, but n is {n}"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "best_of")]
    if prompts * n > MAX_PROMPTS:
        message = f"n: {prompts:,} prompts × {n} make more than {MAX_PROMPTS:,} choices"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "n")]
    return []


def _wrong_logprobs(values: dict[str, Any], endpoint: Endpoint) -> list[FieldError]:
    wanted = values.get("logprobs", False)
    if wanted is not False and isinstance(wanted, bool) != (endpoint == CHAT):
        kind = "true or false" if endpoint == CHAT else "a number"
        return [FieldError(ErrorCode.INVALID_VALUE, f"logprobs must be {kind} here", "logprobs")]
    if values.get("top_logprobs") and wanted is not True:
        message = "top_logprobs needs logprobs to be true"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "top_logprobs")]
    return []


def _wrong_input(body: dict[str, Any], endpoint: Endpoint) -> list[FieldError]:
    needed, other = ("messages", "prompt") if endpoint == CHAT else ("prompt", "messages")
    if body.get(other) is not None:
        message = f"{endpoint} takes {needed}, but the body has {other}"
        return [FieldError(ErrorCode.MISMATCHED_ENDPOINT, message, other)]
    if body.get(needed) is None:
        message = f"{needed} is missing: {endpoint} needs it"
        return [FieldError(ErrorCode.MISSING_REQUIRED_PARAMETER, message, needed)]
    return []


@dataclass(frozen=True)
class Honoured:
    """Changes what is done: parsed and kept in the JobSpec field `into`."""

    into: str
    parse: Callable[[Any], Any]
    neutral: Any = None  # the parsed value that is the same as absent
    only: Endpoint | None = None  # the endpoint where other values mean something


@dataclass(frozen=True)
class Ignored:
    """Cannot change the text, whatever its value."""


@dataclass(frozen=True)
class Refused:
    """Would change the text and cannot be honoured yet; its neutral values are let through."""

    neutral: tuple[Any, ...] = ()
    reason: str = "is not supported yet"
    kind: type | tuple[type, ...] = object  # a value of another type is invalid, not unsupported

    def check(self, value: Any) -> None:
        if any(_same(value, neutral) for neutral in self.neutral):
            return
        is_bool_as_number = isinstance(value, bool) and bool not in _as_tuple(self.kind)
        if self.kind is not object and (is_bool_as_number or not isinstance(value, self.kind)):
            raise invalid(f"has the wrong type: {kind_of(value)}")
        raise unsupported(self.reason)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _as_tuple(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


_OLD_TOOLS = "is not supported: offer tools"

FIELDS: dict[str, Honoured | Ignored | Refused] = {
    # what is asked
    "model": Honoured("model", parse.text),
    "messages": Honoured("messages", messages.messages),
    "prompt": Honoured("prompts", parse.prompts),
    # how much, and where to stop
    "max_tokens": Honoured("max_tokens", parse.amount),  # 0 with echo only
    "max_completion_tokens": Honoured("max_completion_tokens", parse.amount),  # wins
    "stop": Honoured("stop", parse.stop),
    "stop_token_ids": Honoured("stop_token_ids", parse.ids),
    "ignore_eos": Honoured("ignore_eos", parse.boolean),
    "min_tokens": Honoured("min_tokens", parse.amount, neutral=0),
    # what the answer carries
    "return_token_ids": Honoured("return_token_ids", parse.boolean),
    "dflash_trace": Honoured("trace", parse.boolean),
    "n": Honoured("n", parse.choices, neutral=1),
    "best_of": Honoured("best_of", parse.count),  # only as another word for n
    "logprobs": Honoured("logprobs", parse.logprobs),
    "top_logprobs": Honoured("top_logprobs", parse.top_logprobs),
    "prompt_logprobs": Refused(kind=int),
    "echo": Honoured("echo", parse.boolean, neutral=False, only=TEXT),
    "suffix": Refused(("",), kind=str),
    "include_stop_str_in_output": Refused((False,), kind=bool),
    "skip_special_tokens": Honoured("skip_special_tokens", parse.boolean, neutral=True),
    "stream": Refused((False,), "has no meaning in a batch", kind=bool),
    # sampling: greedy where no temperature is named
    "temperature": Honoured("temperature", parse.between(0, 2), neutral=0),
    "top_p": Honoured("top_p", parse.between(0, 1), neutral=1),
    "top_k": Honoured("top_k", parse.top_k, neutral=0),
    "min_p": Honoured("min_p", parse.between(0, 1), neutral=0),
    "seed": Honoured("seed", parse.seed),
    # these move the most likely token too
    "repetition_penalty": Honoured("repetition_penalty", parse.repetition, neutral=1),
    "presence_penalty": Honoured("presence_penalty", parse.between(-2, 2), neutral=0),
    "frequency_penalty": Honoured("frequency_penalty", parse.between(-2, 2), neutral=0),
    "logit_bias": Honoured("logit_bias", parse.logit_bias, neutral={}),
    "response_format": Refused(({"type": "text"},), kind=dict),
    # tools
    "tools": Honoured("tools", messages.tools, neutral=[], only=CHAT),
    "tool_choice": Honoured("tool_choice", messages.tool_choice),
    "parallel_tool_calls": Honoured("parallel_tool_calls", parse.boolean),
    "functions": Refused(([],), _OLD_TOOLS, kind=list),
    "function_call": Refused(("none", "auto"), _OLD_TOOLS, kind=(str, dict)),
    "web_search_options": Refused(reason="is not supported", kind=dict),
    # the chat template
    "chat_template_kwargs": Honoured("template", messages.template_kwargs, neutral={}, only=CHAT),
    "enable_thinking": Honoured("enable_thinking", parse.boolean, only=CHAT),
    "reasoning_effort": Honoured("reasoning_effort", parse.effort, only=CHAT),
    "thinking_token_budget": Honoured("thinking_token_budget", parse.amount, only=CHAT),
    "continue_final_message": Honoured(
        "continue_final_message", parse.boolean, neutral=False, only=CHAT
    ),
    "add_generation_prompt": Honoured("add_generation_prompt", parse.boolean, only=CHAT),
    # sound
    "modalities": Refused((["text"],), "can only be text", kind=list),
    "audio": Refused(reason="is not supported: answers are text", kind=dict),
    # words for a hosted service
    "user": Ignored(),
    "metadata": Ignored(),
    "store": Ignored(),
    "service_tier": Ignored(),
    "safety_identifier": Ignored(),
    "prompt_cache_key": Ignored(),
    "prompt_cache_retention": Ignored(),
    "prediction": Ignored(),
    "verbosity": Ignored(),
    "stream_options": Ignored(),
}
