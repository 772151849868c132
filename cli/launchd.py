"""`dflash-batch worker --launchd …`: the worker of this very command line, kept by macOS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from dflash_batch.cli.common import Common, talk
from dflash_batch.worker.binary import ENV_BINARY, ENV_REDIS
from dflash_batch.worker.contract import ModelRef
from dflash_batch.worker.home import ENV_HOME
from dflash_batch.worker.launchd import Agent, LaunchdError, user_launchd
from dflash_batch.worker.server import given_url

CARRIED = (ENV_BINARY, "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT")
"""Of the environment, what an agent needs too; its own is nearly empty."""


def agent(what: str, wanted: Agent) -> None:
    """Install, remove, show or print the agent. Raises LaunchdError."""
    if what == "print":
        click.echo(wanted.plist(), nl=False)
        return
    launchd = user_launchd()
    match what:
        case "install":
            launchd.install(wanted)
            talk(f"installed {launchd.file}; its log is {wanted.log}")
        case "remove":
            talk("removed" if launchd.remove() else "there was none")
        case _:
            said = launchd.status()
            if said is None:
                raise LaunchdError("no worker is installed; --launchd install does it")
            click.echo(said, nl=False)


def worker_agent(ctx: click.Context, common: Common, model: ModelRef | None, home: Path) -> Agent:
    """An agent that runs `worker` with the options of this call.

    The queue's address goes into the environment: it may hold a password, and everybody can read
    command lines.
    """
    given = dict(ctx.params)
    if model is not None:  # whose folders are absolute
        given |= {"model": model.target, "draft": model.draft}
    command = [sys.executable, "-m", "dflash_batch.cli.main", "worker"]
    for option in ctx.command.params:
        name = option.name or ""
        on_line = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not (isinstance(option, click.Option) and option.expose_value and on_line):
            continue
        if name == "launchd":
            continue
        flag = max(option.opts, key=len)
        command += [flag] if option.is_flag else [flag, str(given[name])]
    command += ["--insecure"] if common.insecure else []
    if common.cache_dir is not None:
        # Relative to where this is called, which the agent is not.
        command += ["--cache-dir", common.cache_folder(home) or "none"]
    if common.cache_size is not None:
        command += ["--cache-size", str(common.cache_size)]
    command += ["--quiet"] if common.quiet else ["--verbose"] * common.verbose
    url = given_url(common.redis)
    environment = {name: os.environ[name] for name in CARRIED if os.environ.get(name)}
    environment |= {ENV_HOME: str(home)} | ({ENV_REDIS: url} if url else {})
    return Agent(command, environment, log=home / "worker.log")
