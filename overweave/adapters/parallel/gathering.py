"""A lazily gathered tensor: it has the gathered shape, and its first matmul gathers it for all readers.

Attention reads `hidden_states.shape` before it projects, and calls query, key and value separately. The first
projection gathers while it multiplies; the others reuse the gathered tensor. In backward their gradients are added into
one sum of matmuls, which is reduce-scattered while it is computed.

The gradient of a gathered tensor is whole, and the same on every rank, as that of torch's `Replicate()`. A matmul of
overweave's styles sums its gradient over ranks, whatever produced its input.
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


class Deferred(torch.Tensor):
    """A tensor without memory of its own, whose values are computed when they are first read, by `computed`.

    To autograd it is an ordinary tensor, with a grad_fn, a version and hooks, and a view of one is a view. An operation
    that reads one, in Python or below, comes to `__torch_dispatch__` and gets the values.
    """

    # Shape, dtype and device are read as fast as those of any tensor.
    __torch_function__ = disabled_torch_function_impl

    def computed(self, reader: str) -> torch.Tensor:
        """The values, contiguous, computed at the first call. reader: the function that asks for them."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run a function on the values. An in-place function returns the lazy tensor that it was called with."""
        lazy_of_values: dict[int, Deferred] = {}

        def values(tensor: Deferred) -> torch.Tensor:
            computed = tensor.computed(str(func))
            lazy_of_values[id(computed)] = tensor
            return computed

        args, kwargs = pytree.tree_map_only(Deferred, values, (args, kwargs or {}))
        results = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: lazy_of_values.get(id(each), each), results)

    # Methods that read memory without torch's dispatcher.

    def data_ptr(self) -> int:
        """Where the values lie."""
        return self.computed("data_ptr").data_ptr()

    def untyped_storage(self) -> Any:
        """The memory of the values."""
        return self.computed("untyped_storage").untyped_storage()

    def tolist(self) -> Any:
        """The values as a list."""
        return self.computed("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array; raises for a tensor that requires grad, as torch does."""
        return self.view_as(self).numpy(force=force)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class WeightProduct:
    """A lazy dy @ weight: dy is `[.., S, .., n]`, the weight this rank's shard `[n, k]` of a parameter. Raises
    InputError if the parameter is changed in place before the product is computed."""

    __slots__ = ("_parameter", "_version", "_weight", "dy")

    def __init__(self, dy: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor) -> None:
        self.dy, self._weight, self._parameter, self._version = dy, weight, parameter, version_of(parameter)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the gradient operators take it: `[k, n]`."""
        if version_of(self._parameter) != self._version:
            cure = (
                "Step the optimizer in a hook of the parameter that is registered before backward, or behind backward"
            )
            raise InputError("the gradient of a gathered input", "a weight was changed in place before it", cure)
        return self._weight.t()


Like = tuple[torch.Size, torch.dtype, torch.device]
_ADD = torch.ops.aten.add.Tensor


class Summing(Deferred):
    """A lazy all_reduce(sum of dy @ weight over products) + plain: the gradient of a gathered tensor.

    Autograd adds the gradients of a tensor. Adding two lazy sums makes one, so that query, key and value end in one sum
    of matmuls. A hook, or any other reader, gets the whole sum on every rank, by one `linear_all_reduce`.
    """

    _gather: RowGather
    _products: tuple[WeightProduct, ...]
    _plain: torch.Tensor | None  # gradient from other readers, whole on every rank
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, like: Like, gather: RowGather, products: tuple[WeightProduct, ...], plain: torch.Tensor | None = None
    ) -> Summing:
        """like: shape, dtype and device of the gathered tensor."""
        made: Summing = make_wrapper_subclass(cls, like[0], dtype=like[1], device=like[2])
        made._gather, made._products, made._plain, made._whole = gather, products, plain, None
        return made

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
        return self._whole is None

    def computed(self, reader: str) -> torch.Tensor:
        """The whole sum, the same on every rank."""
        if self._whole is None:
            parts = [linear_all_reduce(*factors, group=self._gather.group) for factors in self._factors()]
            self._whole = _total(parts, self.dtype, self._plain)
        return self._whole

    def scattered(self) -> torch.Tensor:
        """This rank's rows of the sum."""
        dim, group = self._gather.dim, self._gather.group
        parts = [linear_reduce_scatter(*factors, group=group, dim=dim) for factors in self._factors()]
        return _total(parts, self.dtype, None if self._plain is None else self._gather.own(self._plain))

    def _factors(self) -> list[tuple[Any, Any]]:
        """Return ([dy], [weight]) for each dtype: there are two if autocast was on for some matmuls only."""
        by_dtype: dict[torch.dtype, list[WeightProduct]] = defaultdict(list)
        for product in self._products:
            by_dtype[product.dy.dtype].append(product)
        return [
            ([product.dy for product in products], [product.weight for product in products])
            for products in by_dtype.values()
        ]


def _merge(one: Any, other: Any) -> Summing | None:
    """Return the lazy sum of two gradients; None if their values are needed."""
    if not isinstance(one, Summing):
        one, other = other, one
    if not one.is_unread or not isinstance(other, torch.Tensor):
        return None
    like: Like = one.shape, one.dtype, one.device
    if (other.shape, other.dtype, other.device) != like:
        return None
    if not isinstance(other, Summing):
        return Summing(like, one._gather, one._products, _add_optional(one._plain, other))
    if not other.is_unread or other._gather != one._gather:
        return None
    return Summing(like, one._gather, one._products + other._products, _add_optional(one._plain, other._plain))


def _add_optional(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _total(parts: list[torch.Tensor], dtype: torch.dtype, plain: torch.Tensor | None) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total if plain is None else total + plain


Maybe = torch.Tensor | None
SITE, GRADIENT = "PrepareGather", "PrepareGather, its gradient"
_watchers = len_torch_dispatch_stack  # how many modes see what is computed; no function of ours around it


class Gathering(Deferred):
    """all_gather(shard, dim), gathered at the first read. A matmul of overweave's styles calls `linear`."""

    _shard: Maybe  # dropped when it is gathered in its own dtype, unless a dispatch mode was active
    _version_of_shard: int
    _gather: RowGather
    group: str  # name of the process group
    _whole: dict[torch.dtype, torch.Tensor]  # dtype -> gathered tensor; under autocast also in the matmuls' dtype
    _modes: tuple[ReferenceType[Any], ...]  # dispatch modes that were active when it was created
    _seen: dict[torch.dtype, torch.Tensor]  # the part of _whole that matmuls gathered; all of it without modes

    @staticmethod
    def __new__(cls, shard: torch.Tensor, gather: RowGather) -> Gathering:
        """Make a tensor of the gathered shape, with the shard and the active dispatch modes in it."""
        shape = list(shard.shape)
        shape[gather.dim] = gather.size
        made: Gathering = make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        made._shard, made._gather, made.group, made._whole = shard, gather, gather.group, {}
        made._version_of_shard = version_of(shard)
        made._modes, made._seen = (), made._whole
        if _watchers():
            made._modes, made._seen = tuple(map(ref, get_current_dispatch_mode_stack())), {}
        return made

    @property
    def is_as_given(self) -> bool:
        """Whether neither its values nor its grad_fn were changed, so that a gradient of it reaches the shard."""
        if not self.is_inference() and self._version:
            return False
        return not self.requires_grad or self.grad_fn.__class__ is _Gathered._backward_cls

    def linear(self, weight: torch.Tensor, bias: Maybe, parameter: torch.Tensor) -> torch.Tensor:
        """Return linear(all_gather(shard), weight, bias) of local tensors; the first call gathers. parameter: the
        DTensor of which the weight is this rank's shard."""
        dtype = self.dtype
        if is_autocast():
            dtype, weight, bias = autocast_dtype(self) or dtype, cast(weight), cast(bias)
        if torch.is_grad_enabled():
            y: torch.Tensor = _apply(_Multiplied, self, weight, bias, (dtype, parameter))
            return y
        return self.multiplied(weight, bias, dtype)

    def multiplied(self, weight: torch.Tensor, bias: Maybe, dtype: torch.dtype) -> torch.Tensor:
        """Return `linear` without autograd. dtype: of the factors."""
        ready = self._seen
        if _watchers() and not self._is_seen_made():
            ready, whole = self._whole, self.computed("a matmul under a mode, which did not see it prepared")
            with _without_modes():
                ready[dtype] = whole.to(dtype)
        if dtype not in ready and self.dtype in ready:
            ready[dtype] = ready[self.dtype].to(dtype)
        if dtype in ready:
            return linear(ready[dtype], weight, bias)
        if _would_be_inference(self):
            with torch.inference_mode(False), torch.no_grad():
                return self.multiplied(weight, bias, dtype)
        site(SITE).by_overweave += 1
        dim, group, size = self._gather.dim, self._gather.group, self._gather.uneven_size
        shard = self._unchanged().to(dtype)
        y, whole = all_gather_linear(shard, weight, bias, group, dim=dim, size=size, return_gathered=True)
        self._keep(whole)
        self._seen[dtype] = whole
        return y  # type: ignore[no-any-return]

    def computed(self, reader: str) -> torch.Tensor:
        """The gathered tensor."""
        if self.dtype in self._whole:
            return self._whole[self.dtype]
        if _would_be_inference(self):
            with torch.inference_mode(False), torch.no_grad():
                return self.computed(reader)
        site(SITE).by_torch[f"read by {reader}"] += 1
        with _without_modes():
            self._keep(gathered_by_c10d(self._unchanged(), self._gather))
        return self._whole[self.dtype]

    def _is_seen_made(self) -> bool:
        """Whether the dispatch modes are those of its creation, so that a rerun under them sees the same operations.

        A selective checkpoint reruns its segment, expects the same operations, and skips those whose results it saved.
        A segment's input may be gathered by the time of the rerun, and a tensor that another reader gathered may not
        be: so a matmul reuses only what earlier matmuls gathered.
        """
        return bool([made() for made in self._modes] == get_current_dispatch_mode_stack())

    def _keep(self, whole: torch.Tensor) -> None:
        self._whole[whole.dtype] = whole
        if whole.dtype == self.dtype and not self._modes:
            self._shard = None

    def _unchanged(self) -> torch.Tensor:
        """Return the shard. Raises InputError if it was changed in place."""
        assert self._shard is not None
        if version_of(self._shard) != self._version_of_shard:
            cure = "Change a copy, or read what PrepareGather prepared before: `x + 0`"
            raise InputError("gather the input of a module", "its shard was changed in place meanwhile", cure)
        return self._shard


def gather_lazily(shard: torch.Tensor, gather: RowGather) -> Gathering:
    """Return a lazy all_gather(shard, dim), differentiable in the shard."""
    if torch.is_grad_enabled() and shard.requires_grad:
        made: Gathering = _apply(_Gathered, shard, gather)
        return made
    return Gathering(shard, gather)


class _Gathered(torch.autograd.Function):
    """Lazy all_gather; the gradient of the shard is this rank's rows of the gathered tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, gather: RowGather) -> Any:
        ctx.gather = gather
        ctx.set_materialize_grads(False)
        return Gathering(shard.detach(), gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> Any:
        gradient = gradients[0]
        if gradient is None:
            return None, None
        if torch.is_grad_enabled():
            return _own_part(gradient, ctx.gather), None
        if isinstance(gradient, Summing) and gradient.is_unread:
            site(GRADIENT).by_overweave += 1
            return gradient.scattered(), None
        site(GRADIENT).by_torch["it was whole already"] += 1
        return ctx.gather.own(gradient).contiguous(), None


class _Multiplied(torch.autograd.Function):
    """linear(gathered, weight, bias). The gradient of the gathered tensor is a lazy sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Gathering, weight: torch.Tensor, bias: Maybe, how: tuple[torch.dtype, torch.Tensor]
    ) -> torch.Tensor:
        wanted, (dtype, ctx.parameter) = ctx.needs_input_grad, how
        ctx.gather, ctx.like = x._gather, (x.shape, x.dtype, x.device)
        ctx.set_materialize_grads(False)
        y = x.multiplied(weight, bias, dtype)
        whole = x if dtype == x.dtype else x._whole[dtype]
        ctx.save_for_backward(whole if wanted[1] else None, weight if wanted[0] else None)
        return y

    @staticmethod
    def backward(ctx: Any, *of_results: Maybe) -> Any:
        (whole, weight), of_y, wanted = ctx.saved_tensors, of_results[0], ctx.needs_input_grad
        if of_y is None:
            return None, None, None, None
        is_recorded = torch.is_grad_enabled()  # create_graph=True
        if is_recorded:
            whole = _of_all_ranks(whole, ctx.gather.group)
        if isinstance(whole, Gathering):
            whole = whole.computed("the gradient of a weight")
        of_x: Maybe = None
        if wanted[0] and (is_recorded or _may_step_early(ctx.parameter)):
            of_x = linear_all_reduce(of_y, weight.t(), group=ctx.gather.group).to(ctx.like[1])
        elif wanted[0]:
            of_x = Summing(ctx.like, ctx.gather, (WeightProduct(of_y, weight, ctx.parameter),))
        return of_x, *weight_gradients(of_y, whole, wanted[1:3]), None


def _of_all_ranks(whole: Maybe, group: str) -> Maybe:
    """A gathered tensor of which each rank's use gives a part of the gradient, for gradients of gradients."""
    if whole is None:
        return None
    if not isinstance(whole, Gathering):
        cure = "Leave out autocast, or create_graph=True"
        error = InputError("differentiate Colwise twice", "its input was gathered in the dtype of autocast", cure)
        raise refused(group, error)
    return replicated(exchange_in(group, "Colwise"), whole)


def _own_part(gradient: torch.Tensor, gather: RowGather) -> torch.Tensor:
    """This rank's rows of a gradient that all ranks have alike, with their history."""
    rows = own_rows(exchange_in(gather.group, "PrepareGather"), gradient.movedim(gather.dim, 0))
    return rows.movedim(0, gather.dim).contiguous()


def _may_step_early(parameter: torch.Tensor) -> bool:
    """Whether a hook of a parameter may step the optimizer before the lazy sum reads the weight.

    A computed weight, such as a parametrization's, may be a view of a parameter whose hooks are unknown here.
    """
    return parameter.grad_fn is not None or bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


def _without_modes() -> AbstractContextManager[Any]:
    """Disable dispatch modes: they must not see a result that is computed once and reused."""
    return disable_current_modes() if _watchers() else nullcontext()


def _would_be_inference(tensor: torch.Tensor) -> bool:
    """Whether a result would be an inference tensor, which later readers outside inference mode could not use."""
    return torch.is_inference_mode_enabled() and not tensor.is_inference()


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
