"""Output and error lines: shapes, ids that never change, and text that no reader can split."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dflash_batch.worker.contract import ErrorCode, RowResult, RowStatus
from dflash_batch.worker.lines import is_error, output_line, rejected_line
from dflash_batch.worker.reader import LineError

OK = {"status_code": 200, "request_id": "req_1", "body": {"id": "chatcmpl-1", "choices": []}}


def result(**changes: Any) -> RowResult:
    good = {"index": 3, "custom_id": "q", "status": RowStatus.OK, "response": OK}
    return RowResult.model_validate(good | changes)


def test_a_finished_row() -> None:
    line = output_line(result(), "batch_x")
    assert line.endswith("\n")
    value = json.loads(line)
    assert list(value) == ["id", "custom_id", "response", "error"]
    assert value["id"].startswith("batch_req_")
    assert (value["custom_id"], value["response"], value["error"]) == ("q", OK, None)
    assert not is_error(result())


def test_a_row_that_failed_and_one_that_never_ran() -> None:
    body = {"error": {"message": "m", "type": "t", "param": None, "code": "internal_error"}}
    response = {"status_code": 500, "request_id": "r", "body": body}
    failed = result(status=RowStatus.ERROR, response=response)
    assert is_error(failed)
    assert json.loads(output_line(failed, "b"))["response"]["body"] == body
    error = {"code": "batch_cancelled", "message": "cancelled"}
    cancelled = result(status=RowStatus.CANCELLED, response=None, error=error)
    assert is_error(cancelled)
    value = json.loads(output_line(cancelled, "b"))
    assert (value["response"], value["error"]) == (None, error)


def test_metadata_is_echoed_only_where_it_was_given() -> None:
    assert json.loads(output_line(result(metadata={"a": 1}), "b"))["metadata"] == {"a": 1}


def test_ids_depend_on_batch_and_row_alone() -> None:
    ids = [
        json.loads(output_line(result(index=index), batch))["id"]
        for batch in ("a", "b")
        for index in (1, 2)
    ]
    assert len(set(ids)) == 4
    assert json.loads(output_line(result(index=1, custom_id="other"), "a"))["id"] == ids[0]


def test_a_refused_line() -> None:
    error = LineError(
        line=40,
        code=ErrorCode.DUPLICATE_CUSTOM_ID,
        message='"q-17" first used on line 17',
        param="custom_id",
        custom_id="q-17",
    )
    value = json.loads(rejected_line(error, "b"))
    assert list(value) == ["id", "custom_id", "response", "error", "line"]
    assert (value["custom_id"], value["error"], value["line"]) == ("q-17", None, 40)
    assert value["response"]["status_code"] == 400
    assert value["response"]["body"]["error"] == {
        "message": '"q-17" first used on line 17',
        "type": "invalid_request_error",
        "param": "custom_id",
        "code": "duplicate_custom_id",
    }


def test_text_is_raw_utf8_save_for_what_ends_lines() -> None:
    line = output_line(result(custom_id="ü\U0001f600\u2028\u2029\u0085\n"), "b")
    assert "ü\U0001f600\\u2028\\u2029\\u0085\\n" in line
    assert ", " not in line


@given(st.text(), st.text())
def test_any_text_survives_and_stays_on_one_line(name: str, content: str) -> None:
    response = {"status_code": 200, "request_id": "r", "body": {"text": content}}
    row = RowResult.model_construct(index=0, custom_id=name, status=RowStatus.OK, response=response)
    line = output_line(row, "b")
    line.encode()
    assert len(line.splitlines()) == 1
    value = json.loads(line)
    assert (value["custom_id"], value["response"]["body"]["text"]) == (name, content)
