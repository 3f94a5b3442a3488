"""Defines the op of an operator, `torch.ops.overweave.*`, from the operator's record.

`Library.define` and `impl`, not `custom_op`, whose own Python would be most of the host time of a small call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overweave.compat.torch_names import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, OpOverload
from overweave.ir.operators.forms import SCALE_DTYPE, Form, register
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import record_of
from overweave.ops.dispatch.autograd import autograd_kernel, eager_call
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.fake import results_for
from overweave.ops.dispatch.schema import (
    DEFINED,
    NAMESPACE,
    Defined,
    SchemaCall,
    arguments_from,
    in_order,
    schema_of,
    tensor_names,
)

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_CAST = (torch.bfloat16, torch.float16, torch.float32)  # neither fp64 nor fp8


def define(operator: Operator) -> OpOverload:
    """Return the op of an operator; define it, and that of its dual, if it is not defined yet."""
    if operator.name not in DEFINED:
        _define(operator, "")
        if operator.dual:  # its gradients call that one
            define(record_of(operator.dual))
    return DEFINED[operator.name].op


def register_epilogue(form: Form) -> None:
    """Make an epilogue a keyword, and an overload of the op, of all operators that take epilogues; by its name.

    Raises InputError for one that cannot be done.
    """
    if not register(form):
        return
    for name in DEFINED:
        if form in record_of(name).forms.allowed:
            _define(record_of(name), form.name)


_OVERLOADS: dict[str, Defined] = {}  # by their schemas


def _define(operator: Operator, overload: str) -> None:
    """Define an overload with all that the operator takes by now; it is the operator's op from then on."""
    schema = schema_of(operator, overload)
    if schema not in _OVERLOADS:
        _LIBRARY.define(schema)
        _OVERLOADS[schema] = _implement(operator, overload)
    DEFINED[operator.name] = _OVERLOADS[schema]


def _implement(operator: Operator, overload: str) -> Defined:
    """Register the kernel, fake kernel, Autograd and autocast kernels of an overload that is defined."""
    names = tensor_names(operator)
    op = getattr(getattr(getattr(torch.ops, NAMESPACE), operator.name), overload or "default")
    name = f"{operator.name}.{overload}" if overload else operator.name

    def kernel(*tensors: Any, **options: Any) -> list[torch.Tensor]:
        arguments = arguments_from(names, SchemaCall(tensors, options))
        return in_order(arguments, call(operator, options["group_name"], arguments, options.get("gradients", "")))

    def fake(*tensors: Any, **options: Any) -> list[torch.Tensor]:
        return results_for(operator, options["group_name"], arguments_from(names, SchemaCall(tensors, options)))

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    differentiated = autograd_kernel(operator, op, kernel)
    _LIBRARY.impl(name, differentiated, "Autograd")
    inputs = [each for form in operator.forms.allowed for each in form.inputs]
    never_cast = frozenset(2 + index for index, each in enumerate(inputs) if each.dtype == SCALE_DTYPE)
    for device, key in _KEYS.items():
        _LIBRARY.impl(name, autocast_kernel(op, device, never_cast), key.name)
    return Defined(op, names, eager_call(operator))


def autocast_kernel(op: OpOverload, device: str, never_cast: frozenset[int]) -> Callable[..., Any]:
    """Return the autocast kernel of an op on a device: operands are cast as those of `torch.nn.functional.linear` are.

    never_cast: positions of tensors that keep their dtype, such as fp8 scales.
    """
    below = DispatchKeySet(_KEYS[device])

    def kernel(*tensors: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        cast = [each if index in never_cast else _cast(each, dtype) for index, each in enumerate(tensors)]
        with ExcludeDispatchKeyGuard(below):
            return op(*cast, **options)

    return kernel


def _cast(each: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor, or a list of them, if autocast may; return other values as they are."""
    if isinstance(each, list):
        return [_cast(one, dtype) for one in each]
    return each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype in _CAST else each
