"""What may surround a call: a compiler that reads it, a tracer that would record memory, and autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from overweave.errors import InputError

_T = TypeVar("_T")
_C = torch._C
_PROXY, PRE_DISPATCH = _C._TorchDispatchModeKey.PROXY, _C.DispatchKey.PreDispatch
_OF_THE_CALLER = 5  # frames up: from here through `call` and the operator
_CASTS = (torch.bfloat16, torch.float16, torch.float32)

# Whether torch's compiler reads the code that asks, instead of Python running it.
is_read_by_compiler = torch.compiler.is_dynamo_compiling


def _call(operator: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    return operator(*arguments, **options)


# An operator under torch.compile runs as it is, between two graphs: it agrees with peers, looks addresses up, launches.
# `fullgraph=True` refuses it. `torch.compiler.disable` would load the compiler, a second, here and not when called.
eagerly = torch._disable_dynamo(_call)


def check_surroundings(operator: str, x: object) -> None:
    """Raises InputError where a tracer records; warns where autocast would have cast the operands."""
    check_untraced(operator)
    if _C._is_any_autocast_enabled() and isinstance(x, torch.Tensor):
        _tell_of_autocast(operator, x)


def check_untraced(name: str) -> None:
    """Raises InputError where a tracer records what this thread calls."""
    if _is_traced():
        found = "a tracer records it: a replay would return what this call left in memory"
        cure = "Call it outside of make_fx, torch.export and torch.jit.trace; torch.compile runs it between two graphs"
        raise InputError(f"trace {name}", found, cure)


def _is_traced() -> bool:
    if _C._get_tracing_state() is not None or _C._dispatch_tls_is_dispatch_key_included(PRE_DISPATCH):
        return True
    return _C._len_torch_dispatch_stack() > 0 and _C._get_dispatch_mode(_PROXY) is not None


def _tell_of_autocast(operator: str, x: torch.Tensor) -> None:
    device = x.device.type
    if x.dtype not in _CASTS or not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype:
        return
    said = f"{operator}: autocast does not reach it, and it computes in {x.dtype}; cast the operands for another dtype"
    warnings.warn(said, stacklevel=_OF_THE_CALLER)
