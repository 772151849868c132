"""What may become of what: the states of a batch and of a shard, and every change that is allowed.

The scripts get these tables and change a state in one place only (`move` in prelude.lua), which
raises on a change that is not in them. A row has two states, without and with a record; its bit
in the bitmap is set once and never cleared.
"""

from __future__ import annotations

from collections.abc import Mapping

Machine = Mapping[str, tuple[str, ...]]

BATCH: Machine = {
    "uploading": ("running", "cancelling"),
    "running": ("paused", "cancelling", "done"),
    "paused": ("running", "cancelling", "done"),  # rows in hand are finished
    "cancelling": ("cancelled",),
    "done": (),
    "cancelled": (),
}

SHARD: Machine = {
    "later": ("ready", "leased"),  # a retry that waits for its time
    "ready": ("leased",),
    "leased": ("leased", "ready", "done"),  # to itself: taken out of its owner's hands
    "done": (),
}


def as_lua(machine: Machine) -> str:
    """The table as a Lua literal: `from` -> set of `to`."""
    rows = (
        f"{state} = {{ {', '.join(f'{to} = true' for to in following)} }}"
        for state, following in machine.items()
    )
    return f"{{ {', '.join(rows)} }}"
