"""`doctor`: it finds what does not work, says what to do, and ends with 1 only then."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke

from dflash_batch.decoder import checkup as decoder_checkup
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.finding import Finding
from dflash_batch.decoder.types import LoadSpec
from dflash_batch.worker import checkup
from dflash_batch.worker.checkup import Subject
from dflash_batch.worker.contract import ModelRef, WorkerInfo
from dflash_batch.worker.footprint import Pressure
from dflash_batch.worker.heat import Heat
from dflash_batch.worker.power import Power
from dflash_batch.worker.queue import Queue

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"
Usage = namedtuple("Usage", "total used free")


def subject(home: Path, url: str | None = None, model: ModelRef | None = None) -> Subject:
    return Subject(home, url, model)


def levels(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


def test_all_is_well_here_and_the_bundled_pair_decodes(
    queue: Queue, valkey_url: str, tmp_path: Path
) -> None:
    home = ("--home", tmp_path / "home")
    result = invoke("doctor", *home, "--redis", valkey_url, "-m", "demo", "--json")
    report = json.loads(result.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert (result.exit_code, report["ok"]) == (0, True), found
    assert {"python", "packages", "device", "arithmetic", "disk", "state", "power"} <= found.keys()
    assert found["decoding"]["text"] == "4 tokens were decoded"
    assert "draft demo, block 16" in found["model"]["text"]
    assert found["workers"]["text"] == "0 up"


def test_what_does_not_work_is_shown_and_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "CHECKS", [checkup.queue, checkup.modes])
    result = invoke("doctor", "--home", tmp_path / "home", "--redis", "redis://:pw@127.0.0.1:1")
    assert result.exit_code == 1
    assert "failed   queue" in result.stdout
    assert "ok       state" in result.stdout
    assert "pw" not in result.output
    quiet = invoke("doctor", "-q", "--home", tmp_path / "home", "--redis", "redis://127.0.0.1:1")
    assert "state" not in quiet.stdout


def test_a_model_that_cannot_be_loaded_fails_with_its_reason(tmp_path: Path) -> None:
    spec = LoadSpec(target=str(VECTORS / "target"), draft=str(tmp_path))
    found = list(decoder_checkup.findings(spec))
    assert levels(iter(found))[-2:] == [("arithmetic", "ok"), ("model", "failed")]
    assert "config.json: not found" in found[-1].text


def test_an_engine_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ENGINE_CHECKUP", "import mlx_of_another_world")
    (finding,) = checkup.engine(subject(tmp_path))
    assert finding.level == "failed"
    assert "No module named 'mlx_of_another_world'" in finding.text


def test_a_check_appended_for_models_is_run_with_the_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def vocabulary(decoder: Decoder) -> Iterator[Finding]:
        yield Finding("vocabulary", "note", str(decoder.info.vocab_size))

    monkeypatch.setattr(decoder_checkup, "MODEL_CHECKS", [decoder_checkup.pair, vocabulary])
    spec = LoadSpec(target=str(VECTORS / "target"), draft="none")
    found = list(decoder_checkup.findings(spec))
    assert found[-1].check == "vocabulary"
    assert int(found[-1].text) > 0
    assert ("model", "warning") in levels(iter(found)), "the tiny model has no tokenizer"


@pytest.mark.parametrize(
    ("need", "level", "cure"),
    [
        ("no-such-package-of-ours>=1", "failed", 'pip install "no-such-package-of-ours>=1"'),
        ("click<1", "failed", 'pip install "click<1"'),
        ('click<1; python_version < "3"', None, ""),
        ('click<1; extra == "plot"', None, ""),
        ("click>=8", None, ""),
    ],
)
def test_packages_are_held_against_what_we_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, need: str, level: str | None, cure: str
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: [need])
    *bad, own = checkup.packages(subject(tmp_path))
    assert [(finding.level, finding.cure) for finding in bad] == ([(level, cure)] if level else [])
    assert own.text.startswith("dflash-batch ")


@pytest.mark.parametrize(
    ("free", "level"), [(1 << 40, "ok"), (5 << 30, "warning"), (1 << 20, "failed")]
)
def test_disk_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 41, 0, free))
    assert levels(checkup.disk(subject(tmp_path))) == [("disk", level)]


@pytest.mark.parametrize(("mode", "level"), [(0o700, "ok"), (0o750, "warning"), (0o705, "warning")])
def test_a_state_directory_that_others_may_read(tmp_path: Path, mode: int, level: str) -> None:
    tmp_path.chmod(mode)
    (finding,) = checkup.modes(subject(tmp_path))
    assert finding.level == level
    assert (finding.cure == f"chmod 700 '{tmp_path}'") == (level == "warning")


@pytest.mark.parametrize(
    ("now", "level"),
    [(None, "note"), (Power(True, 0.5), "ok"), (Power(False, 0.5), "warning")],
)
def test_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: Power | None, level: str
) -> None:
    monkeypatch.setattr(checkup, "power", lambda: now)
    assert levels(checkup.power_source(subject(tmp_path))) == [("power", level)]


def test_heat_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[tuple[Any, str]] = [(None, "note"), (Heat.FAIR, "ok"), (Heat.SERIOUS, "warning")]
    for hot, level in readings:
        monkeypatch.setattr(checkup, "heat", lambda hot=hot: hot)
        assert levels(checkup.temperature(subject(tmp_path))) == [("heat", level)]
    for short, level in [(Pressure.UNKNOWN, "ok"), (Pressure.CRITICAL, "warning")]:
        monkeypatch.setattr(checkup, "pressure", lambda short=short: short)
        assert levels(checkup.memory(subject(tmp_path))) == [("memory", level)]


def test_macos_sleep_settings() -> None:
    said = (
        "System-wide power settings:\n SleepDisabled\t\t0\nCurrently in use:\n"
        " standby              1\n lowpowermode         {}\n disksleep            10\n"
        " sleep                {} (sleep prevented by caffeinate)\n displaysleep         5\n"
    )
    assert levels(checkup.pmset_findings(said.format(0, 0))) == [("sleep", "ok")]
    found = list(checkup.pmset_findings(said.format(1, 15)))
    assert [finding.level for finding in found] == ["note", "warning"]
    assert "idle sleep after 15 min" in found[0].text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("unix:///run/s", []),
        ("redis://localhost:6379", []),
        ("redis://127.0.0.1", []),
        ("redis://studio.local", ["warning", "note"]),
        ("redis://:pw@studio.local", ["note"]),
        ("rediss://:pw@studio.local", []),
    ],
)
def test_a_queue_on_a_network_is_looked_at(url: str, expected: list[str]) -> None:
    found = list(checkup._openness(url))
    assert [finding.level for finding in found] == expected
    assert "pw" not in repr(found)


def test_a_server_that_would_forget_is_told(queue: Queue, valkey_url: str, tmp_path: Path) -> None:
    queue.client.config_set("appendonly", "no")
    try:
        found = levels(checkup.queue(subject(tmp_path, valkey_url)))
    finally:
        queue.client.config_set("appendonly", "yes")
    assert found[:2] == [("queue", "ok"), ("queue", "warning")]


def test_workers_of_several_versions_are_told(
    queue: Queue, valkey_url: str, tmp_path: Path
) -> None:
    for name, version, newest in (("a", "0.1.0", 1), ("b", "0.2.0", 0)):
        info = WorkerInfo(name=name, host="h", pid=1, version=version, schema_max=newest)
        queue.announce(info, 60)
    found = [f for f in checkup.queue(subject(tmp_path, valkey_url)) if f.check == "workers"]
    assert [finding.text for finding in found[:2]] == ["2 up", "of several versions: 0.1.0, 0.2.0"]
    assert found[2].level == "warning"


def test_a_subject_keeps_its_password_to_itself() -> None:
    assert "pw" not in repr(Subject(Path("/"), "redis://:pw@studio.local"))
