"""A worker that macOS starts at login and again when it fails: a LaunchAgent of the user.

What is run, and where its files lie, comes in; nothing here knows what a worker does.
"""

from __future__ import annotations

import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_batch.worker.errors import UserError

LABEL = "dflash-batch.worker"

AGAIN_S = 30
"""Least seconds between two starts: a model that is missing need not be looked for more often."""

GRACE_S = 90
"""How long launchd waits after SIGTERM: longer than a worker's own grace and its last commits."""


class LaunchdError(UserError):
    """Raised when there is no launchd, or it refuses."""

    code = "launchd_failed"


@dataclass(frozen=True)
class Agent:
    """What launchd is told. The environment may hold a password; the command line may not."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path  # of stdout and stderr

    def plist(self) -> bytes:
        """The property list, as XML."""
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": list(self.command),
                "EnvironmentVariables": dict(self.environment),
                "WorkingDirectory": str(self.log.parent),
                "RunAtLoad": True,
                # a worker that was drained stays away; one that failed comes back
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": AGAIN_S,
                "ExitTimeOut": GRACE_S,
                # any other type is throttled: its threads go to the small cores, and the GPU waits
                "ProcessType": "Interactive",
                "LowPriorityIO": True,
                "Nice": 5,
                "Umask": 0o077,
                "StandardOutPath": str(self.log),
                "StandardErrorPath": str(self.log),
            }
        )


_PASSWORD = re.compile(r"://\S*@")
_IN_PROGRESS = 36  # EINPROGRESS of macOS: bootout does not wait for the end

Run = Callable[[Sequence[str]], tuple[int, str]]
"""Runs a command; returns its exit status and what it said."""


class Launchd:
    """The user's launchd. `agents` is ~/Library/LaunchAgents."""

    def __init__(
        self, agents: Path, run: Run, uid: int, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._run, self._pause = run, pause
        self._domain = f"gui/{uid}"
        self._agents = agents
        self.file = agents / f"{LABEL}.plist"

    def install(self, agent: Agent) -> None:
        """Write the agent's file and start it; one that was there is replaced. Raises LaunchdError.

        File and log are for the user's eyes only.
        """
        self._agents.mkdir(parents=True, exist_ok=True)
        agent.log.touch(mode=0o600)
        agent.log.chmod(0o600)
        self._write(agent.plist())
        self._unload()
        self._tell("bootstrap", self._domain, str(self.file))

    def remove(self) -> bool:
        """Stop the agent, which drains it, and remove its file. Whether there was one."""
        loaded = self._unload()
        there = self.file.exists()
        self.file.unlink(missing_ok=True)
        return loaded or there

    def status(self) -> str | None:
        """What launchd says of the agent, in its own words; None if it does not know it.

        It tells the environment too; passwords in addresses are left out.
        """
        code, said = self._run(["launchctl", "print", self._service])
        return _PASSWORD.sub("://***@", said) if code == 0 else None

    @property
    def _service(self) -> str:
        return f"{self._domain}/{LABEL}"

    def _unload(self) -> bool:
        """Have launchd end the agent and forget it. Whether it knew one."""
        if self.status() is None:
            return False
        self._tell("bootout", self._service)
        # a draining worker takes its time, and until it is gone no other can be loaded
        for _ in range(GRACE_S + 10):
            if self.status() is None:
                return True
            self._pause(1.0)
        raise LaunchdError(f"{LABEL} does not end; see launchctl print {self._service}")

    def _tell(self, verb: str, *words: str) -> None:
        code, said = self._run(["launchctl", verb, *words])
        if code not in (0, _IN_PROGRESS):
            raise LaunchdError(
                f"launchctl {verb} failed with status {code}: {said.strip()}. "
                "A user who is not logged in at the screen has no agents"
            )

    def _write(self, data: bytes) -> None:
        draft = self.file.with_suffix(".new")
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        draft.replace(self.file)


def user_launchd() -> Launchd:
    """This user's. Raises LaunchdError on other systems."""
    if sys.platform != "darwin":
        raise LaunchdError(
            "launchd is part of macOS. --launchd print shows the file anywhere; "
            "deploy/dflash-batch-worker.service is for systemd"
        )
    return Launchd(Path.home() / "Library" / "LaunchAgents", _run, os.getuid())


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return done.returncode, done.stdout + done.stderr
