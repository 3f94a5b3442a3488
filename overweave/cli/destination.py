"""Where a command writes what it found: judged before the work, written whole or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from overweave.errors import InputError
from overweave.tuner.caches import check_writable, write_whole


def check_file(path: Path) -> None:
    """Before hours are spent on what it is to hold. Raises InputError."""
    try:
        check_writable(path)
    except OSError as error:
        raise _cannot(path, error) from None


def write_file(path: Path, data: bytes) -> None:
    """Raises InputError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise _cannot(path, error) from None


def make_folder(folder: Path) -> None:
    """Makes it if need be, and sees whether files can be written there. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        cure = "Name a folder that can be made and written into"
        raise InputError(f"write into {folder}", error.strerror or str(error), cure) from None


def _cannot(path: Path, error: OSError) -> InputError:
    return InputError(f"write {path}", error.strerror or str(error), "Name a file that can be written")
