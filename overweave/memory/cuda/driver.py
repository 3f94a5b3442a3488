"""The few CUDA driver calls the copy engine needs, with their result codes checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from overweave.errors import MachineError

_BUFFER_ID, _SUCCESS = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, driver.CUresult.CUDA_SUCCESS
MOST_MEMORY_OPERATIONS = 255  # SOURCE: cuStreamBatchMemOp takes fewer than 256


def checked(call: str, outcome: tuple[Any, ...]) -> Any:
    """Return the value of a driver call. Raises MachineError with the driver's own words."""
    status = outcome[0]
    if status != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(status)[1]
        raise MachineError(call, f"the CUDA driver answered {status.name}: {text.decode()}", "See `overweave doctor`")
    return outcome[1] if len(outcome) == 2 else outcome[1:]


def current_context() -> Any:
    """Return the CUDA context that is current on this thread: torch's."""
    return checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())


@contextmanager
def own_context(device: int) -> Iterator[int]:
    """Yield a stream of a new CUDA context; on exit, synchronize it and destroy the context.

    Driver calls of other threads in torch's context do not block it. MEASURED: 0.2 to 0.6 s beside seven others
    (campaigns/rates/gpu_driver_waits.py, one H200, 2026-11-23), and half a GiB of its memory (a draft). Raises
    MachineError.
    """
    create = getattr(driver, "cuCtxCreate_v4", driver.cuCtxCreate)  # cuda-bindings 12 and 13: the same function
    context = checked("cuCtxCreate", create(None, 0, checked("cuDeviceGet", driver.cuDeviceGet(device))))
    try:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        stream = checked("cuStreamCreate", driver.cuStreamCreate(flags))
        yield int(stream)
        checked("cuStreamSynchronize", driver.cuStreamSynchronize(stream))
    finally:
        checked("cuCtxDestroy", driver.cuCtxDestroy(context))


def allocation_id(address: int) -> int:
    """Return the id of the driver allocation that an address lies in; 0 for the address of an empty tensor.

    A copy node of a graph refers to the allocation, not the address alone. If torch returns memory to the driver
    (`torch.cuda.empty_cache`) and gets new memory at the same address, that copy fails on the device.
    MEASURED: unspecified launch failure (campaigns.gpu_exactness --shapes 12, two H100s, 2026-11-25).
    """
    if not address:
        return 0
    outcome = driver.cuPointerGetAttribute(_BUFFER_ID, address)
    return outcome[1] if outcome[0] == _SUCCESS else checked("cuPointerGetAttribute", outcome)  # type: ignore[no-any-return]


def write_value(stream: int, address: int, value: int) -> None:
    """Set the 32-bit word at `address`, of any GPU, in stream order."""
    checked("cuStreamWriteValue32", driver.cuStreamWriteValue32(stream, address, value, 0))


def write_values(stream: int, addresses: Sequence[int], value: int) -> None:
    """`write_value` at every address."""
    for first in range(0, len(addresses), MOST_MEMORY_OPERATIONS):
        writes = [_write(address, value) for address in addresses[first : first + MOST_MEMORY_OPERATIONS]]
        checked("cuStreamBatchMemOp", driver.cuStreamBatchMemOp(stream, len(writes), writes, 0))


def wait_value(stream: int, address: int, value: int) -> None:
    """Make the stream wait until the 32-bit word at `address` is at least `value` (by signed difference)."""
    flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    checked("cuStreamWaitValue32", driver.cuStreamWaitValue32(stream, address, value, flags))


def _write(address: int, value: int) -> Any:
    """Return `write_value` as an operation of a batch."""
    operation = driver.CUstreamBatchMemOpParams()
    operation.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    operation.writeValue.address = address
    operation.writeValue.value = value
    return operation


def copy_description(source: int, target: int, row_bytes: int, rows: int, pitches: tuple[int, int]) -> Any:
    """Describe a copy of `rows` rows of `row_bytes` bytes. pitches: bytes between rows, of source and target."""
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = source, target
    copy.srcPitch, copy.dstPitch = pitches
    copy.srcHeight = copy.dstHeight = rows
    copy.WidthInBytes, copy.Height, copy.Depth = row_bytes, rows, 1
    return copy


def copy(stream: int, source: int, target: int, row_bytes: int, rows: int, pitches: tuple[int, int]) -> None:
    """Copy rows between any two GPUs, in stream order."""
    if pitches == (row_bytes, row_bytes):
        checked("cuMemcpyAsync", driver.cuMemcpyAsync(target, source, row_bytes * rows, stream))
        return
    description = copy_description(source, target, row_bytes, rows, pitches)
    checked("cuMemcpy3DAsync", driver.cuMemcpy3DAsync(description, stream))


class LinearGraph:
    """A chain of copies, waits and writes, instantiated once and launched with one call.

    Copies may be retargeted before each launch: an operator's inputs move from call to call.
    """

    def __init__(self) -> None:
        self._graph = checked("cuGraphCreate", driver.cuGraphCreate(0))
        self._context = current_context()
        self._last: list[Any] = []
        self._executable: Any = None

    def add_copy(self, description: Any) -> Any:
        """Append a copy; the returned node can be passed to `retarget_copy`."""
        return self._append(
            "cuGraphAddMemcpyNode",
            driver.cuGraphAddMemcpyNode(self._graph, self._last, len(self._last), description, self._context),
        )

    def add_write(self, address: int, value: int) -> None:
        """Append `write_value`."""
        self._add_memory_operation(_write(address, value))

    def add_wait(self, address: int, value: int) -> None:
        """Append `wait_value`."""
        operation = driver.CUstreamBatchMemOpParams()
        operation.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        operation.waitValue.address = address
        operation.waitValue.value = value
        operation.waitValue.flags = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._add_memory_operation(operation)

    def instantiate(self) -> None:
        """Instantiate the graph: no operation can be appended any more."""
        self._executable = checked("cuGraphInstantiate", driver.cuGraphInstantiate(self._graph, 0))

    def upload(self, stream: int) -> None:
        """Allocate the memory that the chain needs to run, ahead of its first launch."""
        checked("cuGraphUpload", driver.cuGraphUpload(self._executable, stream))

    def retarget_copy(self, node: Any, description: Any) -> None:
        """Replace the copy of `node` from the next launch on."""
        outcome = driver.cuGraphExecMemcpyNodeSetParams(self._executable, node, description, self._context)
        checked("cuGraphExecMemcpyNodeSetParams", outcome)

    def launch(self, stream: int) -> None:
        """Launch the chain, in stream order."""
        checked("cuGraphLaunch", driver.cuGraphLaunch(self._executable, stream))

    def _add_memory_operation(self, operation: Any) -> None:
        parameters = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        parameters.ctx = self._context
        parameters.count = 1
        parameters.paramArray = [operation]
        parameters.flags = 0
        self._append(
            "cuGraphAddBatchMemOpNode",
            driver.cuGraphAddBatchMemOpNode(self._graph, self._last, len(self._last), parameters),
        )

    def _append(self, call: str, outcome: tuple[Any, ...]) -> Any:
        node = checked(call, outcome)
        self._last = [node]
        return node
