"""A thread-local switch: torch's own kernels for its fused symmetric-memory operators.

`overweave.install` registers overweave's kernels for these operators. overweave itself calls the operators to run
torch's kernels: as a plan that it chose, and as a baseline of a measurement. `use_torch_kernels` marks such a call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    wants_torch = False


_THREAD = _Thread()


@contextmanager
def use_torch_kernels() -> Iterator[None]:
    """Run the operators by torch's kernels inside, in this thread."""
    before, _THREAD.wants_torch = _THREAD.wants_torch, True
    try:
        yield
    finally:
        _THREAD.wants_torch = before


def wants_torch() -> bool:
    """Return whether this thread is inside `use_torch_kernels`."""
    return _THREAD.wants_torch
