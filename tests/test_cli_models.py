"""`dflash-batch models`: lists, fetches, removes and checks, on a hub of our own making."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_tools import invoke

from dflash_batch.cli import exits, shelf
from dflash_batch.worker.shelf import WANTED, Held

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"
TARGET, DRAFT = "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"


class FakeHub:
    """A hub with a few repositories, and a cache of folders."""

    def __init__(self, folder: Path) -> None:
        self.repos = {
            TARGET: ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"],
            DRAFT: ["config.json", "model.safetensors"],
            "old/pickled": ["config.json", "pytorch_model.bin", "extra/weights.pt"],
            "some/dataset": ["README.md"],
        }
        self.folder = folder
        self.fetched: list[tuple[str, str | None]] = []
        self.cache: list[Held] = []

    def files(self, name: str, revision: str | None) -> list[str]:
        if name not in self.repos:
            raise OSError(f"{name}: no such repository\nand more lines")
        return self.repos[name]

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        assert patterns == WANTED
        assert not any(pattern.endswith((".bin", ".pt")) for pattern in patterns)
        self.fetched.append((name, revision))
        folder = self.folder / name.replace("/", "--")
        shutil.copytree(VECTORS / ("draft-b8" if name == DRAFT else "target"), folder)
        self.cache.append(Held(name, f"{len(self.cache):040x}", folder, 5000))
        return folder

    def held(self) -> list[Held]:
        return list(self.cache)

    def remove(self, revisions: Sequence[str]) -> None:
        self.cache = [held for held in self.cache if held.revision not in revisions]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path)
    monkeypatch.setattr(shelf, "open_hub", lambda: fake)
    return fake


def test_a_target_is_fetched_with_its_draft_and_without_pickles(hub: FakeHub) -> None:
    result = invoke("models", "pull", "qwen3-4b", "--revision", "abc")
    assert result.exit_code == exits.OK, result.output
    assert hub.fetched == [(TARGET, "abc"), (DRAFT, None)]
    assert [line.split()[0] for line in result.stdout.splitlines()] == [TARGET, DRAFT]
    assert "left out: pytorch_model.bin" in result.stderr
    assert invoke("models", "pull", DRAFT.upper()).exit_code == exits.NOT_FOUND


def test_a_target_is_fetched_alone_if_wanted(hub: FakeHub) -> None:
    assert invoke("models", "pull", TARGET, "--no-draft").exit_code == exits.OK
    assert hub.fetched == [(TARGET, None)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("old/pickled", "only pickles (pytorch_model.bin, extra/weights.pt)"),
        ("some/dataset", "has no *.safetensors"),
        ("no/where", "no such repository"),
    ],
)
def test_what_is_not_fetched_is_said(hub: FakeHub, name: str, says: str) -> None:
    result = invoke("models", "pull", name)
    assert result.exit_code == exits.NOT_FOUND
    assert says in result.stderr
    assert "more lines" not in result.stderr
    assert not hub.fetched


def test_the_list_shows_sizes_pairs_and_memory(hub: FakeHub) -> None:
    invoke("models", "pull", TARGET)
    listed = json.loads(invoke("models", "ls", "--json", "--context", 1000, "--all").stdout)
    demo, target, draft = listed["models"]
    assert (demo["name"], demo["draft"], demo["draft_here"]) == ("demo", "demo (draft)", True)
    assert (target["name"], target["draft"], target["draft_here"]) == (TARGET, DRAFT, True)
    assert (target["kind"], draft["kind"], draft["draft"]) == ("target", "draft", None)
    # The tiny pair: 6 layers of 2 heads of 8, and 2 layers of 2 heads of 16, in bfloat16.
    per_token = 2 * 2 * 2 * (6 * 8 + 2 * 16)
    memory = {int(n): size for n, size in target["memory"].items()}
    assert memory[8] - memory[1] == 7 * 1000 * per_token
    assert memory[32] - memory[8] == 24 * 1000 * per_token
    weights = sum(p.stat().st_size for p in hub.folder.glob("*/model.safetensors"))
    assert memory[1] == weights + 1000 * per_token
    absent = {entry["name"] for entry in listed["not_here"]}
    assert "Qwen/Qwen3-8B" in absent
    assert TARGET not in absent

    shown = invoke("models", "ls", "--all").stdout
    assert "context of 4,096" in shown
    assert "-m qwen3-8b" in shown
    hub.cache.pop()
    assert "not here" in invoke("models", "ls").stdout


def test_a_folder_that_tells_nothing_is_listed_all_the_same(hub: FakeHub) -> None:
    for name, config in (("a/b", None), ("c/d", "{"), ("e/f", "{}"), ("g/h", "[]")):
        folder = hub.folder / name.replace("/", "--")
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(config)
        hub.cache.append(Held(name, "0" * 40, folder, 12))
    listed = json.loads(invoke("models", "ls", "--json").stdout)["models"]
    assert [entry["memory"] for entry in listed[1:]] == [None] * 4


def test_a_model_is_removed_when_that_is_confirmed(hub: FakeHub) -> None:
    invoke("models", "pull", TARGET)
    assert invoke("models", "rm", TARGET, stdin="n\n").exit_code != exits.OK
    assert len(hub.cache) == 2
    result = invoke("models", "rm", "qwen3-4b", "--yes")
    assert result.exit_code == exits.OK
    assert result.stdout == f"{TARGET} removed, 5.0 kB\n"
    assert [held.name for held in hub.cache] == [DRAFT]
    assert invoke("models", "rm", TARGET, "--yes").exit_code == exits.NOT_FOUND


def test_a_pair_is_checked_in_a_process_of_its_own() -> None:
    folders = (str(VECTORS / "target"), "--draft", str(VECTORS / "draft-b8"))
    result = invoke("models", "check", *folders, "--dtype", "float32", "--json")
    assert result.exit_code == exits.OK, result.output
    found = json.loads(result.stdout)
    assert {check["name"] for check in found["checks"]} >= {"taps", "mask", "acceptance"}
    result = invoke("models", "check", folders[0], "--draft", "none")
    assert result.exit_code == exits.NOT_FOUND
    assert "no draft was named" in result.stderr


def test_the_report_on_a_pair_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "target": "t",
        "draft": "d",
        "dtype": "float32",
        "checks": [{"name": "taps", "level": "failed", "text": "wrong"}],
        "level": "failed",
        "verdict": "the pair does not fit",
    }
    monkeypatch.setattr(shelf, "_checked", lambda order, common: found)
    result = invoke("models", "check", "demo")
    assert result.exit_code == exits.SOME_FAILED
    assert result.stdout.splitlines()[1:] == ["failed   taps        wrong", "the pair does not fit"]
