"""Reads an uploaded batch file for one endpoint and one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_batch.worker.contract import Endpoint, ErrorCode, JobSpec
from dflash_batch.worker.reader import BOM, LineError, Reading, read_lines
from dflash_batch.worker.strict_json import BadLine, parse_object

PEEK_BYTES = 16 << 20
"""Longest first line in which a model is looked for."""


def first_model(path: Path) -> str | None:
    """The model that the first line names, as far as it can be read. Raises OSError."""
    with path.open("rb") as file:
        for _ in range(1000):  # blank lines
            line = file.readline(PEEK_BYTES).removeprefix(BOM)
            if line.strip() or not line:
                break
    try:
        found = parse_object(line.strip())
    except BadLine:
        return None  # the line is reported when the whole file is read
    body = found.get("body", found)
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


def read_batch(path: Path, endpoint: Endpoint, model: str | None) -> Reading:
    """The file, with lines for another endpoint or model among the errors.

    Raises InputError and OSError.
    """
    with path.open("rb") as file:
        reading = read_lines(file, default_model=None)
    wrong = [error for row in reading.rows if (error := _misplaced(row, endpoint, model))]
    errors = sorted([*reading.errors, *wrong], key=lambda error: error.line)
    return replace(reading, errors=errors)


def _misplaced(row: JobSpec, endpoint: Endpoint, model: str | None) -> LineError | None:
    if row.endpoint != endpoint:
        code, param = ErrorCode.MISMATCHED_ENDPOINT, "url"
        message = f"the line is for {row.endpoint}, the batch for {endpoint}"
    elif row.model != model:
        code, param = ErrorCode.INVALID_VALUE, "model"
        message = f"the line names another model than the first one, {model or 'which names none'}"
    else:
        return None
    return LineError(
        line=row.line, code=code, message=message, param=param, custom_id=row.custom_id
    )
