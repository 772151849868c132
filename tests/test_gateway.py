"""The REST front door, by the unmodified OpenAI SDK, against a real server process."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_tools import ServerProcess, answer_to, serving
from openai import OpenAI
from openai.types import Batch
from queue_tools import LocalServer, until

from dflash_batch.worker.contract import CHAT

TOO_LONG = {"role": "user", "content": "x" * 5000}
OVER = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("h"), None) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def lines(count: int, name: str = "q", **body: Any) -> bytes:
    """A batch file of `count` lines; the texts begin with `name`."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"{name}-{n}",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": "fake",
                    "max_tokens": 8,
                    "messages": [{"role": "user", "content": f"{name} {n}"}],
                }
                | body,
            }
        ).encode()
        + b"\n"
        for n in range(count)
    )


def start(client: OpenAI, data: bytes, **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more
    )


def wait(client: OpenAI, batch: Batch) -> Batch:
    found = [batch]

    def over() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status in OVER

    until(over, "the batch is over", 60)
    return found[0]


def records(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_upload_create_poll_download(client: OpenAI) -> None:
    data = lines(40, "walk")
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"run": "1"},
        extra_body={"priority": 5},
    )
    assert (batch.model_extra or {})["dflash"]["priority"] == 5
    assert batch.status in ("validating", "in_progress")
    assert batch.output_file_id is None
    batch = wait(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert batch.error_file_id is None
    assert batch.metadata == {"run": "1"}
    assert batch.usage is not None
    assert batch.usage.output_tokens == 40 * 8
    found = {r["custom_id"]: r for r in records(client, batch.output_file_id)}
    assert len(found) == 40
    for n in range(40):
        body = found[f"walk-{n}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == answer_to(f"walk {n}")
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output"


def test_a_batch_with_bad_lines_fails_and_names_them(client: OpenAI) -> None:
    data = lines(3, "bad") + b'{"custom_id": "x"\n' + lines(1, "bad")
    batch = wait(client, start(client, data))
    assert batch.status == "failed"
    assert batch.errors is not None
    errors = [(e.line, e.code) for e in batch.errors.data or []]
    assert errors == [(4, "invalid_json_line"), (5, "duplicate_custom_id")]
    assert batch.output_file_id is None


def test_rows_that_all_fail_make_a_completed_batch_with_errors_only(client: OpenAI) -> None:
    batch = wait(client, start(client, lines(3, messages=[TOO_LONG])))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    codes = {r["response"]["body"]["error"]["code"] for r in records(client, batch.error_file_id)}
    assert codes == {"context_length_exceeded"}


def test_the_same_request_makes_one_batch(client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(1, "same")), purpose="batch")

    def create(key: str | None, window: Any = "24h") -> str:
        return client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window=window,
            extra_headers={"Idempotency-Key": key} if key else {},
        ).id

    assert create(None) == create(None)
    assert create(None, "7d") != create(None)
    assert create("k-1") == create("k-1") != create("k-2")
    with pytest.raises(openai.ConflictError) as caught:
        create("k-1", "7d")
    assert caught.value.code == "idempotency_conflict"


def test_lists_come_in_pages(client: OpenAI) -> None:
    ids = {start(client, lines(1, f"page {n}")).id for n in range(3)}
    page = client.batches.list(limit=2)
    assert len(page.data) == 2
    assert page.has_more
    assert ids <= {batch.id for batch in client.batches.list(limit=2)}
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=101)
    assert {f.purpose for f in client.files.list(purpose="batch")} == {"batch"}


def test_files_are_read_in_ranges_and_deleted(server: ServerProcess, client: OpenAI) -> None:
    data = lines(5, "range")
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    url = f"{server.url}/v1/files/{file.id}/content"
    part = httpx.get(url, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(data)}"
    assert httpx.get(url, headers={"Range": "bytes=-5"}).content == data[-5:]
    assert httpx.get(url, headers={"Range": "bytes=99999-"}).status_code == 416
    assert httpx.get(url).content == data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


def test_errors_have_the_shape_of_the_api(server: ServerProcess, client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(1, model="gpt-9")), purpose="batch")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nothing")
    for answer, status in (
        (httpx.get(f"{server.url}/v2"), 404),
        (httpx.put(f"{server.url}/v1/files"), 405),
        (httpx.post(f"{server.url}/v1/batches", content=b"{"), 415),
        (httpx.post(f"{server.url}/v1/batches", content=b"{", headers=JSON), 400),
        (httpx.post(f"{server.url}/v1/files", content=b"{", headers=JSON), 400),
        (httpx.get(f"{server.url}/v1/files", headers={"Host": "evil.example"}), 403),
        (httpx.get(f"{server.url}/v1/files", headers={"Origin": "http://evil.example"}), 403),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


JSON = {"Content-Type": "application/json"}


def test_live_requests_are_answered(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "live one"}]
    chat = client.chat.completions.create(model="fake", messages=messages, max_tokens=8)
    assert chat.choices[0].message.content == answer_to("live one")
    text = client.completions.create(model="fake", prompt="some text", max_tokens=3)
    assert text.choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=messages, stream=True)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "stream")


def test_health_and_metrics(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    text = httpx.get(f"{server.url}/metrics").text
    assert "dflash_batch_live_requests_waiting 0.0" in text
    assert "# TYPE dflash_batch_worker_tokens_per_second gauge" in text


def test_a_batch_is_cancelled_and_what_is_done_is_kept(
    tmp_path: Path, valkey_server: LocalServer
) -> None:
    with serving(tmp_path, valkey_server.url, "--step-s", "0.02") as server:
        client = server.client()
        batch = start(client, lines(400, "cancel"))
        until(lambda: _completed(client, batch) > 0, "rows are done")
        assert client.batches.cancel(batch.id).status == "cancelling"
        client.batches.cancel(batch.id)
        url = f"{server.url}/v1/batches/{batch.id}/results?follow=1"
        followed = [json.loads(line) for line in httpx.get(url, timeout=60).text.splitlines()]
        batch = wait(client, batch)
        assert batch.status == "cancelled"
        done = records(client, batch.output_file_id)
        ended = records(client, batch.error_file_id)
        assert {r["error"]["code"] for r in ended} == {"batch_cancelled"}
        assert sorted(r["custom_id"] for r in done + ended) == sorted(
            f"cancel-{n}" for n in range(400)
        )
        assert sorted(r["id"] for r in followed) == sorted(r["id"] for r in done + ended)


def test_rows_that_failed_are_tried_again(server: ServerProcess, client: OpenAI) -> None:
    data = lines(2, "good") + lines(2, "long", messages=[TOO_LONG])
    batch = wait(client, start(client, data))
    url = f"{server.url}/v1/batches/{batch.id}/retry"
    again = client.batches.retrieve(httpx.post(url).json()["id"])
    assert client.files.content(again.input_file_id).content == lines(
        2, "long", messages=[TOO_LONG]
    )
    assert {r["custom_id"] for r in records(client, wait(client, again).error_file_id)} == {
        "long-0",
        "long-1",
    }
    good = wait(client, start(client, lines(1, "all good")))
    assert httpx.post(f"{server.url}/v1/batches/{good.id}/retry").status_code == 409


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path, valkey_server: LocalServer) -> None:
    server = ServerProcess(tmp_path, valkey_server.url, "--step-s", "0.01")
    batch = start(server.client(), lines(200, "kill"))
    until(lambda: _completed(server.client(), batch) > 5, "rows are done")
    server.stop(signal.SIGKILL)
    with serving(tmp_path, valkey_server.url) as server:
        client = server.client()
        batch = wait(client, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 200
        found = records(client, batch.output_file_id)
        assert sorted(r["custom_id"] for r in found) == sorted(f"kill-{n}" for n in range(200))


def test_only_callers_with_a_token_are_answered(tmp_path: Path, valkey_server: LocalServer) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# ours\nsecret-of-sixteen-and-more\n")
    tokens.chmod(0o600)
    home = tmp_path / "h"
    with serving(home, valkey_server.url, worker=False, tokens=str(tokens)) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert [m.id for m in server.client("secret-of-sixteen-and-more").models.list()] == ["fake"]


def _completed(client: OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts else 0
