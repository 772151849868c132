"""`check`: all bad lines in one pass, aligned; nothing queued; and what a good file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke, line, write_lines
from tokenizers import Tokenizer, models, pre_tokenizers

from dflash_batch.cli import exits
from dflash_batch.worker.contract import CHAT, TEXT

BAD: list[tuple[Any, str]] = [
    ('{"custom_id":"b1","body":{"messages":[{"role":"user","con', "invalid_json_line"),
    (b'{"custom_id":"b2\xff"}', "invalid_encoding"),
    ('{"custom_id":"b3","custom_id":"b3"}', "invalid_json_line"),
    ('{"custom_id":"b4","body":{"x":NaN}}', "invalid_json_line"),
    ('{"custom_id":"\\ud800"}', "invalid_encoding"),
    ("[1,2]", "invalid_json_line"),
    ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter"),
    (line("ok-1"), "duplicate_custom_id"),
    (line("b9") | {"method": "GET"}, "invalid_value"),
    (line("b10") | {"url": "/v1/embeddings"}, "unsupported_endpoint"),
    (line("b11") | {"url": TEXT}, "mismatched_endpoint"),
    (line("b12", stream=True), "unsupported_parameter"),
    (line("b13", max_tokens=0), "invalid_value"),
    ("[" * 100_000, "invalid_json_line"),
]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "home"))


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "bad.jsonl", [line("ok-1"), *(item for item, _ in BAD)])


def test_all_bad_lines_are_named_in_one_pass_and_nothing_is_queued(
    bad: Path, tmp_path: Path
) -> None:
    result = invoke("check", bad)
    assert result.exit_code == exits.INVALID_INPUT
    lines = result.stdout.splitlines()
    assert lines[0] == f"bad.jsonl: {len(BAD)} problems in {len(BAD) + 1} lines"
    for number, (shown, (_, code)) in enumerate(zip(lines[1:], BAD, strict=False), 2):
        assert shown.startswith(f"  line {number:<4}{code} ")
    assert lines[-1] == "nothing was queued. skip them: --on-invalid skip"
    # aligned: every message begins in one column
    starts = {len(text) - len(text.split(maxsplit=3)[3]) for text in lines[1 : len(BAD) + 1]}
    assert len(starts) == 1
    assert "ends inside a string (col 58)" in lines[1]
    assert '"ok-1" first used on line 1' in lines[8]
    assert not (tmp_path / "home").exists()


def test_json_has_all_problems(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["{"] * 60)
    result = invoke("check", path, "--json")
    assert result.exit_code == exits.INVALID_INPUT
    report = json.loads(result.stdout)
    assert (report["requests"], report["valid"], report["invalid"]) == (60, 0, 60)
    assert report["errors"][59] == {
        "line": 60,
        "code": "invalid_json_line",
        "message": "ends before the object is closed (col 2)",
        "param": None,
        "custom_id": None,
        "column": 2,
    }
    text = invoke("check", path).stdout.splitlines()
    assert len(text) == 53
    assert text[51] == "  and 10 more: check --json lists all"


def test_what_a_good_file_holds(tmp_path: Path) -> None:
    lines = [line(str(n), "few shots " * 200 + str(n), model="m") for n in range(8)]
    path = write_lines(tmp_path / "good.jsonl", lines)
    result = invoke("check", path)
    assert result.exit_code == exits.OK
    assert "good.jsonl   8 requests · " in result.stdout
    assert "8 chat" in result.stdout
    assert "8 ok · 0 invalid" in result.stdout
    assert "greedy" in result.stdout
    assert "model           m (8)" in result.stdout
    assert "87% of the prompt text, in 1 group" in result.stdout
    assert result.stderr == ""


def test_what_will_be_sampled_is_said(tmp_path: Path) -> None:
    lines = [line("a"), line("b", temperature=0.7, n=3), line("c", temperature=0)]
    path = write_lines(tmp_path / "mixed.jsonl", [dict(item, model="m") for item in lines])
    result = invoke("check", path)
    assert "1 sampled, 2 greedy (temperature 0 or none named) · 5 choices" in result.stdout


def test_stdin_is_read(tmp_path: Path) -> None:
    result = invoke("check", "-", stdin=json.dumps(line("a")))
    assert result.exit_code == exits.OK
    assert result.stdout.startswith("stdin   1 request ")


@pytest.mark.parametrize(("content", "code"), [(None, exits.NOT_FOUND), (b"", exits.INVALID_INPUT)])
def test_inputs_that_cannot_be_read(tmp_path: Path, content: bytes | None, code: int) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = invoke("check", path)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_what_a_file_says_cannot_command_the_terminal(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [line("a", "x", **{"\x1b[2J\n": 1})])
    result = invoke("check", path)
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 3


# With a model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of one token a word, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "user": 1, "word": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no!') }}{% endif %}"
        "{{ m.role }} {{ m.content }} {% endfor %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {"model_type": "qwen3", "max_position_embeddings": 32, "vocab_size": 3}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_prompts_are_counted_with_the_models_tokenizer(tmp_path: Path, model: Path) -> None:
    lines = [line("a", "word " * 3), line("b", "word " * 7), line("c", "word " * 5)]
    result = invoke("check", write_lines(tmp_path / "x.jsonl", lines), "-m", model)
    assert result.exit_code == exits.OK
    assert "prompt tokens   18   p50 6   max 8   limit 32   ok" in result.stdout


def test_what_the_template_is_told_counts(tmp_path: Path, model: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}"
        "{% for t in tools or [] %}word {% endfor %}"
        "{% if loud %}word word {% endif %}{% if add_generation_prompt %}user {% endif %}"
        "{% if enable_thinking %}word word word{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    told: list[dict[str, Any]] = [
        {},
        {"chat_template_kwargs": {"loud": True}},
        {"enable_thinking": True},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    lines = [line(str(n), **more) for n, more in enumerate(told)]
    result = invoke("check", write_lines(tmp_path / "x.jsonl", lines), "-m", model, "--json")
    report = json.loads(result.stdout)
    assert report["prompt_tokens"]["total"] == 2 + 4 + 5 + 1 + 3


def test_prompts_that_do_not_fit_are_line_errors(tmp_path: Path, model: Path) -> None:
    ids = {"custom_id": "ids", "method": "POST", "url": TEXT, "body": {"prompt": [1, 3]}}
    lines = [line("a"), line("b", "word " * 40), "{", line("c", "no"), ids]
    path = write_lines(tmp_path / "x.jsonl", lines)
    result = invoke("check", path, "-m", model, "--json")
    assert result.exit_code == exits.INVALID_INPUT
    report = json.loads(result.stdout)
    assert [(error["line"], error["code"]) for error in report["errors"]] == [
        (2, "context_length_exceeded"),
        (3, "invalid_json_line"),
        (4, "chat_template_error"),
        (5, "invalid_value"),
    ]
    assert report["errors"][0]["message"] == "41 tokens + 4 > 32"
    assert report["errors"][0]["param"] == "messages"
    assert report["valid"] == 1
    result = invoke("check", path, "-m", model, "--max-context", 5)
    assert "line 1  context_length_exceeded   2 tokens + 4 > 5" in result.stdout


def test_a_model_without_tokenizer_or_template_says_so(tmp_path: Path, model: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [line("a")])
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "chat_template_missing" in invoke("check", path, "-m", model).stdout
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "tokenizer_missing" in invoke("check", path, "-m", model).stdout
    ids = {"custom_id": "i", "method": "POST", "url": TEXT, "body": {"prompt": [1, 2]}}
    path = write_lines(path, [ids])
    assert invoke("check", path, "-m", model).exit_code == exits.OK


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [line("a")])
    result = invoke("check", path, "-m", tmp_path)
    assert result.exit_code == exits.NOT_FOUND
    assert "config.json not found" in result.stderr
