"""Rows on their way into the decoder and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.types import (
    Candidate,
    Completion,
    Fault,
    ModelInfo,
    Sampling,
    Thinking,
    TokenLogprob,
    ToolCall,
)
from dflash_batch.worker import rows
from dflash_batch.worker.contract import CHAT, TEXT, JobSpec, RowResult, RowStatus

INFO = ModelInfo(
    target="org/target",
    family="qwen3",
    draft="org/draft",
    draft_notice=None,
    block=16,
    dtype="bfloat16",
    context_length=64,
    vocab_size=100,
    eos_token_ids=frozenset({2}),
    has_tokenizer=True,
    has_chat_template=True,
)
OPEN, CLOSE = 90, 91
WHERE = rows.Circumstances(
    info=INFO, worker="host-1", attempts=2, created=1_764_530_000, waited_ms=5.0
)


class Encoder:
    """`<` begins thinking and `>` ends it; a prompt that ends in `<` ends inside."""

    def __init__(self, info: ModelInfo = INFO) -> None:
        self.info = info
        self.options: dict[str, Any] = {}

    def thinking(self, prompt: Sequence[int], *, continued: bool = False) -> Thinking | None:
        inside = prompt[-1] == OPEN or (continued and OPEN in prompt)
        return Thinking((OPEN,), (CLOSE,), open=inside) if self.info.family == "qwen3" else None

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.options = options
        if messages[0]["role"] == "robot":
            raise PromptError("no such role", code="chat_template_error")
        return [1, *self.encode_text(messages[0]["content"])]

    def encode_text(self, text: str) -> list[int]:
        marks = {"<": OPEN, ">": CLOSE}
        return [marks.get(letter, 10 + ord(letter) - ord("a")) for letter in text]

    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        if len(prompt) >= self.info.context_length:
            raise PromptError("too long", code="context_length_exceeded")
        return self.info.context_length - len(prompt) if max_tokens is None else max_tokens


def chat(**fields: Any) -> JobSpec:
    messages = fields.pop("messages", [{"role": "user", "content": "ab"}])
    return JobSpec(index=3, line=4, custom_id="q", endpoint=CHAT, messages=messages, **fields)


def text(*prompts: str | list[int], **fields: Any) -> JobSpec:
    return JobSpec(index=3, line=4, custom_id="q", endpoint=TEXT, prompts=list(prompts), **fields)


def completion(uid: int, **fields: Any) -> Completion:
    values: dict[str, Any] = {
        "uid": uid,
        "token_ids": (5, 6, 2),
        "text": "hi",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "prefill_tokens": 4,
        "cached_tokens": 6,
        "cycles": 2,
        "draft_tokens": 30,
        "accepted_tokens": 1,
        "batch_width": 4,
        "wait_ms": 1.0,
        "prefill_ms": 2.0,
        "ttft_ms": 3.0,
        "decode_ms": 4.0,
    }
    return Completion(**(values | fields))


def answer(row: JobSpec, completions: list[Completion]) -> RowResult:
    prompts = [request.prompt for request in rows.requests(row, Encoder(), 0)]
    return rows.result(row, prompts, completions, WHERE)


def test_a_chat_row_is_one_request_with_all_its_settings() -> None:
    row = chat(max_tokens=7, stop=["x"], stop_token_ids=[9], ignore_eos=True, trace=True)
    (request,) = rows.requests(row, Encoder(), 40)
    assert request.uid == 40
    assert request.prompt == (1, 10, 11)
    assert request.max_tokens == 7
    assert request.stop == ("x",)
    assert request.stop_token_ids == frozenset({9})
    assert request.ignore_eos
    assert request.trace


def test_a_text_row_is_a_request_for_each_prompt_and_has_the_room_that_is_left() -> None:
    requests = rows.requests(text("ab", [7, 8, 9]), Encoder(), 5)
    assert [(r.uid, r.prompt, r.max_tokens) for r in requests] == [
        (5, (10, 11), 62),
        (6, (7, 8, 9), 61),
    ]


def test_choices_are_numbered_through_prompts_and_each_samples_on_its_own() -> None:
    settings: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    row = text("a", "b", n=2, seed=-9, logit_bias={4: 1.5}, **settings)
    requests = rows.requests(row, Encoder(), 5)
    assert [(r.uid, r.prompt) for r in requests] == [(5, (10,)), (6, (10,)), (7, (11,)), (8, (11,))]
    assert [r.sampling for r in requests] == [
        Sampling(**settings, logit_bias=((4, 1.5),), seed=-9, choice=choice) for choice in range(4)
    ]


def test_without_a_seed_a_row_draws_one_for_all_its_choices() -> None:
    row = chat(temperature=1.0, n=3)
    seeds = [{r.sampling.seed for r in rows.requests(row, Encoder(), 0)} for _ in range(2)]
    assert [len(drawn) for drawn in seeds] == [1, 1]
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**53 for drawn in seeds for seed in drawn)


@pytest.mark.parametrize(
    ("computed", "ram", "ssd", "source"),
    [
        (10, 0, 0, "none"),
        (4, 0, 0, "batch"),
        (2, 1, 6, "ssd"),
        (2, 6, 1, "ram"),
        (2, 2, 2, "batch"),
    ],
)
def test_cached_tokens_tell_their_tier(computed: int, ram: int, ssd: int, source: str) -> None:
    first = completion(0, prefill_tokens=computed, ram_tokens=ram, ssd_tokens=ssd)
    copy = completion(1, prefill_tokens=0, ram_tokens=ram, ssd_tokens=ssd)
    metrics = answer(chat(n=2), [first, copy]).metrics
    assert metrics.cache_source == source
    assert (metrics.cached_ram_tokens, metrics.cached_ssd_tokens) == (ram, ssd)
    assert metrics.cached_tokens == 10 - computed


def test_why_nothing_on_ssd_served_a_row_is_told() -> None:
    result = answer(chat(), [completion(0, cache_miss="diverges_at:512")])
    assert rows.facts(result.metrics)["cache_miss"] == "diverges_at:512"


def test_n_choices_count_their_prompt_once_and_tell_the_seed() -> None:
    row = chat(n=2, temperature=1.0)
    first = completion(0, prefill_tokens=10, cached_tokens=0, seed=77)
    second = completion(1, prefill_tokens=1, cached_tokens=9, seed=77, text="yo")
    result = answer(row, [first, second])
    assert result.response is not None
    body = result.response["body"]
    assert [c["message"]["content"] for c in body["choices"]] == ["hi", "yo"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["dflash"]["seed"] == 77
    assert RowResult.unpacked(result.packed()) == result


@pytest.mark.parametrize(
    ("row", "code", "param"),
    [
        (chat(messages=[{"role": "robot", "content": "a"}]), "chat_template_error", "messages"),
        (text("a" * 64), "context_length_exceeded", "prompt"),
        (text("a", []), "invalid_value", "prompt"),
        (text([99, 100]), "invalid_value", "prompt"),
        (text([-1]), "invalid_value", "prompt"),
        (text([1], logit_bias={100: 1.0}), "invalid_value", "logit_bias"),
    ],
)
def test_a_prompt_that_cannot_be_used_says_which_field(row: JobSpec, code: str, param: str) -> None:
    with pytest.raises(PromptError) as caught:
        rows.requests(row, Encoder(), 0)
    result = rows.refusal(row, caught.value, WHERE)
    assert result.status is RowStatus.ERROR
    assert result.code == code
    assert result.error is None
    assert result.response is not None
    assert result.response["status_code"] == 400
    error = result.response["body"]["error"]
    assert error == {
        "message": str(caught.value),
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


def test_a_chat_answer_has_the_shape_of_the_api() -> None:
    result = answer(chat(model="mine", metadata={"k": 1}), [completion(0)])
    assert result.ok
    assert result.metadata == {"k": 1}
    assert result.response is not None
    body = result.response["body"]
    assert result.response["status_code"] == 200
    assert result.response["request_id"].startswith("req_")
    assert list(body) == [
        "id",
        "object",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
        "dflash",
    ]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["created"] == 1_764_530_000
    assert body["model"] == "mine"
    assert body["system_fingerprint"].startswith("dfb-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["dflash"] == {
        "worker": "host-1",
        "attempts": 2,
        "queue_ms": 6.0,
        "prefill_ms": 2.0,
        "decode_ms": 4.0,
        "ttft_ms": 3.0,
        "batch_width": 4,
        "cycles": 2,
        "prefill_tokens": 4,
        "cached_tokens": 6,
        "draft_tokens": 30,
        "accepted_tokens": 1,
        "spec": "on",
        "cache_source": "batch",
        "cached_ram_tokens": 0,
        "cached_ssd_tokens": 0,
        "draft": "org/draft",
        "draft_quant": "none",
        "block": 16,
        "dtype": "bfloat16",
    }
    assert RowResult.unpacked(result.packed()) == result


def test_a_text_answer_has_a_choice_for_each_prompt_and_sums() -> None:
    row = text("ab", "c", return_token_ids=True)
    result = answer(row, [completion(0), completion(1, text="yo", decode_ms=9.0)])
    assert result.response is not None
    body = result.response["body"]
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "org/target"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hi",
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [5, 6, 2],
            "prompt_token_ids": [10, 11],
        },
        {
            "index": 1,
            "text": "yo",
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [5, 6, 2],
            "prompt_token_ids": [12],
        },
    ]
    assert body["usage"]["total_tokens"] == 26
    assert result.metrics.cycles == 4
    assert result.metrics.decode_ms == 9.0
    assert "prompt_token_ids" not in body


def test_token_ids_of_a_chat_prompt_are_given_once() -> None:
    result = answer(chat(return_token_ids=True), [completion(0)])
    assert result.response is not None
    body = result.response["body"]
    assert body["prompt_token_ids"] == [1, 10, 11]
    assert body["choices"][0]["token_ids"] == [5, 6, 2]


def test_the_trace_is_flat_for_one_choice_and_a_list_of_them_for_several() -> None:
    traced = completion(0, emitted_per_cycle=(1, 2), drafted_per_cycle=((7, 8), (9,)))
    one = answer(chat(trace=True), [traced])
    assert one.response is not None
    assert one.response["body"]["dflash"]["emitted_per_cycle"] == [1, 2]
    assert one.response["body"]["dflash"]["drafted_per_cycle"] == [[7, 8], [9]]
    assert one.metrics.emitted_per_cycle == [[1, 2]]
    two = answer(text("a", "b", trace=True), [traced, replace(traced, uid=1)])
    assert two.response is not None
    assert two.response["body"]["dflash"]["emitted_per_cycle"] == [[1, 2], [1, 2]]
    assert two.response["body"]["dflash"]["drafted_per_cycle"] == [[[7, 8], [9]]] * 2
    assert "emitted_per_cycle" not in rows.facts(answer(chat(), [completion(0)]).metrics)


def test_the_fingerprint_follows_the_settings() -> None:
    assert rows.fingerprint(INFO) == rows.fingerprint(replace(INFO, context_length=9))
    assert rows.fingerprint(INFO) != rows.fingerprint(replace(INFO, dtype="float32"))


def test_a_condemned_row_says_what_happened() -> None:
    result = rows.poison(chat(), "host-1", 3)
    assert result.status is RowStatus.POISON
    assert result.code == "worker_lost"
    assert result.response is not None
    assert result.response["status_code"] == 500
    assert result.metrics.attempts == 3


LOGPROBS = (
    TokenLogprob(Candidate(5, "h", -0.5), (Candidate(5, "h", -0.5), Candidate(9, "é", -1.0)), 0),
    TokenLogprob(Candidate(6, "\ufffd", -float("inf")), (Candidate(7, "i", -0.25),), 1),
)


def test_logprobs_of_a_chat_have_the_shape_of_the_api() -> None:
    (request,) = rows.requests(chat(logprobs=2), Encoder(), 0)
    assert request.logprobs == 2
    result = answer(chat(logprobs=2), [completion(0, logprobs=LOGPROBS)])
    assert result.response is not None
    h = {"token": "h", "logprob": -0.5, "bytes": [104]}
    assert result.response["body"]["choices"][0]["logprobs"] == {
        "content": [
            {**h, "top_logprobs": [h, {"token": "é", "logprob": -1.0, "bytes": [195, 169]}]},
            {
                **{"token": "\ufffd", "logprob": -9999.0, "bytes": None},
                "top_logprobs": [{"token": "i", "logprob": -0.25, "bytes": [105]}],
            },
        ],
        "refusal": None,
    }


def test_logprobs_of_a_completion_have_the_shape_of_the_api() -> None:
    result = answer(text("a", logprobs=2), [completion(0, logprobs=LOGPROBS)])
    assert result.response is not None
    assert result.response["body"]["choices"][0]["logprobs"] == {
        "tokens": ["h", "\ufffd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"h": -0.5, "é": -1.0}, {"i": -0.25, "\ufffd": -9999.0}],
        "text_offset": [0, 1],
    }


def test_a_chat_is_told_of_its_template_and_its_tools() -> None:
    encoder = Encoder(replace(INFO, calls_tools=True, template_names=frozenset({"tools"})))
    tool = {"type": "function", "function": {"name": "f"}}
    row = chat(template={"enable_thinking": False}, tools=[tool], skip_special_tokens=False)
    (request,) = rows.requests(row, encoder, 0)
    assert encoder.options == {"enable_thinking": False, "tools": [tool]}
    assert request.tools == (tool,)
    assert not request.skip_special_tokens


@pytest.mark.parametrize(
    ("content", "fields", "prompt", "thinking"),
    [
        ("ab", {}, (1, 10, 11), Thinking((OPEN,), (CLOSE,))),
        ("ab<", {}, (1, 10, 11, OPEN), Thinking((OPEN,), (CLOSE,), open=True)),
        (
            *("ab<", {"thinking_token_budget": 7}, (1, 10, 11, OPEN)),
            Thinking((OPEN,), (CLOSE,), open=True, budget=7),
        ),
        (
            *("ab", {"thinking_token_budget": 0}, (1, 10, 11)),
            Thinking((OPEN,), (CLOSE,), budget=0),
        ),
        # a block without room is closed before anything is said
        (
            *("ab<", {"thinking_token_budget": 0}, (1, 10, 11, OPEN, CLOSE)),
            Thinking((OPEN,), (CLOSE,), budget=0),
        ),
        (
            *("<a", {"template": {"continue_final_message": True}}, (1, OPEN, 10)),
            Thinking((OPEN,), (CLOSE,), open=True),
        ),
    ],
)
def test_a_chat_knows_whether_it_begins_inside_a_thinking_block(
    content: str, fields: dict[str, Any], prompt: tuple[int, ...], thinking: Thinking
) -> None:
    row = chat(messages=[{"role": "user", "content": content}], **fields)
    (request,) = rows.requests(row, Encoder(), 0)
    assert (request.prompt, request.thinking) == (prompt, thinking)


def test_a_completion_is_not_split() -> None:
    (request,) = rows.requests(text("ab<"), Encoder(), 0)
    assert request.thinking is None


@pytest.mark.parametrize(
    ("changes", "fields", "param"),
    [
        ({"family": "llama"}, {"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"calls_tools": False}, {"tools": [{}]}, "tools"),
        ({"calls_tools": True, "template_names": frozenset()}, {"tools": [{}]}, "tools"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    changes: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(PromptError) as caught:
        rows.requests(chat(**fields), Encoder(replace(INFO, **changes)), 0)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)


def test_nothing_ends_a_text_before_min_tokens() -> None:
    row = text("abc", [7], min_tokens=5, stop_token_ids=[9, 400])
    first, second = rows.requests(row, Encoder(), 0)
    assert first.sampling.late == (2, 9)  # the end of the text too, and no id beyond the words
    assert (first.sampling.late_from, second.sampling.late_from) == (8, 6)
    assert first.min_tokens == 5
    (request,) = rows.requests(text("a", min_tokens=5, ignore_eos=True), Encoder(), 0)
    assert request.sampling.late == ()


def test_thinking_has_both_its_names_and_is_counted() -> None:
    row = chat(n=2, template={"enable_thinking": True, "colour": 1}, thinking_token_budget=9)
    where = replace(WHERE, info=replace(INFO, template_names=frozenset({"enable_thinking"})))
    done = [
        completion(0, reasoning="hm", reasoning_tokens=2),
        completion(1, reasoning="", reasoning_tokens=1, text="", finish_reason="length"),
    ]
    prompts = [request.prompt for request in rows.requests(row, Encoder(), 0)]
    result = rows.result(row, prompts, done, where)
    assert result.response is not None
    body = result.response["body"]
    assert [choice["message"] for choice in body["choices"]] == [
        {
            **{"role": "assistant", "content": "hi", "refusal": None},
            **{"reasoning_content": "hm", "reasoning": "hm"},
        },
        {
            **{"role": "assistant", "content": "", "refusal": None},
            **{"reasoning_content": "", "reasoning": ""},
        },
    ]
    assert body["choices"][1]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert body["dflash"]["template"] == row.template
    assert body["dflash"]["thinking_token_budget"] == 9
    assert body["dflash"]["warnings"] == ["the chat template does not read colour"]
    assert RowResult.unpacked(result.packed()) == result


def test_tool_calls_have_the_shape_of_the_api() -> None:
    call = ToolCall("add", '{"a": 1}')
    result = answer(
        chat(), [completion(0, text="", tool_calls=(call,), finish_reason="tool_calls")]
    )
    assert result.response is not None
    (choice,) = result.response["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (shown,) = choice["message"]["tool_calls"]
    assert shown["id"].startswith("call_")
    assert shown["type"] == "function"
    assert shown["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_an_echo_is_the_prompt_as_given_and_its_first_token_has_no_log_probability() -> None:
    first = TokenLogprob(Candidate(10, "a", float("nan")), (), 0)
    row = text("a", [10], echo=True, max_tokens=0, logprobs=2)
    (request, _) = rows.requests(row, Encoder(), 0)
    assert (request.echo, request.max_tokens, request.scored) == (True, 0, True)
    said: dict[str, Any] = {"text": "", "token_ids": (), "logprobs": (first, *LOGPROBS)}
    done = [completion(uid, echo="(a)", **said) for uid in range(2)]
    result = answer(row, done)
    assert result.response is not None
    choices = result.response["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["a", "(a)"]
    assert choices[0]["logprobs"] == {
        "tokens": ["a", "h", "\ufffd"],
        "token_logprobs": [None, -0.5, -9999.0],
        "top_logprobs": [None, {"h": -0.5, "é": -1.0}, {"i": -0.25, "\ufffd": -9999.0}],
        "text_offset": [0, 0, 1],
    }


def test_a_row_whose_numbers_failed_is_an_error_line() -> None:
    fault = Fault("numerical_error", "NaN")
    result = rows.faulty(chat(), fault, [completion(0, fault=fault)], WHERE)
    assert (result.status, result.code) == (RowStatus.ERROR, "numerical_error")
    assert result.response is not None
    assert result.response["status_code"] == 500
    assert result.metrics.completion_tokens == 3
