"""Where things that were paid for are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folders() -> dict[str, Path]:
    """Each cache by name: measurements of ours, and the compiled kernels that triton keeps.

    OVERWEAVE_CACHE_DIR moves ours, for ranks that share no home, or a home that is slow.
    """
    triton, own = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("OVERWEAVE_CACHE_DIR")
    return {
        "overweave": Path(own) if own else user_cache_path("overweave", appauthor=False),
        "triton": Path(triton) if triton else Path.home() / ".triton" / "cache",
    }
