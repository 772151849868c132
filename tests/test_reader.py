"""The reader: whatever is in the file, each line is a row or a named error, in one pass."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_batch.worker import reader
from dflash_batch.worker.contract import CHAT, TEXT, ErrorCode, JobSpec, RowResult, RowStatus, Shard
from dflash_batch.worker.reader import InputError, LineError, Reading, read_lines

MESSAGES = [{"role": "user", "content": "2+2?"}]
BODY = {"model": "m", "messages": MESSAGES, "max_tokens": 4}


def read(data: str | bytes, default_model: str | None = None, **options: Any) -> Reading:
    raw = data.encode() if isinstance(data, str) else data
    return read_lines(io.BytesIO(raw), default_model=default_model, **options)


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    """A good line, with keys changed, or left out where the change is `...`."""
    good = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY}
    return {key: value for key, value in (good | changes).items() if value is not ...}


def error_of(item: Any, **options: Any) -> LineError:
    """The one error of a file with this one line."""
    text = item if isinstance(item, str | bytes) else json.dumps(item)
    reading = read(text, **options)
    assert reading.rows == []
    (error,) = reading.errors
    return error


# Good lines


def test_a_line_of_the_openai_form_becomes_a_row() -> None:
    reading = read(json.dumps(line("q-1", metadata={"k": [1]})) + "\n")
    (row,) = reading.rows
    assert (row.index, row.line, row.custom_id, row.endpoint) == (0, 1, "q-1", CHAT)
    assert (row.messages, row.max_tokens, row.model) == (MESSAGES, 4, "m")
    assert row.metadata == {"k": [1]}
    assert reading.errors == []
    assert reading.warnings == []
    assert reading.models == {"m": 1}


def test_bare_bodies_get_ids_of_their_line_numbers_and_one_warning_a_kind() -> None:
    bare = [{"messages": MESSAGES}, {"prompt": "one"}, {"custom_id": "mine", "prompt": [1, 2]}]
    reading = read("\n".join(map(json.dumps, bare)), "m")
    assert [row.custom_id for row in reading.rows] == ["line-000001", "line-000002", "mine"]
    assert [row.endpoint for row in reading.rows] == [CHAT, TEXT, TEXT]
    assert reading.rows[2].prompts == [[1, 2]]
    assert reading.warnings == [
        "2 lines: bare body without custom_id: ids made of line numbers (first: line 1)",
        "3 lines: no max_tokens: the default is used (first: line 1)",
    ]


def test_method_and_url_are_inferred_with_a_warning() -> None:
    text = "\n".join(json.dumps(line(str(n), method=..., url=...)) for n in range(3))
    reading = read(text)
    assert [row.endpoint for row in reading.rows] == [CHAT] * 3
    assert reading.warnings == [
        "3 lines: no method: POST assumed (first: line 1)",
        "3 lines: no url: taken from messages or prompt (first: line 1)",
    ]


def test_unknown_top_level_keys_and_ignored_fields_are_summed_up() -> None:
    body = BODY | {"user": "me", "seed": 7, "top_p": 0.9}
    text = "\n".join(json.dumps(line(str(n), body=body, priority=1)) for n in range(2))
    reading = read(text)
    assert reading.ignored == {"user": 2, "seed": 2, "top_p": 2}
    assert reading.rows[0].seed == 7
    assert reading.warnings == [
        "2 lines: unknown top-level keys ignored (priority) (first: line 1)",
        "fields without effect on the text: user (2 lines), seed (2 lines), top_p (2 lines)",
    ]


def test_bom_cr_blank_lines_and_a_last_line_without_lf() -> None:
    first, last = json.dumps(line("a")), json.dumps(line("b"))
    data = b"\xef\xbb\xbf" + f"{first}\r\n\r\n  \t\n{last}".encode()
    reading = read(data)
    assert [(row.custom_id, row.line) for row in reading.rows] == [("a", 1), ("b", 4)]
    assert (reading.lines, reading.bytes, reading.requests) == (4, len(data), 2)
    assert reading.digest == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_lines_end_at_lf_only(separator: str) -> None:
    body = BODY | {"messages": [{"role": "user", "content": f"a{separator}b"}]}
    text = json.dumps(line(body=body), ensure_ascii=False)
    reading = read(text + "\n" + json.dumps(line("b")))
    assert [row.line for row in reading.rows] == [1, 2]
    assert reading.rows[0].messages == [{"role": "user", "content": f"a{separator}b"}]


def test_another_model_than_the_default_is_said() -> None:
    reading = read(json.dumps(line()), "mine")
    assert reading.warnings == ["1 line: another model is named (m); mine answers"]
    assert reading.rows[0].model == "m"


def test_progress_ends_at_the_size() -> None:
    seen: list[int] = []
    text = "\n".join(json.dumps(line(str(n))) for n in range(4001))
    reading = read(text, progress=seen.append)
    assert len(seen) == 3
    assert seen[-1] == reading.bytes


# Errors: one test for each kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"custom_id":"a', "ends inside a string (col 16)"),
        ('{"custom_id":"a",', "ends before the object is closed (col 18)"),
        ('{"a":1', "ends before the object is closed (col 7)"),
        ('{"a":', "ends before the object is closed (col 6)"),
        ('{"a" 1}', 'expected a colon, found "1" (col 6)'),
        ('{"a":1 "b":2}', 'expected a comma or a closing bracket, found "\\"" (col 8)'),
        ("{a:1}", 'expected a key in double quotes, found "a" (col 2)'),
        ('{"a":x}', 'expected a value, found "x" (col 6)'),
        ('{"a":1} {"b":2}', "text after the end of the object (col 9)"),
        ('{"a":"b\tc"}', "raw control character U+0009 in a string (col 8)"),
        ('{"a":"\\x"}', "unknown escape in a string (col 7)"),
        ('{"a":"NaN","b":NaN}', "NaN is not JSON (col 16)"),
        ('{"a":-Infinity}', "-Infinity is not JSON (col 6)"),
        ('{"a":1e999}', "number 1e999 is too large"),
        ('{"a":1,"a":2}', 'key "a" appears twice in one object'),
        ("[1]", "must be an object, not an array"),
        ("null", "must be an object, not null"),
        ("3", "must be an object, not a number"),
        ('"s"', "must be an object, not a string"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ('{"a":%s}' % ("9" * 9000), "holds an integer of thousands of digits"),
    ],
)
def test_invalid_json_says_where(text: str, message: str) -> None:
    error = error_of(text)
    assert error.code is ErrorCode.INVALID_JSON_LINE
    assert error.message == message
    if "(col " in message:
        assert f"(col {error.column})" in message


@pytest.mark.parametrize(
    ("data", "column"),
    [
        (b'{"a":"\xff"}', 7),
        ('{"ü":"'.encode() + b"\xc3(", 7),
        (b'{"a":"\\ud83d"}', 7),
        (b'{"a":"\\uDE00"}', 7),
        (b'{"a":"\\ud83dx\\ude00"}', 7),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}', 7),
    ],
)
def test_bytes_and_surrogates_that_are_no_text(data: bytes, column: int) -> None:
    error = error_of(data)
    assert error.code is ErrorCode.INVALID_ENCODING
    assert error.column == column


def test_escaped_pairs_and_escaped_backslashes_are_fine() -> None:
    text = json.dumps(line("\U0001f600")).replace('"m"', '"\\\\ud83d"')
    (row,) = read(text).rows
    assert row.custom_id == "\U0001f600"
    assert row.model == "\\ud83d"


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (line(custom_id=...), ErrorCode.MISSING_REQUIRED_PARAMETER, "custom_id"),
        ({}, ErrorCode.MISSING_REQUIRED_PARAMETER, "custom_id"),
        ({"key": "a", "request": {}}, ErrorCode.MISSING_REQUIRED_PARAMETER, "custom_id"),
        (line(custom_id=7), ErrorCode.INVALID_VALUE, "custom_id"),
        (line(custom_id=""), ErrorCode.INVALID_VALUE, "custom_id"),
        (line(custom_id="x" * 1025), ErrorCode.INVALID_VALUE, "custom_id"),
        (line(method="GET"), ErrorCode.INVALID_VALUE, "method"),
        (line(method=["POST"]), ErrorCode.INVALID_VALUE, "method"),
        (line(url="/v1/embeddings"), ErrorCode.UNSUPPORTED_ENDPOINT, "url"),
        (line(url={}), ErrorCode.INVALID_VALUE, "url"),
        (line(body=...), ErrorCode.MISSING_REQUIRED_PARAMETER, "body"),
        (line(body=..., messages=MESSAGES), ErrorCode.MISSING_REQUIRED_PARAMETER, "body"),
        ({"custom_id": "a", "params": {}}, ErrorCode.MISSING_REQUIRED_PARAMETER, "body"),
        (line(body=[]), ErrorCode.INVALID_VALUE, "body"),
        (line(body={"model": "m"}), ErrorCode.MISSING_REQUIRED_PARAMETER, "messages"),
        (line(url=TEXT, body={}), ErrorCode.MISSING_REQUIRED_PARAMETER, "prompt"),
        (line(url=..., body={}), ErrorCode.MISSING_REQUIRED_PARAMETER, "messages"),
        (line(body={"prompt": "x"}), ErrorCode.MISMATCHED_ENDPOINT, "prompt"),
        (line(url=TEXT), ErrorCode.MISMATCHED_ENDPOINT, "messages"),
        (line(body=BODY | {"prompt": "x"}), ErrorCode.MISMATCHED_ENDPOINT, "prompt"),
        (BODY | {"prompt": "x"}, ErrorCode.MISMATCHED_ENDPOINT, "prompt"),
        (line(body=BODY | {"stream": True}), ErrorCode.UNSUPPORTED_PARAMETER, "stream"),
        (line(body=BODY | {"max_tokens": "8"}), ErrorCode.INVALID_VALUE, "max_tokens"),
        (line(metadata="x"), ErrorCode.INVALID_VALUE, "metadata"),
    ],
)
def test_wrong_lines_are_named(item: dict[str, Any], code: ErrorCode, param: str) -> None:
    error = error_of(item, default_model="m")
    assert (error.code, error.param, error.line) == (code, param, 1)


def test_a_duplicate_names_the_line_of_its_first_use_even_if_that_was_refused() -> None:
    bad = line("b", method="GET")
    reading = read("\n".join(map(json.dumps, [line("a"), bad, line("a"), line("b")])))
    assert [row.line for row in reading.rows] == [1]
    assert [(error.line, error.message) for error in reading.errors[1:]] == [
        (3, '"a" first used on line 1'),
        (4, '"b" first used on line 2'),
    ]
    assert {error.code for error in reading.errors[1:]} == {ErrorCode.DUPLICATE_CUSTOM_ID}


def test_ids_are_compared_by_code_points() -> None:
    assert len(read("\n".join(json.dumps(line(i)) for i in ["é", "e\u0301"])).rows) == 2


def test_an_error_carries_the_id_of_its_line_and_all_its_problems() -> None:
    error = error_of(line("q", body=BODY | {"temperature": 2.5, "n": 0}))
    assert error.custom_id == "q"
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "temperature")
    assert error.message == ("temperature must be between 0 and 2; n must be between 1 and 128")


def test_a_line_without_a_model_is_wrong_only_among_lines_that_name_one() -> None:
    bare = line("b", body={"messages": MESSAGES})
    text = "\n".join(map(json.dumps, [line("a"), bare, line("c")]))
    reading = read(text)
    (error,) = reading.errors
    assert (error.line, error.param) == (2, "model")
    assert [(row.index, row.custom_id) for row in reading.rows] == [(0, "a"), (1, "c")]
    assert read(text, "m").errors == []
    assert read(json.dumps(bare)).models == {}


def test_deep_metadata_is_refused_before_it_meets_an_encoder() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"a": deep}
    assert error_of(line(metadata=deep)).param == "metadata"


def test_a_very_long_line_is_an_error_and_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 500)
    data = json.dumps(line("a" * 600)) + "\n" + json.dumps(line("b"))
    reading = read(data)
    assert [(error.line, error.code) for error in reading.errors] == [(1, ErrorCode.INVALID_VALUE)]
    assert [row.line for row in reading.rows] == [2]
    assert reading.digest == hashlib.sha256(data.encode()).hexdigest()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("", {}, "the file is empty"),
        ("\n \r\n", {}, "no requests: all 2 lines are blank"),
        ("{}\n{}\n{}", {"max_lines": 2}, "more than 2 lines"),
        ("{}\n{}\n{}", {"max_bytes": 5}, "larger than 5 bytes"),
    ],
)
def test_inputs_that_are_no_batch(data: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(data, **options)


def test_a_file_can_be_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json.dumps(line()).encode())
    with path.open("rb") as stream:
        assert len(read_lines(stream, default_model=None).rows) == 1


# Whatever the bytes

NEARLY_JSON = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": st.sampled_from(["a", "b", "", 3]),
            "url": st.sampled_from([CHAT, TEXT, "/x"]),
            "body": st.sampled_from([BODY, {"prompt": [1, 2]}, {}, None]),
            "messages": st.just(MESSAGES),
        },
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NEARLY_JSON, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_every_line_that_is_not_blank_is_a_row_or_an_error_with_its_number(
    parts: list[bytes], end: bytes
) -> None:
    data = end.join(parts)
    lines = data.removeprefix(reader.BOM).split(b"\n")
    expected = [n for n, text in enumerate(lines, 1) if text.strip(b" \t\r")]
    try:
        reading = read(data, "m")
    except InputError:
        assert expected == []
        return
    found = [row.line for row in reading.rows] + [error.line for error in reading.errors]
    assert sorted(found) == expected
    assert [row.index for row in reading.rows] == list(range(len(reading.rows)))
    assert len({row.custom_id for row in reading.rows}) == len(reading.rows)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5, unique_by=lambda pair: pair[0]),
    st.booleans(),
)
def test_any_text_comes_through_whole(pairs: list[tuple[str, str]], escaped: bool) -> None:
    pairs = [(f"id {name}", text) for name, text in pairs]
    bodies = [{"messages": [{"role": "user", "content": text}]} for _, text in pairs]
    lines = [line(name, body=body) for (name, _), body in zip(pairs, bodies, strict=True)]
    data = "\n".join(json.dumps(item, ensure_ascii=escaped) for item in lines)
    reading = read(data)
    assert [row.custom_id for row in reading.rows] == [name for name, _ in pairs]
    assert [row.messages for row in reading.rows] == [body["messages"] for body in bodies]


def test_what_the_reader_lets_through_survives_the_queue() -> None:
    metadata = {"big": 10**30, "x": 1.5, "n": None, "t": [True, {"ü\u2028": "\U0001f600"}]}
    (row,) = read(json.dumps(line(metadata=metadata)), "m").rows
    assert Shard.unpacked(Shard(id="s", batch_id="b", rows=[row]).packed().payload) == [row]
    assert JobSpec.parse(row.dump()) == row
    result = RowResult(index=0, custom_id="a", status=RowStatus.OK, metadata=row.metadata)
    assert RowResult.unpacked(result.packed()).metadata == metadata
