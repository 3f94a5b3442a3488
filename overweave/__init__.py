"""overweave weaves communication into computation on multi-GPU machines.

    import overweave as ow
    y = ow.all_gather_matmul(x_shard, w, group)          # [m/W, k], [k, n] -> [m, n]
    z = ow.matmul_reduce_scatter(h, w, group)            # [m, k], [k, n] -> [m/W, n]
    z = ow.matmul_all_reduce(h, w, group)                # [m, k], [k, n] -> [m, n]
    y = ow.all_to_all_matmul(x, w, group)                # blocks of rows [m, k], [k, n] -> [m, n]
    print(ow.explain("all_gather_matmul", m=8192, n=3584, k=4096, world_size=4))

Importing is light: a name is loaded when it is first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from overweave.errors import package_error

if TYPE_CHECKING:
    from overweave.adapters.parallel.styles import Colwise, PrepareGather, Rowwise
    from overweave.adapters.symm_mem.install import install, report, uninstall
    from overweave.attention.context_parallel import context_parallel_attention
    from overweave.lang.mapping import TileChannel, Tiles
    from overweave.layers.linear import ColumnParallelLinear, QkvParallelLinear, RowParallelLinear, SwiGluMlp
    from overweave.ops.all_gather_matmul import all_gather_matmul
    from overweave.ops.all_to_all_matmul import all_to_all_matmul
    from overweave.ops.author.compile import compile
    from overweave.ops.author.compile_auto import compile_auto
    from overweave.ops.author.tile_program import SymmetricBuffer, TileProgram
    from overweave.ops.call.norm import RmsNorm
    from overweave.ops.call.row_map import RowMap
    from overweave.ops.explain import explain
    from overweave.ops.matmul_all_reduce import matmul_all_reduce
    from overweave.ops.matmul_all_to_all import matmul_all_to_all
    from overweave.ops.matmul_reduce_scatter import matmul_reduce_scatter
    from overweave.ops.tune import tune
    from overweave.ops.workspace import check, islands, memory_report, reset, symmetric_empty
    from overweave.process_settings import settings
    from overweave.schedules.moves.moves import AllToAll, Chunk, Collective, Gather, Get, Put, Reduction, Sum

__version__ = "0.2.0"

_MODULE_OF = {
    "all_gather_matmul": "overweave.ops.all_gather_matmul",
    "all_to_all_matmul": "overweave.ops.all_to_all_matmul",
    "matmul_all_reduce": "overweave.ops.matmul_all_reduce",
    "matmul_all_to_all": "overweave.ops.matmul_all_to_all",
    "matmul_reduce_scatter": "overweave.ops.matmul_reduce_scatter",
    "compile": "overweave.ops.author.compile",
    "compile_auto": "overweave.ops.author.compile_auto",
    "context_parallel_attention": "overweave.attention.context_parallel",
    "Colwise": "overweave.adapters.parallel.styles",
    "ColumnParallelLinear": "overweave.layers.linear",
    "PrepareGather": "overweave.adapters.parallel.styles",
    "QkvParallelLinear": "overweave.layers.linear",
    "RowParallelLinear": "overweave.layers.linear",
    "Rowwise": "overweave.adapters.parallel.styles",
    "SwiGluMlp": "overweave.layers.linear",
    "explain": "overweave.ops.explain",
    "install": "overweave.adapters.symm_mem.install",
    "report": "overweave.adapters.symm_mem.install",
    "uninstall": "overweave.adapters.symm_mem.install",
    "tune": "overweave.ops.tune",
    "AllToAll": "overweave.schedules.moves.moves",
    "Chunk": "overweave.schedules.moves.moves",
    "Collective": "overweave.schedules.moves.moves",
    "Gather": "overweave.schedules.moves.moves",
    "Get": "overweave.schedules.moves.moves",
    "Put": "overweave.schedules.moves.moves",
    "Reduction": "overweave.schedules.moves.moves",
    "RmsNorm": "overweave.ops.call.norm",
    "RowMap": "overweave.ops.call.row_map",
    "check": "overweave.ops.workspace",
    "islands": "overweave.ops.workspace",
    "memory_report": "overweave.ops.workspace",
    "reset": "overweave.ops.workspace",
    "settings": "overweave.process_settings",
    "symmetric_empty": "overweave.ops.workspace",
    "Sum": "overweave.schedules.moves.moves",
    "SymmetricBuffer": "overweave.ops.author.tile_program",
    "TileChannel": "overweave.lang.mapping",
    "TileProgram": "overweave.ops.author.tile_program",
    "Tiles": "overweave.lang.mapping",
}

__all__ = [
    "AllToAll",
    "Chunk",
    "Collective",
    "ColumnParallelLinear",
    "Colwise",
    "Gather",
    "Get",
    "PrepareGather",
    "Put",
    "QkvParallelLinear",
    "Reduction",
    "RmsNorm",
    "RowMap",
    "RowParallelLinear",
    "Rowwise",
    "Sum",
    "SwiGluMlp",
    "SymmetricBuffer",
    "TileChannel",
    "TileProgram",
    "Tiles",
    "all_gather_matmul",
    "all_to_all_matmul",
    "check",
    "compile",
    "compile_auto",
    "context_parallel_attention",
    "explain",
    "install",
    "islands",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "memory_report",
    "report",
    "reset",
    "settings",
    "symmetric_empty",
    "tune",
    "uninstall",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'overweave' has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        raise package_error(f"load overweave.{name}", error) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *_MODULE_OF))


def _on_torch_import() -> None:
    """Entry point that torch calls when it is imported: OVERWEAVE_INSTALL=1 installs, see `install`."""
    if value := _install_variable():
        import_module(_MODULE_OF["install"]).install_by_environment(value)


def _on_vllm_start() -> None:
    """Entry point that vLLM calls in each of its processes: OVERWEAVE_INSTALL=1 registers with vLLM."""
    if _install_variable():
        import_module("overweave.adapters.vllm").plugin()


def _install_variable() -> str:
    """Return OVERWEAVE_INSTALL; empty for 0."""
    value = os.environ.get("OVERWEAVE_INSTALL", "")
    return "" if value == "0" else value
