"""The cost table: what it says between the points, what it learns, and what it does with files."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_batch.decoder.cost import CostKey, CostTable, bucket, load_table

KEY = CostKey(machine="studio/M3 Ultra", mlx="0.32.4", model="abc")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


def forward(rows: int, tokens: int, context: int) -> float:
    """A machine: launches, weights or arithmetic, attention. Seconds."""
    m = rows * tokens
    return 2e-3 + max(25e-3, m * 0.8e-3) + rows * context * 5e-8


def measured(widths: tuple[int, ...], contexts: tuple[int, ...] = (2048, 32768)) -> CostTable:
    table = CostTable()
    for b in widths:
        for t in SIZES:
            for c in contexts:
                table.forward.put(b, t, c, forward(b, t, c))
                if t > 1:
                    table.draft.put(b, t, c, 0.1 * forward(b, t, c))
    return table


def test_a_measured_point_is_what_was_measured() -> None:
    table = measured((1, 4, 16))
    assert table.t_fwd(4, 8, 2048) == pytest.approx(forward(4, 8, 2048), rel=1e-3)
    assert table.t_draft(4, 7, 2048) == pytest.approx(0.1 * forward(4, 8, 2048), rel=1e-3)
    assert table.t_draft(4, 0, 2048) == 0.0


def test_between_the_points_it_is_near_the_machine() -> None:
    table = measured((1, 2, 4, 8, 16, 32))
    for b, t, c in ((3, 4, 2048), (12, 8, 2048), (24, 2, 4096), (8, 16, 10000), (6, 5, 32768)):
        assert table.t_fwd(b, t, c) == pytest.approx(forward(b, t, c), rel=0.2)


def test_more_rows_tokens_or_context_never_look_cheaper_by_much() -> None:
    table = measured((1, 4, 16))
    for c in (500, 2048, 9000, 32768):
        grid = np.array([table.cycle(b, SIZES, c) for b in (1, 2, 3, 4, 6, 8, 12, 16, 24)])
        assert (np.diff(grid, axis=0) > -0.05 * grid[:-1]).all()
        assert (np.diff(grid, axis=1) > -0.05 * grid[:, :-1]).all()


def test_one_point_is_enough_to_say_something() -> None:
    table = CostTable()
    assert table.empty
    assert table.cycle(8, SIZES, 300).tolist() == [0.0] * len(SIZES)
    table.observe(8, 1, 300, 0.01)
    assert table.cycle(8, SIZES, 300)[0] == pytest.approx(0.01, rel=0.1)
    assert (table.cycle(4, SIZES, 5000) > 0).all()


def test_it_learns_the_machine_from_whole_cycles() -> None:
    table = measured((1, 4, 16))
    before = table.t_fwd(1, 4, 2048)
    for _ in range(60):
        table.observe(4, 8, 2300, 0.08)
    assert table.cycle(4, [8], 2300)[0] == pytest.approx(0.08, rel=0.03)
    assert table.t_fwd(1, 4, 2048) == pytest.approx(before, rel=0.1)


def test_a_pause_counts_little() -> None:
    table = measured((1, 4, 16))
    before = table.cycle(4, [8], 2048)[0]
    table.observe(4, 8, 2048, 30.0)
    assert table.cycle(4, [8], 2048)[0] < 1.2 * before


def test_contexts_fall_into_powers_of_two() -> None:
    assert [bucket(c) for c in (1, 128, 256, 300, 2048, 3000, 32768)] == [
        *(128, 128, 256, 256, 2048, 4096, 32768)
    ]


def test_a_saved_table_comes_back_and_is_private(tmp_path: Path) -> None:
    table = measured((1, 4))
    path = table.save(tmp_path / "costs", KEY)
    again, notice = load_table(tmp_path / "costs", KEY)
    assert notice is None
    assert again.to_json(KEY) == table.to_json(KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == [KEY.file_name]


def test_no_file_is_an_empty_table_without_a_word(tmp_path: Path) -> None:
    table, notice = load_table(tmp_path, KEY)
    assert table.empty
    assert notice is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{\x00",
        '{"version": 1}',
        '{"version": 99, "key": {}, "forward": [], "draft": []}',
    ],
)
def test_a_broken_file_is_ignored_with_a_notice(tmp_path: Path, text: str) -> None:
    (tmp_path / KEY.file_name).write_text(text)
    table, notice = load_table(tmp_path, KEY)
    assert table.empty
    assert notice is not None
    assert KEY.file_name in notice


def test_nonsense_in_a_table_is_ignored_with_a_notice(tmp_path: Path) -> None:
    path = measured((1,)).save(tmp_path, KEY)
    data = json.loads(path.read_text())
    data["forward"][0][3] = -1.0
    path.write_text(json.dumps(data))
    table, notice = load_table(tmp_path, KEY)
    assert table.empty
    assert "measured anew" in (notice or "")


def test_another_machine_or_model_has_another_file(tmp_path: Path) -> None:
    other = replace(KEY, model="def")
    path = measured((1,)).save(tmp_path, KEY)
    path.rename(tmp_path / other.file_name)  # as if the names had collided
    table, notice = load_table(tmp_path, other)
    assert table.empty
    assert "another machine or model" in (notice or "")
