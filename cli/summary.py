"""What a person is told when a run is over. Figures come from `Totals` and the files alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dflash_batch.cli.common import printable
from dflash_batch.worker.results import Totals


def summary(totals: Totals, *, shared_share: float | None = None) -> Iterator[str]:
    """The lines of the summary: outcome, failures, speed, prefixes, settings, files."""
    colour = "green" if not totals.failed else "yellow"
    counts = click.style(f"{totals.ok:,} of {totals.requests:,} ok", fg=colour, bold=True)
    yield f"{counts} · {duration(totals.elapsed_s)} · {totals.batch}"
    if totals.errors is not None and totals.failed:
        yield f"  failed          {totals.failed:,}: {_causes(Path(totals.errors))}"
    if totals.completion_tokens:
        yield f"  speed           {_speed(totals)}"
    if totals.prompt_tokens:
        yield f"  prefixes        {_prefixes(totals, shared_share)}"
    facts = first_facts(Path(totals.output))
    if facts is not None:
        yield f"  settings        {_settings(facts)}"
    yield f"  output          {totals.output}"
    if totals.errors is not None and totals.failed:
        yield f"  errors          {totals.errors}"


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a result file, in its order."""
    with path.open(encoding="utf-8", newline="\n") as stream:
        for line in stream:
            yield json.loads(line)


def first_facts(output: Path) -> dict[str, Any] | None:
    """`body.dflash` of the first answer: the settings that were in effect."""
    if not output.exists():
        return None
    record = next(records(output), None)
    facts: dict[str, Any] | None = record["response"]["body"].get("dflash") if record else None
    return facts


def _causes(errors: Path) -> str:
    """Failures by code, the most common first, with an example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for record in records(errors):
        error = record["error"] or record["response"]["body"]["error"]
        counts[error["code"]] += 1
        examples.setdefault(error["code"], error["message"])
    if not counts:
        return "see the file of errors"
    text = ", ".join(f"{code} {count:,}" for code, count in counts.most_common())
    return printable(f"{text} ({examples[counts.most_common(1)[0][0]][:120]})")


def _speed(totals: Totals) -> str:
    rate = totals.completion_tokens / max(totals.elapsed_s, 1e-3)
    text = f"{totals.completion_tokens:,} tokens, {rate:,.0f} a second, loading included"
    if totals.draft_tokens:
        text += f" · {totals.tokens_per_cycle:.2f} tokens per cycle"
    return text


def _prefixes(totals: Totals, shared_share: float | None) -> str:
    hit = totals.cached_tokens / totals.prompt_tokens
    text = f"{totals.prompt_tokens:,} prompt tokens, {hit:.0%} taken from shared prefixes"
    return text if shared_share is None else f"{text} (shared text: {shared_share:.0%})"


def _settings(facts: dict[str, Any]) -> str:
    """`facts` may come from another version: what is not there is left out."""
    parts = ["greedy (temperature 0)" if facts.get("seed") is None else "sampled"]
    draft = facts.get("draft")
    if draft:
        parts.append(f"draft {draft}, block {facts.get('block', '?')}")
    else:
        parts.append("no draft")
    if facts.get("dtype"):
        parts.append(str(facts["dtype"]))
    return printable(" · ".join(parts))
