"""The agent's file, and what launchd is told; launchd itself is made up here."""

from __future__ import annotations

import plistlib
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_tools import invoke

from dflash_batch.cli.common import Common
from dflash_batch.cli.main import main
from dflash_batch.worker.launchd import AGAIN_S, GRACE_S, LABEL, Agent, Launchd, LaunchdError
from dflash_batch.worker.settings import WorkerSettings

SERVICE = f"gui/501/{LABEL}"
PRINTED = "state = running\n DFLASH_BATCH_REDIS => redis://u:p/@w@studio.local:6379/0\n"


class FakeLaunchd:
    """Knows one agent or none; a stopped one takes a while to go, as real ones do."""

    def __init__(self, *, loaded: bool = False, refuses: bool = False, lingers: int = 0) -> None:
        self.loaded, self._refuses, self._lingers = loaded, refuses, lingers
        self._ending = False
        self.told: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        launchctl, verb, *words = command
        assert launchctl == "launchctl"
        if verb != "print":
            self.told.append([verb, *words])
        match verb:
            case "print":
                assert words == [SERVICE]
                if self._ending and self._lingers == 0:
                    self.loaded = self._ending = False
                self._lingers -= self._ending
                return (0, PRINTED) if self.loaded else (113, "Could not find service")
            case "bootout":
                assert words == [SERVICE]
                self._ending = True
                return 36, "Operation now in progress"
            case "bootstrap":
                if self.loaded or self._refuses:
                    return 5, "Bootstrap failed: 5: Input/output error"
                self.loaded = True
                return 0, ""
        raise AssertionError(verb)


def launchd(folder: Path, fake: FakeLaunchd) -> Launchd:
    return Launchd(folder / "LaunchAgents", fake, 501, pause=lambda _: None)


def sample(folder: Path, *command: str) -> Agent:
    return Agent(command or ("python", "worker"), {"A": "b & <c>"}, folder / "worker.log")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_says_what_launchd_is_to_do(tmp_path: Path) -> None:
    told = plistlib.loads(sample(tmp_path).plist())
    assert told["Label"] == LABEL
    assert told["ProgramArguments"] == ["python", "worker"]
    assert told["EnvironmentVariables"] == {"A": "b & <c>"}
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["ThrottleInterval"] == AGAIN_S
    assert told["StandardErrorPath"] == told["StandardOutPath"] == str(tmp_path / "worker.log")
    assert told["ProcessType"] == "Interactive"
    assert told["LowPriorityIO"] is True
    assert told["Umask"] == 0o077


def test_launchd_waits_longer_than_a_worker_drains() -> None:
    assert WorkerSettings(redis_url="unix:///s").grace_s + 15 < GRACE_S


def test_install_writes_private_files_and_loads_the_agent(tmp_path: Path) -> None:
    fake = FakeLaunchd()
    agents = launchd(tmp_path, fake)
    agents.install(sample(tmp_path))
    assert fake.told == [["bootstrap", "gui/501", str(agents.file)]]
    assert fake.loaded
    assert mode(agents.file) == mode(tmp_path / "worker.log") == 0o600
    assert [path.name for path in agents.file.parent.iterdir()] == [f"{LABEL}.plist"]
    said = agents.status()
    assert said is not None
    assert said.startswith("state = running\n")


def test_status_keeps_passwords_to_itself(tmp_path: Path) -> None:
    said = launchd(tmp_path, FakeLaunchd(loaded=True)).status()
    assert said == "state = running\n DFLASH_BATCH_REDIS => redis://***@studio.local:6379/0\n"


def test_install_replaces_one_that_runs_once_it_is_gone(tmp_path: Path) -> None:
    fake = FakeLaunchd(lingers=3)
    agents = launchd(tmp_path, fake)
    agents.install(sample(tmp_path, "old"))
    agents.install(sample(tmp_path, "new"))
    assert [words[0] for words in fake.told] == ["bootstrap", "bootout", "bootstrap"]
    assert plistlib.loads(agents.file.read_bytes())["ProgramArguments"] == ["new"]


def test_remove_leaves_nothing_but_the_log(tmp_path: Path) -> None:
    fake = FakeLaunchd()
    agents = launchd(tmp_path, fake)
    assert agents.remove() is False
    agents.install(sample(tmp_path))
    assert agents.remove() is True
    assert not fake.loaded
    assert not agents.file.exists()
    assert agents.status() is None


def test_an_agent_that_does_not_end_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchdError, match="does not end"):
        launchd(tmp_path, FakeLaunchd(loaded=True, lingers=10_000)).remove()


def test_a_refusal_is_told_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(LaunchdError, match="status 5: Bootstrap failed"):
        launchd(tmp_path, FakeLaunchd(refuses=True)).install(sample(tmp_path))


def test_print_shows_the_worker_of_this_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.delenv("DFLASH_BATCH_REDIS", raising=False)
    (tmp_path / "target").mkdir()
    monkeypatch.chdir(tmp_path)
    secret = "redis://:secret@studio.local:6379"
    options = ["--redis", secret, "-m", "target", "--draft", "none", "--only-when", "idle,plugged"]
    options += ["--lease-ttl", "60", "-q", "--burst", "--cache-dir", "ssd", "--cache-size", "2G"]
    result = invoke("--home", tmp_path / "home", "worker", *options, "--launchd", "print")
    assert result.exit_code == 0, result.stderr
    told = plistlib.loads(result.stdout.encode())
    python, *command = told["ProgramArguments"]
    assert python == sys.executable
    assert command[:3] == ["-m", "dflash_batch.cli.main", "worker"]
    assert "secret" not in " ".join(command)
    assert told["EnvironmentVariables"] == {
        "DFLASH_BATCH_HOME": str(tmp_path / "home"),
        "DFLASH_BATCH_REDIS": secret,
        "HF_HOME": "/models",
    }
    assert told["StandardErrorPath"] == str(tmp_path / "home" / "worker.log")
    with main.make_context("dflash-batch", command[2:]) as ctx:
        verb = main.get_command(ctx, "worker")
        assert verb is not None
        with verb.make_context("worker", command[3:], parent=ctx) as parsed:
            given, common = parsed.params, parsed.find_object(Common)
    assert common is not None
    assert (common.cache_dir, common.cache_size) == (str(tmp_path / "ssd"), 2 << 30)
    assert given["model"] == str(tmp_path / "target")
    assert (given["draft"], given["lease_ttl"], given["burst"]) == ("none", 60.0, True)
    assert given["only_when"] == "idle,plugged"
    assert given["launchd"] is None


@pytest.mark.skipif(sys.platform == "darwin", reason="there is launchd")
@pytest.mark.parametrize("what", ["install", "remove", "status"])
def test_other_systems_are_told_that_they_have_no_launchd(tmp_path: Path, what: str) -> None:
    result = invoke("--home", tmp_path, "worker", "--launchd", what)
    assert result.exit_code == 2
    assert "launchd is part of macOS" in result.stderr
