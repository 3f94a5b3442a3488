"""A matmul by a tile kernel alone on one GPU, for calibration (tuner/calibrate/single_gpu.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import MatmulConfig
from overweave.ir.tile_order import TileRow
from overweave.kernels.arguments import LaunchTiles, SignalWords
from overweave.memory.device.signals import TRACE_COLUMNS
from overweave.runtime.gpu.bound import free_sms
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import TileKernelArgs, table_tensor
from overweave.runtime.kernel_calls.matmul import Operands, matmul_call


class Matmul:
    """`out = a @ b` over a table without waits."""

    def __init__(
        self,
        config: MatmulConfig,
        rows: tuple[TileRow, ...],
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        epilogue: Epilogue = NO_EPILOGUE,
        extras: Mapping[str, torch.Tensor] = MappingProxyType({}),
        traced: bool = False,
        sms_beside: int = 0,
    ) -> None:
        """extras: operands of the epilogue, by name. traced: each run fills `trace`, int64 `[rows, TRACE_COLUMNS]`.
        sms_beside: SMs that it leaves free.
        """
        device, is_transposed = a.device, b.stride(0) == 1 and b.stride(1) != 1
        words = torch.zeros(64, dtype=torch.int32, device=device)
        limits = torch.tensor([10**9, 0, 0], dtype=torch.int64, device=device)
        trace_size = (len(rows) if traced else 1, TRACE_COLUMNS.value)
        self.trace = torch.zeros(trace_size, dtype=torch.int64, device=device)
        self._claims = torch.zeros(1, dtype=torch.int32, device=device)
        self.out = out
        queue = LaunchTiles(table_tensor(rows, device), self._claims, self.trace, len(rows))
        known: dict[str, Any] = {**extras, "epilogue": epilogue}
        operands = Operands(a, None, ((b, out),), is_transposed, **known)
        tiles = TileKernelArgs(queue, SignalWords(words, words, limits, 1), traced)
        self.launch = Launch(matmul_call(config, operands, tiles), free_sms(device, sms_beside))

    def __call__(self) -> None:
        """Compute all tiles on the current stream."""
        self.reset_claims()
        self.run()

    def reset_claims(self) -> None:
        """Zero the work counter: all tiles can be claimed again."""
        self._claims.zero_()

    def run(self) -> None:
        """Compute the tiles that are not claimed yet."""
        self.launch.start(torch.cuda.current_stream().cuda_stream)
