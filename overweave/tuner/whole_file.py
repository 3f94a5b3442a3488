"""Files that are there whole or not at all, whoever looks while they are written, and whatever ends the writer."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one. What is no plain file, as a pipe, is written to. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays one
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Whether `write_whole` could: to be asked before the work whose outcome is to be written. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    if not path.exists() or path.is_file():
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
