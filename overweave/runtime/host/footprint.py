"""Run an author's kernel tile by tile under the interpreter and record every address that it accesses.

A process of its own: `python -m overweave.runtime.host.footprint`, which reads a `FootprintTrial` from standard input
and writes a `FootprintVerdict`. Each tile's addresses are compared with the rectangle that its directives declare. A
streamed loop runs over its ranges in other orders, and all tiles run as one launch backwards, and must store the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from triton.runtime import interpreter as triton_interpreter  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from overweave.compiler.emit.emit import (  # noqa: E402
    PARAMETERS,
    FusionOptions,
    emit,
    load_generated,
    shape_parameters,
)
from overweave.compiler.emit.fuse import kernel_of  # noqa: E402
from overweave.ir.footprint import Operand, TileSpace  # noqa: E402
from overweave.ir.tile_order import APPLY, NO_SIGNAL, PART, WORKSPACE, TileRow  # noqa: E402

READY = b"\n"  # written when all is imported: the time limit of a trial begins
GUARD_BYTES = 1 << 16  # before and behind each tensor: an access there is out of bounds
DIFFERENCE = 0.02  # of the largest value: ranges in another order round differently
ROUNDING = 1e-3  # of the largest value, of tiles in another order: what atomics add to


class TracedInput(msgspec.Struct, frozen=True):
    """A tensor of the call: its shape, its dtype, and the block of its descriptor, if it has one."""

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...] = ()


class FootprintTrial(msgspec.Struct, frozen=True):
    """A kernel and the arguments of one call. constants: those that are not tensors."""

    file: str
    kernel: str
    constants: dict[str, Any]
    tensors: dict[str, TracedInput]


class FootprintVerdict(msgspec.Struct, frozen=True):
    """found: what is wrong, empty if nothing is. subject: the tensor whose directive is blamed, or an axis."""

    found: str = ""
    subject: str = ""
    is_store: bool = False


class Untrue(Exception):
    """A directive contradicts what the kernel does. subject: as of `FootprintVerdict`."""

    def __init__(self, found: str, subject: str, is_store: bool = False) -> None:
        super().__init__(found)
        self.verdict = FootprintVerdict(found, subject, is_store)


def main() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdout.buffer.write(run_trial(sys.stdin.buffer.read()))


def run_trial(trial: bytes) -> bytes:
    """Run a trial and return its encoded verdict. The interpreter of this process records all accesses from then on."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _Run(msgspec.json.decode(trial, type=FootprintTrial), Path(folder)).check()
        verdict = FootprintVerdict()
    except Untrue as untrue:
        verdict = untrue.verdict
    return msgspec.json.encode(verdict)


class _Run:
    """The kernel of a trial, its tensors, and the accesses of its last tile: (is_store, pointers)."""

    def __init__(self, trial: FootprintTrial, folder: Path) -> None:
        self.kernel = kernel_of(Path(trial.file), trial.kernel)
        self.space: TileSpace = self.kernel.space(_integer_values(trial))
        walks = bool(self.kernel.streams)
        options = FusionOptions(
            frozenset(), None, waits_in_loop=walks, notifies=False, push_path=None, stored_at_peers=None, exchanges=()
        )
        self.function = load_generated(folder, trial.kernel, emit(self.kernel, options))
        self.trial = trial
        self.memory, self.tensors = _allocate(trial.tensors, _least_extent(self.space))
        self.accesses: list[tuple[bool, Any]] = []

    def check(self) -> None:
        """Raise Untrue unless all tiles access what their directives declare, and loop ranges commute."""
        ranges = list(self._loop_ranges())
        _record_accesses(self.accesses)
        tiles = list(enumerate(self.space.coordinates()))
        stores = self._run_tiles(tiles, ranges, is_checked=True)
        for order in (ranges[::-1], ranges[1:] + ranges[:1]) if len(ranges) > 1 else ():
            axis = self.kernel.streams[0].directive.axis
            _compare(stores, self._run_tiles(tiles, order, is_checked=False), "its parts", axis, DIFFERENCE)
        together = self._run_tiles(tiles[::-1], ranges, is_checked=None)
        _compare(stores, together, "its tiles", "", ROUNDING)

    def _loop_ranges(self) -> Iterator[tuple[int, int]]:
        for axis in self.space.axes:
            if axis.is_streamed:
                yield from ((lo, min(lo + axis.block, axis.extent)) for lo in range(0, axis.extent, axis.block))

    def _run_tiles(
        self, tiles: list[tuple[int, dict[str, int]]], ranges: list[tuple[int, int]], is_checked: bool | None
    ) -> dict[str, torch.Tensor]:
        """Run tiles on zeroed outputs and return what all tensors hold then, which are put back.

        is_checked: compare accesses with directives; None for all tiles in one launch.
        """
        names = {store.parameter for store in self.space.stores} - {load.parameter for load in self.space.loads}
        for name in names:
            self.tensors[name].zero_()
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for number, tile in tiles if is_checked is not None else ():
            self.accesses.clear()
            self._launch([number], ranges)
            for operand in (*self.space.loads, *self.space.stores) if is_checked else ():
                self._check_operand(operand, operand in self.space.stores, number, tile)
        if is_checked is None:
            self._launch([number for number, _ in tiles], ranges)
        after = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, tensor in before.items():
            self.tensors[name].copy_(tensor)
        return after

    def _launch(self, numbers: list[int], ranges: list[tuple[int, int]]) -> None:
        """Run tiles in order. ranges: of their streamed loops, in order."""
        rows = [*(_row(APPLY, number, number + 1) for number in numbers), *(_row(PART, lo, hi) for lo, hi in ranges)]
        words, limits = torch.zeros(4096, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
        arrays = (torch.tensor(rows, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), words, words, limits)
        arguments: dict[str, Any] = {**self.trial.constants, **self.tensors}
        for name, tensor in self.trial.tensors.items():
            if tensor.block:
                arguments[name] = TensorDescriptor.from_tensor(self.tensors[name], list(tensor.block))
        arguments |= dict(zip(PARAMETERS, (*arrays, len(numbers), len(ranges), 1), strict=True))
        arguments |= {
            name: self.trial.tensors[of].shape[at] for name, (of, at) in shape_parameters(self.kernel).items()
        }
        self.function[(1 if self.kernel.tile_loop is not None else len(numbers),)](**arguments)

    def _check_operand(self, operand: Operand, is_store: bool, number: int, tile: dict[str, int]) -> None:
        """Raise Untrue if a tile has accessed an operand outside of its rectangle, or has not stored all of it."""
        tensor = self.tensors[operand.parameter]
        shape = tuple(dim.extent for dim in operand.dims)
        first, size, elements = tensor.data_ptr(), tensor.element_size(), prod(shape)
        seen = np.zeros(elements, bool)
        for stores, pointers in self.accesses:
            near = (pointers >= first - GUARD_BYTES) & (pointers < first + tensor.numel() * size + GUARD_BYTES)
            if stores is not is_store or not near.any():
                continue
            elements_accessed = (pointers[near].astype(np.int64) - first) // size
            if elements_accessed.min() < 0 or elements_accessed.max() >= elements:
                raise Untrue(f"tile {number} reaches beyond the {list(shape)} elements", operand.tensor, is_store)
            seen[elements_accessed] = True
        if not seen.any() and not is_store:
            return
        declared = [self.space.touched(dim, tile) for dim in operand.dims]
        inside = np.zeros(shape, bool)
        inside[tuple(slice(lo, hi) for lo, hi in declared)] = True
        outside = seen.reshape(shape) & ~(inside if is_store else _allowed_loads(operand, self.space, tile))
        if outside.any():
            element = [int(at[0]) for at in np.nonzero(outside)]
            verb = "stores" if is_store else "loads"
            found = f"tile {number} {verb} element {element}, and its rectangle is {_slices_text(declared)}"
            raise Untrue(found, operand.tensor, is_store)
        if is_store and (inside & ~seen.reshape(shape)).any():
            element = [int(at[0]) for at in np.nonzero(inside & ~seen.reshape(shape))]
            raise Untrue(
                f"tile {number} does not store element {element} of {_slices_text(declared)}", operand.tensor, is_store
            )


def _allowed_loads(operand: Operand, space: TileSpace, tile: dict[str, int]) -> Any:
    """Return the mask of elements that a load may access: rows beyond the end of an axis may wrap to its first ones."""
    allowed = np.ones((1,) * len(operand.dims), bool)
    for index, dim in enumerate(operand.dims):
        accessible = np.zeros(dim.extent, bool)
        accessible[slice(*space.touched(dim, tile))] = True
        if dim.axis is not None and dim.axis in tile:
            overhang = (dim.scale * tile[dim.axis] + dim.shift + 1) * space.entries(dim) - dim.extent
            accessible[: max(overhang, 0)] = True
        allowed = allowed & accessible.reshape([-1 if each == index else 1 for each in range(len(operand.dims))])
    return allowed


def _least_extent(space: TileSpace) -> int:
    """Return the shortest dimension: an index below it is valid in all of them."""
    extents = [dim.extent for one in (*space.loads, *space.stores) for dim in one.dims]
    return max(1, min(extents, default=1))


def _compare(
    first: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], what: str, subject: str, most: float
) -> None:
    """Raise Untrue for a tensor that holds something else. most: of its largest value, how much it may differ."""
    for name, tensor in first.items():
        one, other = tensor.float(), others[name].float()
        are_finite, other_finite = one.isfinite(), other.isfinite()
        largest = float(one[are_finite].abs().max()) if are_finite.any() else 0.0
        is_other = bool((are_finite != other_finite).any())
        differences = (one - other)[are_finite & other_finite].abs()
        if is_other or (differences.numel() and float(differences.max()) > most * largest):
            raise Untrue(f"with {what} in another order {name} holds something else", subject)


def _allocate(tensors: Mapping[str, TracedInput], bound: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate all tensors in one piece of memory, with guards between them: an access out of bounds must not fault.

    bound: of integers in the tensors.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = {name: prod(one.shape) * getattr(torch, one.dtype).itemsize for name, one in tensors.items()}
    room = GUARD_BYTES * 2
    memory = torch.zeros(room + sum(-(-size // 256) * 256 + room for size in sizes.values()), dtype=torch.uint8)
    allocated: dict[str, torch.Tensor] = {}
    offset = GUARD_BYTES + -(memory.data_ptr() + GUARD_BYTES) % 256
    for name, one in tensors.items():
        dtype = getattr(torch, one.dtype)
        allocated[name] = memory[offset : offset + sizes[name]].view(dtype).view(one.shape)
        if dtype.is_floating_point:
            allocated[name].copy_(torch.randn(one.shape, generator=generator, dtype=torch.float32) / 2)
        else:  # indices, lengths, labels: valid, and ascending
            numbers = torch.randint(0, bound, (allocated[name].numel(),), generator=generator)
            allocated[name].copy_(numbers.sort().values.view(one.shape))
        offset += -(-sizes[name] // 256) * 256 + room
    return memory, allocated


def _record_accesses(accesses: list[tuple[bool, Any]]) -> None:
    """Patch the interpreter to append the pointers of its loads and stores to `accesses`."""
    builder = triton_interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def recording_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        accesses.append((False, _accessed(pointers, mask)))
        return load(self, pointers, mask, *rest, **named)

    def recording_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        accesses.append((True, _accessed(pointers, mask)))
        return store(self, pointers, value, mask, *rest, **named)

    builder.create_masked_load, builder.create_masked_store = recording_load, recording_store


def _accessed(pointers: Any, mask: Any) -> Any:
    data, inside = np.broadcast_arrays(pointers.data, mask.data)
    return data[inside.astype(bool)]


def _row(kind: int, low: int, high: int) -> list[int]:
    return list(TileRow(kind, low, high, 0, WORKSPACE, 0, 0, 0, 0, NO_SIGNAL, 0))


def _integer_values(trial: FootprintTrial) -> dict[str, int]:
    shapes = {f"{name}.shape[{at}]": size for name, one in trial.tensors.items() for at, size in enumerate(one.shape)}
    return shapes | {name: value for name, value in trial.constants.items() if type(value) is int}


def _slices_text(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"[{lo}:{hi}]" for lo, hi in ranges)


if __name__ == "__main__":
    main()
