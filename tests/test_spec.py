"""`spec` auto, on and off from loading to the result, and the costs kept between starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_vectors import FOLDER
from tiny import finish, request

from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.guard import Guarded
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.policy import (
    SIZES,
    Fixed,
    Goodput,
    Landed,
    Plain,
    RowOutcome,
    RowView,
)
from dflash_batch.decoder.types import Completion, LoadSpec

QWEN3 = FOLDER / "dflash-qwen3-tiny"
PROMPTS = [[1, 2, 3], [4, 5], [9, 8, 7, 6], [30, 31]]


def load(**options: Any) -> Decoder:
    pair: dict[str, Any] = {"target": str(QWEN3 / "target"), "draft": str(QWEN3 / "draft-b8")}
    return load_decoder(LoadSpec(**(pair | {"dtype": "float32", "max_batch": 4} | options)))


def decode(decoder: Decoder, tokens: int = 40) -> dict[int, Completion]:
    for uid, prompt in enumerate(PROMPTS):
        decoder.add(request(uid, prompt, tokens, ignore_eos=True))
    return finish(decoder)


def as_on_a_cpu() -> CostTable:
    """Sixteen rows cost sixteen times one, as MLX's CPU backend has it."""
    table = CostTable()
    for rows in (1, 2, 4, 8, 16):
        for tokens in SIZES:
            table.forward.put(rows, tokens, 128, 1e-3 * rows * tokens)
    return table


def test_the_policy_is_the_one_named() -> None:
    assert isinstance(load(spec="auto").policy, Goodput)
    on = load(spec="on").policy
    assert isinstance(on, Guarded)
    assert type(on.inner) is Fixed
    assert isinstance(load(spec="off").policy, Plain)
    assert isinstance(load(spec="auto", draft="none").policy, Plain)


def test_off_loads_no_draft() -> None:
    decoder = load(spec="off")
    assert (decoder.info.draft, decoder.info.block) == (None, 1)


def test_all_three_give_the_same_texts() -> None:
    on, off, auto = (decode(load(spec=spec)) for spec in ("on", "off", "auto"))
    for uid in on:
        assert on[uid].token_ids == off[uid].token_ids == auto[uid].token_ids
    assert {c.spec for c in on.values()} == {"on"}
    assert {c.spec for c in off.values()} == {"off"}


def test_auto_parks_where_every_token_costs_the_same_and_says_so() -> None:
    decoder = load(spec="auto")
    policy = Goodput(as_on_a_cpu(), decoder.info.block)
    policy.landed = policy_without_clock(policy)  # type: ignore[method-assign]
    decoder.policy = policy
    done = decode(decoder)
    assert policy.parked
    assert {c.spec for c in done.values()} == {"auto-off"}
    assert sum(c.draft_tokens for c in done.values()) < 0.1 * 4 * 40


def test_drafts_that_hardly_ever_stand_are_parked_with_one_warning_and_said_in_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = load(spec="on")
    guard = decoder.policy
    assert isinstance(guard, Guarded)
    # A random draft: next to nothing stands, until texts run in circles.
    with caplog.at_level(logging.WARNING):
        done = decode(decoder, 400)
    assert caplog.text.count("drafts_parked") == 1
    slow = [c for c in done.values() if c.cycles > 300]
    assert slow, "they saw the drafts parked"
    assert all(c.draft_tokens < 0.7 * 7 * c.cycles for c in slow)
    assert all("parked" in (c.draft_notice or "") for c in slow)
    plain = decode(load(spec="off"), 400)
    assert {u: c.token_ids for u, c in done.items()} == {u: c.token_ids for u, c in plain.items()}


def cycles(guard: Guarded, count: int, accepted: int) -> list[int]:
    """What is chosen in `count` cycles of one row in which `accepted` drafts of seven stand."""
    chosen = []
    for _ in range(count):
        k = guard.choose([RowView(0, 100)], 1, 64)
        stood = min(accepted, k)
        guard.landed(Landed(1, k + 1, 64, None, [RowOutcome(0, k, stood)]))
        chosen.append(k)
    return chosen


def test_a_guard_parks_tries_again_rarely_and_lets_good_drafts_be() -> None:
    warned: list[str] = []
    guard = Guarded(Fixed(7, trim=False), warned.append)
    assert set(cycles(guard, 200, 1)) == {7}, "one in seven is enough"
    cycles(guard, -200 % guard.CYCLES, 1)
    assert (guard.parked, guard.notice, guard.effective(200, 0)) == (False, None, "on")
    bad = cycles(guard, guard.CYCLES + guard.WAIT + guard.TRIAL + 2 * guard.WAIT, 0)
    trial = [7] * guard.TRIAL
    assert bad == [7] * guard.CYCLES + [0] * guard.WAIT + trial + [0] * 2 * guard.WAIT
    assert guard.effective(200, 150) == "auto-off"
    assert guard.effective(200, 20) == "on"
    assert cycles(guard, 300, 5) == [7] * 300, "the trial went well"
    cycles(guard, 10_000, 0)
    assert len(warned) == 1
    assert warned[0] == guard.notice


def policy_without_clock(policy: Goodput) -> Any:
    """`landed` that learns of drafts but not of this machine's times."""
    landed = policy.landed
    return lambda cycle: landed(cycle._replace(seconds=None))


def test_costs_are_kept_and_read_again(tmp_path: Path) -> None:
    decoder = load(spec="auto", cost_dir=str(tmp_path / "costs"))
    decode(decoder)
    decoder.close()
    files = list((tmp_path / "costs").iterdir())
    assert len(files) == 1
    assert json.loads(files[0].read_text())["key"]["mlx"]

    again = load(spec="auto", cost_dir=str(tmp_path / "costs")).policy
    assert isinstance(again, Goodput)
    assert not again.table.empty
    other = load(spec="auto", cost_dir=str(tmp_path / "costs"), block=4).policy
    assert isinstance(other, Goodput)
    assert other.table.empty, "another block length is another model"


def test_a_broken_cost_file_is_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder = load(spec="auto", cost_dir=str(tmp_path))
    decode(decoder)
    decoder.close()
    next(tmp_path.iterdir()).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert decode(load(spec="auto", cost_dir=str(tmp_path)))
    assert "cost_table_ignored" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    decoder = load(spec="auto", cost_dir=str(tmp_path / "file"))
    decode(decoder)
    with caplog.at_level(logging.WARNING):
        decoder.close()
    assert "cost_table_not_saved" in caplog.text
