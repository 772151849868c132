"""Whatever a caller sends, the answer is one of the API: no fault of ours, no wrong acceptance."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from queue_tools import MODEL

from dflash_batch.worker.contract import CHAT, TEXT
from dflash_batch.worker.gateway.app import Options, build
from dflash_batch.worker.gateway.guard import NotLoopback, TokensUnfit, check_address, read_tokens

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
KEYS = [
    *("input_file_id", "endpoint", "completion_window", "metadata", "model", "messages"),
    *("prompt", "stream", "n", "stop", "max_tokens", "temperature", "logit_bias", "tools"),
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.one_of(
    st.binary(max_size=80),
    anything.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(st.sampled_from(KEYS), anything, max_size=8).map(
        lambda value: json.dumps(value).encode()
    ),
)
parts = st.lists(
    st.sampled_from(
        [
            b"--b\r\n",
            b"--b--\r\n",
            b'Content-Disposition: form-data; name="file"; filename="x"\r\n',
            b'Content-Disposition: form-data; name="purpose"\r\n',
            b"\r\n",
            b"batch",
            b": \r\n",
            b"\0\xff",
        ]
    ),
    max_size=14,
).map(b"".join)
many = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def options(valkey_url: str) -> Iterator[Options]:
    with tempfile.TemporaryDirectory() as folder:
        yield Options(Path(folder), valkey_url, (MODEL,))


def call(options: Options, path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    """One call of the application in this process; a fault of ours is raised here."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=build(options))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(run())


def assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]


@many
@given(content=bodies)
def test_no_batch_is_made_of_anything_else(options: Options, content: bytes) -> None:
    assert_refused(call(options, "/v1/batches", content, JSON))


@many
@given(content=bodies, path=st.sampled_from([CHAT, TEXT]))
def test_no_row_is_made_of_anything_else(options: Options, content: bytes, path: str) -> None:
    # Such a body can only be right by accident if it names a model, and then none of ours.
    content = content.replace(b'"model": null', b'"model": "x"')
    if b'"model"' not in content and content.startswith(b"{") and len(content) > 1:
        content = b'{"model":"x",' + content[1:]
    assert_refused(call(options, path, content, JSON))


@many
@given(content=parts)
def test_an_upload_is_whole_or_refused(options: Options, content: bytes) -> None:
    answer = call(options, "/v1/files", content, FORM)
    folder = options.home / "gateway" / "files"
    assert not list(folder.glob("*.part"))
    if answer.status_code == 200:
        assert content.count(b'name="file"') >= 1
        assert b"--b--" in content
        path = folder / f"{answer.json()['id']}.jsonl"
        assert path.stat().st_size == answer.json()["bytes"]
    else:
        assert_refused(answer)


def test_a_body_that_is_too_large_is_refused(options: Options) -> None:
    answer = call(options, CHAT, b" " * ((16 << 20) + 1), JSON)
    assert answer.status_code == 413
    assert_refused(answer)


def test_tokens_come_from_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# two\nabcdefghijklmnop\n\nqrstuvwxyz0123456\n")
    path.chmod(0o644)
    with pytest.raises(TokensUnfit, match="chmod 600"):
        read_tokens(path)
    path.chmod(0o600)
    tokens = read_tokens(path)
    assert len(tokens) == 2
    path.write_text("short\n")
    with pytest.raises(TokensUnfit, match="fewer than 16"):
        read_tokens(path)
    path.write_text("# none\n")
    with pytest.raises(TokensUnfit, match="no token"):
        read_tokens(path)
    check_address("0.0.0.0", tokens)
    for own in ("127.0.0.1", "::1", "localhost"):
        check_address(own, frozenset())
    for other in ("0.0.0.0", "::", "studio.local", "127.0.0.1.evil.example"):
        with pytest.raises(NotLoopback):
            check_address(other, frozenset())
