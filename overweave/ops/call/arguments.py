"""What the operators accept: one typed error, with the cure, for everything else, before anything is launched."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import NoneType
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from overweave.errors import InputError
from overweave.ir.problem import LONGEST_LIST

_T = TypeVar("_T")
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


_OPTIONS: dict[str, tuple[type, ...]] = {"m": (int, NoneType), "return_gathered": (bool,), "plan": (str, NoneType)}


def check_kinds(operator: str, x: object, weights: tuple[object, ...], options: Mapping[str, object]) -> None:
    """x and every weight are strided tensors, options of the types that the operators declare. Raises InputError."""
    if not 1 <= len(weights) <= LONGEST_LIST:
        cure = f"Pass a weight, or a list of 1 to {LONGEST_LIST}"
        raise InputError(f"{operator}: w", f"got {len(weights)} weights", cure)
    for name, tensor in (("x", x), *_named(weights)):
        check_plain(f"{operator}: {name}", tensor)
    for name, value in options.items():
        is_unasked_bool = isinstance(value, bool) and bool not in _OPTIONS[name]  # to Python a bool is an int
        if is_unasked_bool or not isinstance(value, _OPTIONS[name]):
            wanted = " or ".join(kind.__name__ for kind in _OPTIONS[name]).replace("NoneType", "None")
            raise InputError(f"{operator}: {name}", f"got {type(value).__name__}", f"Pass {wanted}")


def check_plain(asked: str, tensor: object) -> None:
    """A strided torch.Tensor whose elements lie where it says, and that nobody differentiates. Raises InputError."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(asked, f"got {type(tensor).__name__}", "Pass a torch.Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        found = f"got {type(tensor).__name__}, which stands for tensors that lie elsewhere, or nowhere"
        cure = "Pass the local tensor: `.to_local()` of a DTensor, `.wait()` of an AsyncCollectiveTensor"
        raise InputError(asked, found, cure)
    if tensor.layout is not torch.strided:
        raise InputError(asked, f"its layout is {tensor.layout}", "Pass a dense tensor")
    try:
        tensor.data_ptr()
    except RuntimeError:
        cure = "Call it outside of torch.func and vmap: it has no rules for them"
        raise InputError(asked, "it has no memory of its own: a transform of torch.func wraps it", cure) from None
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise InputError(asked, "it has a tangent", "Pass the primal: there are no gradients, forward or backward")


def check_operands(
    operator: str, x: torch.Tensor, *weights: torch.Tensor, dtypes: Collection[torch.dtype] = DTYPES.keys()
) -> bool:
    """`x @ w` for dense matrices of one of these dtypes on one device, all weights in one layout. Raises InputError.

    Returns whether the weights lie in memory as `[n, k]`.
    """
    if x.dtype not in dtypes:
        known = ", ".join(map(str, dtypes))
        raise InputError(f"{operator}: x of a supported dtype", f"got {x.dtype}", f"Use one of {known}")
    for name, w in _named(weights):
        _check_pair(operator, x, w, name)
    if all(w.is_contiguous() for w in weights):
        return False
    if not all(w.t().is_contiguous() for w in weights):
        found = ", ".join("[k, n]" if w.is_contiguous() else "[n, k]" for w in weights)
        raise InputError(f"{operator}: weights in one memory layout", f"they lie as {found}", "Lay them out alike")
    return True


def _named(weights: tuple[_T, ...]) -> list[tuple[str, _T]]:
    return [("w" if len(weights) == 1 else f"w[{index}]", each) for index, each in enumerate(weights)]


def _check_pair(operator: str, x: torch.Tensor, w: torch.Tensor, called: str) -> None:
    for name, tensor in (("x", x), (called, w)):
        if tensor.dim() != 2:
            raise InputError(f"{operator}: {name} [rows, cols]", f"got {list(tensor.shape)}", "Pass a matrix")
    if x.dtype != w.dtype or x.device != w.device:
        found = f"x is {x.dtype} on {x.device}, {called} is {w.dtype} on {w.device}"
        raise InputError(f"{operator}: x and {called} alike", found, "Cast or move one of them")
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(f"{operator}: tensors on a CPU or a CUDA GPU", f"got {x.device}", "Move them")
    if x.shape[1] != w.shape[0]:
        found = f"x is {list(x.shape)}, {called} is {list(w.shape)}"
        raise InputError(
            f"{operator}: x [.., k] @ {called} [k, n]", found, "Pass w as [k, n]; `w.t()` is accepted as it is"
        )
    if not w.numel():
        raise InputError(f"{operator}: {called} [k, n], both at least 1", f"got {list(w.shape)}", "Leave out the call")
    if not x.is_contiguous():
        raise InputError(f"{operator}: x row-major", f"its strides are {x.stride()}", "Pass x.contiguous()")
    if not (w.is_contiguous() or w.t().is_contiguous()):
        found = f"{called} {list(w.shape)} has strides {w.stride()}"
        raise InputError(f"{operator}: {called} dense, as [k, n] or [n, k] in memory", found, "Pass w.contiguous()")
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        raise InputError(f"{operator}: tensors without gradient", "requires_grad is set", "Call it under no_grad")
