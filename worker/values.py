"""Values of body fields: each parser takes what JSON gave, and raises FieldError if it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_batch.worker.contract import ErrorCode, Prompt

MAX_STOPS = 16
"""Most stop strings of a request."""

MAX_PROMPTS = 2048
"""Most prompts, and most choices, of one `/v1/completions` request."""

MAX_CHOICES = 128
"""Most choices of one prompt."""

ID_LIMIT = 2**31
"""Token ids, and counts of tokens, are below this."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""What a model can be told of how much to think."""


class FieldError(Exception):
    """Raised when one field of a body cannot be honoured."""

    def __init__(self, code: ErrorCode, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def invalid(message: str) -> FieldError:
    return FieldError(ErrorCode.INVALID_VALUE, message)


def unsupported(message: str) -> FieldError:
    return FieldError(ErrorCode.UNSUPPORTED_PARAMETER, message)


def kind_of(value: Any) -> str:
    """The JSON type of a value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list"}
    return "null" if value is None else names.get(type(value), "an object")


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(f"must be a string, not {kind_of(value)}")
    if not value:
        raise invalid("must not be empty")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"must be true or false, not {kind_of(value)}")
    return value


def integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"must be an integer, not {kind_of(value)}")
    return value


_NUMBER = (int, float)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise invalid(f"must be a number, not {kind_of(value)}")
    return value


def count(value: Any) -> int:
    if not 1 <= integer(value) < ID_LIMIT:
        raise invalid("must be at least 1 and below 2^31")
    return int(value)


def amount(value: Any) -> int:
    if not 0 <= integer(value) < ID_LIMIT:
        raise invalid("must be at least 0 and below 2^31")
    return int(value)


def effort(value: Any) -> str:
    if value not in EFFORTS:
        raise invalid(f"must be one of {', '.join(EFFORTS)}")
    return str(value)


def seed(value: Any) -> int:
    if not -(2**63) <= integer(value) < 2**63:
        raise invalid("must fit into 64 bits")
    return int(value)


def between(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if not low <= number(value) <= high:
            raise invalid(f"must be between {low:g} and {high:g}")
        return float(value)

    return parse


def repetition(value: Any) -> float:
    if not 0 < number(value) <= 100:
        raise invalid("must be above 0 and at most 100")
    return float(value)


def top_k(value: Any) -> int:
    if not -1 <= integer(value) < ID_LIMIT:
        raise invalid("must be at least 1, or -1 or 0 for no limit")
    return max(0, int(value))


def choices(value: Any) -> int:
    if not 1 <= integer(value) <= MAX_CHOICES:
        raise invalid(f"must be between 1 and {MAX_CHOICES}")
    return int(value)


def logprobs(value: Any) -> bool | int:
    """A yes or no of chats, a number of alternatives of completions."""
    if not isinstance(value, bool) and not 0 <= integer(value) <= 5:
        raise invalid("must be between 0 and 5")
    return bool(value) if isinstance(value, bool) else int(value)


def top_logprobs(value: Any) -> int:
    if not 0 <= integer(value) <= 20:
        raise invalid("must be between 0 and 20")
    return int(value)


def logit_bias(value: Any) -> dict[int, float]:
    """Token ids, as strings, to what is added to their logits."""
    if not isinstance(value, dict):
        raise invalid(f"must be an object, not {kind_of(value)}")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < ID_LIMIT):
            raise invalid(f"has a key that is no token id: {key[:40]!r}")
        if isinstance(number, bool) or not isinstance(number, _NUMBER) or abs(number) > 100:
            raise invalid(f"[{key}] must be a number between -100 and 100")
        bias[int(key)] = float(number)
    return bias


def stop(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid("must be a string or a list of strings")
    if len(value) > MAX_STOPS:
        raise invalid(f"has {len(value)} strings; at most {MAX_STOPS} are allowed")
    if not all(value):
        raise invalid("must not hold an empty string")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < ID_LIMIT


def ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise invalid("must be a list of token ids: integers from 0 to 2^31 - 1")
    return value


def prompts(value: Any) -> list[Prompt]:
    """A string, token ids, or a list of either; one choice for each prompt."""
    shape = "must be a string, a list of strings, a list of token ids, or a list of such lists"
    prompts: list[Any]
    if isinstance(value, list) and value and not any(isinstance(p, str | list) for p in value):
        prompts = [value]
    else:
        prompts = value if isinstance(value, list) else [value]
    if not prompts:
        raise invalid("must not be empty")
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"has {len(prompts):,} prompts; at most {MAX_PROMPTS:,} are allowed")
    if len({type(prompt) for prompt in prompts}) != 1:
        raise invalid(shape + ", not a mixture")
    for prompt in prompts:
        if isinstance(prompt, list):
            ids(prompt)
        elif not isinstance(prompt, str):
            raise invalid(shape)
        if not prompt:
            raise invalid("must not be empty" if len(prompts) == 1 else "has an empty prompt")
    return prompts
