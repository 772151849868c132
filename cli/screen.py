"""Progress on stderr: a live picture on a terminal, plain lines elsewhere, nothing with -q."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from dflash_batch.cli.common import Common, printable, talk

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dflash_batch.worker.progress import Progress

LINE_S = 60.0
"""A plain line is written at least this often while rows are decoded,"""

LINE_STEPS = 20
"""and whenever another of so many parts of the rows is done."""

SHORT_S = 1.0
"""A phase that ends sooner is not worth a line."""

_SURE_ROWS, _SURE_SHARE = 20, 0.03
"""Before so much is done, the time left is not known well enough to be shown."""


class Screen(Protocol):
    """A `Watcher` (worker/progress.py) that remembers whether rows ran at all."""

    rows_ran: bool

    def on_phase(self, text: str, share: float | None) -> None:
        """A phase has begun or moved on."""

    def on_progress(self, progress: Progress) -> None:
        """Rows are being decoded."""

    def on_note(self, text: str) -> None:
        """Something happened that a person may want to know."""


@contextmanager
def open_screen(common: Common, label: str) -> Iterator[Screen]:
    """The screen that fits where stderr goes. `label` names the input in plain lines."""
    if common.quiet:
        yield SilentScreen()
    elif sys.stderr.isatty():
        with LiveScreen(no_color=common.no_color).shown() as screen:
            yield screen
    else:
        yield PlainScreen(label)


class SilentScreen:
    """Shows nothing."""

    def __init__(self) -> None:
        self.rows_ran = False

    def on_phase(self, text: str, share: float | None) -> None:
        pass

    def on_progress(self, progress: Progress) -> None:
        self.rows_ran = True

    def on_note(self, text: str) -> None:
        pass


class PlainScreen:
    """One whole line at a time, for logs: no carriage returns, nothing is overwritten."""

    def __init__(self, label: str) -> None:
        self.rows_ran = False
        self._label = printable(label)
        self._phase = ""
        self._began = 0.0  # monotonic time of the phase,
        self._said = False  # and whether it was mentioned
        self._step = 0
        self._last = 0.0

    def on_phase(self, text: str, share: float | None) -> None:
        """A phase of known share is mentioned only when it takes a while."""
        now = time.monotonic()
        if text != self._phase:
            self._phase, self._began, self._said = text, now, False
        if not self._said and (share is None or now - self._began > SHORT_S):
            self._said = True
            self._say(text)

    def on_progress(self, progress: Progress) -> None:
        step = progress.done * LINE_STEPS // max(1, progress.total)
        now = time.monotonic()
        first = not self.rows_ran
        self.rows_ran = True
        if first or step > self._step or now - self._last >= LINE_S:
            self._step, self._last = step, now
            self._say(progress_line(progress))

    def on_note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        talk(f"{datetime.now():%H:%M:%S} {self._label} {printable(text)}")


class LiveScreen:
    """A bar and two lines of figures that are drawn again in place, by rich."""

    def __init__(self, *, no_color: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self.rows_ran = False
        self._phase = "starting"
        self._share: float | None = None
        self._progress: Progress | None = None
        # None leaves the choice to rich, which honours NO_COLOR
        console = Console(stderr=True, highlight=False, no_color=no_color or None)
        self._live = Live(
            console=console, transient=True, refresh_per_second=5, get_renderable=self._picture
        )

    @contextmanager
    def shown(self) -> Iterator[LiveScreen]:
        """Draw for as long as the block lasts, then wipe the picture away."""
        with self._live:
            yield self

    def on_phase(self, text: str, share: float | None) -> None:
        self._phase, self._share, self._progress = text, share, None

    def on_progress(self, progress: Progress) -> None:
        self.rows_ran = True
        self._progress = progress

    def on_note(self, text: str) -> None:
        self._live.console.print(printable(text), markup=False)

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress, share = self._progress, self._share
        if progress is not None:
            share = progress.done / max(1, progress.total)
        bar = ProgressBar(total=1.0, completed=share or 0.0, width=40, pulse=share is None)
        row = Table.grid(padding=(0, 2))
        if progress is None:
            percent = "" if share is None else f"{share:.0%}"
            row.add_row(Text(self._phase), bar, Text(percent))
            return row
        counts = f"{progress.done:,}/{progress.total:,}   ok {progress.ok:,}"
        counts += f"  failed {progress.failed:,}  running {progress.running:,}"
        row.add_row(bar, Text(counts))
        return Group(row, Text("  ".join(live_figures(progress)), style="dim"))


def live_figures(progress: Progress) -> list[str]:
    """Speed and the rest, for the second line of the live picture."""
    return [
        f"{progress.tokens_per_s:,.0f} tok/s",
        f"prefix hit {progress.cached_share:.0%}",
        f"{progress.tokens_per_cycle:.1f} tokens/cycle",
        f"ETA {_eta(progress)}",
    ]


def progress_line(progress: Progress) -> str:
    """One plain line: `648/1319 49% ok=647 failed=1 1912tok/s eta=23:04`."""
    share = progress.done / max(1, progress.total)
    return (
        f"{progress.done}/{progress.total} {share:.0%} ok={progress.ok} "
        f"failed={progress.failed} {progress.tokens_per_s:.0f}tok/s eta={_eta(progress)}"
    )


def _eta(progress: Progress) -> str:
    """The clock time of the end, or what is known of it."""
    sure = progress.done >= min(_SURE_ROWS, max(1, _SURE_SHARE * progress.total))
    if progress.eta_s is None or not sure:
        return "measuring"
    end = datetime.now() + timedelta(seconds=progress.eta_s)
    if progress.eta_s < 120:
        return f"{end:%H:%M:%S}"
    return f"{end:%H:%M}" if progress.eta_s < 86_400 else f"{end:%d %b %H:%M}"
