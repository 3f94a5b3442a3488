"""Where things that were paid for are kept between processes."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from platformdirs import user_cache_path


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
