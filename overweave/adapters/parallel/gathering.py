"""Lazy tensors of tensor parallelism: `LazyGather`, an all-gathered input, and `LazyGradSum`, its gradient.

Attention reads `hidden_states.shape` before it projects, and calls query, key and value separately. The first
projection runs a fused all-gather + matmul; the others reuse the gathered tensor. In backward the three input gradients
are added lazily, and one fused matmul + reduce-scatter computes this rank's rows of the sum.

The gradient of a gathered tensor is whole, and the same on every rank, as that of torch's `Replicate()`. A matmul of
overweave's styles sums its input gradient over ranks, whatever produced its input.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.functional import linear

from overweave.adapters.report import site
from overweave.adapters.rows import RowGather, gathered_by_c10d
from overweave.compat.torch_names import (
    disable_current_modes,
    disabled_torch_function_impl,
    get_current_dispatch_mode_stack,
    len_torch_dispatch_stack,
    make_wrapper_subclass,
    pytree,
)
from overweave.errors import InputError
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.replicated import autocast_dtype, cast, is_autocast, weight_gradients
from overweave.ops.dispatch.collectives import exchange_in, own_rows, replicated
from overweave.ops.dispatch.route import refused


class LazyTensor(torch.Tensor):
    """A tensor subclass without storage; `materialize` computes its values when they are first read.

    To autograd it is an ordinary tensor, with a grad_fn, a version and hooks, and a view of one is a view. An operation
    that reads one, in Python or below, comes to `__torch_dispatch__`, which runs it on the values.
    """

    # Shape, dtype and device are read as fast as those of any tensor.
    __torch_function__ = disabled_torch_function_impl

    def materialize(self, reader: str) -> torch.Tensor:
        """Return the values, contiguous, computed once; they have no grad_fn. reader: the function that reads them."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run a function on the values. An in-place function returns the lazy tensor that it was called with."""
        lazy_of_values: dict[int, LazyTensor] = {}

        def values(tensor: LazyTensor) -> torch.Tensor:
            computed = tensor.materialize(str(func))
            lazy_of_values[id(computed)] = tensor
            return computed

        args, kwargs = pytree.tree_map_only(LazyTensor, values, (args, kwargs or {}))
        results = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: lazy_of_values.get(id(each), each), results)

    # Methods that read memory without torch's dispatcher.

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.materialize("data_ptr").data_ptr()

    def untyped_storage(self) -> Any:
        """Return the storage of the values."""
        return self.materialize("untyped_storage").untyped_storage()

    def tolist(self) -> Any:
        """Return the values as a list."""
        return self.materialize("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array. Raises RuntimeError for a tensor that requires grad, as torch does."""
        return self.view_as(self).numpy(force=force)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class WeightProduct:
    """The operands of a lazy input gradient dy @ weight: dy `[.., S, .., n]`, the local shard `[n, k]` of a parameter.

    Reading `weight` raises InputError if the parameter was changed in place since.
    """

    __slots__ = ("_parameter", "_version", "_weight", "dy")

    def __init__(self, dy: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> None:
        self.dy, self._weight, self._parameter, self._version = dy, weight, parameter, version_of(parameter)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the gradient operators take it: `[k, n]`."""
        if version_of(self._parameter) != self._version:
            cure = "Step the optimizer in a hook of the parameter that is registered before backward, or after backward"
            raise InputError("the gradient of a gathered input", "a weight was changed in place before it", cure)
        return self._weight.t()


TensorMeta = tuple[torch.Size, torch.dtype, torch.device]
_ADD = torch.ops.aten.add.Tensor


class LazyGradSum(LazyTensor):
    """A lazy all_reduce(sum of dy @ weight over products) + plain: the gradient of a gathered tensor.

    Autograd adds the gradients of a tensor. Adding two lazy sums gives a lazy sum, so that query, key and value end in
    one. `reduce_scattered` computes this rank's rows of it; a hook, or any other reader, gets the whole sum on every
    rank, by one `linear_all_reduce`.
    """

    _gather: RowGather
    _products: tuple[WeightProduct, ...]
    _plain: torch.Tensor | None  # gradient from other readers, whole on every rank
    _sum: torch.Tensor | None  # the values, once they are computed

    @staticmethod
    def __new__(
        cls, like: TensorMeta, gather: RowGather, products: tuple[WeightProduct, ...], plain: torch.Tensor | None = None
    ) -> LazyGradSum:
        """like: shape, dtype and device of the gathered tensor."""
        grad_sum: LazyGradSum = make_wrapper_subclass(cls, like[0], dtype=like[1], device=like[2])
        grad_sum._gather, grad_sum._products, grad_sum._plain, grad_sum._sum = gather, products, plain, None
        return grad_sum

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _ADD and not kwargs and len(args) == 2:
            added = _merge(*args)
            if added is not None:
                return added
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def is_unread(self) -> bool:
        """Whether its values were never read, and so never changed."""
        return self._sum is None

    def materialize(self, reader: str) -> torch.Tensor:
        """Return the whole sum, the same on every rank."""
        if self._sum is None:
            parts = [linear_all_reduce(*operands, group=self._gather.group) for operands in self._matmul_operands()]
            self._sum = _add_parts(parts, self.dtype, self._plain)
        return self._sum

    def reduce_scattered(self) -> torch.Tensor:
        """Return this rank's rows of the sum, by `linear_reduce_scatter`."""
        dim, group = self._gather.dim, self._gather.group
        parts = [linear_reduce_scatter(*operands, group=group, dim=dim) for operands in self._matmul_operands()]
        return _add_parts(parts, self.dtype, None if self._plain is None else self._gather.own(self._plain))

    def _matmul_operands(self) -> list[tuple[Any, Any]]:
        """Return ([dy], [weight]) for each dtype: there are two if autocast was on for some matmuls only."""
        by_dtype: dict[torch.dtype, list[WeightProduct]] = defaultdict(list)
        for product in self._products:
            by_dtype[product.dy.dtype].append(product)
        return [
            ([product.dy for product in products], [product.weight for product in products])
            for products in by_dtype.values()
        ]


def _merge(one: Any, other: Any) -> LazyGradSum | None:
    """Return the lazy sum of two gradients, at least one of them lazy; None if it cannot stay lazy."""
    if not isinstance(one, LazyGradSum):
        one, other = other, one
    if not one.is_unread or not isinstance(other, torch.Tensor):
        return None
    like: TensorMeta = one.shape, one.dtype, one.device
    if (other.shape, other.dtype, other.device) != like:
        return None
    if not isinstance(other, LazyGradSum):
        return LazyGradSum(like, one._gather, one._products, _add_optional(one._plain, other))
    if not other.is_unread or other._gather != one._gather:
        return None
    return LazyGradSum(like, one._gather, one._products + other._products, _add_optional(one._plain, other._plain))


def _add_optional(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _add_parts(parts: list[torch.Tensor], dtype: torch.dtype, plain: torch.Tensor | None) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total if plain is None else total + plain


OptionalTensor = torch.Tensor | None
SITE, GRADIENT = "PrepareGather", "PrepareGather, its gradient"
num_dispatch_modes = len_torch_dispatch_stack  # of active TorchDispatchModes; an alias, since every call asks


class LazyGather(LazyTensor):
    """A lazy all_gather(shard, dim). The first `linear` gathers by `all_gather_linear`, any other reader unfused."""

    _shard: OptionalTensor  # freed once gathered in its own dtype, unless a dispatch mode was active at creation
    _version_of_shard: int
    _gather: RowGather
    group: str  # name of the process group
    _gathered: dict[torch.dtype, torch.Tensor]  # dtype -> gathered tensor; under autocast also in the matmuls' dtype
    _modes: tuple[ReferenceType[Any], ...]  # dispatch modes that were active when it was created
    # What a matmul may reuse: if modes were active at creation, what matmuls gathered; else all of _gathered.
    _gathered_by_linear: dict[torch.dtype, torch.Tensor]

    @staticmethod
    def __new__(cls, shard: torch.Tensor, gather: RowGather) -> LazyGather:
        """Create a tensor of the gathered shape that keeps the shard and the active dispatch modes."""
        shape = list(shard.shape)
        shape[gather.dim] = gather.size
        lazy: LazyGather = make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        lazy._shard, lazy._gather, lazy.group, lazy._gathered = shard, gather, gather.group, {}
        lazy._version_of_shard = version_of(shard)
        lazy._modes, lazy._gathered_by_linear = (), lazy._gathered
        if num_dispatch_modes():
            lazy._modes, lazy._gathered_by_linear = tuple(map(ref, get_current_dispatch_mode_stack())), {}
        return lazy

    @property
    def is_unmodified(self) -> bool:
        """Whether neither its values nor its grad_fn were changed, so that a gradient of it reaches the shard."""
        if not self.is_inference() and self._version:
            return False
        return not self.requires_grad or self.grad_fn.__class__ is _LazyAllGather._backward_cls

    def linear(self, weight: torch.Tensor, bias: OptionalTensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return linear(all_gather(shard), weight, bias), differentiable; the first call gathers.

        weight, bias: this rank's shards. parameter: the DTensor of the weight.
        """
        dtype = self.dtype
        if is_autocast():
            dtype, weight, bias = autocast_dtype(self) or dtype, cast(weight), cast(bias)
        if torch.is_grad_enabled():
            y: torch.Tensor = _apply(_GatheredLinear, self, weight, bias, (dtype, parameter))
            return y
        return self.linear_forward(weight, bias, dtype)

    def linear_forward(self, weight: torch.Tensor, bias: OptionalTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `linear` without autograd, gathering only if needed. dtype: in which to multiply.

        Raises InputError if the shard was changed in place before it is gathered.
        """
        cache = self._gathered_by_linear
        if num_dispatch_modes() and not self._has_creation_modes():
            cache, gathered = (
                self._gathered,
                self.materialize("a matmul under a TorchDispatchMode that was not active at PrepareGather"),
            )
            with _without_modes():
                cache[dtype] = gathered.to(dtype)
        if dtype not in cache and self.dtype in cache:
            cache[dtype] = cache[self.dtype].to(dtype)
        if dtype in cache:
            return linear(cache[dtype], weight, bias)
        if _would_be_inference(self):
            with torch.inference_mode(False), torch.no_grad():
                return self.linear_forward(weight, bias, dtype)
        site(SITE).by_overweave += 1
        dim, group, size = self._gather.dim, self._gather.group, self._gather.uneven_size
        shard = self._checked_shard().to(dtype)
        y, gathered = all_gather_linear(shard, weight, bias, group, dim=dim, size=size, return_gathered=True)
        self._cache(gathered)
        self._gathered_by_linear[dtype] = gathered
        return y  # type: ignore[no-any-return]

    def materialize(self, reader: str) -> torch.Tensor:
        """Return the gathered tensor, by torch's all_gather unless it is gathered already."""
        if self.dtype in self._gathered:
            return self._gathered[self.dtype]
        if _would_be_inference(self):
            with torch.inference_mode(False), torch.no_grad():
                return self.materialize(reader)
        site(SITE).by_torch[f"read by {reader}"] += 1
        with _without_modes():
            self._cache(gathered_by_c10d(self._checked_shard(), self._gather))
        return self._gathered[self.dtype]

    def _has_creation_modes(self) -> bool:
        """Whether the active dispatch modes are those of its creation.

        Selective checkpointing reruns its segment, expects the same operations as in the forward pass, and skips those
        whose results it saved. At the rerun another reader may have gathered the segment's input already: so that the
        operations stay the same, a matmul reuses only what earlier matmuls gathered.
        """
        return bool([mode() for mode in self._modes] == get_current_dispatch_mode_stack())

    def _cache(self, gathered: torch.Tensor) -> None:
        """Keep the gathered tensor by its dtype, and free the shard if that is the shard's."""
        self._gathered[gathered.dtype] = gathered
        if gathered.dtype == self.dtype and not self._modes:
            self._shard = None

    def _checked_shard(self) -> torch.Tensor:
        """Return the shard. Raises InputError if it was changed in place."""
        assert self._shard is not None
        if version_of(self._shard) != self._version_of_shard:
            cure = "Change a copy, or read what PrepareGather prepared before: `x + 0`"
            raise InputError("gather the input of a module", "its shard was changed in place meanwhile", cure)
        return self._shard


def gather_lazily(shard: torch.Tensor, gather: RowGather) -> LazyGather:
    """Return a lazy all_gather(shard, dim), differentiable in the shard."""
    if torch.is_grad_enabled() and shard.requires_grad:
        lazy: LazyGather = _apply(_LazyAllGather, shard, gather)
        return lazy
    return LazyGather(shard, gather)


class _LazyAllGather(torch.autograd.Function):
    """Lazy all_gather; the gradient of the shard is this rank's rows of the gathered tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, gather: RowGather) -> Any:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        return LazyGather(shard.detach(), gather)

    @staticmethod
    def backward(ctx: Any, *grads: OptionalTensor) -> Any:
        """Return the shard's gradient: this rank's rows of a lazy sum by a reduce-scatter, or of a whole gradient."""
        grad = grads[0]
        if grad is None:
            return None, None
        if torch.is_grad_enabled():
            return _own_part(grad, ctx.gather), None
        if isinstance(grad, LazyGradSum) and grad.is_unread:
            site(GRADIENT).by_overweave += 1
            return grad.reduce_scattered(), None
        site(GRADIENT).by_torch["it was whole already"] += 1
        return ctx.gather.own(grad).contiguous(), None


class _GatheredLinear(torch.autograd.Function):
    """linear(gathered, weight, bias). The gradient of the gathered tensor is a LazyGradSum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: LazyGather,
        weight: torch.Tensor,
        bias: OptionalTensor,
        dtype_and_parameter: tuple[torch.dtype, torch.Tensor],
    ) -> torch.Tensor:
        """Gather if needed, and multiply. Save the gathered tensor for the weight's gradient, the weight for x's."""
        needs_grad, (dtype, ctx.parameter) = ctx.needs_input_grad, dtype_and_parameter
        ctx.gather, ctx.like = x._gather, (x.shape, x.dtype, x.device)
        ctx.set_materialize_grads(False)
        y = x.linear_forward(weight, bias, dtype)
        gathered = x if dtype == x.dtype else x._gathered[dtype]
        ctx.save_for_backward(gathered if needs_grad[1] else None, weight if needs_grad[0] else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: OptionalTensor) -> Any:
        """Return the gradients: of x lazily, unless create_graph, or the optimizer may step early; others at once."""
        (gathered, weight), grad_y, needs_grad = ctx.saved_tensors, grads[0], ctx.needs_input_grad
        if grad_y is None:
            return None, None, None, None
        is_recorded = torch.is_grad_enabled()  # create_graph=True
        if is_recorded:
            gathered = _with_summed_gradient(gathered, ctx.gather.group)
        if isinstance(gathered, LazyGather):
            gathered = gathered.materialize("the gradient of a weight")
        grad_x: OptionalTensor = None
        if needs_grad[0] and (is_recorded or _may_step_early(ctx.parameter)):
            grad_x = linear_all_reduce(grad_y, weight.t(), group=ctx.gather.group).to(ctx.like[1])
        elif needs_grad[0]:
            grad_x = LazyGradSum(ctx.like, ctx.gather, (WeightProduct(grad_y, weight, ctx.parameter),))
        return grad_x, *weight_gradients(grad_y, gathered, needs_grad[1:3]), None


def _with_summed_gradient(gathered: OptionalTensor, group: str) -> OptionalTensor:
    """Return a gathered tensor whose gradient is summed over ranks, for gradients of gradients.

    Raises InputError, on every rank, if autocast gathered it in another dtype, without a history.
    """
    if gathered is None:
        return None
    if not isinstance(gathered, LazyGather):
        cure = "Leave out autocast, or create_graph=True"
        error = InputError("differentiate Colwise twice", "its input was gathered in the dtype of autocast", cure)
        raise refused(group, error)
    return replicated(exchange_in(group, "Colwise"), gathered)


def _own_part(grad: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """Return this rank's rows of a gradient that is equal on all ranks, differentiably."""
    rows = own_rows(exchange_in(gather.group, "PrepareGather"), grad.movedim(gather.dim, 0))
    return rows.movedim(0, gather.dim).contiguous()


def _may_step_early(parameter: torch.Tensor) -> bool:
    """Whether a hook of a parameter may step the optimizer before the lazy sum reads the weight.

    A computed weight, such as a parametrization's, may be a view of a parameter whose hooks are unknown here.
    """
    return parameter.grad_fn is not None or bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


def _without_modes() -> AbstractContextManager[Any]:
    """Disable dispatch modes: a mode must not see an operation whose result is cached, and thus run once only."""
    return disable_current_modes() if num_dispatch_modes() else nullcontext()


def _would_be_inference(tensor: torch.Tensor) -> bool:
    """Whether a cached result would be an inference tensor, which readers outside inference mode could not use."""
    return torch.is_inference_mode_enabled() and not tensor.is_inference()


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
