"""A tensor of the gathered shape that is gathered at its first matmul, once for all that read it.

Attention reads `hidden_states.shape` before it projects, and calls query, key and value apart. The first projection
gathers while it multiplies; the others multiply what was gathered. Backward, their gradients meet in one sum of
matmuls that is scattered while it is computed.

One convention holds for gradients: that of a gathered tensor is whole, and the same on every rank, as that of torch's
`Replicate()`. A matmul of overweave's styles sums its own over ranks, whatever stands before it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.functional import linear

from overweave.adapters.parallel.deferred import Deferred, version_of
from overweave.adapters.parallel.summing import Summing, WeightProduct
from overweave.adapters.report import site
from overweave.adapters.rows import RowGather, gathered_by_library
from overweave.compat.torch_names import (
    disable_current_modes,
    get_current_dispatch_mode_stack,
    len_torch_dispatch_stack,
    make_wrapper_subclass,
)
from overweave.errors import InputError
from overweave.functional import all_gather_linear, linear_all_reduce
from overweave.layers.precision import autocast_dtype, cast, is_autocast
from overweave.layers.replicated import differentiated_twice, gradients_of_weights

Maybe = torch.Tensor | None
SITE, GRADIENT = "PrepareGather", "PrepareGather, its gradient"
_watchers = len_torch_dispatch_stack  # how many modes see what is computed; no function of ours around it


class Gathering(Deferred):
    """all_gather(shard, dim), not gathered yet. A matmul of overweave's styles asks `linear`."""

    _shard: Maybe  # until it is gathered in its own dtype, or longer where a mode saw it made
    _version_of_shard: int
    _gather: RowGather
    group: str  # whose rows these are
    _whole: dict[torch.dtype, torch.Tensor]  # under autocast also in the dtype that matmuls read
    _modes: tuple[ReferenceType[Any], ...]  # of torch's dispatcher, which saw it made
    _seen: dict[torch.dtype, torch.Tensor]  # of _whole, what matmuls gathered: all of it where no mode saw it made

    @staticmethod
    def __new__(cls, shard: torch.Tensor, gather: RowGather) -> Gathering:
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
        """Whether nobody changed its values or its history: a gradient of it reaches the shard."""
        if not self.is_inference() and self._version:
            return False
        return not self.requires_grad or self.grad_fn.__class__ is _Gathered._backward_cls

    def linear(self, weight: torch.Tensor, bias: Maybe, parameter: torch.Tensor) -> torch.Tensor:
        """linear(all_gather(shard), weight, bias), of local tensors: the first such call gathers. parameter: of which
        the weight is this rank's part."""
        dtype = self.dtype
        if is_autocast():
            dtype, weight, bias = autocast_dtype(self) or dtype, cast(weight), cast(bias)
        if torch.is_grad_enabled():
            y: torch.Tensor = _apply(_Multiplied, self, weight, bias, (dtype, parameter))
            return y
        return self.multiplied(weight, bias, dtype)

    def multiplied(self, weight: torch.Tensor, bias: Maybe, dtype: torch.dtype) -> torch.Tensor:
        """As `linear`, undifferentiated. dtype: that of the factors."""
        ready = self._seen
        if _watchers() and not self._is_seen_made():
            ready, whole = self._whole, self.computed("a matmul under a mode, which did not see it prepared")
            with _unseen():
                ready[dtype] = whole.to(dtype)
        if dtype not in ready and self.dtype in ready:
            ready[dtype] = ready[self.dtype].to(dtype)
        if dtype in ready:
            return linear(ready[dtype], weight, bias)
        if _is_fleeting(self):
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
        if _is_fleeting(self):
            with torch.inference_mode(False), torch.no_grad():
                return self.computed(reader)
        site(SITE).by_torch[f"read by {reader}"] += 1
        with _unseen():
            self._keep(gathered_by_library(self._unchanged(), self._gather))
        return self._whole[self.dtype]

    def _is_seen_made(self) -> bool:
        """Whether each mode that sees it read has seen it made, too, and so sees the same at every repetition.

        A selective checkpoint runs its segment again, and wants the operations that it has seen before, of which it
        skips those whose results it holds. What a segment is given may be gathered then, and what other readers had
        gathered may not be: a matmul looks only at what earlier matmuls did.
        """
        return bool([made() for made in self._modes] == get_current_dispatch_mode_stack())

    def _keep(self, whole: torch.Tensor) -> None:
        self._whole[whole.dtype] = whole
        if whole.dtype == self.dtype and not self._modes:
            self._shard = None

    def _unchanged(self) -> torch.Tensor:
        assert self._shard is not None
        if version_of(self._shard) != self._version_of_shard:
            cure = "Change a copy, or read what PrepareGather prepared before: `x + 0`"
            raise InputError("gather the input of a module", "its shard was changed in place meanwhile", cure)
        return self._shard


def gathered_later(shard: torch.Tensor, gather: RowGather) -> Gathering:
    """all_gather(shard, dim) as a function of the shard, gathered when it is read."""
    if torch.is_grad_enabled() and shard.requires_grad:
        made: Gathering = _apply(_Gathered, shard, gather)
        return made
    return Gathering(shard, gather)


class _Gathered(torch.autograd.Function):
    """The gathered tensor as a function of the shard, whose gradient is this rank's rows of the gathered one's."""

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
            raise differentiated_twice("PrepareGather", ctx.gather.group)
        if isinstance(gradient, Summing) and gradient.is_unread:
            site(GRADIENT).by_overweave += 1
            return gradient.scattered(), None
        site(GRADIENT).by_torch["it was whole already"] += 1
        return ctx.gather.own(gradient).contiguous(), None


class _Multiplied(torch.autograd.Function):
    """linear(gathered, weight, bias). The gradient of the gathered tensor is a sum over ranks that waits to be read."""

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
        if torch.is_grad_enabled():
            raise differentiated_twice("Colwise", ctx.gather.group)
        if isinstance(whole, Gathering):
            whole = whole.computed("the gradient of a weight")
        of_x: Maybe = None
        if wanted[0] and _may_change(ctx.parameter):
            of_x = linear_all_reduce(of_y, weight.t(), group=ctx.gather.group).to(ctx.like[1])
        elif wanted[0]:
            of_x = Summing(ctx.like, ctx.gather, (WeightProduct(of_y, weight, ctx.parameter),))
        return of_x, *gradients_of_weights(of_y, whole, wanted[1:3]), None


def _may_change(parameter: torch.Tensor) -> bool:
    """Whether a hook sees the gradient of a parameter, and may step the optimizer, before the sum is scattered.

    A weight that is computed, by a parametrization, say, may be a view of one whose hooks are not seen here.
    """
    return parameter.grad_fn is not None or bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


def _unseen() -> AbstractContextManager[Any]:
    """Modes of torch's dispatcher see nothing of what is computed once, and kept."""
    return disable_current_modes() if _watchers() else nullcontext()


def _is_fleeting(tensor: torch.Tensor) -> bool:
    """Whether what is computed here would be an inference tensor, where others need to read it later."""
    return torch.is_inference_mode_enabled() and not tensor.is_inference()


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
