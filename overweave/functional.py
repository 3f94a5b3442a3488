"""Linear layers whose collective overlaps with the matmul. Weights are `[n, k]`, as in `torch.nn.functional.linear`.

    y = all_gather_linear(x, weight, bias, group, dim=1)            # [B, S/W, k], [n, k] -> [B, S, n]
    z = linear_reduce_scatter(h, weight, bias, group, dim=1)        # [B, S, k], [n, k] -> [B, S/W, n]
    z = linear_all_reduce(h, weight, bias, group)                   # [B, S, k], [n, k] -> [B, S, n]

All three are differentiable, run under torch.compile(fullgraph=True) and autocast, and take inputs of any rank and any
strides. Their weights may be DTensors: Shard(0) of the column-parallel layer, Shard(1) of the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard, Unpack, overload

import torch
from torch.autograd import forward_ad

from overweave.compat.torch_names import are_functorch_transforms_active, current_level
from overweave.errors import GroupError, InputError
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.operators.forms import NORM
from overweave.ir.operators.record import Operator
from overweave.memory.group import GroupLike
from overweave.ops.call.norm import RmsNorm, with_norm
from overweave.ops.call.surroundings import is_read_by_compiler
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.library import define
from overweave.ops.dispatch.main_grad import added_to_main_grad
from overweave.ops.dispatch.route import GroupRank, by_dispatcher, group_rank_of, refused
from overweave.ops.dispatch.rows import gathered_rows, matrix_of, scattered_rows
from overweave.ops.dispatch.schema import results_named
from overweave.ops.keywords import GatheredLinear, NormedLinear, Save, ScatteredLinear

for _record in (all_gather_matmul.OPERATOR, matmul_reduce_scatter.OPERATOR, matmul_all_reduce.OPERATOR):
    define(_record)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GATHER, _SCATTER, _REDUCE = all_gather_matmul.OPERATOR, matmul_reduce_scatter.OPERATOR, matmul_all_reduce.OPERATOR
Matrices = torch.Tensor | Sequence[torch.Tensor]  # one operand, or a list


@overload
def all_gather_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, group: GroupLike = None, *,
    return_gathered: Literal[False] = False, **keywords: Unpack[GatheredLinear],
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_linear(
    x: torch.Tensor, weight: Matrices, bias: torch.Tensor | None = None, group: GroupLike = None, *,
    return_gathered: bool = False, **keywords: Unpack[GatheredLinear],
) -> Any: ...  # fmt: skip
def all_gather_linear(
    x: torch.Tensor,
    weight: Matrices,
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
    """y = linear(all_gather(x, dim), weight, bias): column-parallel, with rows sharded over ranks.

    Plain torch:  whole = torch.cat(x of all ranks, dim); y = activation(F.linear(whole, weight, bias)) + residual,
                  or y = F.linear(whole, weight) * activation(F.linear(whole, gate)) + residual
                  of several weights: ys = tuple(activation(F.linear(whole, each, its bias)) for each in weight)

    x: `[.., S/W, .., k]`; `dim` is any dimension but the last. weight: `[n, k]`, this rank's rows of the
    whole weight, or a list of `[n_i, k]`, which returns a tuple and takes one concatenated bias. Returns y
    `[.., S, .., n]`, contiguous, and also the gathered input if `return_gathered`. size: S, if W does not divide it:
    ranks hold the parts of `torch.chunk(whole, W, dim)`. y is copied once, unless all dimensions before `dim` have
    size 1.
    bias, activation, gate `[n, k]` and residual, of the shape of y: as in `ow.all_gather_matmul`.

    Gradients: that of x by `matmul_reduce_scatter`, those of the weights by local matmuls. save: the saved tensor
    of the latter: `gathered`, the gathered input; `shard`, x alone, gathered again by torch.distributed; `columns`,
    this rank's columns of the gathered input, as large as x, gathered again while it is multiplied. The gradient of a
    returned gathered input must be equal on all ranks. main_grad: weights' gradients are added to
    `weight.main_grad`. plan, backward_plan: of the forward, and of the gradient of x; None: the tuner chooses.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    layer = _prepare_layer(_GATHER, x, weight, group, (0, main_grad))
    rows = gathered_rows((layer.operator, layer.group_rank), x, dim, size)
    gate_operand = None if gate is None else _weight_operand(layer, gate, "gate", (0, main_grad))
    if residual is not None:
        _check_shapes(layer, rows.shape, [residual], [x])
        if not isinstance(weight, torch.Tensor):
            raise _layer_error(layer, "residual", "it is beside several weights", "Add it to the result that it is for")
    # The operator adds the residual only if its rows have the order of y.
    fused = None if residual is None or not rows.is_in_order else residual.reshape(-1, residual.shape[-1]).contiguous()
    operands = {
        "x": rows.matrix, "w": layer.weights, "bias": _bias_operand(layer, bias, 0), "activation": activation,
        "gate": gate_operand, "residual": fused, "m": rows.m, "return_gathered": return_gathered, "plan": plan,
    }  # fmt: skip
    outputs = _run_operator(layer, operands, {"save": save, "backward_plan": backward_plan})
    results = [rows.restored(each) for each in outputs]
    if residual is not None and fused is None:
        results[0] = results[0] + residual.to(results[0].dtype)
    gathered = results.pop() if return_gathered else None
    y = results[0] if isinstance(weight, torch.Tensor) else tuple(results)
    return (y, gathered) if return_gathered else y


@overload
def linear_reduce_scatter(
    x: Matrices, weight: Matrices, bias: torch.Tensor | None = None, group: GroupLike = None, *, norm: None = None,
    **keywords: Unpack[ScatteredLinear],
) -> torch.Tensor: ...  # fmt: skip
@overload
def linear_reduce_scatter(
    x: Matrices, weight: Matrices, bias: torch.Tensor | None = None, group: GroupLike = None, *, norm: RmsNorm,
    **keywords: Unpack[NormedLinear],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def linear_reduce_scatter(
    x: Matrices,
    weight: Matrices,
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
    """y = reduce_scatter(linear(x, weight), dim) + bias: row-parallel, with rows sharded over ranks.

    Plain torch:  partial = F.linear(x, weight); dist.all_reduce(partial)
                  y = activation(torch.chunk(partial, W, dim)[rank] + bias) + residual
                  with a norm:  z = torch.chunk(partial, W, dim)[rank] + residual
                                normed = F.rms_norm(z, (n,), norm.weight, norm.eps)

    x: `[.., S, .., k]`, k this rank's part of the reduced axis. weight: `[n, k]`, this rank's columns of the whole
    weight. Lists of both, of one length: their products are summed before the collective. Returns y `[.., S/W, ..,
    n]`, contiguous, or with a norm (normed, z); if W does not divide S, the parts of `torch.chunk`. x is copied once,
    unless all dimensions before `dim` have size 1.
    bias `[n]`, the same on every rank, and residual, of the shape of y: added once, to the sum.

    Gradients: that of x by `all_gather_matmul`, those of the weights by local matmuls; those of the bias and of the
    norm's weight are summed over the rows of all ranks, equal on all ranks. main_grad, plan, backward_plan:
    as in `all_gather_linear`.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    layer = _prepare_layer(_SCATTER, x, weight, group, (1, main_grad))
    parts = [scattered_rows((layer.operator, layer.group_rank), each, dim) for each in xs]
    rows = parts[0]
    if residual is not None or norm is not None or len(xs) > 1:
        _check_shapes(layer, rows.shape, [residual, None if norm is None else norm.residual], xs)
    operands = {
        "x": [part.matrix for part in parts] if len(parts) > 1 else rows.matrix, "w": layer.weights,
        "bias": _bias_operand(layer, bias, None), "activation": activation,
        "residual": None if residual is None else rows.arranged(residual),
        "norm": _norm_operand(norm, rows.arranged), "plan": plan,
    }  # fmt: skip
    results = [rows.restored(each) for each in _run_operator(layer, operands, {"backward_plan": backward_plan})]
    return results[0] if norm is None else tuple(results)


def linear_all_reduce(
    x: Matrices,
    weight: Matrices,
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
    Lists of both, of one length: their products are summed before the collective. Returns y `[.., n]`, the same bits
    on every rank; with a norm (normed, z). bias `[n]` and residual `[.., n]`: the same on every rank, added once,
    to the sum.

    The gradient of y must be equal on all ranks, as y is; those of x and of the weight are local matmuls, so no rank
    waits for another. main_grad, plan: as in `all_gather_linear`.

    Raises InputError or GroupError for arguments it cannot take, on every rank, and what the operator raises.
    """
    layer = _prepare_layer(_REDUCE, x, weight, group, (1, main_grad))
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    if residual is not None or norm is not None or len(xs) > 1:
        _check_shapes(layer, xs[0].shape[:-1], [residual, None if norm is None else norm.residual], xs)
    shape, parts = (*xs[0].shape[:-1], layer.columns), [matrix_of(each) for each in xs]
    operands = {
        "x": parts if len(parts) > 1 else parts[0], "w": layer.weights,
        "bias": _bias_operand(layer, bias, None), "activation": activation,
        "residual": None if residual is None else matrix_of(residual),
        "norm": _norm_operand(norm, matrix_of), "plan": plan,
    }  # fmt: skip
    results = [each.view(shape) for each in _run_operator(layer, operands, {})]
    return results[0] if norm is None else tuple(results)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active, which operators do not support."""
    return bool(are_functorch_transforms_active()) or current_level() >= 0


def check_untransformed(name: str, group: GroupLike, tensors: Iterable[Any]) -> None:
    """Raise InputError, on every rank, inside a torch.func transform such as `vmap`, and for tensors with a tangent:
    operators run below both, and would silently drop them."""
    if are_functorch_transforms_active():
        found = "a transform of torch.func is active"
    elif any(_tangent_of(one) is not None for each in tensors for one in (each if isinstance(each, list) else [each])):
        found = "an operand carries a tangent of forward-mode AD"
    else:
        return
    cure = "Differentiate by backward(), or call it outside of the transform"
    raise refused(group, InputError(f"{name} as torch.func and forward-mode AD ask", found, cure))


def _tangent_of(tensor: Any) -> torch.Tensor | None:
    """Return the tangent of forward-mode AD, or None."""
    is_dual = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return forward_ad.unpack_dual(tensor).tangent if is_dual else None


class _Layer(NamedTuple):
    """A layer's operator, group and weights. weights: as the operator takes them, `[k, n]` or a list. columns: n."""

    operator: Operator
    group_rank: GroupRank
    group: GroupLike
    weights: Any = None
    columns: int = 0


def _run_operator(layer: _Layer, operands: dict[str, Any], backward_options: dict[str, Any]) -> list[torch.Tensor]:
    """Run the operator, through torch's dispatcher if gradients are enabled.

    backward_options: keywords that only the backward pass reads. Returns the results in order: products, z of a norm,
    the gathered x. Raises what the operator raises.
    """
    if operands.get(NORM) is not None:
        operands = with_norm(operands)
    if not is_read_by_compiler() and is_transformed():
        check_untransformed(layer.operator.name, layer.group, operands.values())
    if torch.is_grad_enabled():
        return list(by_dispatcher(layer.operator, layer.group_rank.name, operands | backward_options).values())
    found = call(layer.operator, layer.group, operands)
    return [found[name] for name in results_named(operands)]


def _prepare_layer(
    operator: Operator, x: Any, weight: Matrices, group: GroupLike, shard_and_grad: tuple[int, bool]
) -> _Layer:
    """Check x and weights, and return the layer. x: one for all weights, or a list with one for each.

    shard_and_grad: (the dimension along which DTensor weights must be sharded, whether gradients go to `main_grad`).
    Raises InputError or GroupError, on every rank.
    """
    if _is_plain(weight, x) and not shard_and_grad[1]:
        return _Layer(operator, group_rank_of(group), group, weight.t(), weight.shape[0])
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    xs = list(x) if isinstance(x, (list, tuple)) else [x] * len(weights)
    if any(each.__class__ not in _PLAIN for each in weights):
        group = _group_of_weights(operator, weights, group)
    layer = _Layer(operator, group_rank_of(group), group)
    for each in xs:
        if not isinstance(each, torch.Tensor) or each.dim() < 1 or _is_dtensor(each):
            found = f"got {list(each.shape)}" if isinstance(each, torch.Tensor) else f"got {type(each).__name__}"
            raise _layer_error(layer, "x [.., k]", found, "Pass a local torch.Tensor: `.to_local()` of a DTensor")
    if not xs or not weights:
        raise _layer_error(
            layer, "x and weight", f"got {len(xs)} of x, {len(weights)} weights", "Pass one of each, or more"
        )
    operands = [_weight_operand(layer, each, "weight", shard_and_grad) for each in weights]
    for one, each in zip(xs, operands, strict=False):
        if each.shape[0] != one.shape[-1]:
            found = f"x is {list(one.shape)}, weight is {[each.shape[1], each.shape[0]]}"
            raise _layer_error(
                layer, "x [.., k], weight [n, k]", found, "Pass the weight as torch.nn.functional.linear does"
            )
    if len({each.is_contiguous() for each in operands}) > 1:
        operands = [each.t().contiguous().t() for each in operands]
    return layer._replace(weights=operands if len(weights) > 1 else operands[0], columns=operands[0].shape[1])


def _check_shapes(layer: _Layer, rows: tuple[int, ...], added: list[Any], xs: list[torch.Tensor]) -> None:
    """Compare what is flattened to matrices: a residual must have the shape of y, and all x have the same rows. rows:
    the dimensions of y before its last. A compiler sees the sizes of matrices alone. Raises InputError."""
    if is_read_by_compiler():
        return
    for residual in added:
        is_tensor = isinstance(residual, torch.Tensor)
        if residual is not None and not (is_tensor and tuple(residual.shape) == (*rows, layer.columns)):
            found = f"got {list(residual.shape) if is_tensor else type(residual).__name__}"
            raise _layer_error(layer, f"residual {[*rows, layer.columns]}", found, "Pass it in the shape of the result")
    for each in xs[1:]:
        if each.shape[:-1] != xs[0].shape[:-1]:
            found = f"got {list(each.shape)} beside {list(xs[0].shape)}"
            raise _layer_error(
                layer, "x of the same rows in all products", found, "Pass x of one shape but for columns"
            )


def _is_plain(weight: Any, x: Any) -> TypeGuard[torch.Tensor]:
    """Whether x and weight are plain local tensors whose shapes match, as is usual: no more checks are needed."""
    if x.__class__ not in _PLAIN or weight.__class__ not in _PLAIN or weight.dim() != 2 or not x.dim():
        return False
    return bool(weight.is_contiguous()) and x.shape[-1] == weight.shape[1]


def _group_of_weights(operator: Operator, weights: list[Any], group: GroupLike) -> GroupLike:
    """Return the group that was passed, or that of the weights' mesh. Raises GroupError if they differ."""
    meshes = [weight.device_mesh for weight in weights if _is_dtensor(weight)]
    if not meshes:
        return group
    groups = [group_rank_of(weight) for weight in ([*meshes] if group is None else [group, *meshes])]
    different = next((weight for weight in groups if weight.ranks != groups[0].ranks), None)
    if different is not None:
        found = f"ranks {[*groups[0].ranks]} of {groups[0].name!r}, and {[*different.ranks]} of {different.name!r}"[
            :200
        ]
        cure = "Leave out group=, or pass the weights'"
        raise refused(group, GroupError(f"{operator.name}: one group for a layer and its weights", found, cure))
    mesh: GroupLike = meshes[0]
    return mesh


def _weight_operand(layer: _Layer, weight: Any, name: str, shard_and_grad: tuple[int, bool]) -> Any:
    """Return a weight `[n, k]` as the operator's `[k, n]`, dense. shard_and_grad: see `_prepare_layer`."""
    shard_dim, has_main_grad = shard_and_grad
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        found = f"got {list(weight.shape)}" if isinstance(weight, torch.Tensor) else f"got {type(weight).__name__}"
        raise _layer_error(layer, f"{name} [n, k]", found, "Pass a matrix")
    shard = _local_shard(layer, weight, name, shard_dim)
    if has_main_grad:
        try:
            shard = added_to_main_grad(layer.operator.name, shard)
        except InputError as error:
            raise refused(layer.group_rank.name, error) from None
    return (shard if shard.is_contiguous() or shard.t().is_contiguous() else shard.contiguous()).t()


def _norm_operand(norm: RmsNorm | None, as_rows: Callable[[torch.Tensor], torch.Tensor]) -> RmsNorm | None:
    """Return a norm whose residual is a matrix. as_rows: reshapes a tensor of the result's shape to the operator's."""
    if norm is None:
        return None
    residual = None if norm.residual is None else as_rows(norm.residual)
    return norm._replace(weight=norm.weight.contiguous(), residual=residual)


def _bias_operand(layer: _Layer, bias: Any, shard_dim: int | None) -> torch.Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, torch.Tensor):
        raise _layer_error(layer, "bias [n]", f"got {type(bias).__name__}", "Pass a torch.Tensor")
    shard: torch.Tensor = _local_shard(layer, bias, "bias", shard_dim).contiguous()
    return shard


def _local_shard(layer: _Layer, tensor: Any, name: str, shard_dim: int | None) -> Any:
    """Return the local shard of a DTensor, and any other tensor as it is.

    shard_dim: the placement must be Shard(shard_dim); Replicate() if None. Raises InputError, on every rank.
    """
    if not _is_dtensor(tensor):
        return tensor
    mesh = tensor.device_mesh
    if mesh.ndim != 1 or (mesh is not layer.group and group_rank_of(mesh).ranks != layer.group_rank.ranks):
        asked, found = f"{name} on the ranks of {layer.group_rank.name!r}", f"it lies on {mesh}"[:100]
        raise _layer_error(layer, asked, found, "Distribute it over the layer's group, or pass its local shard")
    (placement,) = tensor.placements
    if not (placement.is_shard(shard_dim) if shard_dim is not None else placement.is_replicate()):
        required = f"Shard({shard_dim})" if shard_dim is not None else "Replicate()"
        raise _layer_error(layer, f"{name}, {required}", f"its placement is {placement}", "Distribute it so")
    return tensor.to_local()


def _is_dtensor(tensor: Any) -> bool:
    return tensor.__class__ not in _PLAIN and hasattr(tensor, "device_mesh")


def _layer_error(layer: _Layer, asked: str, found: str, cure: str) -> Exception:
    """Return an InputError that every rank raises."""
    return refused(layer.group_rank.name, InputError(f"{layer.operator.name}: {asked}", found, cure))
