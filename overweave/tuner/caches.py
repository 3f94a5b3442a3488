"""Where things that were paid for are kept between processes."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folders() -> dict[str, Path]:
    """Each cache by name: measurements of ours, and the compiled kernels that triton keeps."""
    triton = os.environ.get("TRITON_CACHE_DIR")
    return {
        "overweave": user_cache_path("overweave", appauthor=False),
        "triton": Path(triton) if triton else Path.home() / ".triton" / "cache",
    }
