"""Files that nobody vouches for: read without waiting, and no more of them than was asked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotAFileError(OSError):
    """A folder, a pipe or a device."""


def read_bytes(path: Path, most: int) -> bytes:
    """What a regular file holds, up to one byte more than it may; nobody is waited for. Raises OSError, NotAFileError
    for anything else, or ValueError where the name cannot be one."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotAFileError("not a regular file")
        return file.read(most + 1)
