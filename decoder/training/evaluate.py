"""How well a draft does on a user's prompts, by decoding them: τ, and which drafts stand.

`python -m dflash_batch.decoder.training.evaluate` reads an `Order` as one line of JSON from stdin
and writes JSON lines: phases, then the result, or `{"error", "code"}`.

τ is the tokens emitted in cycles over the cycles; a row's first token comes of its prompt and does
not count. The target decides the text, greedily, so τ is the draft's alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_batch.decoder import demo, registry
from dflash_batch.decoder.cost import CostTable, load_table
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.loading import find, load_decoder, read_config
from dflash_batch.decoder.measured import cost_key
from dflash_batch.decoder.training.service import Say, Wanted, serve
from dflash_batch.decoder.training.texts import PromptFile
from dflash_batch.decoder.types import Completion, LoadSpec, Request


@dataclass(frozen=True)
class Order:
    """What to measure on what."""

    target: str
    draft: str
    prompts: str  # a file, as `PromptFile` reads it
    block: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    draft_quant: Literal["none", "w4", "w8"] = "none"
    width: int = 16  # rows decoded together
    max_tokens: int = 256  # of a reply
    cost_dir: str | None = None  # folder of measured cycle costs


@dataclass
class Tally:
    """Cycles counted."""

    rows: int = 0
    emitted: int = 0  # tokens, but for each row's first
    cycles: int = 0
    tried: list[int] = field(default_factory=list)  # cycles whose text goes so far, by position
    stood: list[int] = field(default_factory=list)  # of them, with all drafts up to it right

    def add(self, row: Completion) -> None:
        """Count a row that was decoded with its trace."""
        assert row.emitted_per_cycle is not None
        assert row.drafted_per_cycle is not None
        self.rows += 1
        self.emitted += sum(row.emitted_per_cycle)
        self.cycles += len(row.emitted_per_cycle)
        at = 1  # of the token behind the anchor
        for emitted, drafts in zip(row.emitted_per_cycle, row.drafted_per_cycle, strict=True):
            right = True
            for position, (draft, token) in enumerate(
                zip(drafts, row.token_ids[at:], strict=False)
            ):
                right = right and draft == token
                if position == len(self.tried):
                    self.tried.append(0)
                    self.stood.append(0)
                self.tried[position] += 1
                self.stood[position] += right
            at += emitted

    def report(self) -> dict[str, Any]:
        """As plain data; shares are rounded to four places."""
        stood = [
            round(right / tried, 4) for right, tried in zip(self.stood, self.tried, strict=True)
        ]
        return {
            "rows": self.rows,
            "tokens": self.emitted,
            "cycles": self.cycles,
            "tau": round(self.emitted / self.cycles, 4) if self.cycles else None,
            "stands_by_position": stood,
        }


def evaluate(order: Order, say: Say, wanted: Wanted) -> dict[str, Any]:
    """Decode all prompts with the draft. Raises LoadError and PromptError."""
    spec = LoadSpec(
        target=order.target,
        draft=order.draft,
        block=order.block,
        dtype=order.dtype,
        draft_quant=order.draft_quant,
        max_batch=order.width,
    )
    decoder = load_decoder(spec, lambda phase, share: say({"phase": phase, "share": share}))
    if decoder.info.draft is None:
        raise LoadError(decoder.info.draft_notice or "there is no draft to measure")
    longest = decoder.info.context_length - 1
    prompts, refused = PromptFile(Path(order.prompts)).read(decoder, longest)
    rows = [
        Request(
            uid=i,
            prompt=tuple(prompt.tokens),
            max_tokens=min(prompt.max_tokens or order.max_tokens, longest + 1 - len(prompt.tokens)),
            trace=True,
        )
        for i, prompt in enumerate(prompts)
    ]
    whole, kinds = Tally(), defaultdict[str, Tally](Tally)
    longest_seen = 0
    for done, completion in enumerate(decoder.run(rows), 1):
        whole.add(completion)
        kind = prompts[completion.uid].kind
        if kind is not None:
            kinds[kind].add(completion)
        longest_seen = max(longest_seen, completion.prompt_tokens + len(completion.token_ids))
        say({"phase": "decoding", "share": done / len(rows)})
        if not wanted():
            return {"stopped": {"done": done, "of": len(rows)}}
    tau = whole.emitted / max(whole.cycles, 1)
    return {
        "result": {
            "target": decoder.info.target,
            "draft": decoder.info.draft,
            "block": decoder.info.block,
            "dtype": decoder.info.dtype,
            "max_tokens": order.max_tokens,
            "left_out": sum(refused.values()),
            **whole.report(),
            "kinds": {kind: tally.report() for kind, tally in sorted(kinds.items())},
            "speedups": _speedups(order, decoder, tau, longest_seen),
        }
    }


def _speedups(order: Order, decoder: Decoder, tau: float, context: int) -> list[dict[str, float]]:
    """By rows decoded together; none where costs were not measured on this machine."""
    if order.cost_dir is None:
        return []
    name = str(demo.TARGET_DIR) if order.target == registry.DEMO else order.target
    folder = find(name)
    key = cost_key(folder, read_config(folder), *decoder.pair)
    table, _ = load_table(Path(order.cost_dir), key)
    return predicted(table, decoder.info.block, tau, context)


def predicted(table: CostTable, block: int, tau: float, context: int) -> list[dict[str, float]]:
    """Tokens per second with drafts over without, at each width that was measured.

    A cycle of `block` tokens a row brings τ, one of a single token brings 1.
    """
    if table.empty:
        return []
    found = []
    for rows in sorted({point[0] for point in table.forward.cells}):
        plain, drafted = table.cycle(rows, (1, block), context).tolist()
        found.append({"rows": rows, "speedup": round(tau * plain / drafted, 3)})
    return found


if __name__ == "__main__":
    raise SystemExit(serve(Order, evaluate))
