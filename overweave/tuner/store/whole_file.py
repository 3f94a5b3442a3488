"""Files that are there whole or not at all, whoever looks while they are written, and whatever ends the writer."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_TURN_S = 5.0  # to add to a file takes some ten milliseconds, and several on a busy machine wait for each other


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one. What is no plain file, as a pipe, is written to. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        replace_whole(path, data)


def replace_whole(path: Path, data: bytes) -> None:
    """As `write_whole`, but what is no plain file gives way to one: a pipe would wait for a reader. Raises OSError."""
    if path.is_file() or not path.exists():
        path = Path(os.path.realpath(path))  # a link stays one
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


@contextmanager
def by_turns(folder: Path) -> Iterator[None]:
    """One process at a time does so in a folder, so that none overwrites what another has just added. Who waits longer
    than LONGEST_TURN_S, or stands on a file system without locks, goes on alone. Raises OSError for no folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + LONGEST_TURN_S
        while not _is_ours(handle) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)  # and the lock with it, as when the process is killed


def _is_ours(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def check_writable(path: Path) -> None:
    """Whether `write_whole` could: to be asked before the work whose outcome is to be written. Raises OSError."""
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    if not path.exists() or path.is_file():
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
