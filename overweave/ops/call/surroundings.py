"""What may surround a call: a compiler that reads it, a tracer that would record memory, results still under way."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overweave.errors import InputError

_C = torch._C
_PROXY, PRE_DISPATCH = _C._TorchDispatchModeKey.PROXY, _C.DispatchKey.PreDispatch

# Whether torch's compiler reads the code that asks, instead of Python running it.
is_read_by_compiler = torch.compiler.is_dynamo_compiling


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a functional collective of torch returned, once it is there; any other as it is."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_watched() -> bool:
    """Whether a tracer or a mode stands between ops and their kernels, and must see each op."""
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._get_tracing_state() is not None
        or _C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH)
    )


def check_untraced(name: str) -> None:
    """Raises InputError where a tracer records what this thread calls."""
    if _is_traced():
        found = "a tracer records it: a replay would return what this call left in memory"
        cure = "Call it outside of make_fx, torch.export and torch.jit.trace; torch.compile runs it between two graphs"
        raise InputError(f"trace {name}", found, cure)


def _is_traced() -> bool:
    is_in_mode = _C._len_torch_dispatch_stack() > 0
    return is_watched() and (not is_in_mode or _C._get_dispatch_mode(_PROXY) is not None)
