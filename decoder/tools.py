"""Tool calls in an answer: found between the model's markers, and read by its family's parser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dflash_batch.decoder.types import ToolCall

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError)
"""What a parser may raise at text that is no call."""


def calls_in(
    text: str, tokenizer: Any, tools: Sequence[dict[str, Any]]
) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and the calls; all of the text and no call if one is unreadable.

    `tokenizer` is mlx-lm's TokenizerWrapper: `tool_call_start`, `tool_call_end`, `tool_parser`.
    An empty end marker means that a call goes on to the next start, or the end.
    """
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    before, *parts = text.split(start)
    calls: list[ToolCall] = []
    said = [before]
    for part in parts:
        body, _, rest = part.partition(end) if end else (part, "", "")
        try:
            found = tokenizer.tool_parser(body.strip(), list(tools))
            calls += map(_call, found if isinstance(found, list) else [found])
        except _UNREADABLE:
            return text, ()
        said.append(rest)
    return "".join(said).strip(), tuple(calls)


def _call(parsed: dict[str, Any]) -> ToolCall:
    arguments = parsed["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(parsed["name"]), arguments)
