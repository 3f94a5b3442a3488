"""The grouped matmul and its parts in plain torch, group by group: what a CPU computes, and what tests compare with.

The host looks at the groups here. Products are summed in fp32, in the order of torch's matmul, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from msgspec import UNSET

from overweave.errors import InputError
from overweave.ir.epilogue import Epilogue
from overweave.ir.operators.forms import BIAS, GATE
from overweave.runtime.library.epilogue import ended


class Grouped(NamedTuple):
    """The arguments of one call, as `grouped_matmul` takes them. activation: "" for none; gating: () for none."""

    x: torch.Tensor
    w: torch.Tensor
    offs: torch.Tensor
    bias: torch.Tensor | None
    gate: torch.Tensor | None
    activation: str
    rows: torch.Tensor | None
    into: torch.Tensor | None
    row_weights: torch.Tensor | None
    scale_x: torch.Tensor | None
    scale_w: torch.Tensor | None
    out_dtype: torch.dtype
    gating: tuple[float, ...] = ()

    @property
    def epilogue(self) -> Epilogue:
        """What is done to a product before it is weighed and stored."""
        return Epilogue.of(
            [name for name, each in self._asdict().items() if each is not None],
            activation=self.activation or None,
            gating=(*self.gating,) or UNSET,
            scaling=None if self.scale_x is None else "rows",
        )

    @property
    def factors(self) -> dict[str, Any]:
        """The weights by which all rows are multiplied, by name."""
        return {"w": self.w} if self.gate is None else {"w": self.w, GATE: self.gate}

    @property
    def pairs(self) -> int:
        """Rows of the product."""
        return self.x.shape[0] if self.rows is None else self.rows.shape[0]


def groups_of(offs: torch.Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with them. Raises InputError if `offs` descend or exceed the rows."""
    ends = [0, *offs.tolist()]
    if any(end < start for start, end in zip(ends, ends[1:], strict=False)) or ends[-1] > rows:
        raise InputError("offs", f"they end at {str(ends[1:])[:80]} of {rows} rows", "Pass ascending ends of groups")
    for expert, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end > start:
            yield expert, slice(start, end)


def multiply(call: Grouped) -> torch.Tensor:
    """The whole result; rows that are not computed are zeros."""
    rows, n = call.pairs, call.w.shape[2]
    x = _taken(call.x, call.rows)
    scale_x = None if call.scale_x is None else _taken(call.scale_x, call.rows)
    out, epilogue = torch.zeros(rows, n, dtype=call.out_dtype, device=call.x.device), call.epilogue
    for expert, its in groups_of(call.offs, rows):
        value, *gate = (
            _scaled(_product(x[its], w[expert]), call, expert, its, scale_x, index)
            for index, w in enumerate(call.factors.values())
        )
        tensors = {} if call.bias is None else {BIAS: call.bias[expert]}
        value = ended(value, its, epilogue, tensors, *gate)
        value = value if call.row_weights is None else value * call.row_weights[its, None]
        _store(out, value, its, call.into)
    return out


def outer(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """`x[group].T @ g[group]` of every group: `[experts, k, n]`."""
    out = torch.zeros(offs.shape[0], x.shape[1], g.shape[1], dtype=x.dtype, device=x.device)
    for expert, its in groups_of(offs, x.shape[0]):
        out[expert] = _product(x[its].t(), g[its]).to(x.dtype)
    return out


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()


def _scaled(
    value: torch.Tensor, call: Grouped, expert: int, its: slice, scale_x: torch.Tensor | None, which: int
) -> torch.Tensor:
    if scale_x is None or call.scale_w is None:
        return value
    of_columns = call.scale_w[expert].reshape(-1, value.shape[1])[which]
    return value * (scale_x[its, None] * of_columns)


def _taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Rows by index; those out of range are NaN."""
    if rows is None:
        return x
    is_known = (rows >= 0) & (rows < x.shape[0])
    if x.shape[0] == 0:
        return torch.full((rows.shape[0], *x.shape[1:]), float("nan"), dtype=torch.float32, device=x.device)
    taken = x.float()[torch.where(is_known, rows, 0).long()]
    taken[~is_known] = float("nan")
    return taken


def _store(out: torch.Tensor, value: torch.Tensor, its: slice, into: torch.Tensor | None) -> None:
    if into is None:
        out[its] = value.to(out.dtype)
        return
    places = into[its].long()
    is_stored = (places >= 0) & (places < out.shape[0])
    out[places[is_stored]] = value[is_stored].to(out.dtype)


_WORD_BYTES = 16


def with_steps(call: Grouped) -> Grouped:
    """The same call; where k is 0, of factors with a step of zeros."""
    if call.w.shape[1]:
        return call
    w = call.w.new_zeros(call.w.shape[0], _WORD_BYTES, call.w.shape[2])
    factors: dict[str, Any] = dict.fromkeys(call.factors, w)
    return call._replace(x=call.x.new_zeros(call.x.shape[0], _WORD_BYTES), **factors)


def aligned(call: Grouped) -> Grouped:
    """The same call with rows of all matrices at multiples of 16 bytes, as bulk-tensor loads want them; copied where
    they are not, and with columns of zeros behind those of the result where these are no whole words.
    """
    n, unit = call.w.shape[2], 8
    more = -n % unit
    if more:
        wider = call.factors | {name: getattr(call, name) for name in (BIAS, "scale_w")}
        wider = {name: _wider(one, more) for name, one in wider.items() if one is not None}
        call = call._replace(**wider)
    of_k = call.x.element_size() == 1  # fp8 is multiplied along k, as it lies in memory
    factors: dict[str, Any] = {name: _aligned_stack(each, of_k) for name, each in call.factors.items()}
    if len({each.stride() for each in factors.values()}) > 1:
        factors = {name: each.contiguous() for name, each in factors.items()}
    contiguous: dict[str, Any] = {
        name: None if one is None else one.contiguous()
        for name in ("offs", "bias", "rows", "into", "row_weights", "scale_x", "scale_w")
        for one in (getattr(call, name),)
    }
    x = _aligned_rows(call.x)
    if call.rows is not None and call.x.shape[1] * call.x.element_size() % _WORD_BYTES:
        x = _with_room(call.x)  # whole words of it are copied: zeros behind its own columns
    return call._replace(x=x, **factors, **contiguous)


def _is_aligned(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    size = tensor.element_size()
    return tensor.data_ptr() % _WORD_BYTES == 0 and all(stride * size % _WORD_BYTES == 0 for stride in strides)


def _wider(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    if tensor.dim() == 3 and tensor.stride(1) == 1:  # as weights of linear layers lie
        return torch.nn.functional.pad(tensor.transpose(1, 2), (0, 0, 0, columns)).transpose(1, 2)
    return torch.nn.functional.pad(tensor, (0, columns))


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix, or a copy, whose rows are contiguous and begin at multiples of 16 bytes."""
    if (x.stride(1) == 1 or x.shape[1] == 1) and x.stride(0) >= x.shape[1] and _is_aligned(x, (x.stride(0),)):
        return x
    return _with_room(x)


def _aligned_stack(w: torch.Tensor, of_k: bool) -> torch.Tensor:
    """A stack of weights, or a copy, in which k (alone if `of_k`) or n is contiguous."""
    for is_transposed in (True,) if of_k else (False, True):
        along, across = (1, 2) if is_transposed else (2, 1)
        if w.stride(along) == 1 and w.stride(across) >= w.shape[along]:
            step = w.stride(across)
            is_stack = w.shape[0] == 1 or (w.stride(0) % step == 0 and w.stride(0) > 0)
            if is_stack and _is_aligned(w, (step, w.stride(0))):
                return w
    return _with_room(w.transpose(1, 2)).transpose(1, 2) if of_k or w.stride(1) == 1 else _with_room(w)


def _with_room(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last dimension is contiguous, with room behind it up to whole words."""
    unit = _WORD_BYTES // tensor.element_size()
    width = tensor.shape[-1]
    room = tensor.new_zeros((*tensor.shape[:-1], -(-width // unit) * unit))
    kept = room[..., :width]
    kept.copy_(tensor)
    return kept
