"""Messages and tools of a chat, as the chat template gets them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dflash_batch.worker.values import invalid, kind_of, unsupported

ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles of messages, and what the chat template is told."""


def messages(value: Any) -> list[dict[str, Any]]:
    """Messages as the chat template gets them: content as one string, developer as system."""
    if not isinstance(value, list):
        raise invalid(f"must be a list of messages, not {kind_of(value)}")
    if not value:
        raise invalid("must not be empty")
    return [_message(message, at) for at, message in enumerate(value)]


_MESSAGE_TEXTS = {name: name for name in ("name", "tool_call_id", "reasoning_content")}
_MESSAGE_TEXTS["reasoning"] = "reasoning_content"
"""Keys of a message, besides role and content, and what the template gets them as."""


def _message(value: Any, at: int) -> dict[str, Any]:
    where = f"[{at}]"
    if not isinstance(value, dict):
        raise invalid(f"{where} must be an object, not {kind_of(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise invalid(f"{where}.role must be one of {known}")
    calls = _calls(value.get("tool_calls"), f"{where}.tool_calls")
    content = value.get("content")
    message: dict[str, Any] = {"role": ROLES[role]}
    message["content"] = "" if content is None and calls else _content(content, where)
    if calls:
        message["tool_calls"] = calls
    for key, item in value.items():
        if key in ("role", "content", "tool_calls") or item is None or item in ([], {}):
            continue
        if key not in _MESSAGE_TEXTS:
            raise unsupported(f"{where}.{key} is not supported")
        if not isinstance(item, str):
            raise invalid(f"{where}.{key} must be a string, not {kind_of(item)}")
        message[_MESSAGE_TEXTS[key]] = item
    return message


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier answer; arguments as the object that their text says."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{where} must be a list, not {kind_of(value)}")
    return [_call(call, f"{where}[{at}]") for at, call in enumerate(value)]


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} must be an object with a function that has a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments must be an object as JSON text")
    call: dict[str, Any] = {"type": "function"}
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call | {"function": {"name": function["name"], "arguments": arguments}}


def tools(value: Any) -> list[dict[str, Any]]:
    """Functions on offer, as the template gets them."""
    if not isinstance(value, list):
        raise invalid(f"must be a list, not {kind_of(value)}")
    for at, tool in enumerate(value):
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise invalid(f"[{at}] must be an object with a type")
        if tool["type"] != "function":
            raise unsupported(f"[{at}] is of type {tool['type'][:40]!r}: only functions are")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"[{at}].function must be an object with a name")
    return value


def tool_choice(value: Any) -> str:
    if value in ("none", "auto"):
        return str(value)
    if value == "required" or isinstance(value, dict):
        raise unsupported("is not supported: a call cannot be made sure of")
    raise invalid("must be none, auto, required, or an object")


def _content(value: Any, where: str) -> str:
    """Text, or text parts joined without anything between them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{where}.content must be a string or a list of parts, not {kind_of(value)}")
    return "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid(f"{where} must be an object with a type")
    if value["type"] != "text":
        raise unsupported(f"{where} is of type {value['type'][:40]!r}: only text is supported")
    if not isinstance(value.get("text"), str):
        raise invalid(f"{where}.text must be a string")
    extra = _first(key for key in value if key not in ("type", "text") and value[key] is not None)
    if extra is not None:
        raise unsupported(f"{where}.{extra} is not supported")
    text: str = value["text"]
    return text


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


_NOT_FOR_TEMPLATES = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
"""Names that mean something to the call that renders a template."""


def template_kwargs(value: Any) -> dict[str, Any]:
    """What the template gets under its own names; none of those that apply_chat_template has."""
    if not isinstance(value, dict):
        raise invalid(f"must be an object, not {kind_of(value)}")
    for key in value:
        if not key.isidentifier():
            raise invalid(f"has a key that is no name: {key[:40]!r}")
        if key in _NOT_FOR_TEMPLATES:
            raise unsupported(f"[{key}] is not for the template")
    return value
