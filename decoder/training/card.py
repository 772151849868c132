"""The model card of a trained draft: what it is for, how it fared, how it was made."""

from __future__ import annotations

from typing import Any


def model_card(facts: dict[str, Any]) -> str:
    """Markdown. `facts` is the result of a run."""
    before = facts["first_tau"]
    tau = f"{facts['tau']:.2f}" + ("" if before is None else f" (before: {before:.2f})")
    rows = [
        ("target", facts["target"]),
        ("began with", facts["init"] or "random weights"),
        ("layers, block", f"{facts['layers']}, {facts['block']}"),
        ("taps", ", ".join(map(str, facts["taps"]))),
        ("mask token", facts["mask_token_id"]),
        ("parameters", f"{facts['parameters']:,}"),
        (
            "texts",
            f"{facts['texts']:,} of the target's own, {facts['reply_tokens']:,} reply tokens",
        ),
        ("held out", f"{facts['held_out']:,} texts"),
        ("steps", f"{facts['steps']:,}, about {facts['batch_tokens']:,} tokens each"),
        ("learning rate", f"{facts['lr']:g} at its peak"),
        ("seed", facts["seed"]),
        ("loss at the end", f"{facts['loss']:.3f}"),
        ("time", f"{facts['text_seconds']:.0f} s for the texts, {facts['seconds']:.0f} s in all"),
        ("made on", facts["machine"]),
        ("prompts sha256", f"`{facts['prompts_sha256']}`"),
        ("texts sha256", f"`{facts['texts_sha256']}`"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return CARD.format(target=facts["target"], tau=tau, held_out=facts["held_out"], table=table)


CARD = """\
# A DFlash draft for {target}

**τ = {tau}** tokens per cycle on {held_out} held-out texts of the target's own: for each the draft
was run at every place where a cycle would begin along the greedy text. `dflash-batch draft eval`
measures it by decoding.

    dflash-batch run FILE.jsonl -m {target} --draft THIS_FOLDER

| | |
|---|---|
{table}

It fits this target alone. Prompts unlike those it was trained on get a lower τ; texts stay the
target's own.
"""
