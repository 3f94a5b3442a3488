"""Where the sums of a list of moves run: by what they wait for.

In a kernel beside the tiles, where a kernel can tell what they wait for and every rank's first one waits for tiles of
its own; behind the tiles where not every one does; and on the caller's stream, by the library, where they are of parts
of rows, or wait for more than a kernel can tell.
"""

from __future__ import annotations

from msgspec.structs import replace

from overweave.ir.schedule import Reduce
from overweave.schedules.communication import COMPUTED, MAIN, PUSHES, Communication, queues_of
from overweave.schedules.signals import with_signals
from overweave.schedules.weave.fewest_waits import is_tellable

KERNEL_COLS = 8  # the kernel that sums reads words of 16 bytes


def with_placed_sums(made: Communication) -> Communication:
    """The same with its signals, sums where they can run."""
    sums = [step for step in made.steps if isinstance(step, Reduce)]
    cols = {buffer.name: buffer.cols for buffer in made.buffers}
    is_whole = all(one.out.cols == (0, cols[one.out.buffer]) and one.out.cols[1] % KERNEL_COLS == 0 for one in sums)
    pushes = any(queue.name == PUSHES for queue in made.queues)  # sums beside them could hold the SMs that they need
    for is_behind in (True,) if pushes else (False, True):
        placed = with_signals(replace(made, queues=queues_of(made.steps, sums_behind=is_behind)))
        if is_whole and _is_for_a_kernel(placed, is_behind):
            return placed
    steps = tuple(replace(one, queue=MAIN, tiles=1) if isinstance(one, Reduce) else one for one in made.steps)
    return with_signals(replace(made, steps=steps, queues=queues_of(steps)))


def _is_for_a_kernel(placed: Communication, is_behind: bool) -> bool:
    first: dict[int, Reduce] = {}
    for one in (step for step in placed.steps if isinstance(step, Reduce)):
        first.setdefault(one.rank, one)
        if not is_tellable(one.waits):
            return False
    return is_behind or all(COMPUTED in {wait.pad for wait in one.waits} for one in first.values())
