"""The copy engine: a queue of peer copies, flags and waits, run beside kernels without taking an SM.

A flag is the constant 1, written in stream order after its copy, to a word that its reader zeroes before the next use
(memory/device/protocol.py): nothing depends on a value that a captured graph would repeat. Only peer copies belong
here: a copy within one GPU is a kernel and would wait for an SM that the waiting kernel may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from overweave.errors import MachineError
from overweave.memory.cuda import driver
from overweave.memory.lower import CopyStep, MemoryRef, StreamStep, WaitStep

MOST_GRAPHS = 8  # a caller's tensors recur at few addresses: each has a graph; new addresses retarget the oldest one

TensorAddresses = tuple[int, ...]  # addresses, and the allocations they lie in


class CopyQueue:
    """One queue of a plan, launched as one internal graph; under capture its operations go into the caller's graph.

    drain: waits for the calls in flight before a graph is created (memory/cuda/workspace.py).
    tensor_names: the caller's tensors that copies read or write.
    """

    def __init__(self, steps: tuple[StreamStep, ...], drain: Callable[[], None] | None = None) -> None:
        self._steps, self._drain = steps, drain
        refs = [ref for step in steps if isinstance(step, CopyStep) for ref in (step.source, step.target)]
        self.tensor_names = tuple(dict.fromkeys(ref.tensor for ref in refs if ref.tensor))
        self._graphs: dict[TensorAddresses, _Graph] = {}  # addresses and allocations of the tensors -> graph
        self._ready: _Graph | None = None

    def prepare(self, stream: int, tensors: Mapping[str, int]) -> None:
        """Create the graph for tensors at these addresses, unless there is one.

        Call it before the call's first kernel: a new graph waits until the calls in flight have ended. The driver may
        wait for running kernels until it has memory for a graph, and peers wait for the copies of that graph.
        """
        if not self._steps:
            return
        addresses = [tensors[name] for name in self.tensor_names]
        key = (*addresses, *map(driver.allocation_id, addresses))
        self._ready = self._graphs.get(key)
        if self._ready is None:
            self._ready = self._graphs[key] = self._graph_for(tensors)
            self._ready.upload(stream)

    def launch(self, stream: int, tensors: Mapping[str, int]) -> None:
        """Run the queue in stream order. tensors: name -> address, as of the last `prepare`."""
        if torch.cuda.is_current_stream_capturing():
            self.issue(stream, tensors)
        elif self._steps:
            assert self._ready is not None, "a queue is prepared before it is launched"
            self._ready.launch(stream)

    def issue(self, stream: int, tensors: Mapping[str, int]) -> None:
        """Enqueue the operations one by one, as a stream under capture needs them."""
        for step in self._steps:
            if isinstance(step, CopyStep):
                source, target = _address(step.source, tensors), _address(step.target, tensors)
                pitches = (step.source.pitch_bytes, step.target.pitch_bytes)
                driver.copy(stream, source, target, step.row_bytes, step.rows, pitches)
            elif isinstance(step, WaitStep):
                driver.wait_value(stream, step.address, step.value)
            else:
                driver.write_value(stream, step.address, step.value)

    def _graph_for(self, tensors: Mapping[str, int]) -> _Graph:
        """Return a new graph, or the oldest one retargeted; a new one, too, if that refuses memory of another kind."""
        if len(self._graphs) >= MOST_GRAPHS:
            oldest = self._graphs.pop(next(iter(self._graphs)))
            with suppress(MachineError):
                oldest.retarget(tensors)
                return oldest
        if self._drain is not None:
            self._drain()
        return _Graph(self._steps, tensors)


class _Graph:
    """The steps as one executable CUDA graph, for tensors at given addresses."""

    def __init__(self, steps: tuple[StreamStep, ...], tensors: Mapping[str, int]) -> None:
        graph = self._graph = driver.LinearGraph()
        self._retargetable: list[tuple[Any, Any, CopyStep]] = []
        for step in steps:
            if isinstance(step, CopyStep):
                description = _describe(step, tensors)
                node = graph.add_copy(description)
                if step.source.tensor or step.target.tensor:
                    self._retargetable.append((node, description, step))
            elif isinstance(step, WaitStep):
                graph.add_wait(step.address, step.value)
            else:
                graph.add_write(step.address, step.value)
        graph.instantiate()
        self.launch, self.upload = graph.launch, graph.upload

    def retarget(self, tensors: Mapping[str, int]) -> None:
        """Use these addresses of the tensors from the next launch on. Raises MachineError if the driver refuses."""
        for node, description, step in self._retargetable:
            description.srcDevice = _address(step.source, tensors)
            description.dstDevice = _address(step.target, tensors)
            self._graph.retarget_copy(node, description)


def _describe(step: CopyStep, tensors: Mapping[str, int]) -> Any:
    """Return the driver's parameters of a copy; contiguous rows become one row."""
    pitches = (step.source.pitch_bytes, step.target.pitch_bytes)
    row_bytes, rows = step.row_bytes, step.rows
    if pitches == (row_bytes, row_bytes):
        row_bytes, rows, pitches = row_bytes * rows, 1, (row_bytes * rows, row_bytes * rows)
    source, target = _address(step.source, tensors), _address(step.target, tensors)
    return driver.copy_description(source, target, row_bytes, rows, pitches)


def _address(ref: MemoryRef, tensors: Mapping[str, int]) -> int:
    return ref.address + tensors[ref.tensor] if ref.tensor else ref.address
