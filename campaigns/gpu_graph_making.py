"""Does making a graph wait for kernels that run, and do launches of other threads wait with it? On one GPU.

    python -m campaigns.gpu_graph_making

Graphs are made while one kernel sleeps for a second. Most take microseconds; where the driver needs memory for one, the
host stands still until the kernel has ended, and so does every other host thread that launches. That is why the head of
a call waits for all peers before kernels fill the SMs (docs/design/0002-device-protocol.md).
"""

from __future__ import annotations

import threading
import time

import torch

from campaigns.gpu_ranks import need_gpus

NODES = (8, 40, 200)  # kernels of a graph
SLEEP_CYCLES, WATCHED_S, MOST = 2_000_000_000, 0.8, 400
STOOD_STILL_S = 0.05


class Maker:
    """Graphs of `nodes` small kernels, all kept, as an operator keeps its own."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(64, device="cuda")
        self._stream = torch.cuda.Stream()
        self._kept: list[torch.cuda.CUDAGraph] = []
        self.launch(1)
        self.graph(4)
        torch.cuda.synchronize()

    def launch(self, count: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                self._numbers.add_(1)

    def graph(self, nodes: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            self.launch(nodes)
            graph.capture_end()
        self._kept.append(graph)


class Launcher(threading.Thread):
    """Another thread of the host, which launches a kernel now and then. slowest_s: of its launches."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers, self._stream = torch.zeros(64, device="cuda"), torch.cuda.Stream()
        self._is_over, self.slowest_s = threading.Event(), 0.0

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            began_s = time.monotonic()
            with torch.cuda.stream(self._stream):
                self._numbers.add_(1)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def end(self) -> None:
        self._is_over.set()
        self.join()


def beside_a_kernel(maker: Maker, nodes: int) -> tuple[int, float]:
    """How many graphs were made while a kernel ran until one stood still, and for how many seconds that one did."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
    began_s, count, took_s = time.monotonic(), 0, 0.0
    while count < MOST and took_s < STOOD_STILL_S and time.monotonic() - began_s < WATCHED_S:
        last_s = time.monotonic()
        maker.graph(nodes)
        count, took_s = count + 1, time.monotonic() - last_s
    torch.cuda.synchronize()
    return count, took_s


def main() -> None:
    need_gpus()
    maker = Maker()
    for nodes in NODES:
        launcher = Launcher()
        launcher.start()
        count, took_s = beside_a_kernel(maker, nodes)
        launcher.end()
        beside = f"another thread's slowest launch {launcher.slowest_s:.3f} s"
        print(f"graphs of {nodes:3d} kernels: number {count:3d} took {took_s:.3f} s, {beside}", flush=True)


if __name__ == "__main__":
    main()
