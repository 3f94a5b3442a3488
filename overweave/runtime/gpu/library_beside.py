"""A library call on a stream of its own: it waits for its signals there, as copies do, and the stream sets its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.ir.schedule import Operation
from overweave.memory.cuda import driver
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.lower import SlotAddresses, wait_steps, write_steps


def library_beside(
    workspace: Workspace, addresses: SlotAddresses, operation: Operation, call: Callable[..., None]
) -> Callable[..., None]:
    """What enqueues `call` on the stream of the operation's queue. Collectives go to the library in the order in which
    they are enqueued, which is the same on all ranks: that of the schedule."""
    side = workspace.stream(operation.queue)
    waits, writes = tuple(wait_steps(addresses, operation)), tuple(write_steps(addresses, operation))

    def enqueue(stream: torch.cuda.Stream, *given: object) -> None:
        for step in waits:
            driver.wait_value(side.cuda_stream, step.address, step.value)
        with torch.cuda.stream(side):
            call(side, *given)
        for write in writes:
            driver.write_value(side.cuda_stream, write.address, write.value)

    return enqueue
