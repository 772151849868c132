"""`run` and `demo`: what they ask of the client, what they print, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke, line, write_lines
from click.testing import Result

from dflash_batch.cli import exits
from dflash_batch.decoder.demo.problems import demo_answers
from dflash_batch.worker import client
from dflash_batch.worker.client import Interrupted, RunOptions
from dflash_batch.worker.contract import JobSpec
from dflash_batch.worker.lines import rejected_line
from dflash_batch.worker.private import ModelUnavailable
from dflash_batch.worker.progress import Progress, Watcher
from dflash_batch.worker.reader import LineError
from dflash_batch.worker.results import OutputTaken, Totals

KEYS = [
    *("batch", "requests", "ok", "failed", "prompt_tokens", "prefill_tokens", "cached_tokens"),
    *("completion_tokens", "cycles", "draft_tokens", "accepted_tokens", "tokens_per_cycle"),
    *("elapsed_s", "output", "errors"),
]


class FakeClient:
    """Stands in for run_batch: answers every row at once, and keeps what it was asked."""

    def __init__(self) -> None:
        self.rows: Sequence[JobSpec] = ()
        self.options: RunOptions | None = None
        self.error: BaseException | None = None
        self.failing: dict[str, str] = {}  # custom_id -> error code
        self.content: Callable[[str], str] = lambda custom_id: "4"
        self.calls = 0

    def __call__(
        self,
        rows: Sequence[JobSpec],
        bad: Sequence[LineError],
        options: RunOptions,
        watch: Watcher,
    ) -> Totals:
        self.rows, self.options, self.calls = rows, options, self.calls + 1
        if self.error is not None:
            raise self.error
        watch.on_phase("loading the model", None)
        watch.on_note("a note")
        good = [row for row in rows if row.custom_id not in self.failing]
        totals = Totals("batch_x", str(options.output), requests=len(rows) + len(bad))
        totals.ok, totals.failed = len(good), totals.requests - len(good)
        totals.prompt_tokens, totals.cached_tokens, totals.prefill_tokens = 100, 75, 25
        totals.completion_tokens, totals.cycles, totals.choices = 50, 10, len(good)
        totals.draft_tokens, totals.accepted_tokens, totals.elapsed_s = 70, 40, 2.0
        watch.on_progress(
            Progress(
                total=len(rows),
                done=len(good),
                ok=len(good),
                failed=totals.failed,
                running=1,
                completion_tokens=50,
                tokens_per_s=25.0,
                tokens_per_cycle=4.0,
                cached_share=0.75,
                elapsed_s=1.0,
                eta_s=None,
            )
        )
        options.output.write_text("".join(self._answer(row.custom_id) for row in good))
        if totals.failed:
            totals.errors = str(options.errors)
            failed = [self._failure(row) for row in rows if row not in good]
            options.errors.write_text("".join(rejected_line(e, "b") for e in [*bad, *failed]))
        return totals

    def _answer(self, custom_id: str) -> str:
        facts = {"draft": "d", "block": 8, "dtype": "float32"}
        message = {"role": "assistant", "content": self.content(custom_id)}
        body = {"choices": [{"index": 0, "message": message}], "dflash": facts}
        response = {"status_code": 200, "body": body}
        return json.dumps({"custom_id": custom_id, "response": response, "error": None}) + "\n"

    def _failure(self, row: JobSpec) -> LineError:
        code: Any = self.failing[row.custom_id]
        return LineError(line=row.line, code=code, message="too long", custom_id=row.custom_id)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClient:
    stand_in = FakeClient()
    monkeypatch.setattr(client, "run_batch", stand_in)
    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return stand_in


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [line("a"), line("b")])


def run(*arguments: object) -> Result:
    return invoke("run", *arguments)


def test_defaults(fake: FakeClient, source: Path, tmp_path: Path) -> None:
    result = run("in.jsonl", "-m", "demo")
    assert result.exit_code == exits.OK
    assert result.stdout == ""
    options = fake.options
    assert options is not None
    assert options.output == tmp_path / "in.out.jsonl"
    assert options.errors == tmp_path / "in.errors.jsonl"
    assert options.home == tmp_path / "home"
    assert (options.name, options.redis, options.new) == ("in.jsonl", None, False)
    assert (options.max_batch, options.lease_ttl_s, options.max_context) == (16, 45.0, None)
    assert options.spec == "on"
    ref = options.model
    assert (ref.target, ref.draft, ref.block, ref.dtype) == ("demo", "auto", None, "auto")
    assert [row.custom_id for row in fake.rows] == ["a", "b"]


def test_every_option_arrives(fake: FakeClient, source: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    result = invoke(
        *("--home", tmp_path / "h", "run", source, "-m", "m", "--draft", "./m", "--block", 4),
        *("--dtype", "float32", "--max-batch", 3, "--max-context", 99, "--new", "--lease-ttl", 5),
        *("--spec", "on"),
        *("-o", "deep.out.jsonl", "--redis", "redis://somewhere", "--errors", "bad.jsonl"),
    )
    assert result.exit_code == exits.OK
    options = fake.options
    assert options is not None
    ref = options.model
    assert (ref.target, ref.draft) == (str(tmp_path / "m"), str(tmp_path / "m"))
    assert (ref.block, ref.dtype) == (4, "float32")
    assert (options.max_batch, options.max_context, options.lease_ttl_s) == (3, 99, 5.0)
    assert options.spec == "on"
    assert options.output == tmp_path / "deep.out.jsonl"
    assert options.errors == tmp_path / "bad.jsonl"
    assert (options.home, options.redis, options.new) == (tmp_path / "h", "redis://somewhere", True)


@pytest.mark.parametrize(
    ("output", "errors"),
    [("x.out.jsonl", "x.errors.jsonl"), ("x.jsonl", "x.errors.jsonl"), ("x", "x.errors.jsonl")],
)
def test_the_error_file_lies_beside_the_output(
    fake: FakeClient, source: Path, tmp_path: Path, output: str, errors: str
) -> None:
    run(source, "-m", "demo", "-o", output)
    assert fake.options is not None
    assert fake.options.errors == tmp_path / errors


def test_json_is_one_object_on_stdout_and_all_talk_is_on_stderr(
    fake: FakeClient, source: Path, tmp_path: Path
) -> None:
    result = run(source, "-m", "demo", "--json")
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert list(report) == KEYS
    assert (report["ok"], report["failed"], report["tokens_per_cycle"]) == (2, 0, 4.8)
    assert report["output"] == str(tmp_path / "in.out.jsonl")
    assert report["errors"] is None


def test_the_summary(fake: FakeClient, source: Path, tmp_path: Path) -> None:
    text = run(source, "-m", "demo").stderr
    assert "2 of 2 ok · 2.0 s · batch_x" in text
    assert "50 tokens, 25 a second, loading included · 4.80 tokens per cycle" in text
    assert "100 prompt tokens, 75% taken from shared prefixes" in text
    assert "greedy (temperature 0) · draft d, block 8 · float32" in text
    assert f"output          {tmp_path / 'in.out.jsonl'}" in text
    assert "errors  " not in text


def test_failures_are_told_with_the_most_common_first_and_exit_1(
    fake: FakeClient, tmp_path: Path
) -> None:
    fake.failing = {"b": "internal_error", "c": "context_length_exceeded", "d": "internal_error"}
    path = write_lines(tmp_path / "in.jsonl", [line(name) for name in "abcd"])
    result = run(path, "-m", "demo")
    assert result.exit_code == exits.SOME_FAILED
    assert "3: internal_error 2, context_length_exceeded 1 (too long)" in result.stderr
    assert f"errors          {tmp_path / 'in.errors.jsonl'}" in result.stderr


def test_bad_lines_stop_the_run_or_are_left_out(fake: FakeClient, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line("a"), "{", line("b")])
    result = run(path, "-m", "demo", "--json")
    assert (result.exit_code, result.stdout, fake.calls) == (exits.INVALID_INPUT, "", 0)
    assert "in.jsonl: 1 problem in 3 lines" in result.stderr
    assert "nothing was queued. skip them: --on-invalid skip" in result.stderr
    result = run(path, "-m", "demo", "--on-invalid", "skip", "--json")
    assert result.exit_code == exits.SOME_FAILED
    assert len(fake.rows) == 2
    report = json.loads(result.stdout)
    assert (report["requests"], report["ok"], report["failed"]) == (3, 2, 1)


def test_a_file_without_one_good_line_is_not_run(fake: FakeClient, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["{", "["])
    result = run(path, "-m", "demo", "--on-invalid", "skip")
    assert (result.exit_code, fake.calls) == (exits.INVALID_INPUT, 0)


def test_without_m_the_lines_name_the_model(fake: FakeClient, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line("a", model="demo"), line("b", model="demo")])
    assert run(path).exit_code == exits.OK
    assert fake.options is not None
    assert fake.options.model.target == "demo"
    write_lines(path, [line("a")])
    result = run(path)
    assert (result.exit_code, fake.calls) == (exits.USAGE, 1)
    assert "give one with -m" in result.stderr
    write_lines(path, [line("a", model="demo"), line("b", model="other")])
    assert run(path).exit_code == exits.USAGE


def test_ctrl_c_says_how_to_go_on(fake: FakeClient, source: Path) -> None:
    fake.error = Interrupted("batch_x", 1, 2)
    result = run(source, "-m", "demo", "--json")
    assert (result.exit_code, result.stdout) == (exits.INTERRUPTED, "")
    assert "1 of 2 rows are written; rerun the same command to continue" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutputTaken("x holds something else"), exits.USAGE),
        (ModelUnavailable("no such model"), exits.NOT_FOUND),
    ],
)
def test_trouble_has_its_exit_code(
    fake: FakeClient, source: Path, error: Exception, code: int
) -> None:
    fake.error = error
    result = run(source, "-m", "demo")
    assert result.exit_code == code
    assert result.stderr.splitlines()[-1] == f"error: {error}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nope.jsonl", "-m", "demo"),
        (".", "-m", "demo"),
        ("in.jsonl", "-m", "no-such-model"),
        ("in.jsonl", "-m", "demo", "--draft", "./nope"),
    ],
)
def test_what_is_not_there(fake: FakeClient, source: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, fake.calls) == (exits.NOT_FOUND, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "demo", "-o", "in.jsonl"),
        ("-m", "demo", "-o", "./in.jsonl", "--new"),
        ("-m", "demo", "--errors", "in.jsonl"),
        ("-m", "demo", "-o", "."),
        ("-m", "demo", "--block", "1"),
        ("-m", "demo", "--max-batch", "0"),
        ("-m", "demo", "--dtype", "int8"),
        ("-m", "demo", "--on-invalid", "maybe"),
    ],
)
def test_usage_errors(fake: FakeClient, source: Path, arguments: tuple[str, ...]) -> None:
    before = source.read_bytes()
    assert run(source, *arguments).exit_code == exits.USAGE
    assert (source.read_bytes(), fake.calls) == (before, 0)


def test_stdin_needs_a_place_for_results(fake: FakeClient, tmp_path: Path) -> None:
    text = json.dumps(line("a"))
    assert invoke("run", "-", "-m", "demo", stdin=text).exit_code == exits.USAGE
    assert invoke("run", "-", "-m", "demo", "-o", "r.jsonl", stdin=text).exit_code == exits.OK
    assert fake.options is not None
    assert fake.options.output == tmp_path / "r.jsonl"


def test_quiet_says_nothing_when_all_is_well(fake: FakeClient, source: Path) -> None:
    result = run(source, "-m", "demo", "-q", "--json")
    assert result.stderr == ""
    assert json.loads(result.stdout)["ok"] == 2


def test_warnings_are_shown_once_a_kind(fake: FakeClient, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line(name, user="u", seed=1) for name in "abc"])
    text = run(path, "-m", "demo").stderr
    assert text.count("  warning  ") == 1
    assert "fields without effect on the text: user (3 lines), seed (3 lines)" in text


# demo


def test_demo_runs_afresh_and_shows_what_came_of_it(fake: FakeClient, tmp_path: Path) -> None:
    answers = demo_answers(64)
    wrong = next(iter(answers))
    fake.content = lambda name: f"So it is\n#### {answers[name] + (name == wrong)}"
    result = invoke("demo", "--draft", "none", "--json")
    assert result.exit_code == exits.OK
    options = fake.options
    assert options is not None
    assert (options.new, options.model.target, options.model.draft) == (True, "demo", "none")
    assert options.output == tmp_path / "home" / "demo" / "demo.out.jsonl"
    assert len(fake.rows) == 64
    report = json.loads(result.stdout)
    assert [key for key in report if key not in KEYS] == [
        "score",
        "problems",
        "shared_prefix_share",
    ]
    assert (report["score"], report["problems"]) == (63, 64)
    assert report["shared_prefix_share"] > 0.5
    text = result.stderr
    assert "score 63/64" in text
    assert text.count("✗ So it is ####") == 1
    assert text.count("✓ So it is ####") == 3
    assert str(options.output) in text
    assert "tokens per cycle" in text
    assert "dflash-batch run FILE.jsonl -m MODEL" in text


def test_demo_files_can_be_put_elsewhere(fake: FakeClient, tmp_path: Path) -> None:
    assert invoke("demo", "-o", "here").exit_code == exits.OK
    assert len((tmp_path / "here" / "demo.jsonl").read_text().splitlines()) == 64
    (tmp_path / "file").write_text("")
    assert invoke("demo", "-o", "file").exit_code == exits.USAGE
