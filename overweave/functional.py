"""Linear layers whose collective runs beside the matmul, as `torch.nn.functional.linear` takes them: weights `[n, k]`.

    y = all_gather_linear(x, weight, bias, group, dim=1)            # [B, S/W, k], [n, k] -> [B, S, n]
    z = linear_reduce_scatter(h, weight, bias, group, dim=1)        # [B, S, k], [n, k] -> [B, S/W, n]
    z = linear_all_reduce(h, weight, bias, group)                   # [B, S, k], [n, k] -> [B, S, n]

All three are differentiable, run under torch.compile(fullgraph=True) and autocast, and take inputs of any rank and any
strides. Their weights may be DTensors, sharded as the layer says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, overload

import torch
from torch.autograd import forward_ad

from overweave.compat.torch_names import are_functorch_transforms_active, current_level
from overweave.errors import GroupError, InputError
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.operators.record import Operator
from overweave.memory.group import GroupLike
from overweave.ops.call.norm import RmsNorm
from overweave.ops.call.surroundings import is_read_by_compiler
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define
from overweave.ops.dispatch.main_grad import added_to_main_grad
from overweave.ops.dispatch.route import GroupRank, by_dispatcher, place_of, refused
from overweave.ops.dispatch.rows import gathered_rows, matrix_of, scattered_rows
from overweave.ops.dispatch.schema import results_named

for _record in (all_gather_matmul.OPERATOR, matmul_reduce_scatter.OPERATOR, matmul_all_reduce.OPERATOR):
    define(_record)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GATHER, _SCATTER, _REDUCE = all_gather_matmul.OPERATOR, matmul_reduce_scatter.OPERATOR, matmul_all_reduce.OPERATOR
Factors = torch.Tensor | Sequence[torch.Tensor]
Save = Literal["gathered", "shard", "columns"]


@overload
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    size: int | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    return_gathered: Literal[False] = False,
    save: Save = "gathered",
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> torch.Tensor: ...


@overload
def all_gather_linear(
    x: torch.Tensor,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    size: int | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    return_gathered: bool = False,
    save: Save = "gathered",
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> Any: ...


def all_gather_linear(
    x: torch.Tensor,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    size: int | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    return_gathered: bool = False,
    save: Save = "gathered",
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> Any:
    """y = linear(all_gather(x, dim), weight, bias): column-parallel, behind rows that ranks share out.

    Plain torch:  whole = torch.cat(x of all ranks, dim); y = activation(F.linear(whole, weight, bias)) + residual,
                  or y = F.linear(whole, weight) * activation(F.linear(whole, gate)) + residual
                  of several weights: ys = tuple(activation(F.linear(whole, each, its bias)) for each in weight)

    x: `[.., S/W, .., k]`, any dimension but the last gathered along `dim`. weight: `[n, k]`, this rank's rows of the
    whole weight, or a list of `[n_i, k]`, for which a tuple is returned and bias has the elements of all. Returns y
    `[.., S, .., n]`, contiguous, and the gathered input behind it if `return_gathered`. size: S, where W does not
    divide it: ranks hold what `torch.chunk(whole, W, dim)` deals. Where only dimensions of size 1 stand before `dim`,
    nothing is copied beside the gather; else y is, once.
    bias, activation, gate `[n, k]` and residual, of the shape of y: as in `ow.all_gather_matmul`.

    Gradients: that of x by `matmul_reduce_scatter`, those of the weights by local matmuls. save: what is kept for the
    latter: `gathered`, all of the gathered input; `shard`, x alone, gathered again by the library; `columns`, this
    rank's columns of the gathered input, as large as x, gathered again while it is multiplied. The gradient of a
    gathered input that was returned is taken as equal on all ranks. main_grad: weights' gradients are added to
    `weight.main_grad`. plan, backward_plan: of the forward, and of the gradient of x; None: chosen.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    layer = _layer(_GATHER, x, weight, group, (0, main_grad))
    rows = gathered_rows((layer.operator, layer.place), x, dim, size)
    gates = None if gate is None else _factor(layer, gate, "gate", (0, main_grad))
    # Where rows come in another order than y's, the residual is added behind.
    fused = None if residual is None or not rows.is_in_order else residual.reshape(-1, residual.shape[-1]).contiguous()
    given = {
        "x": rows.matrix, "w": layer.weights, "bias": _bias(layer, bias, 0), "activation": activation, "gate": gates,
        "residual": fused, "m": rows.m, "return_gathered": return_gathered, "plan": plan,
    }  # fmt: skip
    found = _computed(layer, given, {"save": save, "backward_plan": backward_plan})
    results = [rows.restored(each) for each in found]
    if residual is not None and fused is None:
        results[0] = results[0] + residual
    gathered = results.pop() if return_gathered else None
    y = results[0] if isinstance(weight, torch.Tensor) else tuple(results)
    return (y, gathered) if return_gathered else y


@overload
def linear_reduce_scatter(
    x: Factors,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: None = None,
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> torch.Tensor: ...
@overload
def linear_reduce_scatter(
    x: Factors,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    residual: torch.Tensor | None = None,
    norm: RmsNorm,
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def linear_reduce_scatter(
    x: Factors,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    dim: int = 0,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: RmsNorm | None = None,
    main_grad: bool = False,
    plan: str | None = None,
    backward_plan: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """y = reduce_scatter(linear(x, weight), dim) + bias: row-parallel, in front of rows that ranks share out.

    Plain torch:  partial = F.linear(x, weight); dist.all_reduce(partial)
                  y = activation(torch.chunk(partial, W, dim)[rank] + bias) + residual
                  with a norm:  z = torch.chunk(partial, W, dim)[rank] + residual
                                normed = F.rms_norm(z, (n,), norm.weight, norm.eps)

    x: `[.., S, .., k]`, k this rank's part of the reduced axis. weight: `[n, k]`, this rank's columns of the whole
    weight. Lists of both, of one length: their products are summed before the sum travels. Returns y `[.., S/W, ..,
    n]`, contiguous, or with a norm (normed, z); where W does not divide S, what `torch.chunk` deals. Where only
    dimensions of size 1 stand before `dim`, nothing is copied; else x is, once.
    bias `[n]`, the same on every rank, and residual, of the shape of y: done once to the sum.

    Gradients: that of x by `all_gather_matmul`, those of the weights by local matmuls; that of the bias is of all rows,
    equal on all ranks, and so is that of the norm's weight, which is summed over them. main_grad, plan, backward_plan:
    as in `all_gather_linear`.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    layer = _layer(_SCATTER, x, weight, group, (1, main_grad))
    parts = [scattered_rows((layer.operator, layer.place), each, dim) for each in xs]
    rows = parts[0]
    given = {
        "x": [part.matrix for part in parts] if len(parts) > 1 else rows.matrix, "w": layer.weights,
        "bias": _bias(layer, bias, None), "activation": activation,
        "residual": None if residual is None else rows.arranged(residual),
        "norm": _norm(norm, rows.arranged), "plan": plan,
    }  # fmt: skip
    results = [rows.restored(each) for each in _computed(layer, given, {"backward_plan": backward_plan})]
    return results[0] if norm is None else tuple(results)


def linear_all_reduce(
    x: Factors,
    weight: Factors,
    bias: torch.Tensor | None = None,
    group: GroupLike = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    norm: RmsNorm | None = None,
    main_grad: bool = False,
    plan: str | None = None,
) -> Any:
    """y = all_reduce(linear(x, weight)) + bias: row-parallel, the whole result on every rank.

    Plain torch:  partial = F.linear(x, weight); dist.all_reduce(partial); y = activation(partial + bias) + residual
                  with a norm:  z = partial + residual; normed = F.rms_norm(z, (n,), norm.weight, norm.eps)

    x: `[.., k]`, k this rank's part of the reduced axis. weight: `[n, k]`, this rank's columns of the whole weight.
    Lists of both, of one length: their products are summed before the sum travels. Returns y `[.., n]`, the same bits
    on every rank; with a norm (normed, z). bias `[n]` and residual `[.., n]`: the same on every rank, done once to the
    sum.

    Gradients are taken as equal on all ranks, as y is, so that no rank waits for another: those of x and of the weight
    are local matmuls. main_grad, plan: as in `all_gather_linear`.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    layer = _layer(_REDUCE, x, weight, group, (1, main_grad))
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    shape, parts = (*xs[0].shape[:-1], layer.columns), [matrix_of(each) for each in xs]
    given = {
        "x": parts if len(parts) > 1 else parts[0], "w": layer.weights,
        "bias": _bias(layer, bias, None), "activation": activation,
        "residual": None if residual is None else matrix_of(residual), "norm": _norm(norm, matrix_of), "plan": plan,
    }  # fmt: skip
    results = [each.view(shape) for each in _computed(layer, given, {})]
    return results[0] if norm is None else tuple(results)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active, of which an operator may know nothing."""
    return bool(are_functorch_transforms_active()) or current_level() >= 0


def check_untransformed(name: str, group: GroupLike, factors: Iterable[Any]) -> None:
    """Raises InputError, on every rank, within `vmap` and its like, and for tensors that carry a tangent: an operator
    runs below both, and would drop them."""
    if are_functorch_transforms_active():
        found = "a transform of torch.func is active"
    elif any(_tangent(one) is not None for each in factors for one in (each if isinstance(each, list) else [each])):
        found = "a factor carries a tangent of forward-mode AD"
    else:
        return
    cure = "Differentiate by backward(), or call it outside of the transform"
    raise refused(group, InputError(f"{name} as torch.func and forward-mode AD ask", found, cure))


def _tangent(factor: Any) -> torch.Tensor | None:
    is_dual = isinstance(factor, torch.Tensor) and factor.is_floating_point()
    return forward_ad.unpack_dual(factor).tangent if is_dual else None


class _Layer(NamedTuple):
    """A layer's operator, this rank's place in its group, and its weights as the operator takes them: `[k, n]`, or a
    list."""

    operator: Operator
    place: GroupRank
    group: GroupLike
    weights: Any = None
    columns: int = 0


def _computed(layer: _Layer, given: dict[str, Any], of_gradients: dict[str, Any]) -> list[torch.Tensor]:
    """The results in order: products, rows before a norm, what was gathered. of_gradients: keywords of these."""
    if not is_read_by_compiler() and is_transformed():
        check_untransformed(layer.operator.name, layer.group, given.values())
    if torch.is_grad_enabled():
        return list(by_dispatcher(layer.operator, layer.place.name, given | of_gradients).values())
    found = call(layer.operator, layer.group, given)
    return [found[name] for name in results_named(given)]


def _layer(operator: Operator, x: Any, weight: Factors, group: GroupLike, how: tuple[int, bool]) -> _Layer:
    """x: one for all weights, or a list of one for each. how: along which dimension DTensor weights are sharded, and
    whether their gradients go to `main_grad`."""
    if _is_plain(weight, x) and not how[1]:
        return _Layer(operator, place_of(group), group, weight.t(), weight.shape[0])
    listed = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    xs = list(x) if isinstance(x, (list, tuple)) else [x] * len(listed)
    if any(each.__class__ not in _PLAIN for each in listed):
        group = _group(operator, listed, group)
    layer = _Layer(operator, place_of(group), group)
    for each in xs:
        if not isinstance(each, torch.Tensor) or each.dim() < 1 or _is_dtensor(each):
            found = f"got {list(each.shape)}" if isinstance(each, torch.Tensor) else f"got {type(each).__name__}"
            raise _refusal(layer, "x [.., k]", found, "Pass a local torch.Tensor: `.to_local()` of a DTensor")
    if not xs or not listed:
        raise _refusal(layer, "x and weight", f"got {len(xs)} of x, {len(listed)} weights", "Pass one of each, or more")
    factors = [_factor(layer, each, "weight", how) for each in listed]
    for one, each in zip(xs, factors, strict=False):
        if each.shape[0] != one.shape[-1]:
            found = f"x is {list(one.shape)}, weight is {[each.shape[1], each.shape[0]]}"
            raise _refusal(
                layer, "x [.., k], weight [n, k]", found, "Pass the weight as torch.nn.functional.linear does"
            )
    if len({each.is_contiguous() for each in factors}) > 1:
        factors = [each.t().contiguous().t() for each in factors]
    return layer._replace(weights=factors if len(listed) > 1 else factors[0], columns=factors[0].shape[1])


def _is_plain(weight: Any, x: Any) -> TypeGuard[torch.Tensor]:
    """Whether nothing is to be said of a layer, as of most: local tensors that fit each other."""
    if x.__class__ not in _PLAIN or weight.__class__ not in _PLAIN or weight.dim() != 2 or not x.dim():
        return False
    return bool(weight.is_contiguous()) and x.shape[-1] == weight.shape[1]


def _group(operator: Operator, weights: list[Any], group: GroupLike) -> GroupLike:
    """The group that was passed, or that of the weights' mesh."""
    meshes = [each.device_mesh for each in weights if _is_dtensor(each)]
    if not meshes:
        return group
    places = [place_of(each) for each in ([*meshes] if group is None else [group, *meshes])]
    other = next((each for each in places if each.ranks != places[0].ranks), None)
    if other is not None:
        found = f"ranks {[*places[0].ranks]} of {places[0].name!r}, and {[*other.ranks]} of {other.name!r}"[:200]
        cure = "Leave out group=, or pass the weights'"
        raise refused(group, GroupError(f"{operator.name}: one group for a layer and its weights", found, cure))
    mesh: GroupLike = meshes[0]
    return mesh


def _factor(layer: _Layer, weight: Any, called: str, how: tuple[int, bool]) -> Any:
    """A weight `[n, k]` as the operator takes it."""
    along, has_main_grad = how
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        found = f"got {list(weight.shape)}" if isinstance(weight, torch.Tensor) else f"got {type(weight).__name__}"
        raise _refusal(layer, f"{called} [n, k]", found, "Pass a matrix")
    local = _local(layer, weight, called, along)
    if has_main_grad:
        try:
            local = added_to_main_grad(layer.operator.name, local)
        except InputError as error:
            raise refused(layer.place.name, error) from None
    return (local if local.is_contiguous() or local.t().is_contiguous() else local.contiguous()).t()


def _norm(norm: RmsNorm | None, as_rows: Callable[[torch.Tensor], torch.Tensor]) -> RmsNorm | None:
    """A norm as the operator takes it. as_rows: what lays a tensor of the shape of the result as its rows."""
    if norm is None:
        return None
    residual = None if norm.residual is None else as_rows(norm.residual)
    return norm._replace(weight=norm.weight.contiguous(), residual=residual)


def _bias(layer: _Layer, bias: Any, along: int | None) -> torch.Tensor | None:
    return None if bias is None else _local(layer, bias, "bias", along).contiguous()


def _local(layer: _Layer, tensor: Any, called: str, along: int | None) -> Any:
    """The local part of a DTensor that is sharded `along` a dimension, or replicated; any other tensor as it is."""
    if not _is_dtensor(tensor):
        return tensor
    (placement,) = tensor.placements
    if not (placement.is_shard(along) if along is not None else placement.is_replicate()):
        wanted = f"Shard({along})" if along is not None else "Replicate()"
        raise _refusal(layer, f"{called}, {wanted}", f"its placement is {placement}", "Distribute it so")
    return tensor.to_local()


def _is_dtensor(tensor: Any) -> bool:
    return tensor.__class__ not in _PLAIN and hasattr(tensor, "device_mesh")


def _refusal(layer: _Layer, asked: str, found: str, cure: str) -> Exception:
    return refused(layer.place.name, InputError(f"{layer.operator.name}: {asked}", found, cure))
