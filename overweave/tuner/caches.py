"""Cache files: where they lie, and how they are read and written.

A cache file is untrusted input: its kind, size, form and names are checked. A file that fails is ignored with a warning
and rewritten.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
from msgspec import Struct
from platformdirs import user_cache_path

from overweave.errors import InputError
from overweave.untrusted import NotAFileError, printable, read_bytes

T = TypeVar("T")


def read_cached(path: Path, decode: Callable[[bytes], T], most_bytes: int) -> T | None:
    """Return the content of a cache file; None if there is none, or, with a warning, none that `decode` accepts.
    decode: raises msgspec's errors, or InputError. Raises OSError if the file cannot be read."""
    try:
        data = read_bytes(path, most_bytes)
        if len(data) > most_bytes:
            raise InputError(f"read {path.name}", f"more than {most_bytes} bytes", "")
        return decode(data)
    except FileNotFoundError:
        return None
    except (NotAFileError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        found = printable((error.found if isinstance(error, InputError) else str(error))[:300])
        warnings.warn(f"overweave: {path} is ignored and will be written anew: {found}", RuntimeWarning, stacklevel=3)
        return None


def read_cached_if_readable(path: Path, decode: Callable[[bytes], T], most_bytes: int) -> T | None:
    """Return the content as `read_cached`; None, with a warning, if the file cannot be read now."""
    try:
        return read_cached(path, decode, most_bytes)
    except OSError as error:
        message = f"overweave: {path} is ignored, as it cannot be read: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None


def save_file(path: Path, content: Callable[[], bytes]) -> None:
    """Write `content()` atomically under the folder's lock. Warns if the file cannot be written or `content` raises
    OSError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(path.parent):
            replace_whole(path, content())
    except OSError as error:
        warnings.warn(f"overweave: {path} is not written: {error}", RuntimeWarning, stacklevel=3)


def encode(value: Struct) -> bytes:
    """Return a value as indented JSON, the form of cache files."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def cache_folders() -> dict[str, Path]:
    """Return the folder of each cache by name: our measurements, and Triton's compiled kernels.

    OVERWEAVE_CACHE_DIR moves ours, for ranks that share no home, or a home that is slow. A user without a home gets a
    temporary folder, with a warning.
    """
    triton, ours = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("OVERWEAVE_CACHE_DIR")
    return {
        "overweave": Path(ours) if ours else _own_folder(),
        "triton": Path(triton) if triton else _home() / ".triton" / "cache",
    }


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path("~")  # as triton takes it


def _own_folder() -> Path:
    try:
        return user_cache_path("overweave", appauthor=False)
    except RuntimeError:
        return Path(_temporary_folder().name)


@cache
def _temporary_folder() -> TemporaryDirectory[str]:
    """Return a private folder (mode 700) that ends with the process: its contents are executed."""
    message = "overweave: there is no home to keep measurements in; HOME or OVERWEAVE_CACHE_DIR would name a folder"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
    return TemporaryDirectory(prefix="overweave-")


LOCK_TIMEOUT_S = 5.0  # adding to a file takes some ten milliseconds; several writers on a busy machine queue up


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one. A pipe or device is written to. Raises
    OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        replace_whole(path, data)


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file as `write_whole`, but replace a pipe or device, which would wait for a reader. Raises OSError."""
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
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that no process overwrites what another has just added. It goes on without the lock
    after LOCK_TIMEOUT_S, or on a file system without locks. Raises OSError if there is no folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(handle) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)  # and the lock with it, as when the process is killed


def _try_lock(handle: int) -> bool:
    """Whether the lock was taken, or the file system has none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def check_writable(path: Path) -> None:
    """Raise OSError if `write_whole` could not write; for a check before long work."""
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    if not path.exists() or path.is_file():
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
