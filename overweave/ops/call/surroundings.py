"""What may surround a call: a compiler that reads it, a tracer that would record memory, results still under way."""

from __future__ import annotations

import torch

from overweave.compat.torch_names import (
    AsyncCollectiveTensor,
    DispatchKey,
    TorchDispatchModeKey,
    dispatch_tls_is_dispatch_key_included,
    get_dispatch_mode,
    get_tracing_state,
    len_torch_dispatch_stack,
)
from overweave.errors import InputError

_PROXY, PRE_DISPATCH = TorchDispatchModeKey.PROXY, DispatchKey.PreDispatch

# Whether torch's compiler reads the code that asks, instead of Python running it.
is_read_by_compiler = torch.compiler.is_dynamo_compiling


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a functional collective of torch returned, once it is there; any other as it is."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_watched() -> bool:
    """Whether a tracer or a mode stands between ops and their kernels, and must see each op."""
    return (
        len_torch_dispatch_stack() > 0
        or get_tracing_state() is not None
        or dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)
    )


def check_untraced(name: str) -> None:
    """Raises InputError where a tracer records what this thread calls."""
    if _is_traced():
        found = "a tracer records it: a replay would return what this call left in memory"
        cure = "Call it outside of make_fx, torch.export and torch.jit.trace; torch.compile runs it between two graphs"
        raise InputError(f"trace {name}", found, cure)


def _is_traced() -> bool:
    is_in_mode = len_torch_dispatch_stack() > 0
    return is_watched() and (not is_in_mode or get_dispatch_mode(_PROXY) is not None)
