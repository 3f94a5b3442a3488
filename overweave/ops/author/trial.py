"""The footprint check: run an author's kernel under the interpreter, on a smaller problem, in a subprocess, and compare
every address with the directives.

Each axis keeps at least two and a half blocks, or whole blocks if the call's are whole, and no two extents are equal;
strides are those of the smaller tensors. The verdict is cached by a digest of the kernel's text and the smaller
problem, so that a machine tests it once; a timeout is not cached.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm, prod
from pathlib import Path
from typing import Any

import msgspec
import torch

from overweave.compiler.frontend.rectangles import check_addresses
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.compiler.frontend.symbols.polynomials import BlockOf, LaneIndex, TooLarge
from overweave.compiler.frontend.symbols.values import Number
from overweave.compiler.frontend.walk.follow import trace_accesses
from overweave.errors import DirectiveError, InputError, OverweaveError
from overweave.ops.author.arguments import integer_arguments, non_tensor_arguments
from overweave.runtime.authored import shape_of, tensor_of
from overweave.tuner.caches import cache_folders

TRIAL_LIMIT_S = 10.0  # of a trial, from when its process has imported what it needs
STARTUP_LIMIT_S = 120.0  # of the imports before that
READY = b"\n"  # written by the process when it has imported, before it reads the trial
CACHE_VERSION = "2"  # raise it when the check learns to find more: older verdicts are then ignored
MAX_ELEMENTS = 1 << 22  # of the tensors of a trial
UNANNOTATED_ELEMENTS = 1 << 20  # of a tensor without a directive
MAX_HEADS = 16  # an extent up to this may count K/V heads, of which the smaller number of Q heads is a multiple
EXTENT_PERIOD = 128  # an extent n that is no axis becomes EXTENT_PERIOD + n % EXTENT_PERIOD, if that is smaller
_BLOCK = re.compile(r"[0-9]{1,6}(x[0-9]{1,6})+")
CHECKED, NOT_CHECKED = "checked", "not checked"


@dataclass(frozen=True)
class _Descriptor:
    """A descriptor argument of `arguments_of`, which has no tensor of a caller."""

    base: torch.Tensor
    shape: tuple[int, ...]
    block_shape: tuple[int, ...]


class _Trial(msgspec.Struct):
    """The smaller call, as runtime/host/footprint.py reads it. constants: arguments that are not tensors."""

    file: str
    kernel: str
    constants: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


class _Verdict(msgspec.Struct):
    """found: the violation, empty if none. subject: the tensor or axis whose directive is wrong. failed: why the trial
    gave no result, empty if it did."""

    found: str = ""
    subject: str = ""
    is_store: bool = False
    failed: str = ""
    timed_out: bool = False


def check_footprint(kernel: AnnotatedKernel, call_args: Mapping[str, Any], ignore_cache: bool = False) -> str:
    """Check a call's addresses symbolically, then those of an interpreted run on a smaller problem.

    call_args: the arguments by name. ignore_cache: run again even if there is a cached verdict. Returns `checked`, or
    `not checked` and why no run was possible. Raises DirectiveError if an address violates a directive.
    """
    check_addresses(kernel, kernel.source.default_ints | non_tensor_arguments(call_args))
    trial, reason = None, ""
    # If the kernel does not accept the smaller problem, the call itself may be small enough.
    for extents in (_smaller_extents, _same_extents):
        try:
            trial = _smaller_call(kernel, call_args, extents)
            break
        except (OverweaveError, TooLarge, KeyError) as error:
            reason = reason or str(error)
    if trial is None or sum(prod(one["shape"]) for one in trial.tensors.values()) > MAX_ELEMENTS:
        return f"{NOT_CHECKED}: no smaller problem: {reason}"[:200]
    verdict = _cached_verdict(kernel, trial, ignore_cache)
    if verdict.failed:
        return f"{NOT_CHECKED}: {verdict.failed}"
    if verdict.found:
        raise _directive_error(kernel, verdict)
    return CHECKED


def _directive_error(kernel: AnnotatedKernel, verdict: _Verdict) -> DirectiveError:
    """Return the error of a verdict, at the directive of its tensor or axis."""
    directives = [one.directive for one in (kernel.stores if verdict.is_store else kernel.loads)]
    locs = [one.loc for one in directives if one.tensor == verdict.subject]
    locs += [one.directive.loc for one in kernel.streams if one.directive.axis == verdict.subject]
    loc = locs[0] if locs else kernel.source.loc()
    return loc.error(f"tried on a smaller problem, {verdict.found}", "Let directives say what the kernel does")


def _cached_verdict(kernel: AnnotatedKernel, trial: _Trial, ignore_cache: bool) -> _Verdict:
    """Return the cached verdict, or run the trial and cache it. Processes of this machine queue on a file lock."""
    data = msgspec.json.encode(trial)
    problem = msgspec.json.encode([trial.kernel, trial.constants, trial.tensors], order="sorted")
    text = (*kernel.source.file.imported_sources(), kernel.source.text, sys.version, CACHE_VERSION)
    digest = blake2b("\0".join(text).encode() + problem, digest_size=12).hexdigest()
    folder = cache_folders()["overweave"] / "footprints"
    path = folder / f"{digest}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Path(folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file() and not ignore_cache:
                return msgspec.json.decode(path.read_bytes(), type=_Verdict)
            verdict = _run_in_subprocess(data)
            if not verdict.timed_out:
                path.write_bytes(msgspec.json.encode(verdict))
            return verdict
    except (OSError, msgspec.DecodeError) as error:
        return _Verdict(failed=f"{folder}: {error}"[:120])


def _run_in_subprocess(data: bytes) -> _Verdict:
    """Run an encoded trial in a new Python process. A crash or a timeout gives a verdict with `failed`."""
    command = [sys.executable, "-m", "overweave.runtime.host.footprint"]
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=clean) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        step, limit_s = "starting its process", STARTUP_LIMIT_S
        try:
            ready = _read(process.stdout.fileno(), limit_s, len(READY))
            if ready == READY:
                process.stdin.write(data)
                process.stdin.close()
                step, limit_s = "it", TRIAL_LIMIT_S
            output = _read(process.stdout.fileno(), limit_s) if ready == READY else b""
        except TimeoutError:
            return _Verdict(failed=f"{step} took longer than {limit_s:.0f} s", timed_out=True)
        except BrokenPipeError:
            output = b""
        finally:
            process.kill()
        assert process.stderr is not None
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
    if not output:
        return _Verdict(failed=(errors or [f"it ended with {process.returncode}"])[0][:160])
    return msgspec.json.decode(output, type=_Verdict)


def _read(pipe: int, limit_s: float, most: int = MAX_ELEMENTS) -> bytes:
    """Read what a process writes, up to `most` bytes or until it ends. Raises TimeoutError after `limit_s`."""
    data, end = b"", time.monotonic() + limit_s
    while len(data) < most:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, min(1 << 16, most - len(data)))
        if not part:
            break
        data += part
    return data


def _smaller_call(
    kernel: AnnotatedKernel,
    call_args: Mapping[str, Any],
    extents: Callable[[AnnotatedKernel, Mapping[str, int]], dict[str, int]],
) -> _Trial:
    """Return the call with smaller integer arguments and tensors. Raises OverweaveError if the kernel rejects it.

    extents: returns the new values of the integer arguments that are extents.
    """
    numbers = kernel.source.default_ints | integer_arguments(call_args)
    smaller = numbers | extents(kernel, numbers)
    smaller |= _smaller_strides(kernel, numbers, smaller)
    space = kernel.space(smaller)
    shapes = {one.parameter: tuple(dim.extent for dim in one.dims) for one in (*space.loads, *space.stores)}
    tensors = {name: value for name, value in call_args.items() if tensor_of(value) is not None}
    constants = {name: smaller.get(name, value) for name, value in call_args.items() if name not in tensors}
    described = {name: _tensor_record(value, shapes.get(name)) for name, value in tensors.items()}
    sizes = ((name, enumerate(one["block"])) for name, one in described.items())
    blocks = {f"{name}.block_shape[{at}]": size for name, block in sizes for at, size in block}
    check_addresses(kernel, kernel.source.default_ints | constants | smaller | blocks)
    return _Trial(str(kernel.source.path.resolve()), kernel.source.name, constants, described)


def _tensor_record(value: Any, shape: tuple[int, ...] | None) -> dict[str, Any]:
    tensor = tensor_of(value)
    assert isinstance(tensor, torch.Tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": shape or shape_of(value), "dtype": dtype, "block": tuple(getattr(value, "block_shape", ()))}


def _same_extents(kernel: AnnotatedKernel, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return no new extents: the call as it is."""
    return {}


def _smaller_extents(kernel: AnnotatedKernel, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return smaller extents: a few blocks of every axis whose extent is a parameter, and less of other extents.

    No two are equal if the call's are large enough: a kernel that confuses two extents would pass with equal ones.
    """
    smaller: dict[str, int] = {}
    axes, constants = {axis.name for axis in kernel.axes}, kernel.source.constants
    blocks = {f"blocks({name})" for name in axes}
    axis_extents = {str(axis.extent) for axis in kernel.axes}
    for access in (*kernel.loads, *kernel.stores):
        for dim in access.directive.dims:
            for name in dim.names - axes - smaller.keys() - constants - blocks - axis_extents:
                smaller[name] = min(numbers[name], EXTENT_PERIOD + numbers[name] % EXTENT_PERIOD)
    others = dict(smaller)
    for axis in kernel.axes:
        name, block = str(axis.extent), axis.block.value(numbers)
        if name in numbers and name not in smaller:
            heads = (size for size in others.values() if 0 < size <= MAX_HEADS and numbers[name] % size == 0)
            block = lcm(block, *heads) if numbers[name] % block == 0 else block
            tail = 0 if numbers[name] % block == 0 else max(1, block // 2)
            sizes = [count * block + tail for count in (2 + (not tail), 3 + (not tail), 4, 1)]
            taken = set(smaller.values())
            free = (size for size in sizes if size <= numbers[name] and size not in taken)
            smaller[name] = next(free, min(numbers[name], sizes[0]))
    return smaller


def _smaller_strides(kernel: AnnotatedKernel, old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """Return the strides of the smaller tensors, for parameters that multiply a block or lane index in an address.

    old, new: the integer arguments of the call and of the smaller one.
    """
    spaces = [{one.tensor: one for one in (*space.loads, *space.stores)} for space in map(kernel.space, (old, new))]
    strides: dict[str, int] = {}
    extent_names = {
        name for axis in kernel.axes for name in axis.extent.names | axis.block.names
    } | kernel.source.constants
    for access in trace_accesses(kernel).accesses:
        if access.directive is None or not isinstance(access.address, Number):
            continue
        dims = [_stride_list(each[access.directive.tensor]) for each in spaces]
        for atoms, _ in access.address.poly.terms:
            names = [atom for atom in atoms if isinstance(atom, str) and atom in old and atom not in extent_names]
            if not any(isinstance(atom, BlockOf | LaneIndex) for atom in atoms):
                continue
            for name in names:
                pairs = [pair for pair in zip(*dims, strict=True) if pair[0] == old[name]]
                if pairs and new[name] == old[name]:
                    strides.setdefault(name, pairs[0][1])
    return strides


def _stride_list(operand: Any) -> list[int]:
    """Return the strides of a row-major tensor with the operand's extents."""
    stride, strides = 1, list[int]()
    for dim in reversed(operand.dims):
        strides.insert(0, stride)
        stride *= dim.extent
    return strides


def arguments_of(kernel: AnnotatedKernel, text: str) -> dict[str, Any]:
    """Parse a text such as `M=96,eps=1e-5,CAUSAL=True,ACT=silu,a_desc=16x32` into a call's arguments.

    `16x32` is the block shape of a descriptor; a word that is no number is a string, for a `constexpr` only. Parameters
    that are not named are tensors: annotated ones of the shape that their directives say, others of
    UNANNOTATED_ELEMENTS. Raises InputError, and DirectiveError for a missing integer that a directive names.
    """
    values: dict[str, str] = {}
    for word in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in kernel.source.parameters or not equals or name in values:
            known = ", ".join(kernel.source.parameters)
            raise InputError(f"shape {text[:60]!r}", f"{word[:40]!r}", f"Write NAME=NUMBER, each once, of {known}")
        values[name] = value
    blocks = {name: tuple(map(int, value.split("x"))) for name, value in values.items() if _BLOCK.fullmatch(value)}
    constants = kernel.source.constants
    call_args: dict[str, Any] = {
        name: _constant(name, value, name in constants) for name, value in values.items() if name not in blocks
    }
    numbers = kernel.source.default_ints | {name: value for name, value in call_args.items() if type(value) is int}
    space = kernel.space(numbers)
    shapes = {one.parameter: [dim.extent for dim in one.dims] for one in (*space.loads, *space.stores)}
    for name in kernel.source.parameters:
        if name not in call_args and name not in kernel.source.defaults:
            tensor = torch.empty(shapes.get(name, [UNANNOTATED_ELEMENTS]), dtype=torch.float32)
            call_args[name] = _Descriptor(tensor, tuple(tensor.shape), blocks[name]) if name in blocks else tensor
    return call_args


def _constant(name: str, value: str, is_constexpr: bool) -> int | float | bool | str:
    """Parse a bool, an int, a float or, for a constexpr, a string. Raises InputError."""
    if value in ("True", "False"):
        return value == "True"
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        if is_constexpr and value.isidentifier():
            return value
        cure = "Write a number, True or False, or a word for a constexpr"
        raise InputError(f"shape {name}={value[:40]}", "no number", cure) from None
