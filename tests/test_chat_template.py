"""Chats through a real tokenizer and template: what they are told, and how answers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import VOCAB, Scripted, finish, make_model, make_shape
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.tools import calls_in
from dflash_batch.decoder.types import LoadSpec, ToolCall
from dflash_batch.worker import rows
from dflash_batch.worker.contract import CHAT, TEXT, Endpoint, JobSpec
from dflash_batch.worker.fields import parse_body

SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<end>"]
WORDS = ["user", "assistant", "tools", "add", "hi", "hm", "yes", "no", '{"name":', '"add",']
WORDS += ['"arguments":', '{"a":', "1}}", "loud", "STOP"]

TEMPLATE = """
{#- tool_call.name: how mlx-lm knows the form of the calls <tool_call> -#}
{%- for m in messages -%}
{{ m.role }} {{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor -%}
{%- endfor -%}
{%- if tools %}tools {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif -%}
{%- if volume == "high" %}loud {% endif -%}
{%- if add_generation_prompt %}assistant {% if enable_thinking %}<think> {% else -%}
<think> </think> {% endif %}{% endif -%}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of one token a word, and markers that are special."""
    folder = tmp_path_factory.mktemp("thinker")
    vocabulary = {word: at for at, word in enumerate(["[UNK]", *SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": "<end>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(make_shape("qwen3")))
    weights = dict(tree_flatten(make_model("qwen3").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_decoder(LoadSpec(target=str(folder), draft="none"))


def row_of(body: dict[str, Any], endpoint: Endpoint = CHAT) -> JobSpec:
    values = parse_body(body, endpoint).values
    return JobSpec(index=0, line=1, custom_id="q", endpoint=endpoint, **values)


def prompt_of(decoder: Decoder, **fields: Any) -> str:
    """What the template makes of a chat, as text."""
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    (request,) = rows.requests(row_of(body), decoder, 0)
    return " ".join(decoder._tokenizer.convert_ids_to_tokens(list(request.prompt)))


def answer(decoder: Decoder, says: str, **fields: Any) -> dict[str, Any]:
    """The first choice of a chat to which the model says this."""
    row = row_of({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30} | fields)
    (request,) = rows.requests(row, decoder, 0)
    ids = decoder._tokenizer.convert_tokens_to_ids(says.split())
    target: Any = Scripted(decoder.pair[0], len(request.prompt), ids)
    scripted = Decoder(target, NoDrafter(), info=decoder.info, tokenizer=decoder._tokenizer)
    scripted.add(request)
    where = rows.Circumstances(decoder.info, worker="w", attempts=1, created=1, waited_ms=0.0)
    result = rows.result(row, [request.prompt], [finish(scripted)[0]], where)
    assert result.response is not None
    body = result.response["body"]
    choice: dict[str, Any] = body["choices"][0]
    return choice | {"dflash": body["dflash"], "usage": body["usage"]}


TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>'


def test_a_loaded_model_knows_its_template_and_its_tools(decoder: Decoder) -> None:
    names = frozenset(["messages", "tools", "volume", "add_generation_prompt", "enable_thinking"])
    assert decoder.info.template_names == names
    assert decoder.info.calls_tools


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user hi assistant <think>"),
        ({"enable_thinking": False}, "user hi assistant <think> </think>"),
        ({"reasoning_effort": "none"}, "user hi assistant <think> </think>"),
        ({"chat_template_kwargs": {"volume": "high"}}, "user hi loud assistant <think>"),
        ({"thinking_token_budget": 0}, "user hi assistant <think> </think>"),
        ({"add_generation_prompt": False}, "user hi"),
        ({"tools": TOOLS}, "user hi tools add assistant <think>"),
        ({"tools": TOOLS, "tool_choice": "none"}, "user hi assistant <think>"),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "<think> hm"},
                ],
                "continue_final_message": True,
            },
            "user hi assistant <think> hm",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
                    },
                    {"role": "tool", "content": "yes"},
                ]
            },
            "user hi assistant add [UNK] yes assistant <think>",
        ),
    ],
)
def test_what_a_chat_is_told(decoder: Decoder, fields: dict[str, Any], prompt: str) -> None:
    assert prompt_of(decoder, **fields) == prompt


@pytest.mark.parametrize(
    ("says", "fields", "reasoning", "content", "reason"),
    [
        ("hm hm </think> yes no <end>", {}, "hm hm", "yes no", "stop"),
        ("yes no <end>", {"enable_thinking": False}, None, "yes no", "stop"),
        ("hm hm hm", {"max_tokens": 3}, "hm hm hm", "", "length"),
        ("STOP hm </think> yes STOP no", {"stop": "STOP"}, "STOP hm", "yes ", "stop"),
        # whatever it says after two, it is made to end its thinking, and goes on from there
        ("hm hm hm yes <end>", {"thinking_token_budget": 2}, "hm hm", "yes", "stop"),
        ("hm </think> yes <end>", {"thinking_token_budget": 0}, None, "hm yes", "stop"),
        ("hm </think> yes <end>", {"skip_special_tokens": False}, "hm", "yes", "stop"),
        (
            *("yes <tool_call> no <end>", {"skip_special_tokens": False, "enable_thinking": False}),
            *(None, "yes <tool_call> no", "stop"),
        ),
    ],
)
def test_what_an_answer_is(
    decoder: Decoder,
    says: str,
    fields: dict[str, Any],
    reasoning: str | None,
    content: str,
    reason: str,
) -> None:
    choice = answer(decoder, says, **fields)
    message = choice["message"]
    assert message.get("reasoning_content") == message.get("reasoning") == reasoning
    assert (message["content"], choice["finish_reason"]) == (content, reason)
    tokens = choice["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert (tokens > 0) == (reasoning is not None)


def test_settings_that_the_template_does_not_read_are_told(decoder: Decoder) -> None:
    facts = answer(decoder, "<end>", reasoning_effort="low")["dflash"]
    assert facts["template"] == {"reasoning_effort": "low"}
    assert facts["warnings"] == ["the chat template does not read reasoning_effort"]
    assert "warnings" not in answer(decoder, "<end>", enable_thinking=True)["dflash"]


@pytest.mark.parametrize(
    ("says", "content", "calls"),
    [
        (f"hm </think> {CALL} <end>", None, 1),
        (f"hm </think> yes {CALL} {CALL} <end>", "yes", 2),
        ('</think> <tool_call> {"name": <end>', '{"name":', 0),  # unreadable: nothing is lost
        ("</think> yes <end>", "yes", 0),
    ],
)
def test_tool_calls_are_read(decoder: Decoder, says: str, content: str | None, calls: int) -> None:
    choice = answer(decoder, says, tools=TOOLS)
    found = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert found == [{"name": "add", "arguments": '{"a": 1}'}] * calls
    assert choice["message"]["content"] == content
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_call_is_only_looked_for_where_tools_are_on_offer(decoder: Decoder) -> None:
    choice = answer(decoder, f"</think> {CALL} <end>")
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == '{"name": "add", "arguments": {"a": 1}}'


class Bracketed:
    """Calls that are ended by the next one, several in one text."""

    tool_call_start, tool_call_end = "[CALLS]", ""

    @staticmethod
    def tool_parser(text: str, tools: list[Any]) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": {"of": len(tools)}} for name in text.split(",")]


def test_a_parser_may_find_several_calls_and_no_end() -> None:
    text, calls = calls_in("so [CALLS]a,b [CALLS]c", Bracketed(), TOOLS)
    assert text == "so"
    assert calls == tuple(ToolCall(name, '{"of": 1}') for name in "abc")


def test_an_echo_has_the_text_of_its_prompt(decoder: Decoder) -> None:
    where = rows.Circumstances(decoder.info, worker="w", attempts=1, created=1, waited_ms=0.0)
    ids = decoder.encode_text("hi yes no")
    for prompt, text in (("hi  yes no", "hi  yes no"), (ids, "hi yes no")):
        row = row_of({"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}, TEXT)
        (request,) = rows.requests(row, decoder, 0)
        decoder.add(request)
        result = rows.result(row, [request.prompt], [finish(decoder)[0]], where)
        assert result.response is not None
        (choice,) = result.response["body"]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        shown = choice["logprobs"]
        assert shown["tokens"] == ["hi", "yes", "no"]
        assert shown["text_offset"] == [0, 2, 6]
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        assert all(logprob < 0 for logprob in shown["token_logprobs"][1:])
        assert [len(top) for top in shown["top_logprobs"][1:]] == [2, 2]


def test_min_tokens_holds_back_the_end(decoder: Decoder) -> None:
    """With and without it: the script ends at once, and the model is made to say something else."""
    assert (
        answer(decoder, "<end> <end> <end> <end>", enable_thinking=False)["usage"][
            "completion_tokens"
        ]
        == 1
    )
    held = answer(decoder, "<end> <end> <end> <end>", enable_thinking=False, min_tokens=3)
    assert held["usage"]["completion_tokens"] == 4
    assert held["finish_reason"] == "stop"


def test_a_template_that_refuses_is_an_error_of_the_row(decoder: Decoder) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True}
    body["messages"] = [{"role": "assistant", "content": "STOP"}]
    row = row_of(body).model_copy(update={"messages": [{"role": "user"}]})
    with pytest.raises(PromptError) as caught:
        rows.requests(row, decoder, 0)
    assert caught.value.code == "chat_template_error"
    assert len(SPECIAL) + len(WORDS) < VOCAB
