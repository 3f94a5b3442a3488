"""The copy engine: a queue of peer copies, flags and waits, run beside kernels without taking an SM.

A flag is the constant 1, written in stream order after its copy, to a word that its reader zeroes before the next use
(memory/protocol.py): nothing depends on a value that a captured graph would repeat. Only peer copies belong here: a
copy within one GPU is a kernel and would wait for an SM that the waiting kernel may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overweave.errors import MachineError
from overweave.memory import driver
from overweave.memory.steps import CopyStep, Place, Step, WaitStep


class CopyQueue:
    """One queue of one (plan, slot), replayed as one internal graph, or captured raw into the caller's."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._steps = steps
        self._graph: driver.LinearGraph | None = None
        self._moving: list[tuple[Any, Any, CopyStep]] = []
        places = [place for step in steps if isinstance(step, CopyStep) for place in (step.source, step.target)]
        self._named = tuple({place.tensor for place in places if place.tensor})
        self._pointed: dict[str, int] = {}

    def launch(self, stream: int, tensors: Mapping[str, int]) -> None:
        """Runs the queue in stream order. `tensors`: the address of each tensor that a step names."""
        if not self._steps:
            return
        named = {name: tensors[name] for name in self._named}
        if self._graph is None:
            self._build(named)
        elif self._pointed != named:
            self._point(named)
        assert self._graph is not None
        self._graph.launch(stream)

    def issue(self, stream: int, tensors: Mapping[str, int]) -> None:
        """The same operations one by one, for a stream that is being captured."""
        for step in self._steps:
            if isinstance(step, CopyStep):
                source, target = _address(step.source, tensors), _address(step.target, tensors)
                pitches = (step.source.pitch_bytes, step.target.pitch_bytes)
                driver.copy(stream, source, target, step.row_bytes, step.rows, pitches)
            elif isinstance(step, WaitStep):
                driver.wait_value(stream, step.address, step.value)
            else:
                driver.write_value(stream, step.address, step.value)

    def _build(self, tensors: Mapping[str, int]) -> None:
        graph, moving = driver.LinearGraph(), []
        for step in self._steps:
            if isinstance(step, CopyStep):
                description = _describe(step, tensors)
                node = graph.add_copy(description)
                if step.source.tensor or step.target.tensor:
                    moving.append((node, description, step))
            elif isinstance(step, WaitStep):
                graph.add_wait(step.address, step.value)
            else:
                graph.add_write(step.address, step.value)
        graph.instantiate()
        self._graph, self._moving, self._pointed = graph, moving, dict(tensors)

    def _point(self, tensors: Mapping[str, int]) -> None:
        """Points the copies at tensors that moved. A graph refuses memory of another kind: then it is built anew."""
        assert self._graph is not None
        try:
            for node, description, step in self._moving:
                description.srcDevice = _address(step.source, tensors)
                description.dstDevice = _address(step.target, tensors)
                self._graph.point_copy(node, description)
            self._pointed = dict(tensors)
        except MachineError:
            self._build(tensors)


def _describe(step: CopyStep, tensors: Mapping[str, int]) -> Any:
    pitches = (step.source.pitch_bytes, step.target.pitch_bytes)
    row_bytes, rows = step.row_bytes, step.rows
    if pitches == (row_bytes, row_bytes):
        row_bytes, rows, pitches = row_bytes * rows, 1, (row_bytes * rows, row_bytes * rows)
    source, target = _address(step.source, tensors), _address(step.target, tensors)
    return driver.copy_description(source, target, row_bytes, rows, pitches)


def _address(place: Place, tensors: Mapping[str, int]) -> int:
    return place.address + tensors[place.tensor] if place.tensor else place.address
