"""What the operators accept: one typed error, with the cure, for everything else, before anything is launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from types import NoneType
from typing import Any, get_args

import torch
from torch.autograd import forward_ad

from overweave.compat.torch_names import current_level
from overweave.errors import InputError
from overweave.ir.counts import COUNTS
from overweave.ir.dtype import Dtype
from overweave.ir.epilogue import Applied, Epilogue, Norm, applied, told_apart
from overweave.ir.operators.forms import (
    GATE,
    NORM,
    NORM_EPS,
    NORM_WEIGHT,
    REGISTERED,
    RESIDUAL,
    SCALE_W,
    SCALE_X,
    Activation,
    Scaling,
    input_of,
)
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import W_REST, X_REST, indexed_name
from overweave.ir.problem import LONGEST_LIST, Problem
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.ops.call.counts import RowCounts
from overweave.ops.call.norm import RmsNorm
from overweave.schedules.catalog.forms import check_forms
from overweave.tuner.space.shapes import FP8_STEP, unaligned
from overweave.tuner.space.target import under_settings

CallArguments = dict[str, Any]  # what a caller passed beside the group, by name: `x`, `w`, `w.1`, ..., and keywords
WEIGHTS = tuple(indexed_name("w", index) for index in range(LONGEST_LIST))
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
FP8 = torch.float8_e4m3fn
TAKEN = (*DTYPES, FP8)  # by the operators
_KINDS: dict[str, tuple[type, ...]] = {
    "m": (int, NoneType),
    "return_gathered": (bool,),
    "plan": (str, NoneType),
    "activation": (str, NoneType),
    "out_dtype": (torch.dtype, NoneType),
    NORM: (RmsNorm, NoneType),
    "norm_eps": (float, int),
    COUNTS: (RowCounts, NoneType),
    "most": (int, NoneType),
    "tokens": (NoneType,),  # rows of x stand in their order by now
}


def name_of(dtype: torch.dtype) -> Dtype:
    """As plans call it."""
    return str(dtype).removeprefix("torch.")  # type: ignore[return-value]


def problem_of_call(
    operator: Operator, group: Group, given: CallArguments, tensors: dict[str, torch.Tensor]
) -> Problem:
    """What a call asks of its operator. tensors: all of them, by the names under which plans know them.

    Raises InputError for what the operator does not take.
    """
    check_kinds(operator, given)
    name, x, weights = operator.name, tensors["x"], weights_of(given)
    is_transposed = check_operands(name, x, *weights, shard_of=group if operator.gathers_weight else None)
    columns, norm = tuple(w.shape[1] for w in weights), _norm(name, given)
    more, rows = told_apart(added_by(operator, given))
    words = {word for word, each in given.items() if each is not None} - ({RESIDUAL} if norm else set())
    activation, scaling = activation_of(name, given.get("activation")), _scaling(name, x, weights, given)
    epilogue = Epilogue.of(words, activation=activation, scaling=scaling, more=more)
    problem = Problem(
        operator=name,
        m=_rows(operator, x, group, given),
        n=sum(columns),
        k=x.shape[1] + (tensors[X_REST].shape[1] if X_REST in tensors else 0),
        world_size=group.world_size,
        dtype=name_of(x.dtype),
        b_is_transposed=is_transposed,
        returns_gathered=given.get("return_gathered", False),
        epilogue=epilogue,
        norm=norm,
        columns=columns if len(columns) > 1 else (),
        out_dtype=name_of(given.get("out_dtype") or torch.bfloat16) if x.dtype == FP8 else None,
        counted=given.get(COUNTS) is not None,
        rows=rows,
    )
    check_forms(name, problem)
    _check_beside(problem, group.rank, tensors)
    return under_settings(problem)


def with_weights(given: CallArguments) -> CallArguments:
    """What was passed, with each weight of a list by its name; too many as they were."""
    w = given["w"]
    return {**given, **dict(zip(WEIGHTS, w, strict=False))} if len(w) <= LONGEST_LIST else given


def weights_of(given: CallArguments) -> list[Any]:
    """What the caller passed as `w`, one by one."""
    return [given[name] for name in WEIGHTS if name in given]


def check_kinds(operator: Operator, given: CallArguments) -> None:
    """Keywords that the operator has, of the types that it declares, and strided tensors. Raises InputError."""
    name, weights = operator.name, weights_of(given)
    keywords = {keyword: value for keyword, value in given.items() if keyword not in ("x", X_REST, W_REST, *WEIGHTS)}
    words = [word for form in operator.forms.allowed for word in form.words]
    for keyword in keywords:
        if keyword not in operator.keywords and keyword not in words:
            raise _unknown(operator, keyword)
    if operator.forms.several_weights and isinstance(given["w"], (list, tuple)):  # too few or too many
        cure = f"Pass a weight, or a list of 1 to {LONGEST_LIST}"
        raise InputError(f"{name}: w", f"got {len(given['w'])} weights", cure)
    for called, tensor in (("x", given["x"]), *_named(weights)):
        check_plain(f"{name}: {called}", tensor)
    numbers = {name: (float, int, NoneType) for form in operator.forms.allowed for name in form.numbers}
    for keyword, value in keywords.items():
        kinds = (_KINDS | numbers).get(keyword, (torch.Tensor, NoneType))
        is_unasked_bool = isinstance(value, bool) and bool not in kinds  # to Python a bool is an int
        if is_unasked_bool or not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "None")
            raise InputError(f"{name}: {keyword}", f"got {type(value).__name__}", f"Pass {wanted}")
        if isinstance(value, torch.Tensor):
            check_plain(f"{name}: {keyword}", value)
        if isinstance(value, RmsNorm):  # as `with_norm` leaves it
            check_plain(f"{name}: {NORM_WEIGHT}", value.weight)
            raise InputError(f"{name}: residual", "the norm has one, too", "Pass one of the two")


def _unknown(operator: Operator, keyword: str) -> InputError:
    """A keyword that an operator has not, with those that it has, and the operators that have it."""
    others = [name for name, record in OPERATORS.items() if keyword in record.keywords]
    cure = f"It takes {', '.join(f'{each}=' for each in operator.keywords)}"
    cure += f"; {keyword}= is taken by {', '.join(others)}" if others else ""
    return InputError(f"{operator.name}: {keyword[:40]}=", "it takes no such keyword", cure)


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
    check_primal(asked, tensor)


def check_primal(asked: str, tensor: torch.Tensor) -> None:
    """A tensor that forward-mode AD gave no tangent: a result would drop it. Raises InputError."""
    if torch.compiler.is_compiling() or current_level() < 0:
        return
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise InputError(asked, "it has a tangent", "Pass the primal: there are no gradients of forward mode")


def check_operands(operator: str, x: torch.Tensor, *weights: torch.Tensor, shard_of: Group | None = None) -> bool:
    """`x @ w` for dense matrices of one dtype on one device, all weights in one layout. Raises InputError.

    shard_of: the group whose ranks have shards of the weight's rows, row-major.

    Returns whether the weights lie in memory as `[n, k]`.
    """
    if x.dtype not in TAKEN:
        known = ", ".join(map(str, TAKEN))
        raise InputError(f"{operator}: x of a supported dtype", f"got {x.dtype}", f"Use one of {known}")
    for name, w in _named(weights):
        _check_pair(operator, x, w, name, shard_of)
    if all(w.is_contiguous() for w in weights):
        return False
    if not all(w.t().is_contiguous() for w in weights):
        found = ", ".join("[k, n]" if w.is_contiguous() else "[n, k]" for w in weights)
        raise InputError(f"{operator}: weights in one memory layout", f"they lie as {found}", "Lay them out alike")
    return True


def _named(weights: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("w" if len(weights) == 1 else f"w[{index}]", each) for index, each in enumerate(weights)]


def _check_pair(operator: str, x: torch.Tensor, w: torch.Tensor, called: str, shard_of: Group | None) -> None:
    for name, tensor in (("x", x), (called, w)):
        if tensor.dim() != 2:
            raise InputError(f"{operator}: {name} [rows, cols]", f"got {list(tensor.shape)}", "Pass a matrix")
    if x.dtype != w.dtype or x.device != w.device:
        found = f"x is {x.dtype} on {x.device}, {called} is {w.dtype} on {w.device}"
        raise InputError(f"{operator}: x and {called} alike", found, "Cast or move one of them")
    if x.device.type not in ("cpu", "cuda"):
        raise InputError(f"{operator}: tensors on a CPU or a CUDA GPU", f"got {x.device}", "Move them")
    if shard_of is not None:
        lo, hi = shard_rows(x.shape[1], shard_of.world_size, shard_of.rank)
        if w.shape[0] != hi - lo or not w.is_contiguous():
            found = f"{called} is {list(w.shape)}, its strides are {w.stride()}"
            cure = "Deal its rows as torch.chunk does, and pass them row-major"
            raise InputError(f"{operator}: {called}, [{hi - lo}, n] of k={x.shape[1]} on this rank", found, cure)
    elif x.shape[1] != w.shape[0]:
        found = f"x is {list(x.shape)}, {called} is {list(w.shape)}"
        raise InputError(
            f"{operator}: x [.., k] @ {called} [k, n]", found, "Pass w as [k, n]; `w.t()` is accepted as it is"
        )
    if not w.shape[1] or (shard_of is None and not w.numel()):
        raise InputError(f"{operator}: {called} [k, n], both at least 1", f"got {list(w.shape)}", "Leave out the call")
    if not x.is_contiguous():
        raise InputError(f"{operator}: x row-major", f"its strides are {x.stride()}", "Pass x.contiguous()")
    if not (w.is_contiguous() or w.t().is_contiguous()):
        found = f"{called} {list(w.shape)} has strides {w.stride()}"
        raise InputError(f"{operator}: {called} dense, as [k, n] or [n, k] in memory", found, "Pass w.contiguous()")


def _rows(operator: Operator, x: torch.Tensor, group: Group, given: CallArguments) -> int:
    """All rows of the problem: of which a rank passes its shard, or of which it passes a block for each rank."""
    if operator.exchanges:
        return _blocks(operator, x, group, given)
    return _shards(operator, x, group, given.get("m")) if operator.has_row_shards else x.shape[0]


def _blocks(operator: Operator, x: torch.Tensor, group: Group, given: CallArguments) -> int:
    counts, most = given.get(COUNTS), given.get("most")
    if counts is not None:
        return group.world_size * int(counts.most)
    if most is not None:
        raise InputError(f"{operator.name}: most={most}", "there are no counts", f"Pass {COUNTS}=, or leave it out")
    if x.shape[0] % group.world_size:
        found = f"x has {x.shape[0]} rows, no {group.world_size} equal blocks"
        raise InputError(f"{operator.name}: a block of rows for each rank", found, f"Pass {COUNTS}=")
    return x.shape[0]


def _shards(operator: Operator, x: torch.Tensor, group: Group, m: int | None) -> int:
    rows = x.shape[0] * group.world_size if m is None else m
    if rows < 0:
        raise InputError(f"{operator.name}: m, the rows after the gather", f"got {m}", "Pass an int >= 0, or None")
    lo, hi = shard_rows(rows, group.world_size, group.rank)
    if x.shape[0] != hi - lo:
        found = f"rank {group.rank} of {group.world_size} holds {x.shape[0]} rows, not {hi - lo}"
        raise InputError(f"{operator.name}: shards of m={rows} rows", found, "Deal rows as torch.chunk does, or pass m")
    return rows


def activation_of(operator: str, activation: str | None) -> Activation | None:
    """The activation that was asked for. Raises InputError for one that is not known."""
    if activation is not None and activation not in (known := get_args(Activation)):
        cure = f"Use one of {', '.join(known)}, or None"
        raise InputError(f"{operator}: activation", f"got {activation[:40]!r}", cure)
    return activation  # type: ignore[return-value]


def _norm(operator: str, given: CallArguments) -> Norm | None:
    if given.get(NORM_WEIGHT) is None:
        return None
    eps = given.get("norm_eps", NORM_EPS)
    if not isinstance(eps, float) or not 0 < eps < math.inf:
        raise InputError(f"{operator}: norm eps", f"got {eps!r}"[:60], "Pass a float above 0, such as 1e-5")
    return Norm(eps=eps, residual=given.get(RESIDUAL) is not None)


def added_by(operator: Operator, given: CallArguments) -> tuple[Applied, ...]:
    """The registered epilogues that a call asks for. Raises InputError for one of which an argument is missing."""
    found, asked = [], operator.name
    for form in REGISTERED.values():
        passed = {word: given.get(word) for word in form.words}
        missing = [word for word, each in passed.items() if each is None]
        if missing and len(missing) < len(passed):
            raise InputError(f"{asked}: {missing[0]}=", f"{form.name} needs it", f"Pass all of {', '.join(passed)}")
        if not missing:
            numbers: list[Any] = [passed[name] for name in form.numbers]
            if not all(isinstance(each, (float, int)) and math.isfinite(each) for each in numbers):
                raise InputError(f"{asked}: {form.name}", f"got {numbers}"[:60], "Pass finite numbers")
            found.append(applied(form, numbers, operator.adds))
    return tuple(found)


def _check_beside(problem: Problem, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """What the epilogue and the norm read has the shapes and the dtypes that the problem implies. Raises InputError."""
    operator, x, w = problem.operator, tensors["x"], tensors["w"]
    for name in problem.beside:
        read = input_of(name)
        if read is None or read.name in (SCALE_X, SCALE_W):  # scales say themselves what they scale
            continue
        tensor, (rows, cols, dtype) = tensors[name], problem.operand(name, rank)
        wanted = (cols,) if read.rows == "1" else (rows, cols)
        if (tuple(tensor.shape), name_of(tensor.dtype), tensor.device) != (wanted, dtype, x.device):
            found = f"got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"
            raise InputError(f"{operator}: {name}", found, f"Pass {list(wanted)} of torch.{dtype} on {x.device}")
        if read.dtype == "factor":
            if not (tensor.is_contiguous() if w.is_contiguous() else tensor.t().is_contiguous()):
                found = f"{name} has strides {tensor.stride()}, w {w.stride()}"
                raise InputError(f"{operator}: {name} in the memory layout of w", found, "Lay them out alike")
        elif not tensor.is_contiguous():
            found = f"its strides are {tensor.stride()}"
            raise InputError(f"{operator}: {name} row-major", found, f"Pass {name}.contiguous()")


def _scaling(operator: str, x: torch.Tensor, weights: Sequence[torch.Tensor], given: CallArguments) -> Scaling | None:
    """How the products by all weights are scaled; None if they are not. Raises InputError."""
    scales = {name: given.get(name) for name in (SCALE_X, SCALE_W)}
    if x.dtype != FP8:
        _refuse_scales(operator, x, scales, given.get("out_dtype"))
        return None
    for w in weights:
        _check_layout(operator, w)
    if given.get("out_dtype") not in (None, *DTYPES):
        known = ", ".join(map(str, DTYPES))
        raise InputError(f"{operator}: out_dtype", f"got {given['out_dtype']}", f"Use one of {known}, or None")
    shapes = {name: _shape_of_scale(operator, name, scale, x) for name, scale in scales.items()}
    products = 1 if given.get(GATE) is None else 2
    if prod(shapes[SCALE_X]) == 1 and prod(shapes[SCALE_W]) == products and shapes[SCALE_W][-1:] in ((), (products,)):
        return "tensor"
    wanted = {SCALE_X: (x.shape[0], 1), SCALE_W: (1, products * sum(w.shape[1] for w in weights))}
    if shapes != wanted:
        one = (
            f"one element of {SCALE_X} and two of {SCALE_W}, w's and the gate's" if products > 1 else "one element each"
        )
        columns = "columns of w and, behind them, of the gate" if products > 1 else "columns"
        cure = f"Pass {one}, or {wanted[SCALE_X]} for the own rows and {wanted[SCALE_W]} for the {columns}"
        raise InputError(f"{operator}: {SCALE_X} and {SCALE_W}", f"got {shapes[SCALE_X]} and {shapes[SCALE_W]}", cure)
    return "rows"


def _shape_of_scale(operator: str, name: str, scale: torch.Tensor | None, x: torch.Tensor) -> tuple[int, ...]:
    if scale is None:
        cure = f"Pass {SCALE_X}= and {SCALE_W}=, fp32 tensors; of ones if nothing was scaled"
        raise InputError(f"{operator}: {name} of fp8 operands", "got None", cure)
    if (scale.dtype, scale.device) != (torch.float32, x.device) or not scale.is_contiguous():
        found = f"got {scale.dtype} on {scale.device}, strides {scale.stride()}"
        raise InputError(f"{operator}: {name}, fp32, contiguous, beside x", found, f"Pass {name}.float().contiguous()")
    return tuple(scale.shape)


def _refuse_scales(
    operator: str, x: torch.Tensor, scales: dict[str, torch.Tensor | None], out_dtype: torch.dtype | None
) -> None:
    if any(scale is not None for scale in scales.values()):
        raise InputError(f"{operator}: scales", f"x is {x.dtype}", f"Cast x and w to {FP8}, or leave the scales out")
    if out_dtype not in (None, x.dtype):
        raise InputError(f"{operator}: out_dtype {out_dtype}", f"x is {x.dtype}", "Only fp8 has another: cast y")


def _check_layout(operator: str, w: torch.Tensor) -> None:
    k, n = w.shape
    if k % FP8_STEP or n % FP8_STEP:
        raise unaligned(operator, n, k)
    if not w.t().is_contiguous():
        found, cure = f"w {list(w.shape)} has strides {w.stride()}", "Store the weight as [n, k] and pass weight.t()"
        raise InputError(f"{operator}: fp8 w with k contiguous", found, cure)
