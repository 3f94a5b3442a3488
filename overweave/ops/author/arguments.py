"""Checks of the arguments of compiled kernels: of calls, and of `plan`, `rank` and `explain`. They raise InputError."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overweave.compiler.frontend.source.author import KernelSource
from overweave.compiler.frontend.symbols.directives import SHAPE
from overweave.errors import InputError
from overweave.ir.dtype import Dtype, MovedDtype
from overweave.ir.footprint import Operand
from overweave.ops.call.operands import DTYPES, check_plain
from overweave.runtime.authored import shape_of, tensor_of

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # keyword arguments of a Triton launch
MOST_RANKS = 1024
EXCHANGED_DTYPES: dict[torch.dtype, MovedDtype] = {  # what may be exchanged; only floats are summed
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    **DTYPES,  # type: ignore[dict-item]
}
POWER_OF_TWO_OPTIONS = ("num_warps",)


def kernel_location(kernel: Any) -> tuple[Path, str, int | None]:
    """Return (file, name, line) of a kernel: a jitted or autotuned function, or `FILE.py:NAME`, whose line is None.

    Raises InputError for a function that is not at the top level of a file.
    """
    if isinstance(kernel, str):
        path, colon, name = kernel.rpartition(":")
        if not colon or not name.isidentifier():
            raise InputError(f"compile {kernel[:80]!r}", "it names no kernel", "Write FILE.py:NAME")
        return Path(path), name, None
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or not Path(file).is_file():
        found = f"{type(kernel).__name__} has no source file"
        raise InputError("compile a kernel", found, "Pass a @triton.jit function that stands in a file")
    if function.__qualname__ != function.__name__:
        found = f"{function.__qualname__} stands inside another function, or a class"
        raise InputError("compile a kernel", found, "Define it at the top level of its file")
    return Path(file), str(function.__name__), int(function.__code__.co_firstlineno)


def integer_arguments(call_args: Mapping[str, Any]) -> dict[str, int]:
    """Return the integer arguments of a call, and `NAME.shape[i]` of its tensors, as directives name them."""
    numbers = {name: value for name, value in call_args.items() if type(value) is int}
    for name, value in call_args.items():
        if tensor_of(value) is not None:
            numbers |= {f"{name}.shape[{at}]": extent for at, extent in enumerate(shape_of(value))}
    return numbers


def non_tensor_arguments(call_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not tensors, and the shapes and descriptor block shapes of those that are."""
    constants = {name: value for name, value in call_args.items() if tensor_of(value) is None}
    described = ((name, enumerate(getattr(value, "block_shape", ()))) for name, value in call_args.items())
    blocks = {f"{name}.block_shape[{at}]": size for name, sizes in described for at, size in sizes}
    return constants | integer_arguments(call_args) | blocks


def check_has_schedule(kernel: str, asked: Collection[str]) -> None:
    """Raise InputError if no tensor has a schedule."""
    if not asked:
        raise InputError(
            f"fuse {kernel}", "no tensor has a schedule", "Name one that it loads or stores, and its schedule"
        )


def check_options(kernel: str, options: Mapping[str, object]) -> None:
    """Raise InputError for a launch option that is not a positive int, or not a power of two if it must be one."""
    for name, value in options.items():
        is_number = type(value) is int and value > 0
        if not is_number or (name in POWER_OF_TWO_OPTIONS and value & (value - 1)):  # type: ignore[operator]
            cure = "Pass a power of two" if name in POWER_OF_TWO_OPTIONS else "Pass an int of at least 1"
            raise InputError(f"call {kernel} with {name}", f"got {value!r}"[:60], cure)


def unhashable_error(kernel: str, call_args: Mapping[str, Any]) -> InputError:
    """Return the error for the first argument that cannot be hashed: it is neither a tensor nor a constant."""
    for name, value in call_args.items():
        try:
            hash(value)
        except TypeError:
            return InputError(f"call {kernel}: {name}", f"got {type(value).__name__}", "Pass a tensor, or a constant")
    return InputError(f"call {kernel}", "an argument is no constant", "Pass tensors, numbers and constants")


def check_tensors(kernel: str, call_args: Mapping[str, Any]) -> None:
    """Raise InputError unless all tensor arguments are plain strided tensors on one CPU or CUDA device."""
    tensors = {name: tensor for name, value in call_args.items() if (tensor := tensor_of(value)) is not None}
    for name, tensor in tensors.items():
        asked, first = f"call {kernel}: {name}", next(iter(tensors))
        check_plain(asked, tensor)
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(asked, f"it is on {tensor.device}", "Pass tensors on a CPU or a CUDA GPU")
        if tensor.device != tensors[first].device:
            raise InputError(
                asked, f"it is on {tensor.device}, and {first} on {tensors[first].device}", "Move it there"
            )


def check_plan_arguments(
    source: KernelSource, numbers: object, world_size: object, dtype: Dtype | Mapping[str, MovedDtype]
) -> None:
    """Check the arguments of `plan`, `rank` and `explain`, which take no tensors. Raises InputError."""
    kernel, known = source.name, (*source.parameters, *LAUNCH_OPTIONS)
    if not isinstance(numbers, Mapping) or not all(isinstance(name, str) for name in numbers):
        cure = "Pass the kernel's integer arguments by name, as a mapping"
        raise InputError(f"plan {kernel}: numbers", f"got {type(numbers).__name__}", cure)
    for name, value in numbers.items():
        if type(value) is not int:
            raise InputError(f"plan {kernel}: {name[:40]}", f"got {type(value).__name__}", "Pass an int")
        shape = SHAPE.fullmatch(name)
        if (shape[1] if shape else name) not in known:
            cure = f"Name its parameters: {', '.join(source.parameters)}"
            raise InputError(f"plan {kernel}: {name[:40]}", "it has no such parameter", cure)
    if type(world_size) is not int or not 1 <= world_size <= MOST_RANKS:
        raise InputError(f"plan {kernel}", f"world_size {world_size}"[:60], f"Use 1 to {MOST_RANKS} ranks")
    for each in dtype.values() if isinstance(dtype, Mapping) else (dtype,):
        if each not in EXCHANGED_DTYPES.values():
            found = f"dtype {each}"[:60]
            raise InputError(f"plan {kernel}", found, f"Use one of {', '.join(EXCHANGED_DTYPES.values())}, as a string")


def check_local_tensors(kernel: str, operands: Sequence[Operand], call_args: Mapping[str, Any]) -> None:
    """Raise InputError if an annotated tensor that is not exchanged is no tensor, or has too few elements.

    call_args: by name. Strides are not checked; but a tensor that is too small would be accessed out of bounds.
    """
    for operand in operands:
        value, elements = call_args.get(operand.parameter), operand.rows * operand.cols
        tensor = tensor_of(value)
        if tensor is None:
            asked = f"{kernel}: {operand.parameter}, which holds {operand.tensor}"
            raise InputError(asked, f"got {type(value).__name__}", "Pass a tensor")
        if tensor.numel() < elements:
            asked = f"{kernel}: {operand.parameter}, the {[dim.extent for dim in operand.dims]} of {operand.tensor}"
            raise InputError(asked, f"got {list(tensor.shape)}", f"Pass a tensor of at least {elements} elements")


def check_stores(
    kernel: str, gathered: Sequence[Operand], stores: Sequence[Operand], call_args: Mapping[str, Any]
) -> None:
    """Raise InputError if elements that are stored share memory with each other, or with what peers read: a tile may be
    stored before they have read it."""
    read = {one.parameter: each for one in gathered if (each := tensor_of(call_args.get(one.parameter))) is not None}
    for store in stores:
        stored = tensor_of(call_args.get(store.parameter))
        if stored is None or store.parameter in read or not stored.numel():
            continue
        asked, cure = (
            f"{kernel}: {store.parameter}, stored to",
            "Pass a tensor of its own memory, as torch.empty makes it",
        )
        begin, end = _reach(stored)
        if end - begin < stored.numel() * stored.itemsize:
            raise InputError(asked, f"elements share memory: strides are {list(stored.stride())}", cure)
        for parameter, tensor in read.items():
            low, high = _reach(tensor)
            if tensor.numel() and low < end and begin < high:
                raise InputError(asked, f"it shares memory with {parameter}, which peers read", cure)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def check_dtype(kernel: str, operand: Operand, dtype: torch.dtype, is_added: bool) -> None:
    """Raise InputError for a dtype that cannot be exchanged, or, if is_added, not be summed over ranks."""
    known = DTYPES if is_added else EXCHANGED_DTYPES
    if dtype not in known:
        asked = f"{kernel}: {'add' if is_added else 'move'} {operand.tensor} over ranks"
        raise InputError(asked, f"it is of {dtype}", f"Use one of {', '.join(map(str, known))}")


def expected_rows(operand: Operand, rows: int) -> tuple[str, str]:
    """Return (whose rows a call must pass, how to pass them), for an error about a tensor of another size.

    rows: how many the call must pass; more than operand.rows if it passes those of all ranks.
    """
    if rows > operand.rows:
        whose_rows = f"every rank's {operand.rows} rows, all"
        return whose_rows, "Pass the whole tensor, contiguous; the kernel's numbers are those of what one rank writes"
    if rows == operand.rows:
        return "all", "Pass all of it, contiguous"
    return "this rank's", "Pass its rows as torch.chunk deals them, contiguous"
