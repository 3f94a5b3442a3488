"""Where things that were paid for are kept between processes, and how a file of them is read and written.

A file is input from a stranger, whoever wrote it: its kind, size, form and names are judged, and a file that fails is
ignored aloud and written anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
from msgspec import Struct
from platformdirs import user_cache_path

from overweave.errors import InputError
from overweave.tuner.store.whole_file import by_turns, replace_whole
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
