"""The footprint check: an author's kernel runs under the interpreter, on a smaller problem, in a process of its own.

Each axis keeps two blocks and a half, or three where the call's are whole; strides are those of the smaller tensors.
What was found is kept under the digest of the kernel's text, so that a machine tries it once.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch

from overweave.compiler.emit.kernel import Kernel
from overweave.compiler.frontend.follow import follow
from overweave.compiler.frontend.polynomials import BlockOf, Lane, TooLarge
from overweave.compiler.frontend.rectangles import check_places
from overweave.compiler.frontend.values import Number
from overweave.errors import DirectiveError, InputError, OverweaveError
from overweave.ops.author.arguments import numbers_of
from overweave.runtime.authored import shape_of, tensor_of
from overweave.tuner.store.caches import cache_folders

LONGEST_S = 10.0
LARGE = 1 << 20  # elements of a tensor of which no directive tells
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
    of: str = ""
    is_store: bool = False
    failed: str = ""


def check_footprint(kernel: Kernel, given: Mapping[str, Any], anew: bool = False) -> str:
    """`checked`, or `not checked` and why. given: the arguments of a call; anew: whatever was found before.

    Raises DirectiveError for what is untrue.
    """
    try:
        trial = _reduced(kernel, given)
    except (OverweaveError, TooLarge, KeyError) as error:
        return f"{NOT_CHECKED}: no smaller problem: {error}"[:200]
    verdict = _kept(kernel, trial, anew)
    if verdict.failed:
        return f"{NOT_CHECKED}: {verdict.failed}"
    if verdict.found:
        raise _blamed(kernel, verdict)
    return CHECKED


def _blamed(kernel: Kernel, verdict: _Verdict) -> DirectiveError:
    said = [one.directive for one in (kernel.stores if verdict.is_store else kernel.loads)]
    places = [one.place for one in said if one.tensor == verdict.of]
    places += [one.directive.place for one in kernel.streams if one.directive.axis == verdict.of]
    place = places[0] if places else kernel.source.place()
    return place.error(f"tried on a smaller problem, {verdict.found}", "Let directives say what the kernel does")


def _kept(kernel: Kernel, trial: _Trial, anew: bool) -> _Verdict:
    """What was found of a kernel, by this process or an earlier one; others of this machine wait for it."""
    data, text = msgspec.json.encode(trial), (kernel.source.text, kernel.source.name, sys.version)
    digest = blake2b("".join(text).encode(), digest_size=12).hexdigest()
    folder = cache_folders()["overweave"] / "footprints"
    path = folder / f"{digest}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Path(folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file() and not anew:
                return msgspec.json.decode(path.read_bytes(), type=_Verdict)
            verdict = _tried(data)
            path.write_bytes(msgspec.json.encode(verdict))
            return verdict
    except (OSError, msgspec.DecodeError) as error:
        return _Verdict(failed=f"{folder}: {error}"[:120])


def _tried(data: bytes) -> _Verdict:
    command = [sys.executable, "-m", "overweave.runtime.interpreted.footprint"]
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=LONGEST_S, env=clean, check=False)
    except subprocess.TimeoutExpired:
        return _Verdict(failed=f"it took longer than {LONGEST_S:.0f} s")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return _Verdict(failed=last[0][:160])
    return msgspec.json.decode(done.stdout, type=_Verdict)


def _reduced(kernel: Kernel, given: Mapping[str, Any]) -> _Trial:
    """The same call of a smaller problem. Raises OverweaveError where its strides cannot be told."""
    numbers = kernel.source.default_numbers | numbers_of(given)
    smaller = numbers | _extents(kernel, numbers)
    smaller |= _strides(kernel, numbers, smaller)
    space = kernel.space(smaller)
    shapes = {one.parameter: tuple(dim.extent for dim in one.dims) for one in (*space.loads, *space.stores)}
    tensors = {name: value for name, value in given.items() if tensor_of(value) is not None}
    constants = {name: smaller.get(name, value) for name, value in given.items() if name not in tensors}
    described = {name: _described(value, shapes.get(name)) for name, value in tensors.items()}
    sizes = ((name, enumerate(one["block"])) for name, one in described.items())
    blocks = {f"{name}.block_shape[{at}]": size for name, block in sizes for at, size in block}
    check_places(kernel, kernel.source.default_numbers | constants | smaller | blocks)
    return _Trial(str(kernel.source.path.resolve()), kernel.source.name, constants, described)


def _described(value: Any, shape: tuple[int, ...] | None) -> dict[str, Any]:
    tensor = tensor_of(value)
    assert isinstance(tensor, torch.Tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": shape or shape_of(value), "dtype": dtype, "block": tuple(getattr(value, "block_shape", ()))}


def _extents(kernel: Kernel, numbers: Mapping[str, int]) -> dict[str, int]:
    """Two blocks and a half of every axis whose extent is a parameter, or three, and less of other extents."""
    found: dict[str, int] = {}
    for axis in kernel.axes:
        name, block = str(axis.extent), axis.block.value(numbers)
        if name in numbers:
            least = 3 * block if numbers[name] % block == 0 else 2 * block + max(1, block // 2)
            found[name] = min(numbers[name], least)
    axes, constants = {axis.name for axis in kernel.axes}, kernel.source.constants
    for access in (*kernel.loads, *kernel.stores):
        for dim in access.directive.dims:
            for name in dim.names - axes - found.keys() - constants:
                found[name] = min(numbers[name], KEPT + numbers[name] % KEPT)
    return found


def _strides(kernel: Kernel, old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """The strides of the smaller tensors, for parameters that stand before a block or a lane as a stride does."""
    spaces = [{one.tensor: one for one in (*space.loads, *space.stores)} for space in map(kernel.space, (old, new))]
    found: dict[str, int] = {}
    sized = {name for axis in kernel.axes for name in axis.extent.names | axis.block.names} | kernel.source.constants
    for reached in follow(kernel).reached:
        if reached.said is None or not isinstance(reached.place, Number):
            continue
        dims = [_stride_list(each[reached.said.tensor]) for each in spaces]
        for atoms, _ in reached.place.poly.terms:
            names = [atom for atom in atoms if isinstance(atom, str) and atom in old and atom not in sized]
            if not any(isinstance(atom, BlockOf | Lane) for atom in atoms):
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


def arguments_of(kernel: Kernel, text: str) -> dict[str, Any]:
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
