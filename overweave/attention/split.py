"""Attention over a sequence that ranks share, as an op of torch with gradients, by every plan that moves keys."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from overweave.attention.checks import NAME
from overweave.attention.plans import Todo, run
from overweave.attention.sequence import Sequence
from overweave.attention.work import AttendWork, Call, GradientWork
from overweave.errors import InputError
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.dispatch.collectives import WHERE
from overweave.ops.dispatch.torch_ops import TorchOp, define


def split_attention(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], offsets: torch.Tensor | None, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the result, and their log-sum-exp. given: its rows of q, k and v. options: the op's."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.overweave.split_attention(*given, offsets, **options)
    return found


def _call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, given: Any) -> Call:
    where = {name: given[name] for name in ("group_name", "told", "place")}
    mask = (given["is_causal"], given["is_zigzag"], given["window"])
    return Call(
        q, k, v, offsets, Sequence(given["rows"], where["place"][1], *mask), given["plan"], given["scale"], where
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_offsets(offsets, given)
    call, results = _call_of(q, k, v, offsets, given), _attend_fake(q)
    run(call, Todo(lambda: AttendWork(call, results), results))
    return results


def _attend_fake(q: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32 if q.is_cuda else torch.float64)


def _gradients(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call, results = _call_of(q, k, v, offsets, given), _gradients_fake(dout, out, lse, q, k, v)
    dout = dout.contiguous()
    run(call, Todo(lambda: GradientWork(call, (dout, out, lse), results), results, is_backward=True))
    return results


def _gradients_fake(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *given: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = given[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _check_offsets(offsets: torch.Tensor | None, given: dict[str, Any]) -> None:
    """On a CPU, where peers are told of offsets that are none before anything travels. Raises InputError."""
    if offsets is None or offsets.is_cuda:
        return
    rows = given["rows"]
    if bool((offsets.diff() < 0).any()) or int(offsets[0]) < 0 or int(offsets[-1]) > rows:
        cure = "Pass where documents begin, ascending, and where the last ends"
        error = InputError(f"cu_seqlens within {rows} tokens", f"they are {offsets.tolist()}"[:80], cure)
        raise refuse(group_of(given["group_name"]), error) if given["group_name"] else error


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*output, *(each for each in inputs if each is not None))
    ctx.mark_non_differentiable(output[1])
    told = f"gradients of {keyword_only_inputs['told']}"
    ctx.options = dict(keyword_only_inputs) | {"told": told}


def _backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, q, k, v, *offsets = ctx.saved_tensors
    op = torch.ops.overweave.split_attention_gradients
    dq, dk, dv = op(dout, out, lse, q, k, v, *(offsets or (None,)), **ctx.options)
    return dq, dk, dv, None


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError(f"{NAME} has no gradients of gradients; as torch's attention on GPUs, differentiate once")


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? offsets"
_OPTIONS = f"SymInt rows, bool is_causal, bool is_zigzag, int? window, float scale, str plan, {WHERE}"
_ATTEND = f"({_OPERANDS}, *, {_OPTIONS}) -> (Tensor, Tensor)"
_GRADIENTS = f"(Tensor dout, Tensor out, Tensor lse, {_OPERANDS}, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
for _op in (
    TorchOp("split_attention", _ATTEND, _attend, _attend_fake, _backward, _keep, is_twice_differentiable=True),
    TorchOp(
        "split_attention_gradients",
        _GRADIENTS,
        _gradients,
        _gradients_fake,
        _refuse,
        lambda ctx, inputs, keyword_only_inputs, output: None,
    ),
):
    define(_op)
