"""Ask a small program of the system for a fact."""

from __future__ import annotations

import subprocess

_PATIENCE_S = 3.0


def ask(*command: str) -> str | None:
    """What the program prints; None when it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
