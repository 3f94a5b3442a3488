"""A wait in the caller's stream, by one warp, for what follows and cannot wait itself, such as a library's matmul.

A stream can wait on its own, too, but nobody gives such a wait up, and whoever ends it needs the driver, which may
be held up (docs/design/0002-device-protocol.md, "How waits end").
"""

import triton

from overweave.memory.device import satisfy_all, wait_for_signals_at_once

NUMBERS = ("low", "high", "count", "also", "also_count", "operation", "signal_count", "world_size")


@triton.jit(do_not_specialize=NUMBERS)  # compiled once for all waits
def wait_kernel(signals, words, limits, low, high, count, also, also_count, operation, signal_count, world_size):
    """Ends when the own signals `[low, high)` have reached `count`, and `also` (if not negative) its own, or when the
    wait is void: then streams beside the caller's end theirs. signals: of the slot, so many. operation: for a report.
    """
    verdict = wait_for_signals_at_once(
        signals, low, high, count, also, also_count, operation, words, limits, world_size
    )  # fmt: skip
    if verdict == 0:
        satisfy_all(signals, signal_count)
