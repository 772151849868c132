"""The house rules: rooms look one way, every package ships, the command line stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "decoder": {"decoder"},
    "worker": {"worker", "decoder"},
    "cli": {"cli", "worker", "decoder"},
}
FILES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Names of modules imported, at module level only or anywhere."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_only else list(ast.walk(tree))
    names = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    return names | {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_look_one_way(path: Path) -> None:
    seen = {name.split(".")[1] for name in imports(path) if name.startswith("dflash_batch.")}
    assert seen <= MAY_IMPORT[room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_decoder_imports_mlx_and_only_the_worker_redis(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    if room(path) != "decoder":
        assert not tops & {"mlx", "mlx_lm"}
    else:
        assert not tops & {"redis", "rq", "click", "rich"}
    assert not tops & {"pickle", "multiprocessing"}


def test_every_package_ships() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    inits = [path for path in FILES if path.name == "__init__.py"]
    found = {".".join(("dflash_batch", *p.relative_to(ROOT).parent.parts)) for p in inits}
    assert set(config["packages"]) == found


def test_every_module_says_what_it_is_for() -> None:
    bare = [str(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not bare


def test_importing_the_command_line_and_the_supervisor_loads_no_mlx() -> None:
    script = (
        "import sys, dflash_batch.cli.main, dflash_batch.worker.service, dflash_batch.worker.main\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_decoders_public_names_are_all_there() -> None:
    import dflash_batch.decoder as decoder

    assert decoder.__all__ == sorted(decoder.__all__)
    assert all(getattr(decoder, name).__name__ == name for name in decoder.__all__)
    with pytest.raises(AttributeError):
        decoder.nothing  # noqa: B018
