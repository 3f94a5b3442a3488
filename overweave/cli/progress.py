"""Long work shows itself: what is under way, how much of it is done, and how long the rest takes.

Drawn on the error stream, and only where that is a terminal. No thread draws it: work that forks its ranks goes on
being safe, and the bar moves when the work tells.
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
def progress(what: str, total: int | None, is_shown: bool = True) -> Iterator[OnPart]:
    """Gives `tell(part, done)`: which part is under way, and how many of `total` are done; a part may be done in part.

    total: None where nobody knows. is_shown: whether this process draws: of ranks, one does.
    """
    console = Console(stderr=True)
    count = "{task.completed:.0f}" if total is None else "{task.completed:.0f} of {task.total:.0f}"
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=None if console.width >= 100 else 10),
        TextColumn(count), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    is_drawn = is_shown and console.is_terminal
    redirects = is_drawn and sys.stdout.isatty()  # what is printed to a file goes there, and not above the bar
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not is_drawn, redirect_stdout=redirects
    ) as drawn:
        task = drawn.add_task(what, total=total)
        drawn.refresh()
        drawn_s = time.monotonic()

        def tell(part: str, done: float) -> None:
            nonlocal drawn_s
            drawn.update(task, completed=done, description=f"{what} {part}".rstrip())
            if time.monotonic() - drawn_s > EVERY_S:
                drawn.refresh()
                drawn_s = time.monotonic()

        yield tell
