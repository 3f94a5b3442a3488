"""The file of `--html`: checked before the work; bokeh is imported only if it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import typer

from overweave.cli.output_file import check_file, write_file
from overweave.errors import package_error
from overweave.ir.timeline.timeline import Timeline

HTML_HELP = "Write the timeline to this page, for any browser"


def page_writer(file: Path | None) -> Callable[..., None]:
    """Return `write(title, *timelines)`, which writes the page; it does nothing if there is no file. Raises InputError
    for a file that cannot be written, and MachineError if bokeh is not installed."""
    if file is None:
        return _write_nothing
    check_file(file)
    try:
        page_of = resolve_name("overweave.cli.pictures.page:page_of")
    except ModuleNotFoundError as error:
        raise package_error(f"draw {file}", error) from error

    def write(title: str, *timelines: Timeline) -> None:
        write_file(file, page_of(title, timelines).encode())
        typer.echo(f"{file}: a page for any browser", err=True)

    return write


def _write_nothing(title: str, *timelines: Timeline) -> None:
    """Do nothing: no page was asked for."""
