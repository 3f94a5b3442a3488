"""Allocate tensors that outlive a call outside of the caller's torch modes and memory pools.

A tensor allocated under torch.inference_mode may be written to under it only. Memory of a pool that a graph capture or
Inductor's cudagraph trees own is reused by them: torch raises, or overwrites the tensor.

torch redirects allocations to pools by thread, or by the stream that is captured, and its versions differ in which of
two redirections wins. A new thread is subject to none.
SOURCE: c10/cuda/CUDACachingAllocator.cpp, get_pool; torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch

from overweave.compat.torch_names import cuda_getDevice, empty_strided_cuda
from overweave.errors import MachineError

_RELAXED, _CURE = 2, "See `overweave doctor`"  # SOURCE: cuda.h, CU_STREAM_CAPTURE_MODE_RELAXED
Params = ParamSpec("Params")
Allocated = TypeVar("Allocated")


def outside_modes_and_pools(allocate: Callable[Params, Allocated]) -> Callable[Params, Allocated]:
    """Decorate a function that allocates: it runs outside of torch modes and, if CUDA is in use, of memory pools.

    What the function enqueued on its stream has ended when it returns.
    """

    @wraps(allocate)
    def wrapper(*arguments: Params.args, **options: Params.kwargs) -> Allocated:
        call = partial(allocate, *arguments, **options)
        return (
            run_in_own_thread(call, torch.cuda.current_device())
            if torch.cuda.is_initialized()
            else _outside_modes(call)
        )

    return wrapper


def run_in_own_thread(call: Callable[[], Allocated], device: int) -> Allocated:
    """Run a function in a new thread, on this GPU, outside of all captures and pools; return or raise its outcome.

    An interrupt of the waiting thread is raised in the new one, so that it tells its peers, and then here.
    """
    results: list[Allocated] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(_run_and_synchronize(call, device))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="overweave prepares", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException as error:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(type(error)))
        thread.join()
        raise
    if errors:
        raise errors[0]
    return results[0]


def _run_and_synchronize(call: Callable[[], Allocated], device: int) -> Allocated:
    """Run a function in this new thread, and wait for its stream."""
    torch.cuda.set_device(device)
    exempt_thread_from_capture()
    result = _outside_modes(call)
    torch.cuda.current_stream().synchronize()  # the caller goes on on another stream
    return result


def exempt_thread_from_capture() -> None:
    """Keep this thread's CUDA calls from invalidating or joining a graph capture of another thread. Needs a GPU."""
    status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    if status:
        raise MachineError("cuThreadExchangeStreamCaptureMode", f"the CUDA driver answered {status}", _CURE)


def _outside_modes(call: Callable[[], Allocated]) -> Allocated:
    with torch.inference_mode(False), torch.no_grad():
        return call()


Make = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


def empty_factory(device: torch.device) -> Make:
    """Return the function that allocates a row-major matrix on a device."""
    # The allocation function of Inductor's generated code. A CPU build of torch has none.
    empty: Callable[..., torch.Tensor] | None = empty_strided_cuda
    index = device.index

    def by_torch(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def on_gpu(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if empty is None or cuda_getDevice() != index:
            return by_torch(shape, dtype)
        return empty(shape, (shape[1], 1), dtype)

    return on_gpu if device.type == "cuda" else by_torch
