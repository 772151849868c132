"""Options that name a model, and what they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import click

from dflash_batch.cli.common import Size
from dflash_batch.decoder.registry import LOOKUP, repo_for, split
from dflash_batch.worker.contract import ModelRef
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.reader import Reading

DEMO = "demo"
"""The name of the bundled pair."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DraftQuant = Literal["none", "w4", "w8"]

_F = TypeVar("_F", bound=Callable[..., Any])
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


class ModelNotFound(UserError):
    """Raised when a name is neither a folder, nor a Hugging Face id, nor the bundled pair."""

    code = "model_not_found"


def draft_options(function: _F) -> _F:
    """How the model is to be run: `--draft`, `--draft-quant`, `--block`, `--dtype`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def spec_option(function: _F) -> _F:
    """`--spec`, whether to draft."""
    return _SPEC(function)


def max_batch_option(function: _F) -> _F:
    """`--max-batch`."""
    return _MAX_BATCH(function)


def max_context_option(function: _F) -> _F:
    """`--max-context`."""
    return _MAX_CONTEXT(function)


def engine_options(function: _F) -> _F:
    """What the engine may use and is to note: `--memory` and `--diagnostics`."""
    return _MEMORY(_DIAGNOSTICS(function))


def model_option(function: _F) -> _F:
    """`-m MODEL`, which may be left out."""
    return _MODEL(function)


def model_ref(
    model: str, draft: str, block: int | None, dtype: str, draft_quant: str = "none"
) -> ModelRef:
    """The reference for these options; folders become absolute. Raises ModelNotFound."""
    name, looks_up = split(draft)
    if name not in ("auto", "none"):
        name = _place(name)
    if looks_up:
        name = LOOKUP if name == "none" else f"{name}+{LOOKUP}"
    return ModelRef(
        target=_place(repo_for(model) or model),
        draft=name,
        block=block,
        dtype=cast(Dtype, dtype),
        draft_quant=cast(DraftQuant, draft_quant),
    )


def named_model(option: str | None, reading: Reading) -> str:
    """`-m`, or else the one model that the lines name. Raises click.UsageError."""
    if option is not None:
        return option
    if len(reading.models) == 1:
        return next(iter(reading.models))
    if not reading.models:
        raise click.UsageError("no line names a model; give one with -m MODEL")
    names = ", ".join(list(reading.models)[:5])
    raise click.UsageError(f"the lines name several models ({names}); give one with -m MODEL")


def _place(name: str) -> str:
    if name == DEMO:
        return name
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.absolute())
    if _HUB_ID.fullmatch(name) and not folder.exists():
        return name
    raise ModelNotFound(
        f"no model {name}: there is no such folder, and a Hugging Face id has the form "
        f"organisation/name. -m {DEMO} is the bundled model"
    )


_MODEL = click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="A folder, a Hugging Face id, or demo. [default: the one model the lines name]",
)
_OPTIONS = (
    click.option(
        "--draft",
        default="auto",
        show_default=True,
        metavar="auto|none|ngram|MODEL",
        help="The DFlash draft: the one known for the model, none, or a folder or id. ngram drafts "
        "by lookup in what was said before, without a draft model; auto+ngram or MODEL+ngram takes "
        "for each row what promises more.",
    ),
    click.option(
        "--draft-quant",
        type=click.Choice(["none", "w4", "w8"]),
        default="none",
        show_default=True,
        help="Quantise the draft's weights to 4 or 8 bits when it is loaded. Texts stay the same.",
    ),
    click.option(
        "--block",
        type=click.IntRange(min=2),
        metavar="N",
        help="Tokens of a draft block. [default: what the draft was trained for]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Arithmetic of the weights.",
    ),
)
_SPEC = click.option(
    "--spec",
    type=click.Choice(["auto", "on", "off"]),
    default="on",
    show_default=True,
    help="Draft where it pays by what cycles cost here, always (but for drafts of which hardly any "
    "stand), or never. Texts stay the same.",
)
_MEMORY = click.option(
    "--memory",
    type=Size(),
    metavar="SIZE",
    help="Memory of the GPU to use, weights included, such as 24G: the batch is as wide as fits. "
    "[default: most of it]",
)
_DIAGNOSTICS = click.option(
    "--diagnostics",
    metavar="DIR",
    type=click.Path(file_okay=False, resolve_path=True),
    help="Note what each cycle and row took, as JSON lines in a new folder of DIR. It slows a GPU.",
)
_MAX_BATCH = click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="Most rows decoded together.",
)
_MAX_CONTEXT = click.option(
    "--max-context", type=click.IntRange(min=2), metavar="N", help="Use less context, in tokens."
)
