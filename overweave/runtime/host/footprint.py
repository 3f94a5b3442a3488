"""Runs an author's kernel tile by tile under the interpreter and records every address that it touches.

A process of its own: `python -m overweave.runtime.host.footprint`, which reads a `FootprintTrial` from standard input
and writes a `FootprintVerdict`. Each tile's addresses are held against the rectangle that its directives declare; a
streamed loop walks its parts forwards and backwards, and must store the same.
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

from overweave.compiler.emit.emit import PARAMETERS, Weaving, emit, shape_parameters  # noqa: E402
from overweave.compiler.emit.fuse import kernel_of  # noqa: E402
from overweave.compiler.emit.generated import load_generated  # noqa: E402
from overweave.ir.footprint import Operand, TileSpace  # noqa: E402
from overweave.ir.tile_order import APPLY, NO_SIGNAL, PART, WORKSPACE, TileRow  # noqa: E402

READY = b"\n"  # tells that all is imported: the time of a trial begins
GUARD_BYTES = 1 << 16  # before and behind each tensor: what reaches there reaches beyond it
DIFFERENCE = 0.02  # of the largest value: parts in another order round otherwise


class TracedInput(msgspec.Struct, frozen=True):
    """A tensor of the call: its shape, its dtype, and the block of its descriptor, if it has one."""

    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...] = ()


class FootprintTrial(msgspec.Struct, frozen=True):
    """What is tried. constants: the arguments that are no tensors."""

    file: str
    kernel: str
    constants: dict[str, Any]
    tensors: dict[str, TracedInput]


class FootprintVerdict(msgspec.Struct, frozen=True):
    """found: what is wrong, empty if nothing is. of: the tensor whose directive is blamed, or an axis."""

    found: str = ""
    of: str = ""
    is_store: bool = False


class Untrue(Exception):
    """A directive that the trial has found out."""

    def __init__(self, found: str, of: str, is_store: bool = False) -> None:
        super().__init__(found)
        self.verdict = FootprintVerdict(found, of, is_store)


def main() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdout.buffer.write(run_trial(sys.stdin.buffer.read()))


def run_trial(trial: bytes) -> bytes:
    """The verdict. The interpreter of this process records loads and stores from then on."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _Run(msgspec.json.decode(trial, type=FootprintTrial), Path(folder)).tried()
        verdict = FootprintVerdict()
    except Untrue as untrue:
        verdict = untrue.verdict
    return msgspec.json.encode(verdict)


class _Run:
    """The kernel of a trial, its tensors, and what was touched last."""

    def __init__(self, trial: FootprintTrial, folder: Path) -> None:
        self.kernel = kernel_of(Path(trial.file), trial.kernel)
        self.space: TileSpace = self.kernel.space(_integer_values(trial))
        walks = bool(self.kernel.streams)
        weaving = Weaving(
            frozenset(), None, waits_in_loop=walks, notifies=False, push_path=None, stored_at_peers=None, exchanges=()
        )
        self.function = load_generated(folder, trial.kernel, emit(self.kernel, weaving))
        self.trial = trial
        self.memory, self.tensors = _allocate(trial.tensors, _least_extent(self.space))
        self.touched: list[tuple[bool, Any]] = []

    def tried(self) -> None:
        parts = list(self._parts())
        _record_accesses(self.touched)
        stored = self._stored(parts, is_checked=True)
        if len(parts) > 1:
            again = self._stored(parts[::-1], is_checked=False)
            for name, tensor in stored.items():
                _compare(name, tensor, again[name], self.kernel.streams[0].directive.axis)

    def _parts(self) -> Iterator[tuple[int, int]]:
        for axis in self.space.axes:
            if axis.is_streamed:
                yield from ((lo, min(lo + axis.block, axis.extent)) for lo in range(0, axis.extent, axis.block))

    def _stored(self, parts: list[tuple[int, int]], is_checked: bool) -> dict[str, torch.Tensor]:
        """What all tiles store, in tensors that nobody else has stored to."""
        names = {store.parameter for store in self.space.stores} - {load.parameter for load in self.space.loads}
        for name in names:
            self.tensors[name].zero_()
        whole = {store.parameter: self.tensors[store.parameter].clone() for store in self.space.stores}
        for number, tile in enumerate(self.space.coordinates()):
            self.touched.clear()
            self._launch(number, parts)
            for operand in (*self.space.loads, *self.space.stores) if is_checked else ():
                self._check(operand, operand in self.space.stores, number, tile)
        made = {name: self.tensors[name].clone() for name in whole}
        for name, tensor in whole.items():
            self.tensors[name].copy_(tensor)
        return made

    def _launch(self, number: int, parts: list[tuple[int, int]]) -> None:
        rows = [_row(APPLY, number, number + 1), *(_row(PART, lo, hi) for lo, hi in parts)]
        words, limits = torch.zeros(4096, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
        arrays = (torch.tensor(rows, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), words, words, limits)
        given: dict[str, Any] = {**self.trial.constants, **self.tensors}
        for name, tensor in self.trial.tensors.items():
            if tensor.block:
                given[name] = TensorDescriptor.from_tensor(self.tensors[name], list(tensor.block))
        given |= dict(zip(PARAMETERS, (*arrays, 1, len(parts), 1), strict=True))
        given |= {name: self.trial.tensors[of].shape[at] for name, (of, at) in shape_parameters(self.kernel).items()}
        self.function[(1,)](**given)

    def _check(self, operand: Operand, is_store: bool, number: int, tile: dict[str, int]) -> None:
        tensor = self.tensors[operand.parameter]
        shape = tuple(dim.extent for dim in operand.dims)
        first, size, elements = tensor.data_ptr(), tensor.element_size(), prod(shape)
        seen = np.zeros(elements, bool)
        for stores, pointers in self.touched:
            near = (pointers >= first - GUARD_BYTES) & (pointers < first + tensor.numel() * size + GUARD_BYTES)
            if stores is not is_store or not near.any():
                continue
            places = (pointers[near].astype(np.int64) - first) // size
            if places.min() < 0 or places.max() >= elements:
                raise Untrue(f"tile {number} reaches beyond the {list(shape)} elements", operand.tensor, is_store)
            seen[places] = True
        if not seen.any() and not is_store:
            return
        declared = [self.space.touched(dim, tile) for dim in operand.dims]
        inside = np.zeros(shape, bool)
        inside[tuple(slice(lo, hi) for lo, hi in declared)] = True
        outside = seen.reshape(shape) & ~(inside if is_store else _allowed_loads(operand, self.space, tile))
        if outside.any():
            place = [int(at[0]) for at in np.nonzero(outside)]
            verb = "stores" if is_store else "loads"
            found = f"tile {number} {verb} element {place}, and its rectangle is {_slices_text(declared)}"
            raise Untrue(found, operand.tensor, is_store)
        if is_store and (inside & ~seen.reshape(shape)).any():
            place = [int(at[0]) for at in np.nonzero(inside & ~seen.reshape(shape))]
            raise Untrue(
                f"tile {number} does not store element {place} of {_slices_text(declared)}", operand.tensor, is_store
            )


def _allowed_loads(operand: Operand, space: TileSpace, tile: dict[str, int]) -> Any:
    """Where a load may reach: rows beyond the end of an axis may wrap round to its first, which nothing keeps."""
    allowed = np.ones((1,) * len(operand.dims), bool)
    for at, dim in enumerate(operand.dims):
        here = np.zeros(dim.extent, bool)
        here[slice(*space.touched(dim, tile))] = True
        if dim.axis is not None and dim.axis in tile:
            over = (dim.scale * tile[dim.axis] + dim.shift + 1) * space.entries(dim) - dim.extent
            here[: max(over, 0)] = True
        allowed = allowed & here.reshape([-1 if each == at else 1 for each in range(len(operand.dims))])
    return allowed


def _least_extent(space: TileSpace) -> int:
    """The shortest dimension: a number below it finds an element of every one."""
    extents = [dim.extent for one in (*space.loads, *space.stores) for dim in one.dims]
    return max(1, min(extents, default=1))


def _compare(name: str, first: torch.Tensor, again: torch.Tensor, axis: str) -> None:
    one, other = first.float().nan_to_num(), again.float().nan_to_num()
    largest = float(one.abs().max()) if one.numel() else 0.0
    if largest and float((one - other).abs().max()) > DIFFERENCE * largest:
        raise Untrue(f"with its parts in another order {name} holds something else", axis)


def _allocate(tensors: Mapping[str, TracedInput], most: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All tensors in one piece of memory, with room between them: to read beyond one must not end the process.

    most: whole numbers are below it.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = {name: prod(one.shape) * getattr(torch, one.dtype).itemsize for name, one in tensors.items()}
    room = GUARD_BYTES * 2
    memory = torch.zeros(room + sum(-(-size // 256) * 256 + room for size in sizes.values()), dtype=torch.uint8)
    made: dict[str, torch.Tensor] = {}
    at = GUARD_BYTES + -(memory.data_ptr() + GUARD_BYTES) % 256
    for name, one in tensors.items():
        dtype = getattr(torch, one.dtype)
        made[name] = memory[at : at + sizes[name]].view(dtype).view(one.shape)
        if dtype.is_floating_point:
            made[name].copy_(torch.randn(one.shape, generator=generator, dtype=torch.float32) / 2)
        else:  # indices, lengths, labels: of something that is there, and not falling
            numbers = torch.randint(0, most, (made[name].numel(),), generator=generator)
            made[name].copy_(numbers.sort().values.view(one.shape))
        at += -(-sizes[name] // 256) * 256 + room
    return memory, made


def _record_accesses(touched: list[tuple[bool, Any]]) -> None:
    """Lets the interpreter note what its loads and stores reach."""
    builder = triton_interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        touched.append((False, _accessed(pointers, mask)))
        return load(self, pointers, mask, *rest, **named)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        touched.append((True, _accessed(pointers, mask)))
        return store(self, pointers, value, mask, *rest, **named)

    builder.create_masked_load, builder.create_masked_store = loading, storing


def _accessed(pointers: Any, mask: Any) -> Any:
    data, kept = np.broadcast_arrays(pointers.data, mask.data)
    return data[kept.astype(bool)]


def _row(kind: int, low: int, high: int) -> list[int]:
    return list(TileRow(kind, low, high, 0, WORKSPACE, 0, 0, 0, 0, NO_SIGNAL, 0))


def _integer_values(trial: FootprintTrial) -> dict[str, int]:
    shapes = {f"{name}.shape[{at}]": size for name, one in trial.tensors.items() for at, size in enumerate(one.shape)}
    return shapes | {name: value for name, value in trial.constants.items() if type(value) is int}


def _slices_text(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"[{lo}:{hi}]" for lo, hi in ranges)


if __name__ == "__main__":
    main()
