"""What is made in one call and written to in later ones must not bear the mark of the caller's mode in the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside are ordinary ones: those of torch.inference_mode may be written to within it only."""
    with torch.inference_mode(False), torch.no_grad():
        yield
