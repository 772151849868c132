"""Show that the base and test dependencies resolve to wheels on macOS arm64, Python 3.11 to 3.13.

Run by CI: `python tests/macos_wheels.py`. It downloads nothing but metadata and installs nothing.
Requirements marked for another system are left out by pip's own evaluation, which looks at the
machine it runs on; so the markers are resolved here first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = [*project["dependencies"], *extras["serve"], *extras["test"]]
    failed = []
    for version in VERSIONS:
        wanted = list(map(str, on_a_mac(names, version)))
        done = resolve(wanted, version)
        found = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
        if done.returncode or not found:
            failed.append(version)
            print(f"Python {version}: no set of macOS arm64 wheels\n{done.stdout}{done.stderr}")
        else:
            count = len(found[0].split()) - 2
            print(f"Python {version}: {len(wanted)} requirements, {count} macOS arm64 wheels")
    return 1 if failed else 0


def on_a_mac(names: list[str], version: str) -> list[Requirement]:
    """The requirements that apply on macOS arm64, without their markers."""
    machine = {
        "sys_platform": "darwin",
        "platform_system": "Darwin",
        "platform_machine": "arm64",
        "python_version": version,
        "python_full_version": version + ".0",
        "os_name": "posix",
    }
    wanted = []
    for name in names:
        requirement = Requirement(name)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            requirement.marker = None
            wanted.append(requirement)
    return wanted


def resolve(wanted: list[str], version: str) -> subprocess.CompletedProcess[str]:
    platforms = [f"macosx_{major}_0_arm64" for major in (14, 13, 12, 11)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--only-binary=:all:"),
            *("--target", folder, "--python-version", version, "--implementation", "cp"),
            *(part for platform in platforms for part in ("--platform", platform)),
            *wanted,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    sys.exit(main())
