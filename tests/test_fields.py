"""The table of body fields: honoured, ignored, or refused by name; nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_batch.worker.contract import CHAT, TEXT, ErrorCode
from dflash_batch.worker.fields import FIELDS, Body, BodyError, parse_body
from dflash_batch.worker.values import FieldError

USER = [{"role": "user", "content": "hi"}]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def chat(**fields: Any) -> Body:
    return parse_body({"messages": USER} | fields, CHAT)


def text(prompt: Any, **fields: Any) -> Body:
    return parse_body({"prompt": prompt} | fields, TEXT)


def refusal(**fields: Any) -> FieldError:
    """The one problem of a chat body with these fields."""
    with pytest.raises(BodyError) as caught:
        chat(**fields)
    (problem,) = caught.value.problems
    return problem


def test_the_table_knows_every_field_of_the_contract() -> None:
    named = """
        model messages prompt max_completion_tokens max_tokens temperature top_p top_k min_p
        repetition_penalty presence_penalty frequency_penalty logit_bias seed n best_of stop
        logprobs top_logprobs echo suffix response_format tools tool_choice parallel_tool_calls
        chat_template_kwargs reasoning_effort enable_thinking thinking_token_budget
        continue_final_message add_generation_prompt ignore_eos min_tokens stop_token_ids
        skip_special_tokens stream stream_options user metadata store service_tier
        safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity modalities
        audio web_search_options functions function_call return_token_ids dflash_trace
    """
    assert set(named.split()) <= set(FIELDS)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"messages", "prompt"}))
def test_null_is_the_same_as_absent(name: str) -> None:
    assert chat(**{name: None}) == chat()


HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model": "org/m"}, {"model": "org/m"}),
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
    ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
    ({"max_completion_tokens": None, "max_tokens": 9}, {"max_tokens": 9}),
    ({"stop": "\n"}, {"stop": ["\n"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop": []}, {"stop": []}),
    ({"stop_token_ids": [0, 2**31 - 1]}, {"stop_token_ids": [0, 2**31 - 1]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"temperature": 0.5, "seed": -5}, {"temperature": 0.5, "seed": -5}),
    ({"temperature": 1, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
    ({"temperature": 2, "top_k": 40}, {"temperature": 2.0, "top_k": 40}),
    ({"temperature": 1, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
    ({"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}, {"temperature": 1.0}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"logit_bias": {"50256": -100, "7": 0.5}}, {"logit_bias": {50256: -100.0, 7: 0.5}}),
    ({"n": 128}, {"n": 128}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"n": 3, "best_of": 3}, {"n": 3}),
    ({"return_token_ids": True}, {"return_token_ids": True}),
    ({"dflash_trace": True}, {"trace": True}),
    ({"min_tokens": 3}, {"min_tokens": 3}),
    ({"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 3, "max_tokens": 3}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"chat_template_kwargs": {"a": [1]}}, {"template": {"a": [1]}}),
    ({"enable_thinking": False}, {"template": {"enable_thinking": False}}),
    ({"enable_thinking": True}, {"template": {"enable_thinking": True}}),
    ({"reasoning_effort": "none"}, {"template": {"enable_thinking": False}}),
    ({"reasoning_effort": "high"}, {"template": {"reasoning_effort": "high"}}),
    (
        {"reasoning_effort": "low", "enable_thinking": True, "chat_template_kwargs": {"a": 1}},
        {"template": {"a": 1, "enable_thinking": True, "reasoning_effort": "low"}},
    ),
    ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
    ({"add_generation_prompt": False}, {"template": {"add_generation_prompt": False}}),
    ({"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS}),
    ({"tools": TOOLS, "tool_choice": "none"}, {}),
]


@pytest.mark.parametrize(("fields", "values"), HONOURED)
def test_honoured_fields(fields: dict[str, Any], values: dict[str, Any]) -> None:
    assert chat(**fields).values == {"messages": USER} | values


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert text(prompt).values == {"prompts": prompts}


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [[]], [""], ["a", ""], ["a", 1], ["a", [1]], [[1], 2], [True], [-1], [2**31]),
        *([1.0], {}, 3, True, [None], [["a"]], [[[1]]], ["x"] * 2049),
    ],
)
def test_wrong_prompts(prompt: Any) -> None:
    with pytest.raises(BodyError) as caught:
        text(prompt)
    (problem,) = caught.value.problems
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, "prompt")


def test_messages_become_what_the_template_takes() -> None:
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": ""},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "t", "content": "4"},
        {"role": "assistant", "content": "d", "reasoning": "r", "reasoning_content": "r"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "t",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'},
                },
                {"function": {"name": "now"}},
            ],
        },
    ]
    assert chat(messages=given).values["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "name": "ann", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "tool_call_id": "t", "content": "4"},
        {"role": "assistant", "content": "d", "reasoning_content": "r"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "t",
                    "function": {"name": "add", "arguments": {"a": 1}},
                },
                {"type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([], ErrorCode.INVALID_VALUE, "messages must not be empty"),
        ("hi", ErrorCode.INVALID_VALUE, "messages must be a list of messages, not a string"),
        (["hi"], ErrorCode.INVALID_VALUE, "messages[0] must be an object"),
        ([*USER, {"role": "bot", "content": ""}], ErrorCode.INVALID_VALUE, "messages[1].role"),
        ([{"content": "x"}], ErrorCode.INVALID_VALUE, "messages[0].role"),
        ([{"role": ["user"], "content": ""}], ErrorCode.INVALID_VALUE, "messages[0].role"),
        ([{"role": "user"}], ErrorCode.INVALID_VALUE, "messages[0].content"),
        ([{"role": "user", "content": 4}], ErrorCode.INVALID_VALUE, "not an integer"),
        ([{"role": "user", "content": ["x"]}], ErrorCode.INVALID_VALUE, "content[0]"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            ErrorCode.INVALID_VALUE,
            "messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ErrorCode.UNSUPPORTED_PARAMETER,
            "only text is supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "", "cache_control": {}}]}],
            ErrorCode.UNSUPPORTED_PARAMETER,
            "messages[0].content[0].cache_control",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
            ErrorCode.INVALID_VALUE,
            "messages[0].tool_calls[0]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            ErrorCode.INVALID_VALUE,
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": {}}], ErrorCode.INVALID_VALUE, "must be a list"),
        (
            [{"role": "user", "content": "", "colour": 1}],
            ErrorCode.UNSUPPORTED_PARAMETER,
            "messages[0].colour",
        ),
        ([{"role": "user", "content": "", "name": 1}], ErrorCode.INVALID_VALUE, "[0].name"),
    ],
)
def test_wrong_messages(messages: Any, code: ErrorCode, words: str) -> None:
    problem = refusal(messages=messages)
    assert (problem.code, problem.param) == (code, "messages")
    assert words in problem.message


INERT = [
    ("user", "u"),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("service_tier", "auto"),
    ("safety_identifier", "x"),
    ("prompt_cache_key", "k"),
    ("prompt_cache_retention", "24h"),
    ("prediction", {"type": "content", "content": "x"}),
    ("verbosity", "low"),
    ("stream_options", {"include_usage": True}),
    ("parallel_tool_calls", False),
    ("seed", 1),
    ("top_p", 0.5),
    ("top_k", 40),
    ("min_p", 0.1),
]


@pytest.mark.parametrize(("name", "value"), INERT)
def test_fields_that_cannot_change_greedy_text_are_counted(name: str, value: Any) -> None:
    body = chat(**{name: value})
    assert body.ignored == [name]
    assert set(body.values) <= {"messages", name}


NEUTRAL = [
    ("temperature", 0),
    ("temperature", 0.0),
    ("n", 1),
    ("best_of", 1),
    ("top_p", 1),
    ("top_p", 1.0),
    ("top_k", -1),
    ("top_k", 0),
    ("min_p", 0),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("logit_bias", {}),
    ("logprobs", False),
    ("top_logprobs", 0),
    ("echo", False),
    ("suffix", ""),
    ("stream", False),
    ("response_format", {"type": "text"}),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("functions", []),
    ("function_call", "none"),
    ("chat_template_kwargs", {}),
    ("min_tokens", 0),
    ("skip_special_tokens", True),
    ("include_stop_str_in_output", False),
    ("continue_final_message", False),
    ("add_generation_prompt", True),
    ("modalities", ["text"]),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_neutral_values_pass_without_a_word(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


UNSUPPORTED = [
    ("best_of", 3),
    ("prompt_logprobs", 0),
    ("echo", True),
    ("suffix", "end"),
    ("stream", True),
    ("response_format", {"type": "json_object"}),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("function_call", {"name": "f"}),
    ("include_stop_str_in_output", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {}),
    ("guided_json", {}),
    ("max_tokns", 3),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_would_change_the_text_is_refused_by_name(name: str, value: Any) -> None:
    problem = refusal(**{name: value})
    assert (problem.code, problem.param) == (ErrorCode.UNSUPPORTED_PARAMETER, name)
    assert problem.message.startswith(f"{name} ")


INVALID = [
    ("model", ""),
    ("model", 4),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_tokens", 2**31),
    ("max_completion_tokens", "9"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("n", 129),
    ("best_of", 0),
    ("logprobs", 0),
    ("logprobs", 5),
    ("logprobs", "yes"),
    ("top_logprobs", 3),
    ("top_logprobs", 21),
    ("top_logprobs", True),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"4294967296": 1}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 101}),
    ("temperature", False),
    ("temperature", "0"),
    ("n", 0),
    ("n", True),
    ("n", 1.0),
    ("best_of", True),
    ("seed", 1.5),
    ("seed", 2**64),
    ("top_p", 2),
    ("top_p", "1"),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", {}),
    ("stop", ["x"] * 17),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", ["5"]),
    ("ignore_eos", 1),
    ("return_token_ids", "true"),
    ("dflash_trace", 0),
    ("presence_penalty", "0"),
    ("repetition_penalty", True),
    ("logit_bias", []),
    ("echo", "no"),
    ("stream", 0),
    ("response_format", "json"),
    ("tools", {}),
    ("tools", [{}]),
    ("tools", [{"type": "function", "function": {}}]),
    ("tool_choice", "always"),
    ("min_tokens", False),
    ("min_tokens", -1),
    ("skip_special_tokens", "no"),
    ("enable_thinking", "no"),
    ("reasoning_effort", "huge"),
    ("reasoning_effort", True),
    ("chat_template_kwargs", "x"),
    ("chat_template_kwargs", {"a b": 1}),
    ("thinking_token_budget", -1),
    ("thinking_token_budget", "many"),
    ("continue_final_message", True),  # of a user's message
    ("add_generation_prompt", 0),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_values_of_the_wrong_type_or_range(name: str, value: Any) -> None:
    problem = refusal(**{name: value})
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, name)


def test_every_field_is_in_one_of_these_tables() -> None:
    tried = {name for fields, _ in HONOURED for name in fields}
    tried |= {name for table in (INERT, NEUTRAL, UNSUPPORTED, INVALID) for name, _ in table}
    tried |= {"messages", "prompt"}  # these have tables of their own
    assert set(FIELDS) - tried == set()


def test_all_problems_of_a_body_are_reported_at_once() -> None:
    with pytest.raises(BodyError) as caught:
        chat(messages=[], n=0, stop="", junk=1)
    names = [problem.param for problem in caught.value.problems]
    assert names == ["messages", "n", "stop", "junk"]


def test_best_of_may_only_repeat_n() -> None:
    problem = refusal(n=3, best_of=2)
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, "best_of")


def test_all_prompts_together_have_a_limit_of_choices() -> None:
    assert text(["a"] * 16, n=128).values["n"] == 128
    with pytest.raises(BodyError) as caught:
        text(["a"] * 17, n=128)
    (problem,) = caught.value.problems
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, "n")


def test_logprobs_of_a_completion_is_a_number() -> None:
    assert text("a", logprobs=5).values["logprobs"] == 5
    assert text("a", logprobs=0).values["logprobs"] == 0
    for wrong in ({"logprobs": 6}, {"logprobs": True}, {"logprobs": 2, "top_logprobs": 2}):
        with pytest.raises(BodyError) as caught:
            text("a", **wrong)
        assert [problem.code for problem in caught.value.problems] == [ErrorCode.INVALID_VALUE]


def test_an_answer_can_be_gone_on_with() -> None:
    begun = [*USER, {"role": "assistant", "content": "The"}]
    told = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(messages=begun, continue_final_message=True).values["template"] == told
    problem = refusal(messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, "continue_final_message")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, 0),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, 0),
        ({"reasoning_effort": "none", "enable_thinking": True}, 0),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, 0),
        ({"min_tokens": 4, "max_completion_tokens": 3}, 0),
        ({"max_completion_tokens": 0, "max_tokens": 3}, 0),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], param: int) -> None:
    problem = refusal(**fields)
    assert (problem.code, problem.param) == (ErrorCode.INVALID_VALUE, list(fields)[param])


def test_several_calls_cannot_be_kept_from_a_model_with_tools() -> None:
    problem = refusal(tools=TOOLS, parallel_tool_calls=False)
    assert (problem.code, problem.param) == (
        ErrorCode.UNSUPPORTED_PARAMETER,
        "parallel_tool_calls",
    )
    assert chat(tools=TOOLS, parallel_tool_calls=True).ignored == ["parallel_tool_calls"]


def test_a_completion_may_be_only_its_prompt() -> None:
    body = text("a", echo=True, max_tokens=0, logprobs=1)
    assert body.values == {"prompts": ["a"], "echo": True, "max_tokens": 0, "logprobs": 1}
    with pytest.raises(BodyError) as caught:
        text("a", max_tokens=0)
    assert [problem.param for problem in caught.value.problems] == ["max_tokens"]


CHAT_ONLY = {
    "chat_template_kwargs": {"a": 1},
    "enable_thinking": True,
    "reasoning_effort": "low",
    "thinking_token_budget": 5,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "tools": TOOLS,
}


@pytest.mark.parametrize("name", CHAT_ONLY)
def test_fields_of_a_chat_are_refused_in_a_completion(name: str) -> None:
    with pytest.raises(BodyError) as caught:
        text("a", **{name: CHAT_ONLY[name]})
    (problem,) = caught.value.problems
    assert (problem.code, problem.param) == (ErrorCode.UNSUPPORTED_PARAMETER, name)
