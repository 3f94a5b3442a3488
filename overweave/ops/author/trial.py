"""The footprint check: an author's kernel runs under the interpreter, on a smaller problem, in a process of its own.

Each axis keeps two blocks and a half or more, or whole blocks where the call's are whole, no two alike; strides are
those of the smaller tensors. What was found is kept under the digest of the kernel's text and the smaller problem, so
that a machine tries it once; that there was no time is not kept.
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
from overweave.compiler.frontend.walk.follow import follow
from overweave.errors import DirectiveError, InputError, OverweaveError
from overweave.ops.author.arguments import constants_of, numbers_of
from overweave.runtime.authored import shape_of, tensor_of
from overweave.tuner.caches import cache_folders

LONGEST_S = 10.0  # a trial, from where its process has imported what it needs
BEGIN_S = 120.0  # until then
READY = b"\n"  # what the process writes when its trial begins
RULES = "2"  # what trials of other rules found is not kept: raise it where a trial learns to find more
MOST_ELEMENTS = 1 << 22  # of the tensors of a trial
LARGE = 1 << 20  # elements of a tensor of which no directive tells
FEW = 16  # heads of keys, which divide the heads of queries of a smaller problem, too
KEPT = 128  # of an extent that no axis cuts, and what it leaves by that
_BLOCK = re.compile(r"[0-9]{1,6}(x[0-9]{1,6})+")
CHECKED, NOT_CHECKED = "checked", "not checked"


@dataclass(frozen=True)
class _Descriptor:
    """Of a tensor that nobody has passed."""

    base: torch.Tensor
    shape: tuple[int, ...]
    block_shape: tuple[int, ...]


class _Trial(msgspec.Struct):
    file: str
    kernel: str
    constants: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


class _Verdict(msgspec.Struct):
    found: str = ""
    subject: str = ""
    is_store: bool = False
    failed: str = ""
    is_late: bool = False


def check_footprint(kernel: AnnotatedKernel, given: Mapping[str, Any], anew: bool = False) -> str:
    """`checked`, or `not checked` and why. given: the arguments of a call; anew: whatever was found before.

    Raises DirectiveError for what is untrue, of the call or where it is tried.
    """
    check_addresses(kernel, kernel.source.default_numbers | constants_of(given))
    trial, why = None, ""
    for extents in (_extents, _same):  # where a smaller problem is no call of the kernel, the call itself may be small
        try:
            trial = _reduced(kernel, given, extents)
            break
        except (OverweaveError, TooLarge, KeyError) as error:
            why = why or str(error)
    if trial is None or sum(prod(one["shape"]) for one in trial.tensors.values()) > MOST_ELEMENTS:
        return f"{NOT_CHECKED}: no smaller problem: {why}"[:200]
    verdict = _kept(kernel, trial, anew)
    if verdict.failed:
        return f"{NOT_CHECKED}: {verdict.failed}"
    if verdict.found:
        raise _blamed(kernel, verdict)
    return CHECKED


def _blamed(kernel: AnnotatedKernel, verdict: _Verdict) -> DirectiveError:
    said = [one.directive for one in (kernel.stores if verdict.is_store else kernel.loads)]
    places = [one.place for one in said if one.tensor == verdict.subject]
    places += [one.directive.place for one in kernel.streams if one.directive.axis == verdict.subject]
    place = places[0] if places else kernel.source.place()
    return place.error(f"tried on a smaller problem, {verdict.found}", "Let directives say what the kernel does")


def _kept(kernel: AnnotatedKernel, trial: _Trial, anew: bool) -> _Verdict:
    """What was found of a kernel, by this process or an earlier one; others of this machine wait for it."""
    data = msgspec.json.encode(trial)
    problem = msgspec.json.encode([trial.kernel, trial.constants, trial.tensors], order="sorted")
    text = (*kernel.source.file.imported_sources(), kernel.source.text, sys.version, RULES)
    digest = blake2b("\0".join(text).encode() + problem, digest_size=12).hexdigest()
    folder = cache_folders()["overweave"] / "footprints"
    path = folder / f"{digest}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Path(folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file() and not anew:
                return msgspec.json.decode(path.read_bytes(), type=_Verdict)
            verdict = _tried(data)
            if not verdict.is_late:
                path.write_bytes(msgspec.json.encode(verdict))
            return verdict
    except (OSError, msgspec.DecodeError) as error:
        return _Verdict(failed=f"{folder}: {error}"[:120])


def _tried(data: bytes) -> _Verdict:
    command = [sys.executable, "-m", "overweave.runtime.host.footprint"]
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=clean) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            begun = _read(process.stdout.fileno(), BEGIN_S, len(READY))
            if begun == READY:
                process.stdin.write(data)
                process.stdin.close()
            said = _read(process.stdout.fileno(), LONGEST_S) if begun == READY else b""
        except TimeoutError:
            return _Verdict(failed=f"it took longer than {LONGEST_S:.0f} s", is_late=True)
        except BrokenPipeError:
            said = b""
        finally:
            process.kill()
        assert process.stderr is not None
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
    if not said:
        return _Verdict(failed=(errors or [f"it ended with {process.returncode}"])[0][:160])
    return msgspec.json.decode(said, type=_Verdict)


def _read(pipe: int, longest_s: float, most: int = MOST_ELEMENTS) -> bytes:
    """What a process writes until it has written so much, or has ended. Raises TimeoutError."""
    found, end = b"", time.monotonic() + longest_s
    while len(found) < most:
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, min(1 << 16, most - len(found)))
        if not part:
            break
        found += part
    return found


def _reduced(
    kernel: AnnotatedKernel,
    given: Mapping[str, Any],
    extents: Callable[[AnnotatedKernel, Mapping[str, int]], dict[str, int]],
) -> _Trial:
    """The same call of a smaller problem. Raises OverweaveError where it is no call of the kernel."""
    numbers = kernel.source.default_numbers | numbers_of(given)
    smaller = numbers | extents(kernel, numbers)
    smaller |= _strides(kernel, numbers, smaller)
    space = kernel.space(smaller)
    shapes = {one.parameter: tuple(dim.extent for dim in one.dims) for one in (*space.loads, *space.stores)}
    tensors = {name: value for name, value in given.items() if tensor_of(value) is not None}
    constants = {name: smaller.get(name, value) for name, value in given.items() if name not in tensors}
    described = {name: _described(value, shapes.get(name)) for name, value in tensors.items()}
    sizes = ((name, enumerate(one["block"])) for name, one in described.items())
    blocks = {f"{name}.block_shape[{at}]": size for name, block in sizes for at, size in block}
    check_addresses(kernel, kernel.source.default_numbers | constants | smaller | blocks)
    return _Trial(str(kernel.source.path.resolve()), kernel.source.name, constants, described)


def _described(value: Any, shape: tuple[int, ...] | None) -> dict[str, Any]:
    tensor = tensor_of(value)
    assert isinstance(tensor, torch.Tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": shape or shape_of(value), "dtype": dtype, "block": tuple(getattr(value, "block_shape", ()))}


def _same(kernel: AnnotatedKernel, numbers: Mapping[str, int]) -> dict[str, int]:
    """The call itself."""
    return {}


def _extents(kernel: AnnotatedKernel, numbers: Mapping[str, int]) -> dict[str, int]:
    """A few blocks of every axis whose extent is a parameter, and less of other extents, no two alike if the call's
    leave room: what is equal hides which one a kernel means."""
    found: dict[str, int] = {}
    axes, constants = {axis.name for axis in kernel.axes}, kernel.source.constants
    blocks = {f"blocks({name})" for name in axes}
    walked = {str(axis.extent) for axis in kernel.axes}
    for access in (*kernel.loads, *kernel.stores):
        for dim in access.directive.dims:
            for name in dim.names - axes - found.keys() - constants - blocks - walked:
                found[name] = min(numbers[name], KEPT + numbers[name] % KEPT)
    kept = dict(found)
    for axis in kernel.axes:
        name, block = str(axis.extent), axis.block.value(numbers)
        if name in numbers and name not in found:
            heads = (size for size in kept.values() if 0 < size <= FEW and numbers[name] % size == 0)
            block = lcm(block, *heads) if numbers[name] % block == 0 else block
            part = 0 if numbers[name] % block == 0 else max(1, block // 2)
            sizes = [count * block + part for count in (2 + (not part), 3 + (not part), 4, 1)]
            taken = set(found.values())
            free = (size for size in sizes if size <= numbers[name] and size not in taken)
            found[name] = next(free, min(numbers[name], sizes[0]))
    return found


def _strides(kernel: AnnotatedKernel, old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """The strides of the smaller tensors, for parameters that stand before a block or a lane as a stride does."""
    spaces = [{one.tensor: one for one in (*space.loads, *space.stores)} for space in map(kernel.space, (old, new))]
    found: dict[str, int] = {}
    sized = {name for axis in kernel.axes for name in axis.extent.names | axis.block.names} | kernel.source.constants
    for access in follow(kernel).accesses:
        if access.directive is None or not isinstance(access.address, Number):
            continue
        dims = [_stride_list(each[access.directive.tensor]) for each in spaces]
        for atoms, _ in access.address.poly.terms:
            names = [atom for atom in atoms if isinstance(atom, str) and atom in old and atom not in sized]
            if not any(isinstance(atom, BlockOf | LaneIndex) for atom in atoms):
                continue
            for name in names:
                pairs = [pair for pair in zip(*dims, strict=True) if pair[0] == old[name]]
                if pairs and new[name] == old[name]:
                    found.setdefault(name, pairs[0][1])
    return found


def _stride_list(operand: Any) -> list[int]:
    strides, made = 1, list[int]()
    for dim in reversed(operand.dims):
        made.insert(0, strides)
        strides *= dim.extent
    return made


def arguments_of(kernel: AnnotatedKernel, text: str) -> dict[str, Any]:
    """Arguments of a call as `M=96,eps=1e-5,CAUSAL=True,ACT=silu,a_desc=16x32` says them; all others are tensors.

    A word that is no number is a string, of a `constexpr` alone.

    Annotated tensors are as large as their directives say; what has no directive holds numbers enough. Raises
    InputError, and DirectiveError for a number that a directive names and nobody gives.
    """
    said: dict[str, str] = {}
    for word in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in kernel.source.parameters or not equals or name in said:
            known = ", ".join(kernel.source.parameters)
            raise InputError(f"shape {text[:60]!r}", f"{word[:40]!r}", f"Write NAME=NUMBER, each once, of {known}")
        said[name] = value
    blocks = {name: tuple(map(int, value.split("x"))) for name, value in said.items() if _BLOCK.fullmatch(value)}
    constants = kernel.source.constants
    given: dict[str, Any] = {
        name: _constant(name, value, name in constants) for name, value in said.items() if name not in blocks
    }
    numbers = kernel.source.default_numbers | {name: value for name, value in given.items() if type(value) is int}
    space = kernel.space(numbers)
    shapes = {one.parameter: [dim.extent for dim in one.dims] for one in (*space.loads, *space.stores)}
    for name in kernel.source.parameters:
        if name not in given and name not in kernel.source.defaults:
            tensor = torch.empty(shapes.get(name, [LARGE]), dtype=torch.float32)
            given[name] = _Descriptor(tensor, tuple(tensor.shape), blocks[name]) if name in blocks else tensor
    return given


def _constant(name: str, value: str, is_constexpr: bool) -> int | float | bool | str:
    if value in ("True", "False"):
        return value == "True"
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        if is_constexpr and value.isidentifier():
            return value
        cure = "Write a number, True or False, or a word for a constexpr"
        raise InputError(f"shape {name}={value[:40]}", "no number", cure) from None
