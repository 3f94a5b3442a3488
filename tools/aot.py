"""Ahead-of-time compilation of a Triton kernel for Hopper, on any machine: no GPU is needed or touched.

Triton brings its own assembler; what a kernel will occupy on an SM is read from the assembler's report, so residency,
spills and the lint can be judged on a laptop. Nothing stays on disk. The process must not be one in which Triton
interprets kernels: there a `@triton.jit` function is no longer something that can be compiled.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import triton
from msgspec import Struct

from overweave.compat.triton_names import (
    COMPILE_OPTIONS,
    VERSIONS_CURE,
    ASTSource,
    GluonASTSource,
    GPUTarget,
    JITFunction,
    bind_arguments,
    make_backend,
)
from overweave.errors import InputError, MachineError

HOPPER = GPUTarget("cuda", 90, 32)
_SCRATCH_PARAMETERS = 2  # Triton appends a global and a profiling scratch pointer to every kernel
_BY_16 = "D"  # what Triton says of an argument that a launch finds divisible by 16
_DESCRIPTOR = re.compile(r"tensordesc<[^\[]*\[([^\]]*)\]")


class Source(Struct, frozen=True):
    """A kernel and what it is specialised for.

    kernel: the `@triton.jit` or `@gluon.jit` function. signature: argument name -> type, without the constexprs: `i32`,
    `*bf16`, `tensordesc<bf16[128,64]>`; Gluon's descriptors name their layout, `tensordesc<bf16[128, 64],LAYOUT>`; of
    an argument that is a tuple with names, the same tuple of types, with any other value for a constant.
    constexprs: name -> value. attrs: name -> power of two that divides the argument (a launch finds 16 for aligned
    pointers and sizes). options: `num_warps`, `num_stages`, ... config: a label for reports.
    """

    kernel: Any
    signature: Mapping[str, str | tuple[Any, ...]]
    constexprs: Mapping[str, Any] = {}
    attrs: Mapping[str, int] = {}
    options: Mapping[str, int] = {}
    config: str = ""

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


def source_of_launch(kernel: Any, arguments: Sequence[Any], options: Mapping[str, int], config: str) -> Source:
    """What a launch with these arguments compiles: Triton itself says what it specialises for. The arguments may be
    tensors of any device.
    """
    if not isinstance(kernel, JITFunction):
        raise _not_compilable(kernel)
    backend = make_backend(HOPPER)
    bound, specialisation, _ = bind_arguments(kernel.signature, kernel.params, backend)(*arguments)
    signature: dict[str, str | tuple[Any, ...]] = {}
    constexprs: dict[str, Any] = {}
    attrs: dict[str, int] = {}
    for (name, value), (kind, key) in zip(bound.items(), specialisation, strict=True):
        if isinstance(kind, tuple):
            kinds = (given if one == "constexpr" else one for one, given in zip(kind, value, strict=True))
            signature[name] = type(value)(*kinds)
            for field, one in zip(value._fields, key, strict=True):
                parts = {f".{index}": part for index, part in enumerate(one)} if isinstance(one, tuple) else {"": one}
                attrs |= {f"{name}.{field}{place}": 16 for place, part in parts.items() if part == _BY_16}
        elif kind == "constexpr":
            constexprs[name] = value
        else:
            signature[name] = kind
            attrs |= {name: 16} if key == _BY_16 else {}
    return Source(kernel, signature, constexprs, attrs, options, config)


class Resources(Struct, frozen=True):
    """What one block occupies, as the assembler reports it.

    registers: per thread. spill_bytes: stored to local memory because registers ran out. stack_bytes: local memory per
    thread, spills included. shared_bytes: static and dynamic shared memory. warnings: the assembler's, in order.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    warnings: tuple[str, ...] = ()


class Compiled(Struct, frozen=True):
    """A kernel as text and as code. pointers: position of each pointer or descriptor argument among PTX parameters."""

    name: str
    config: str
    ptx: str
    cubin: bytes
    pointers: Mapping[int, str]
    resources: Resources


def compile_kernel(source: Source, capability: int = 90) -> Compiled:
    """Compiles for GPUs of a compute capability, 90 for sm_90a. Only for these `pointers` are told.

    Raises MachineError in an interpreting process and when compiler or assembler refuse the kernel, InputError when
    the source's names do not fit the kernel.
    """
    _require_compilable(source)
    names = source.kernel.arg_names
    given = {name: source.signature.get(name, "constexpr") for name in names}
    signature = {name: _types(kind) for name, kind in given.items()}
    paths = {path: at for at, path in _leaves(given)}
    attrs = {paths[name]: [["tt.divisibility", by]] for name, by in source.attrs.items()}
    constants = {(names.index(name),): value for name, value in source.constexprs.items()} | {
        (at, field): value
        for at, name in enumerate(names)
        if isinstance(given[name], tuple)
        for field, value in enumerate(given[name])
        if not isinstance(value, (str, tuple))
    }
    make = GluonASTSource if source.kernel.is_gluon() else ASTSource
    said = io.StringIO()
    with _kept_out_of_caches():
        try:
            # Triton prints the assembler's report, and the whole PTX when the assembler refuses it.
            with contextlib.redirect_stdout(said):
                kernel = make(source.kernel, signature, constants, attrs)
                target = GPUTarget("cuda", capability, HOPPER.warp_size)
                made = triton.compile(kernel, target, COMPILE_OPTIONS | dict(source.options))
        except Exception as error:
            raise MachineError(
                f"compile {source.name} [{source.config}] for sm_{capability}", str(error)[:800], "Mend the kernel"
            ) from error
        ptx, cubin = str(made.asm["ptx"]), bytes(made.asm["cubin"])
        shared_bytes, num_warps = int(made.metadata.shared), int(made.metadata.num_warps)
    # Descriptors are other parameters on GPUs without bulk copies; the lint reads what is compiled for Hopper.
    pointers = _pointers(source, given, ptx) if capability == HOPPER.arch else {}
    resources = resources_of(said.getvalue(), shared_bytes, num_warps)
    return Compiled(source.name, source.config, ptx, cubin, pointers, resources)


@contextlib.contextmanager
def _kept_out_of_caches() -> Iterator[None]:
    """Within, Triton compiles anew, leaves nothing behind and prints what its assembler reports."""
    temporary = tempfile.TemporaryDirectory(prefix="overweave-")
    with temporary as folder, triton.knobs.cache.scope(), triton.knobs.nvidia.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        yield


def resources_of(report: str, shared_bytes: int, num_warps: int) -> Resources:
    """What the assembler's report on one kernel says. Raises MachineError if that is nothing."""
    if not re.search(r"Used \d+ registers", report):
        raise MachineError(
            "read what a kernel occupies from its assembler's report",
            f"Triton {triton.__version__} printed {report.strip()[:200]!r}",
            VERSIONS_CURE,
        )
    return Resources(
        registers=_number(r"Used (\d+) registers", report),
        spill_bytes=_number(r"(\d+) bytes spill stores", report),
        stack_bytes=_number(r"(\d+) bytes stack frame", report),
        shared_bytes=shared_bytes,
        num_warps=num_warps,
        warnings=tuple(re.findall(r"(?:warning|info)\s*:\s*(\(C\d+\)[^\n]*)", report)),
    )


def _not_compilable(kernel: Any) -> MachineError:
    return MachineError(
        f"compile {getattr(kernel, '__name__', kernel)} ahead of time",
        "this process interprets Triton kernels (TRITON_INTERPRET), or this is no @triton.jit function",
        "Compile in a process of its own, started without TRITON_INTERPRET",
    )


def _require_compilable(source: Source) -> None:
    if triton.knobs.runtime.interpret or not isinstance(source.kernel, JITFunction):
        raise _not_compilable(source.kernel)
    names = set(source.kernel.arg_names)
    given = set(source.signature) | set(source.constexprs)
    if (
        names != given
        or set(source.signature) & set(source.constexprs)
        or not {name.split(".")[0] for name in source.attrs} <= names
    ):
        raise InputError(
            f"compile {source.name}",
            f"arguments {sorted(names ^ given)} are missing or unknown, or stand twice",
            "Name every argument once, in signature or in constexprs",
        )


def _types(kind: str | tuple[Any, ...]) -> Any:
    """A type as Triton wants it: constants within a tuple by that name."""
    if not isinstance(kind, tuple):
        return kind if isinstance(kind, str) else "constexpr"
    types = map(_types, kind)
    return type(kind)(*types) if hasattr(kind, "_fields") else tuple(types)


def _leaves(signature: Mapping[str, str | tuple[Any, ...]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Where each argument stands, and its name: `channel.signals` of a tuple's part."""
    for at, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, str):
            yield (at,), name
            continue
        for place, (field, one) in enumerate(zip(kind._fields, kind, strict=True)):  # type: ignore[attr-defined]
            path, called = (at, place), f"{name}.{field}"
            inner = range(len(one)) if isinstance(one, tuple) else ()
            yield from (((*path, index), f"{called}.{index}") for index in inner)
            if not isinstance(one, tuple):
                yield path, called


def _pointers(source: Source, signature: Mapping[str, str | tuple[Any, ...]], ptx: str) -> dict[int, str]:
    """A descriptor of d dimensions takes 1 + 2 d parameters (itself, its shape, its strides), all else takes one."""
    position = 0
    found = {}
    kinds = list(signature.values())
    for (at, *inside), name in _leaves(signature):
        kind = reduce(getitem, inside, kinds[at])
        if kind == "constexpr" or not isinstance(kind, str):
            continue
        descriptor = _DESCRIPTOR.match(kind)
        if descriptor or kind.startswith("*"):
            found[position] = name
        position += 1 + 2 * len(descriptor.group(1).split(",")) if descriptor else 1
    shown = len(re.findall(rf"\.param [^\n]*{re.escape(source.name)}_param_\d+", ptx))
    if shown != position + _SCRATCH_PARAMETERS:
        raise MachineError(
            f"match the arguments of {source.name} to PTX",
            f"Triton {triton.__version__} passes {shown}, and {position + _SCRATCH_PARAMETERS} are known",
            VERSIONS_CURE,
        )
    return found


def _number(pattern: str, report: str) -> int:
    match = re.search(pattern, report)
    return int(match.group(1)) if match else 0
