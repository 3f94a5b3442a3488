"""What stands beside tokens that travel, on this process's GPU: three launches (kernels/travelling.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.kernels.travelling import choose_ranks_kernel, place_rows_kernel, read_beside_kernel

AT_ONCE = 4096  # elements of a program: tokens, and pairs of their slots


class BesideForm(NamedTuple):
    """Of what stands beside a token: experts, their number as a power of two, scales, alike, and words in all."""

    top: int
    slots: int
    scales: int
    columns: int
    words: int


def choose_ranks(
    given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    outputs: tuple[torch.Tensor, torch.Tensor],
    numbers: tuple[int, int, int],
) -> None:
    """given: ids, weights and scales, contiguous. outputs: targets, beside. numbers: experts, of a rank, ranks."""
    ids, _, scales = given
    form = _form(ids, scales, outputs[1])
    block = max(1, AT_ONCE // max(form.slots**2, form.columns))
    _launch(choose_ranks_kernel, ids.shape[0], block, (*given, *outputs, ids.shape[0], *numbers, *form, block))


def place_rows(
    targets: torch.Tensor, routed: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """routed: rows, offsets, counts and reason of the routing of `targets`. outputs: places, told."""
    (tokens, top), ranks = targets.shape, outputs[0].shape[1]
    slots = _power(top)
    block = max(1, AT_ONCE // slots)
    constants = (top, slots, _power(ranks + 1), block)
    _launch(place_rows_kernel, max(tokens, 1), block, (targets, *routed, *outputs, tokens, ranks, *constants))


def read_beside(
    beside: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], own: tuple[int, int]
) -> None:
    """outputs: ids, weights and scales, the latter two None where none travelled. own: the experts of this rank."""
    form = _form(outputs[0], outputs[2], beside)
    block = max(1, AT_ONCE // max(form.slots, form.columns))
    _launch(read_beside_kernel, beside.shape[0], block, (beside, *outputs, beside.shape[0], *own, *form, block))


def _form(ids: torch.Tensor, scales: torch.Tensor | None, beside: torch.Tensor) -> BesideForm:
    columns = 0 if scales is None else scales.shape[1]
    return BesideForm(ids.shape[1], _power(ids.shape[1]), columns, _power(max(columns, 1)), beside.shape[1])


def _launch(kernel: Any, rows: int, block: int, arguments: tuple[Any, ...]) -> None:
    if rows:
        with torch.cuda.device(arguments[0].device):
            kernel[(-(-rows // block),)](*arguments)


def _power(count: int) -> int:
    """A power of two from `count` on, which rows of a block share evenly."""
    return 1 << (count - 1).bit_length()
