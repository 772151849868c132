"""The whole path with the commands a user types: JSONL in, queue, worker, decoder, JSONL out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_batch.decoder.demo.problems import demo_rows

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"
COMMAND = [sys.executable, "-c", "from dflash_batch.cli.main import main; main()"]
SUMMARY = [
    *("batch", "requests", "ok", "failed", "prompt_tokens", "prefill_tokens", "cached_tokens"),
    *("completion_tokens", "cycles", "draft_tokens", "accepted_tokens", "tokens_per_cycle"),
    *("elapsed_s", "output", "errors"),
]


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "DFLASH_BATCH_HOME": str(home)}
    env.pop("DFLASH_BATCH_REDIS", None)
    return subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def dflash(home: Path, *words: str, expect: int = 0) -> str:
    process = start(home, *words)
    out, err = process.communicate(timeout=240)
    assert process.returncode == expect, err
    return out


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path | str) -> dict[str, dict[str, Any]]:
    """Lines by custom_id; each must be whole, and stand once."""
    lines = Path(path).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    by_id = {row["custom_id"]: row for row in rows}
    assert len(by_id) == len(rows)
    return by_id


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def vector_row(case: dict[str, Any]) -> dict[str, Any]:
    body = {
        "prompt": case["prompt"],
        "max_tokens": case["max_new_tokens"],
        "stop_token_ids": case["stop_token_ids"] or [],
        "ignore_eos": True,
        "return_token_ids": True,
        "dflash_trace": True,
    }
    return {"custom_id": str(case["case"]), "url": "/v1/completions", "body": body}


@pytest.mark.parametrize("max_batch", ["1", "16"])
def test_the_interoperability_vectors_through_the_command_line(
    tmp_path: Path, max_batch: str
) -> None:
    draft = VECTORS / "draft-b8-swa"
    cases = json.loads((draft / "expected" / "cases.json").read_text())
    cases = [case for case in cases if case["block_size"] is None]
    batch = write(tmp_path / "v.jsonl", [vector_row(case) for case in cases])

    out = dflash(
        tmp_path / "home",
        *("run", str(batch), "-m", str(VECTORS / "target"), "--draft", str(draft)),
        *("--spec", "on"),
        *("--dtype", "float32", "--max-batch", max_batch, "--json"),
    )

    summary = json.loads(out)
    assert sorted(summary) == sorted(SUMMARY)
    assert (summary["requests"], summary["ok"], summary["failed"]) == (len(cases), len(cases), 0)
    got = read(summary["output"])
    for case in cases:
        body = got[str(case["case"])]["response"]["body"]
        assert body["choices"][0]["token_ids"] == case["expected_new_tokens"]
        assert body["dflash"]["emitted_per_cycle"] == case["emitted_per_cycle"]
        assert body["dflash"]["drafted_per_cycle"] == case["drafted_per_cycle"]
    cycles = sum(len(case["emitted_per_cycle"]) for case in cases)
    assert summary["cycles"] == cycles
    assert summary["tokens_per_cycle"] == pytest.approx(
        sum(sum(case["emitted_per_cycle"]) for case in cases) / cycles, abs=1e-3
    )


def test_sampled_rows_have_one_text_a_seed_with_any_draft_and_batch(tmp_path: Path) -> None:
    body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "temperature": 1.2}
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "body": {**body, "prompt": [1, 2, 3], "seed": 7, "n": 3, "top_p": 0.9}},
        {"custom_id": "b", "body": {**body, "prompt": [[5, 4], [9]], "frequency_penalty": 1}},
        {"custom_id": "c", "body": {**body, "prompt": [1, 2, 3], "temperature": 0}},
        {"custom_id": "d", "body": {**body, "prompt": [8], "logit_bias": {"11": 100}, "seed": 0}},
    ]
    model = ("-m", str(VECTORS / "target"), "--dtype", "float32", "--json")
    home = tmp_path / "home"

    first = dflash(home, "run", str(write(tmp_path / "1.jsonl", rows)), *model, "--draft", "none")
    bodies = {name: row["response"]["body"] for name, row in read(tmp_path / "1.out.jsonl").items()}
    texts = {name: [c["token_ids"] for c in body["choices"]] for name, body in bodies.items()}

    assert json.loads(first)["ok"] == 4
    assert [c["index"] for c in bodies["a"]["choices"]] == [0, 1, 2]
    assert len({tuple(text) for text in texts["a"]}) == 3
    assert bodies["a"]["usage"]["prompt_tokens"] == 3
    assert bodies["a"]["usage"]["completion_tokens"] == 36
    assert texts["d"] == [[11] * 12]
    assert bodies["a"]["dflash"]["seed"] == 7
    assert "seed" not in bodies["c"]["dflash"]

    # The seed that was drawn for b is in its result: with it, the text comes again.
    rows[1]["body"]["seed"] = bodies["b"]["dflash"]["seed"]
    draft = ("--draft", str(VECTORS / "draft-b8"), "--max-batch", "3")
    dflash(home, "run", str(write(tmp_path / "2.jsonl", rows)), *model, *draft)
    again = read(tmp_path / "2.out.jsonl")
    assert texts == {
        name: [c["token_ids"] for c in row["response"]["body"]["choices"]]
        for name, row in again.items()
    }


def test_every_kind_of_row_gets_its_line(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "ids", "body": {"prompt": [1, 2, 3], "max_tokens": 4}},
        {"custom_id": "several", "body": {"prompt": [[1, 2], [3]], "max_tokens": 3}},
        {"custom_id": "long", "body": {"prompt": [5] * 600, "max_tokens": 4}},
        {"custom_id": "foreign", "body": {"prompt": [99], "max_tokens": 4}},
        {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "hi"}]}},
        {"custom_id": "text", "body": {"prompt": "hi", "max_tokens": 4}},
        {"custom_id": "stop", "body": {"prompt": [1, 2], "max_tokens": 4, "stop": ["x"]}},
    ]
    batch = write(tmp_path / "kinds.jsonl", rows)

    process = start(tmp_path / "home", "run", str(batch), "-m", str(VECTORS / "target"), "--json")
    out, err = process.communicate(timeout=240)

    assert process.returncode == 1
    assert "plain decoding: no draft is known for this target" in err
    summary = json.loads(out)
    assert (summary["ok"], summary["failed"]) == (2, 5)
    good, bad = read(summary["output"]), read(summary["errors"])
    assert len(good["several"]["response"]["body"]["choices"]) == 2
    codes = {
        name: row["response"]["body"]["error"]["code"] if row["response"] else row["error"]["code"]
        for name, row in bad.items()
    }
    assert codes == {
        "long": "context_length_exceeded",
        "foreign": "invalid_value",
        "chat": "tokenizer_missing",
        "text": "tokenizer_missing",
        "stop": "tokenizer_missing",
    }
    assert all(row["response"]["status_code"] == 400 for row in bad.values())


def test_text_stops_and_usage_with_the_bundled_pair(tmp_path: Path) -> None:
    plain = [{**row, "custom_id": f"plain-{i}"} for i, row in enumerate(demo_rows(2))]
    stopped = [{**row, "custom_id": f"stop-{i}"} for i, row in enumerate(demo_rows(2))]
    for row in stopped:
        row["body"] = {**row["body"], "stop": ["####"]}
    batch = write(tmp_path / "text.jsonl", plain + stopped)

    out = dflash(tmp_path / "home", "run", str(batch), "-m", "demo", "--json", "--dtype", "float32")

    got = read(json.loads(out)["output"])
    for i in range(2):
        whole = got[f"plain-{i}"]["response"]["body"]
        cut = got[f"stop-{i}"]["response"]["body"]
        text = whole["choices"][0]["message"]["content"]
        assert "####" in text
        assert cut["choices"][0]["message"]["content"] == text[: text.index("####")]
        assert {c["choices"][0]["finish_reason"] for c in (whole, cut)} == {"stop"}
        assert cut["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
        details = whole["usage"]["prompt_tokens_details"]
        used = whole["dflash"]["prefill_tokens"] + details["cached_tokens"]
        assert used == whole["usage"]["prompt_tokens"]
    # One prefix, computed once: all rows but the first take it from there.
    assert sum(row["response"]["body"]["dflash"]["cached_tokens"] == 0 for row in got.values()) == 1


def test_a_worker_killed_in_mid_run_costs_nothing(tmp_path: Path) -> None:
    """kill -9 of worker and client in mid-run, a line cut in half; the same command finishes."""
    home = tmp_path / "home"
    rows = [
        {
            "custom_id": f"row-{i}",
            "body": {"prompt": [i % 60, 1 + i // 60, 7], "max_tokens": 40, "ignore_eos": True},
        }
        for i in range(150)
    ]
    batch = write(tmp_path / "k.jsonl", rows)
    out = tmp_path / "k.out.jsonl"
    words = [
        *("run", str(batch), "-m", str(VECTORS / "target"), "--draft", str(VECTORS / "draft-b4")),
        *("--spec", "on"),
        *("--dtype", "float32", "--max-batch", "4", "--lease-ttl", "2", "--json"),
    ]

    first = start(home, *words)
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 10)
    for pid in workers_of(first.pid):
        os.kill(pid, signal.SIGKILL)
    before = out.read_bytes().count(b"\n")
    until(lambda: out.read_bytes().count(b"\n") >= min(before + 10, 150))
    first.kill()
    first.communicate(timeout=60)
    half = out.read_bytes()
    out.write_bytes(half[: half[:-1].rfind(b"\n") + 30])

    summary = json.loads(dflash(home, *words))

    assert (summary["requests"], summary["ok"], summary["failed"]) == (150, 150, 0)
    assert set(read(out)) == {row["custom_id"] for row in rows}


def workers_of(pid: int) -> list[int]:
    """The worker and engine processes started by process `pid` (Linux and macOS)."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    return [
        int(child)
        for child, parent, command in rows
        if int(parent) == pid and "dflash_batch.worker.main" in command
    ]
