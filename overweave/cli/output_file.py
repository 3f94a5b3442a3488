"""Output files of commands: checked before the work, written atomically."""

from __future__ import annotations

import tempfile
from pathlib import Path

from overweave.errors import InputError
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
