"""What host threads ask of the driver while a stream waits: does it stand still, and hold up others? On one GPU.

    python -m campaigns.gpu_driver_waits [--deeds graph ...] [--rescues write ...]

A stream waits for a word, as it does for a peer that is gone. One thread does a deed, such as launching a kernel for
the first time, which the driver may hold back until the GPU is idle. Then another thread comes to the rescue: it asks
for the word to be written. A line for each pair: how long the deed and the rescue took, or that they stand still, and
whether the stream passed. The watcher must come by what no deed holds up (docs/design/0002-device-protocol.md): ends
with 1 if a context of its own does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from campaigns.gpu_ranks import need_gpus
from overweave.memory.cuda import driver

BEGINS_S, RESCUED_S, FOR_GOOD_S = 0.5, 2.0, 60.0  # a deed, what comes to its rescue, and the end of both
GRAPHS, NODES = 60, 40
WORDS = 600  # more than the driver writes at once
GIGABYTE = 1 << 30


class Gpu:
    """What deeds and rescues work on, made while nothing waits. words: a stream waits for the last; waited: behind."""

    def __init__(self) -> None:
        self.numbers = torch.rand(64, device="cuda")
        self.words = torch.zeros(WORDS, dtype=torch.int32, device="cuda")
        self.addresses = [self.words[at].data_ptr() for at in range(WORDS)]
        self.waiting, self.own, self.rescuing = (torch.cuda.Stream(priority=each) for each in (-1, 0, -3))
        self.waited = torch.cuda.Event()
        self.kept: list[torch.cuda.CUDAGraph | torch.Tensor] = []
        for rescue in RESCUES.values():
            rescue(self)  # each has run before, so that it is no deed itself
        launch(self)
        graph(self)
        torch.empty(GIGABYTE, dtype=torch.uint8, device="cuda")  # which torch keeps at hand
        self.words.zero_()
        torch.cuda.synchronize()


def launch(gpu: Gpu) -> None:
    """A kernel that has run before."""
    with torch.cuda.stream(gpu.own):
        gpu.numbers.add_(1)


def first_launch(gpu: Gpu) -> None:
    """A kernel that has not: the driver loads it."""
    with torch.cuda.stream(gpu.own):
        gpu.numbers.erfinv_()


def graph(gpu: Gpu) -> None:
    """One graph of many kernels, kept, as an operator keeps its own."""
    made = torch.cuda.CUDAGraph()
    with torch.cuda.stream(gpu.own):
        made.capture_begin(capture_error_mode="thread_local")
        for _ in range(NODES):
            gpu.numbers.add_(1)
        made.capture_end()
    gpu.kept.append(made)


def graphs(gpu: Gpu) -> None:
    """So many that the driver needs memory for them."""
    for _ in range(GRAPHS):
        graph(gpu)


def memory(gpu: Gpu) -> None:
    """Memory of the GPU, more than torch has at hand."""
    gpu.kept.append(torch.empty(4 * GIGABYTE, dtype=torch.uint8, device="cuda"))


def memory_given_back(gpu: Gpu) -> None:
    """What torch has at hand."""
    torch.cuda.empty_cache()


def pinned_memory(gpu: Gpu) -> None:
    """Memory of the host for copies."""
    gpu.kept.append(torch.empty(GIGABYTE // 4, dtype=torch.uint8, pin_memory=True))


def copy_to_host(gpu: Gpu) -> None:
    """A copy that the host waits for, on another stream."""
    with torch.cuda.stream(gpu.own):
        gpu.numbers.cpu()


def synchronize(gpu: Gpu) -> None:
    """All of the GPU's work."""
    torch.cuda.synchronize()


def write(gpu: Gpu) -> None:
    """A look whether that call has ended, and a stream write, as the watcher's."""
    gpu.waited.query()
    driver.write_values(gpu.rescuing.cuda_stream, gpu.addresses, 1)


def own_context(gpu: Gpu) -> None:
    """A stream write in another context, as the watcher's where the first has come to nothing."""
    with driver.own_context(0) as stream:
        driver.write_values(stream, gpu.addresses, 1)


def memset(gpu: Gpu) -> None:
    """Fills bytes by no kernel of torch's."""
    with torch.cuda.stream(gpu.rescuing):
        gpu.words.zero_()
    write(gpu)


def kernel(gpu: Gpu) -> None:
    """Fills words by a kernel."""
    with torch.cuda.stream(gpu.rescuing):
        gpu.words.fill_(1)


Deed = Callable[[Gpu], None]
DEEDS: dict[str, Deed] = {
    each.__name__: each
    for each in (
        launch,
        first_launch,
        graphs,
        memory,
        memory_given_back,
        pinned_memory,
        copy_to_host,
        synchronize,
    )
}
PASSED, THE_LAST_RESORT = "the stream passed", own_context.__name__
RESCUES: dict[str, Deed] = {each.__name__: each for each in (write, own_context, memset, kernel)}


class Timed(threading.Thread):
    """Something that another thread does; `says` how long that took, or has taken so far."""

    def __init__(self, gpu: Gpu, deed: Deed) -> None:
        super().__init__(daemon=True)
        self._gpu, self._deed = gpu, deed
        self._began_s = time.monotonic()
        self._took_s: float | None = None
        self.start()

    def run(self) -> None:
        self._deed(self._gpu)
        self._took_s = time.monotonic() - self._began_s

    def says(self) -> str:
        return "stands still" if self._took_s is None else f"{self._took_s:.3f} s"


def one(deed: str, rescue: str) -> None:
    """The line of a pair. Ends the process, whatever stands still in it."""
    gpu = Gpu()
    driver.wait_value(gpu.waiting.cuda_stream, gpu.addresses[-1], 1)
    gpu.waited.record(gpu.waiting)
    did = Timed(gpu, DEEDS[deed])
    time.sleep(BEGINS_S)
    rescued = Timed(gpu, RESCUES[rescue])
    rescued.join(RESCUED_S)
    did.join(RESCUED_S)
    ending = PASSED if has_passed(gpu) else "the stream waits"
    print(f"{deed:20s} {did.says():14s}  {rescue:12s} {rescued.says():14s}  {ending}", flush=True)


def has_passed(gpu: Gpu) -> bool:
    """Whether the stream that waited does so no more, within a moment."""
    end_s = time.monotonic() + RESCUED_S
    while not gpu.waited.query() and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(gpu.waited.query())


def in_own_process(pair: tuple[str, str]) -> str:
    """The line of a pair, from a process that is ended if it does not end."""
    command = [
        sys.executable,
        "-m",
        "campaigns.rates.gpu_driver_waits",
        "--deeds",
        pair[0],
        "--rescues",
        pair[1],
        "--one",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        ender = threading.Timer(FOR_GOOD_S, running.kill)
        ender.start()
        line = running.stdout.readline()
        running.kill()
        ender.cancel()
    return line.rstrip() or f"{pair}: no line"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deeds", nargs="*", choices=tuple(DEEDS), default=tuple(DEEDS))
    parser.add_argument("--rescues", nargs="*", choices=tuple(RESCUES), default=tuple(RESCUES))
    parser.add_argument("--one", action="store_true", help="only the first pair, in this process")
    arguments = parser.parse_args()
    need_gpus()
    if arguments.one:
        one(arguments.deeds[0], arguments.rescues[0])
        return
    pairs = [(deed, rescue) for deed in arguments.deeds for rescue in arguments.rescues]
    with ThreadPoolExecutor(max_workers=8) as workers:
        lines = list(workers.map(in_own_process, pairs))
    print("\n".join(lines), flush=True)
    last_resort = [line for (_, rescue), line in zip(pairs, lines, strict=True) if rescue == THE_LAST_RESORT]
    sys.exit(not all(line.endswith(PASSED) for line in last_resort))


if __name__ == "__main__":
    main()
