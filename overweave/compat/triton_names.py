"""Triton's private names and those that move, from 3.6 to 3.9: the one place that knows them.

`from overweave.compat.triton_names import load_tile` finds the name that the Triton at hand has. Nothing else in the
library names what is private to Triton, or asks for its version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import triton
from triton.language import core

from overweave.compat.versions import Home, Names, cure_of, first_found, numbers, standing
from overweave.errors import KernelUnavailable

VERSIONS_CURE = cure_of("triton")
_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
_GLUON = "triton.experimental.gluon.language"
_AMPERE = "triton.experimental.gluon.language.nvidia.ampere"


NAMES: Names = {
    "load_tile": (
        Home("3.8 on", _HOPPER, "tma.async_load"),
        Home("3.6, 3.7", _HOPPER, "tma.async_copy_global_to_shared"),
    ),
    "store_tile": (
        Home("3.8 on", _HOPPER, "tma.async_store"),
        Home("3.6, 3.7", _HOPPER, "tma.async_copy_shared_to_global"),
    ),
    "copy_to_shared": (
        Home("3.8 on", _AMPERE, "async_copy.async_load"),
        Home("3.6, 3.7", _AMPERE, "async_copy.async_copy_global_to_shared"),
    ),
    "wait_for_stores_read": (Home("3.6 on", _HOPPER, "tma.store_wait"),),
    "block_barrier": (Home("3.7 on", _GLUON, "barrier"), Home("3.6", _GLUON, "thread_barrier")),
    "reinterpret": (
        Home("3.9 on", _GLUON, "shared_memory_descriptor.reinterpret"),
        Home("3.6 to 3.8", _GLUON, "shared_memory_descriptor._reinterpret"),
    ),
    "encode_tensor_map": (Home("3.6 on", "triton.backends.nvidia.driver", "make_tensordesc_arg"),),
    "CUDAOptions": (Home("3.6 on", "triton.backends.nvidia.compiler", "CUDAOptions"),),
    "GPUTarget": (Home("3.6 on", "triton.backends.compiler", "GPUTarget"),),
    "ASTSource": (Home("3.6 on", "triton.compiler", "ASTSource"),),
    "GluonASTSource": (Home("3.6 on", "triton.experimental.gluon._runtime", "GluonASTSource"),),
    "bind_arguments": (Home("3.6 on", "triton.runtime.jit", "create_function_from_signature"),),
    "make_backend": (Home("3.6 on", "triton.compiler", "make_backend"),),
    "JITFunction": (Home("3.6 on", "triton.runtime", "JITFunction"),),
}


def __getattr__(name: str) -> Any:
    """The name that this Triton has. Raises KernelUnavailable where it has none of those that are known."""
    found = globals()[name] = first_found(NAMES, name, "triton", triton.__version__)
    return found


# Of every compilation. Up to 3.8 that is what is done where nobody says, 3.9 warns, and 3.10 will do the other: bits
# must not depend on the version.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

# Whether shared memory is seen in another shape only where that has as many bytes. 3.9 lets a view have fewer, 3.6 any.
VIEWS_ARE_WHOLE = numbers(triton.__version__) in ((3, 7), (3, 8))


def is_tested() -> bool:
    """Whether the Triton at hand is one that overweave is tested with."""
    return standing("triton", triton.__version__) == "tested"


@core.builtin  # type: ignore[untyped-decorator]
def has_bulk_copies(_semantic: Any = None) -> Any:
    """Of device code: whether the GPU that it is compiled for has bulk copies, and with them the asynchronous proxy."""
    arch = str(_semantic.builder.options.arch)  # `sm90`
    return core.constexpr(int("".join(filter(str.isdigit, arch))) >= 90)


class QuickLaunch(NamedTuple):
    """Triton's C launcher behind the wrapper that encodes descriptors anew at each launch.

    It is called with the grid, the stream, `head`, and the kernel's arguments: one by one if is_flat, else as a list.
    """

    launch: Callable[..., None]
    head: tuple[Any, ...]
    is_flat: bool


def quick_launch(compiled: Any) -> QuickLaunch | None:
    """How to start a compiled kernel past Triton's wrapper, or None where this Triton is built in another way."""
    run, has_maps = compiled.run, bool(getattr(compiled.metadata, "tensordesc_meta", None))
    launch = _c_launcher(getattr(run, "launch", None), has_maps)
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if launch is None or scratch or not _encodes_maps() or getattr(run, "gsan_enabled", False):
        return None
    depends = bool(getattr(compiled.metadata, "launch_pdl", False))
    first = (compiled.function, False, depends)  # function, cooperative, dependent launch
    nothing = (None, None, None)
    if not hasattr(run, "arg_annotations"):  # 3.6: two scratch buffers, metadata, launch metadata, hooks
        return QuickLaunch(launch, (*first, None, None, compiled.packed_metadata, *nothing), True)
    # From 3.7 on: metadata, launch metadata, hooks, two scratch buffers, what the arguments are
    signature = (run.arg_annotations, run.kernel_signature)
    return QuickLaunch(launch, (*first, compiled.packed_metadata, *nothing, None, None, *signature), False)


def _c_launcher(launch: Any, has_maps: bool) -> Callable[..., None] | None:
    """What Triton's wrapper of descriptors calls; of a kernel without descriptors there is no wrapper."""
    if not inspect.isfunction(launch):
        return launch  # type: ignore[no-any-return]
    inner = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return inner if callable(inner) and has_maps else None


def encoded(descriptor: Any, metadata: Any) -> list[Any]:
    """What the launcher takes for a descriptor: its tensor map, its shape and its strides."""
    encode = __getattr__("encode_tensor_map")
    return encode(descriptor, metadata, *(None,) * (_parameters(encode) - 2))  # type: ignore[no-any-return]


def _encodes_maps() -> bool:
    try:
        return 2 <= _parameters(__getattr__("encode_tensor_map")) <= 3  # 3.8 added what AMD's back end needs
    except KernelUnavailable:
        return False


@cache
def _parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)
