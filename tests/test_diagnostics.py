"""Diagnostics: what cycles and rows took is noted, and no text."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from tiny import OracleDrafter, finish, make_decoder, make_info, make_target, request

from dflash_batch.decoder.diagnostics import Diagnostics
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.types import LoadSpec


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_cycles_and_rows_are_noted(tmp_path: Path) -> None:
    info = make_info(make_target("qwen3"), "oracle", 4)
    watch = Diagnostics(tmp_path / "d", info, {"max_batch": 3})
    drafter = OracleDrafter([], 4, 1.0, 0)
    decoder = make_decoder(make_target("qwen3"), drafter, max_batch=3, watch=watch)
    for i in range(3):
        decoder.add(request(i, [i, 1, 2], 6))
    done = finish(decoder)
    decoder.close()

    (folder,) = (tmp_path / "d").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "cycles.jsonl", "jobs.jsonl"}
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in folder.iterdir())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"] == {"max_batch": 3}
    assert set(manifest["versions"]) == {"dflash-batch", "mlx", "mlx-lm"}
    cycles = lines(folder / "cycles.jsonl")
    assert all(set(c["parts_ms"]) == {"draft", "verify", "accept", "commit"} for c in cycles)
    # Each row's first token comes with its prompt.
    assert sum(c["emitted"] for c in cycles) >= sum(len(c.token_ids) - 1 for c in done.values())
    jobs = lines(folder / "jobs.jsonl")
    assert {job["uid"]: job["output_tokens"] for job in jobs} == {0: 6, 1: 6, 2: 6}
    assert not {"text", "token_ids", "logprobs"} & set(jobs[0])


def test_a_loaded_pair_notes_itself(tmp_path: Path) -> None:
    decoder = load_decoder(LoadSpec(target="demo", diagnostics=str(tmp_path)))
    decoder.close()
    (manifest,) = tmp_path.glob("*/manifest.json")
    noted = json.loads(manifest.read_text())
    assert noted["model"]["draft"] == "demo"
    assert noted["settings"]["spec"] == "on"


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    info = make_info(make_target("qwen3"), "oracle", 4)
    with pytest.raises(LoadError, match="diagnostics cannot be written"):
        Diagnostics(tmp_path / "file", info, {})
