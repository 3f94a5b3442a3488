"""Calibration kernels of one block, which store the device clock before and after signals and waits."""

import triton
import triton.language as tl

from overweave.memory.device.signals import notify, read_clock, wait_at_least


@triton.jit
def stamp_kernel(stamps, index):
    """Store the device clock (ns) at `stamps[index]`."""
    tl.store(stamps + index, read_clock())


@triton.jit
def release_kernel(stamps, index, word):
    """Store the device clock, then add 1 to `word` in release order."""
    now = read_clock()
    tl.store(stamps + index, now)
    notify(word, now > 0)


@triton.jit
def watch_kernel(stamps, index, word, words, limits):
    """Wait until `word` >= 1, then store the device clock; 0 if the wait timed out."""
    verdict = wait_at_least(word, 1, words, limits)
    tl.store(stamps + index, read_clock() * verdict)


@triton.jit
def look_kernel(stamps, index, word, words, limits, WAITS: tl.constexpr):
    """Store the clock before and after WAITS waits for a word that is set already; 0 if one timed out."""
    tl.store(stamps + index, read_clock())
    verdict = 1
    for _ in range(WAITS):
        verdict = verdict & wait_at_least(word, 1, words, limits)
    tl.store(stamps + index + 1, read_clock() * verdict)


@triton.jit
def exchange_kernel(
    stamps, index, own_word, peer_address, rounds_before, words, limits, is_first, ROUNDS: tl.constexpr
):
    """Ping-pong with one peer: ROUNDS round trips of notify and wait, with the clock stored before and after.

    own_word: this rank's signal. peer_address: int64 `[1]`, address of the peer's. Both only grow. rounds_before: int32
    `[1]`, rounds of earlier launches. is_first: 1 on the rank that notifies first.
    """
    peer = tl.load(peer_address).to(tl.pointer_type(tl.int32))
    rounds = tl.load(rounds_before)
    verdict = 1
    tl.store(stamps + index, read_clock())
    for round_index in range(ROUNDS):
        if verdict == 1:
            if is_first == 1:
                notify(peer, verdict == 1)
            verdict = wait_at_least(own_word, rounds + round_index + 1, words, limits)
            if is_first == 0:
                notify(peer, verdict == 1)
    tl.store(stamps + index + 1, read_clock() * verdict)
    tl.store(rounds_before, rounds + ROUNDS)
