"""Kernels of one block that take the time of what they do: stamps, signals and waits, each wait with its deadline."""

import triton
import triton.language as tl

from overweave.memory.device.signals import notify, read_clock, wait_at_least


@triton.jit
def stamp_kernel(stamps, place):
    """Writes the time."""
    tl.store(stamps + place, read_clock())


@triton.jit
def release_kernel(stamps, place, word):
    """Writes the time, then adds one to a word."""
    now = read_clock()
    tl.store(stamps + place, now)
    notify(word, now > 0)


@triton.jit
def watch_kernel(stamps, place, word, words, limits):
    """Waits until a word is at least one, then writes the time; 0 if the wait is void."""
    verdict = wait_at_least(word, 1, words, limits)
    tl.store(stamps + place, read_clock() * verdict)


@triton.jit
def look_kernel(stamps, place, word, words, limits, LOOKS: tl.constexpr):
    """Waits LOOKS times for a word that is there already, between two stamps."""
    tl.store(stamps + place, read_clock())
    verdict = 1
    for _ in range(LOOKS):
        verdict = verdict & wait_at_least(word, 1, words, limits)
    tl.store(stamps + place + 1, read_clock() * verdict)


@triton.jit
def exchange_kernel(stamps, place, own, address, turns, words, limits, leads, ROUNDS: tl.constexpr):
    """ROUNDS times: one of two ranks tells the other, and is told in turn, between two stamps.

    own: this rank's word; address: int64 `[1]`, where the other's lies; both only grow. turns: int32 `[1]`, rounds of
    earlier launches.
    leads: 1 on the rank that tells first.
    """
    peer = tl.load(address).to(tl.pointer_type(tl.int32))
    before = tl.load(turns)
    verdict = 1
    tl.store(stamps + place, read_clock())
    for turn in range(ROUNDS):
        if verdict == 1:
            if leads == 1:
                notify(peer, verdict == 1)
            verdict = wait_at_least(own, before + turn + 1, words, limits)
            if leads == 0:
                notify(peer, verdict == 1)
    tl.store(stamps + place + 1, read_clock() * verdict)
    tl.store(turns, before + ROUNDS)
