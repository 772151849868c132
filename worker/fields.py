"""What each field of a request body means here: one table, and the checks behind it.

A field is honoured, ignored because it cannot change the text, or refused by name. Nothing that
could change the text is dropped in silence. The reader calls `parse_body`; nobody else needs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_batch.worker.contract import CHAT, Endpoint, ErrorCode, Prompt

MAX_STOPS = 16
"""Most stop strings of a request."""

MAX_PROMPTS = 2048
"""Most prompts, and most choices, of one `/v1/completions` request."""

MAX_CHOICES = 128
"""Most choices of one prompt."""

ID_LIMIT = 2**31
"""Token ids, and counts of tokens, are below this."""

ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles of messages, and what the chat template is told."""


class FieldError(Exception):
    """Raised when one field of a body cannot be honoured."""

    def __init__(self, code: ErrorCode, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


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
                    values[rule.into] = parsed
            elif isinstance(rule, Ignored):
                ignored.append(name)
            elif rule is None:
                raise _unsupported("is not known here")
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


def _wrong_together(values: dict[str, Any], endpoint: Endpoint) -> list[FieldError]:
    """What is wrong with fields that are each right."""
    n, best_of = values.get("n", 1), values.get("best_of")
    prompts = len(values.get("prompts", ()))
    if best_of is not None and best_of > n:
        message = f"best_of above n is not supported: {n} of {best_of} answers would be chosen"
        return [FieldError(ErrorCode.UNSUPPORTED_PARAMETER, message, "best_of")]
    if best_of is not None and best_of < n:
        message = f"best_of is {best_of}, but n is {n}"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "best_of")]
    if prompts * n > MAX_PROMPTS:
        message = f"n: {prompts:,} prompts × {n} make more than {MAX_PROMPTS:,} choices"
        return [FieldError(ErrorCode.INVALID_VALUE, message, "n")]
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
            raise _invalid(f"has the wrong type: {_name(value)}")
        raise _unsupported(self.reason)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _as_tuple(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _invalid(message: str) -> FieldError:
    return FieldError(ErrorCode.INVALID_VALUE, message)


def _unsupported(message: str) -> FieldError:
    return FieldError(ErrorCode.UNSUPPORTED_PARAMETER, message)


def _name(value: Any) -> str:
    """The JSON type of a value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")


# Parsers. Each takes what JSON gave, never None at the top, and raises FieldError without a param.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _invalid(f"must be a string, not {_name(value)}")
    if not value:
        raise _invalid("must not be empty")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(f"must be true or false, not {_name(value)}")
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(f"must be an integer, not {_name(value)}")
    return value


_NUMBER = (int, float)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise _invalid(f"must be a number, not {_name(value)}")
    return value


def _count(value: Any) -> int:
    if not 1 <= _integer(value) < ID_LIMIT:
        raise _invalid("must be at least 1 and below 2^31")
    return int(value)


def _seed(value: Any) -> int:
    if not -(2**63) <= _integer(value) < 2**63:
        raise _invalid("must fit into 64 bits")
    return int(value)


def _between(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if not low <= _number(value) <= high:
            raise _invalid(f"must be between {low:g} and {high:g}")
        return float(value)

    return parse


def _repetition(value: Any) -> float:
    if not 0 < _number(value) <= 100:
        raise _invalid("must be above 0 and at most 100")
    return float(value)


def _top_k(value: Any) -> int:
    if not -1 <= _integer(value) < ID_LIMIT:
        raise _invalid("must be at least 1, or -1 or 0 for no limit")
    return max(0, int(value))


def _choices(value: Any) -> int:
    if not 1 <= _integer(value) <= MAX_CHOICES:
        raise _invalid(f"must be between 1 and {MAX_CHOICES}")
    return int(value)


def _logprobs(value: Any) -> bool | int:
    """A yes or no of chats, a number of alternatives of completions."""
    if not isinstance(value, bool) and not 0 <= _integer(value) <= 5:
        raise _invalid("must be between 0 and 5")
    return bool(value) if isinstance(value, bool) else int(value)


def _top_logprobs(value: Any) -> int:
    if not 0 <= _integer(value) <= 20:
        raise _invalid("must be between 0 and 20")
    return int(value)


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids, as strings, to what is added to their logits."""
    if not isinstance(value, dict):
        raise _invalid(f"must be an object, not {_name(value)}")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < ID_LIMIT):
            raise _invalid(f"has a key that is no token id: {key[:40]!r}")
        if isinstance(number, bool) or not isinstance(number, _NUMBER) or abs(number) > 100:
            raise _invalid(f"[{key}] must be a number between -100 and 100")
        bias[int(key)] = float(number)
    return bias


def _stop(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _invalid("must be a string or a list of strings")
    if len(value) > MAX_STOPS:
        raise _invalid(f"has {len(value)} strings; at most {MAX_STOPS} are allowed")
    if not all(value):
        raise _invalid("must not hold an empty string")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < ID_LIMIT


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise _invalid("must be a list of token ids: integers from 0 to 2^31 - 1")
    return value


def _prompts(value: Any) -> list[Prompt]:
    """A string, token ids, or a list of either; one choice for each prompt."""
    shape = "must be a string, a list of strings, a list of token ids, or a list of such lists"
    prompts: list[Any]
    if isinstance(value, list) and value and not any(isinstance(p, str | list) for p in value):
        prompts = [value]
    else:
        prompts = value if isinstance(value, list) else [value]
    if not prompts:
        raise _invalid("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise _invalid(f"has {len(prompts):,} prompts; at most {MAX_PROMPTS:,} are allowed")
    if len({type(prompt) for prompt in prompts}) != 1:
        raise _invalid(shape + ", not a mixture")
    for prompt in prompts:
        if isinstance(prompt, list):
            _ids(prompt)
        elif not isinstance(prompt, str):
            raise _invalid(shape)
        if not prompt:
            raise _invalid("must not be empty" if len(prompts) == 1 else "has an empty prompt")
    return prompts


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages as the chat template gets them: content as one string, developer as system."""
    if not isinstance(value, list):
        raise _invalid(f"must be a list of messages, not {_name(value)}")
    if not value:
        raise _invalid("must not be empty")
    return [_message(message, at) for at, message in enumerate(value)]


_MESSAGE_TEXTS = ("name", "tool_call_id")
"""Keys of a message, besides role and content, that the template gets as they are."""


def _message(value: Any, at: int) -> dict[str, Any]:
    where = f"[{at}]"
    if not isinstance(value, dict):
        raise _invalid(f"{where} must be an object, not {_name(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise _invalid(f"{where}.role must be one of {known}")
    message = {"role": ROLES[role], "content": _content(value.get("content"), where)}
    for key, item in value.items():
        if key in ("role", "content") or item is None or item in ([], {}):
            continue
        if key not in _MESSAGE_TEXTS:
            raise _unsupported(f"{where}.{key} is not supported")
        if not isinstance(item, str):
            raise _invalid(f"{where}.{key} must be a string, not {_name(item)}")
        message[key] = item
    return message


def _content(value: Any, where: str) -> str:
    """Text, or text parts joined without anything between them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid(f"{where}.content must be a string or a list of parts, not {_name(value)}")
    return "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise _invalid(f"{where} must be an object with a type")
    if value["type"] != "text":
        raise _unsupported(f"{where} is of type {value['type'][:40]!r}: only text is supported")
    if not isinstance(value.get("text"), str):
        raise _invalid(f"{where}.text must be a string")
    extra = _first(key for key in value if key not in ("type", "text") and value[key] is not None)
    if extra is not None:
        raise _unsupported(f"{where}.{extra} is not supported")
    text: str = value["text"]
    return text


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


_NO_TOOLS = "is not supported yet: tools are not offered to the model"
_NO_THINKING = "is not supported yet: the template's own default is used"

FIELDS: dict[str, Honoured | Ignored | Refused] = {
    # what is asked
    "model": Honoured("model", _text),
    "messages": Honoured("messages", _messages),
    "prompt": Honoured("prompts", _prompts),
    # how much, and where to stop
    "max_tokens": Honoured("max_tokens", _count),
    "max_completion_tokens": Honoured("max_completion_tokens", _count),  # wins over max_tokens
    "stop": Honoured("stop", _stop),
    "stop_token_ids": Honoured("stop_token_ids", _ids),
    "ignore_eos": Honoured("ignore_eos", _boolean),
    "min_tokens": Refused((0,), kind=int),
    # what the answer carries
    "return_token_ids": Honoured("return_token_ids", _boolean),
    "dflash_trace": Honoured("trace", _boolean),
    "n": Honoured("n", _choices, neutral=1),
    "best_of": Honoured("best_of", _count),  # only as another word for n
    "logprobs": Honoured("logprobs", _logprobs),
    "top_logprobs": Honoured("top_logprobs", _top_logprobs),
    "prompt_logprobs": Refused(kind=int),
    "echo": Refused((False,), kind=bool),
    "suffix": Refused(("",), kind=str),
    "include_stop_str_in_output": Refused((False,), kind=bool),
    "skip_special_tokens": Refused((True,), kind=bool),
    "stream": Refused((False,), "has no meaning in a batch", kind=bool),
    # sampling: greedy where no temperature is named
    "temperature": Honoured("temperature", _between(0, 2), neutral=0),
    "top_p": Honoured("top_p", _between(0, 1), neutral=1),
    "top_k": Honoured("top_k", _top_k, neutral=0),
    "min_p": Honoured("min_p", _between(0, 1), neutral=0),
    "seed": Honoured("seed", _seed),
    # these move the most likely token too
    "repetition_penalty": Honoured("repetition_penalty", _repetition, neutral=1),
    "presence_penalty": Honoured("presence_penalty", _between(-2, 2), neutral=0),
    "frequency_penalty": Honoured("frequency_penalty", _between(-2, 2), neutral=0),
    "logit_bias": Honoured("logit_bias", _logit_bias, neutral={}),
    "response_format": Refused(({"type": "text"},), kind=dict),
    # tools
    "tools": Refused(([],), _NO_TOOLS, kind=list),
    "tool_choice": Refused(("none", "auto"), _NO_TOOLS, kind=(str, dict)),
    "parallel_tool_calls": Ignored(),
    "functions": Refused(([],), _NO_TOOLS, kind=list),
    "function_call": Refused(("none", "auto"), _NO_TOOLS, kind=(str, dict)),
    "web_search_options": Refused(reason="is not supported", kind=dict),
    # the chat template
    "chat_template_kwargs": Refused(({},), _NO_THINKING, kind=dict),
    "enable_thinking": Refused(reason=_NO_THINKING, kind=bool),
    "reasoning_effort": Refused(reason=_NO_THINKING, kind=str),
    "thinking_token_budget": Refused(kind=int),
    "continue_final_message": Refused((False,), kind=bool),
    "add_generation_prompt": Refused((True,), kind=bool),
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
