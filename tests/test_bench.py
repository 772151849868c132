"""`bench`: the sweep measures and keeps a table; the command shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke
from test_vectors import FOLDER

from dflash_batch.cli import bench, exits
from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.policy import SIZES, Goodput, best_choices
from dflash_batch.decoder.types import LoadSpec

QWEN3 = FOLDER / "dflash-qwen3-tiny"
PAIR = ("-m", QWEN3 / "target", "--draft", QWEN3 / "draft-b8", "--dtype", "float32")


def test_what_is_measured_is_shown_kept_and_used(tmp_path: Path) -> None:
    result = invoke(
        *("--home", tmp_path, "bench", *PAIR, "--widths", "2,1", "--contexts", "128", "--json")
    )
    assert result.exit_code == exits.OK, result.output
    found = json.loads(result.stdout)
    table = found["table"]
    assert [row[:3] for row in table["forward"]] == [
        [b, t, 128] for b in (1, 2) for t in (1, 2, 3, 4, 6, 8)
    ]
    assert all(row[3] > 0 for row in table["forward"] + table["draft"])
    assert {best["acceptance"] for best in found["best"]} == {0.5, 0.7, 0.85, 0.95}

    spec = LoadSpec(
        target=str(QWEN3 / "target"),
        draft=str(QWEN3 / "draft-b8"),
        dtype="float32",
        spec="auto",
        cost_dir=str(Path(found["file"]).parent),
    )
    policy = load_decoder(spec).policy
    assert isinstance(policy, Goodput)
    assert policy.table.t_fwd(2, 8, 128) == pytest.approx(table["forward"][-1][3], rel=1e-3)


def canned() -> dict[str, Any]:
    forward = [[1, 1, 512, 0.020, 8], [1, 4, 512, 0.021, 8], [4, 1, 512, 0.024, 8]]
    return {
        "table": {
            "key": {"machine": "studio", "mlx": "0.32.4", "model": "x"},
            "forward": forward,
            "draft": [[1, 4, 512, 0.002, 8]],
        },
        "target": "org/model",
        "draft": "org/draft",
        "dtype": "bfloat16",
        "file": None,
        "wanted": 3,
        "best": [],
    }


def test_the_table_for_people() -> None:
    lines = list(bench.report(canned()))
    assert "context 512: ms a cycle" in lines
    assert [line.split() for line in lines if line.lstrip().startswith(("1 ", "4 "))] == [
        ["1", "20.0", "23.0"],
        ["4", "24.0", "-"],
    ]
    assert lines[-1] == "2 of 3 points were measured; --limit gives more time"


def test_the_best_choice_follows_acceptance() -> None:
    table = CostTable()
    for b in (1, 8):
        for t in SIZES:
            table.forward.put(b, t, 512, 0.01 + 0.001 * b * t)
    low, high = best_choices(table, (0.1, 0.99))
    assert (low.rows, low.plain_rows, high.rows) == (8, 8, 8)
    assert low.tokens < high.tokens
    assert high.tokens_per_s > high.plain_tokens_per_s


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("--home", tmp_path, "bench", "-m", tmp_path)
    assert result.exit_code == exits.NOT_FOUND
    assert "this is not a model folder" in result.stderr


def test_a_process_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ENGINE", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    result = invoke("--home", tmp_path, "bench", "-m", "demo")
    assert result.exit_code == exits.NO_WORKER
    assert "no result" in result.stderr


@pytest.mark.parametrize("widths", ["", "0", "1,x", "-3"])
def test_widths_are_positive_numbers(tmp_path: Path, widths: str) -> None:
    result = invoke("--home", tmp_path, "bench", "-m", "demo", "--widths", widths)
    assert result.exit_code == exits.USAGE
    assert "positive numbers" in result.stderr


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("--home", tmp_path, "bench", "-m", "demo", "--plot", tmp_path / "x.png")
    assert result.exit_code == exits.USAGE
    assert "pip install 'dflash-batch[plot]'" in result.stderr


def test_plot_draws_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.draw(canned(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
