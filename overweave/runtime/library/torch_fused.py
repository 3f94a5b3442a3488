"""Which kernels answer torch's fused symmetric-memory operators in a thread.

`overweave.install` puts overweave's kernels behind these operators. overweave itself calls the operators where it means
torch's kernels: as a plan of its own choice, and as a baseline of a measurement. `use_torch_kernels` marks such a call.
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
    """Inside, torch's kernels answer the operators in this thread."""
    before, _THREAD.wants_torch = _THREAD.wants_torch, True
    try:
        yield
    finally:
        _THREAD.wants_torch = before


def wants_torch() -> bool:
    """Whether this thread is inside `use_torch_kernels`."""
    return _THREAD.wants_torch
