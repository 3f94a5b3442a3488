"""Output files of commands: checked before the work, written atomically."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import typer

from overweave.errors import InputError, package_error
from overweave.ir.timeline.timeline import Timeline
from overweave.tuner.caches import check_writable, write_whole


def check_file(path: Path) -> None:
    """Raise InputError if the file cannot be written; for a check before long work."""
    try:
        check_writable(path)
    except OSError as error:
        raise _cannot(path, error) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically. Raises InputError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise _cannot(path, error) from None


def make_folder(folder: Path) -> None:
    """Make a folder if needed, and check that files can be written there. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        cure = "Name a folder that can be made and written into"
        raise InputError(f"write into {folder}", error.strerror or str(error), cure) from None


def _cannot(path: Path, error: OSError) -> InputError:
    return InputError(f"write {path}", error.strerror or str(error), "Name a file that can be written")


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
