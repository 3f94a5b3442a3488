"""Launches of the metadata kernels of expert-parallel dispatch on this process's GPU (kernels/travelling.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.kernels.travelling import choose_ranks_kernel, place_rows_kernel, read_metadata_kernel

ELEMENTS = 4096  # of a program: elements of the largest block, such as tokens x pairs of their top-k choices


class MetadataShape(NamedTuple):
    """Sizes of a token's metadata: top-k experts, that as a power of two, scales, likewise, and int32 words in all."""

    top: int
    slots: int
    scales: int
    columns: int
    words: int


def choose_ranks(
    inputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    outputs: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int],
) -> None:
    """Choose the ranks that tokens go to, and pack their metadata (`choose_ranks_kernel`).

    inputs: ids, weights and scales, contiguous. outputs: targets, metadata rows. sizes: experts, experts of a rank,
    ranks.
    """
    ids, _, scales = inputs
    shape = _metadata_shape(ids, scales, outputs[1])
    block = max(1, ELEMENTS // max(shape.slots**2, shape.columns))
    _launch(choose_ranks_kernel, ids.shape[0], block, (*inputs, *outputs, ids.shape[0], *sizes, *shape, block))


def place_rows(
    targets: torch.Tensor, tables: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Store each token's row among those sent to each rank (`place_rows_kernel`).

    tables: rows, offsets, counts and reason of the routing of `targets`. outputs: positions, counts.
    """
    (tokens, top), ranks = targets.shape, outputs[0].shape[1]
    slots = _power_of_two(top)
    block = max(1, ELEMENTS // slots)
    constants = (top, slots, _power_of_two(ranks + 1), block)
    _launch(place_rows_kernel, max(tokens, 1), block, (targets, *tables, *outputs, tokens, ranks, *constants))


def read_metadata(
    metadata: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    local_experts: tuple[int, int],
) -> None:
    """Unpack received metadata rows (`read_beside_kernel`).

    outputs: ids, weights and scales, the latter two None where none travelled. local_experts: `[low, high)`.
    """
    shape = _metadata_shape(outputs[0], outputs[2], metadata)
    block = max(1, ELEMENTS // max(shape.slots, shape.columns))
    arguments = (metadata, *outputs, metadata.shape[0], *local_experts, *shape, block)
    _launch(read_metadata_kernel, metadata.shape[0], block, arguments)


def _metadata_shape(ids: torch.Tensor, scales: torch.Tensor | None, metadata: torch.Tensor) -> MetadataShape:
    columns = 0 if scales is None else scales.shape[1]
    return MetadataShape(
        ids.shape[1], _power_of_two(ids.shape[1]), columns, _power_of_two(max(columns, 1)), metadata.shape[1]
    )


def _launch(kernel: Any, rows: int, block: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel with one program for each `block` rows, on the GPU of its first argument."""
    if rows:
        with torch.cuda.device(arguments[0].device):
            kernel[(-(-rows // block),)](*arguments)


def _power_of_two(count: int) -> int:
    """Return the next power of two from `count` on."""
    return 1 << (count - 1).bit_length()
