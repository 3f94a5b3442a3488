"""The progress bar of long work: the current part, how much is done, and the remaining time.

It is drawn on the error stream, only if that is a terminal. It has no thread, so that the work can still fork ranks;
the bar moves when the work reports.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

OnPart = Callable[[str, float], None]
EVERY_S = 0.1


@contextmanager
def progress(title: str, total: int | None, is_shown: bool = True) -> Iterator[OnPart]:
    """Yield `report(part, done)`, which shows the current part and how many of `total` are done (fractions allowed).
    total: None if unknown. is_shown: whether this process draws: one of the ranks does."""
    console = Console(stderr=True)
    count = "{task.completed:.0f}" if total is None else "{task.completed:.0f} of {task.total:.0f}"
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=None if console.width >= 100 else 10),
        TextColumn(count), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    is_drawn = is_shown and console.is_terminal
    redirects = is_drawn and sys.stdout.isatty()  # stdout to a file must not be printed above the bar
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not is_drawn, redirect_stdout=redirects
    ) as bar:
        task = bar.add_task(title, total=total)
        bar.refresh()
        drawn_s = time.monotonic()

        def tell(part: str, done: float) -> None:
            nonlocal drawn_s
            bar.update(task, completed=done, description=f"{title} {part}".rstrip())
            if time.monotonic() - drawn_s > EVERY_S:
                bar.refresh()
                drawn_s = time.monotonic()

        yield tell
