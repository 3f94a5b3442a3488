"""Where things that were paid for are kept between processes, and how a file of them is read and written.

A file is input from a stranger, whoever wrote it: its kind, size, form and names are judged, and a file that fails is
ignored aloud and written anew.
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


def recall(path: Path, decode: Callable[[bytes], T], most_bytes: int) -> T | None:
    """What a kept file holds; None where there is none, or, with a warning, none that `decode` takes.

    decode: raises what msgspec raises, or InputError. Raises OSError where a file cannot be read, whatever it holds.
    """
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


def recall_if_readable(path: Path, decode: Callable[[bytes], T], most_bytes: int) -> T | None:
    """As `recall`, but a file that cannot be read for now is none, with a warning."""
    try:
        return recall(path, decode, most_bytes)
    except OSError as error:
        message = f"overweave: {path} is ignored, as it cannot be read: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None


def keep_file(path: Path, made: Callable[[], bytes]) -> None:
    """Keeps what is made while no other process keeps anything beside it, whole or not at all. Warns where it cannot be
    written, or, as it is made, not be read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with by_turns(path.parent):
            replace_whole(path, made())
    except OSError as error:
        warnings.warn(f"overweave: {path} is not written: {error}", RuntimeWarning, stacklevel=3)


def encoded(value: Struct) -> bytes:
    """As kept files hold it: JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def cache_folders() -> dict[str, Path]:
    """Each cache by name: measurements of ours, and the compiled kernels that triton keeps.

    OVERWEAVE_CACHE_DIR moves ours, for ranks that share no home, or a home that is slow. A user without a home has one
    that ends with the process, and is told so.
    """
    triton, own = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("OVERWEAVE_CACHE_DIR")
    return {
        "overweave": Path(own) if own else _own_folder(),
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
        return Path(_without_home().name)


@cache
def _without_home() -> TemporaryDirectory[str]:
    """Nobody else's, since what lies in it is executed."""
    message = "overweave: there is no home to keep measurements in; HOME or OVERWEAVE_CACHE_DIR would name a folder"
    warnings.warn(message, RuntimeWarning, stacklevel=4)
    return TemporaryDirectory(prefix="overweave-")


# Files that are there whole or not at all, whoever looks while they are written, and whatever ends the writer.

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
