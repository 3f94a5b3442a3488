"""Grouped matmuls by experts on this process's GPU: two launches, without a look of the host at group sizes."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from msgspec.structs import replace

from overweave.compat.torch_names import grouped_mm
from overweave.kernels.experts import clear_rest_kernel, outer_kernel
from overweave.lang.arguments import Channel
from overweave.memory.device.signals import PEER_ADDRESSES, STRIDE
from overweave.runtime.gpu.bound import free_sms
from overweave.runtime.gpu.launcher import Launch
from overweave.runtime.kernel_calls.call import Moving
from overweave.runtime.kernel_calls.experts import (
    COLUMNS,
    ArrivingRows,
    ArrivingTensors,
    ExpertsForm,
    ExpertTensors,
    experts_call,
    fill_call,
    table_rows,
)
from overweave.runtime.library.grouped import Grouped, aligned, with_steps
from overweave.schedules.tiles.grouped import Groups, grouped_shape

HOPPER = 9
MOST_BOUND = 256
OUTER_TILE = {"BLOCK_R": 64, "BLOCK_K": 128, "BLOCK_N": 128}
OUTER_TILE_FP32 = {"BLOCK_R": 32, "BLOCK_K": 64, "BLOCK_N": 64}
_BOUND: dict[Any, Any] = {}


class GroupedLaunch:
    """Both launches (fill the tile table, multiply) of a form, for shapes, strides and dtypes of an example."""

    def __init__(self, form: ExpertsForm, example: ExpertTensors) -> None:
        device = example.x.device
        self._stand_ins = _stand_ins(example)
        self._lock = Lock()
        fill, product = fill_call(form, self._stand_ins), experts_call(form, self._stand_ins, device)
        self._fill = Launch(fill)
        self._multiply = Launch(product, free_sms(device, 0))

    def __call__(self, tensors: ExpertTensors, stream: int) -> None:
        """Enqueue both launches on a stream."""
        with self._lock:
            for stand_in, tensor in zip(_flat(self._stand_ins), _flat(tensors), strict=True):
                if tensor is not None:
                    stand_in.address = tensor.data_ptr()
            self._fill.start(stream)
            self._multiply.start(stream)


def multiply(call: Grouped) -> torch.Tensor:
    """Return the result of a call whose tensors are on one GPU."""
    n = call.w.shape[2]
    call = aligned(with_steps(call))
    out = torch.empty(call.pairs, call.w.shape[2], dtype=call.out_dtype, device=call.x.device)
    if out.numel():
        multiply_into(out, call)
    return out if n == out.shape[1] else out[:, :n].contiguous()


def multiply_into(out: torch.Tensor, call: Grouped, form: ExpertsForm | None = None) -> None:
    """Compute `out` of an aligned call. form: of campaigns, which compare configurations."""
    launch_grouped(form or form_of(call), _tensors_of(out, call))


def multiply_arriving(
    out: torch.Tensor,
    call: Grouped,
    bounds: torch.Tensor,
    rank_and_early_experts: tuple[int, int],
    channel: Channel | None,
) -> None:
    """Compute `out` of an aligned call while rows of its x arrive from peers.

    bounds: int32 `[ranks, experts]` (`Arrivals.row_starts`). rank_and_early_experts: this rank; tiles of so many first
    experts are ordered by arrival. channel: the signals of the shards; None: all rows are present.
    """
    (rank, early_experts), ranks = rank_and_early_experts, bounds.shape[0]
    if channel is None:
        words = torch.ones(ranks * STRIDE.value, dtype=torch.int32, device=out.device)
        limits = torch.ones(PEER_ADDRESSES.value, dtype=torch.int64, device=out.device)
        waits, operation = (words, torch.zeros_like(words), limits), 0
    else:
        waits, operation = (channel.signals, channel.words, channel.limits), channel.number
    form = replace(form_of(call), arriving=ArrivingRows(rank, ranks, early_experts, operation))
    tensors = ArrivingTensors(bounds, *(each[:1] for each in waits))
    launch_grouped(form, _tensors_of(out, call)._replace(arriving=tensors))


def _tensors_of(out: torch.Tensor, call: Grouped) -> ExpertTensors:
    """Return the tensors of a call, with fp8 row scales gathered as its rows are; without table and head."""
    scale_x = call.scale_x
    if scale_x is not None and call.rows is not None:
        scale_x = scale_x.index_select(0, call.rows.clamp(0, max(0, call.x.shape[0] - 1)))
    fields = call._replace(scale_x=scale_x)._asdict()
    call_fields = {name: fields[name] for name in ExpertTensors._fields if name in fields}
    return ExpertTensors(**call_fields, out=out, table=None, head=None)


def form_of(call: Grouped) -> ExpertsForm:
    """Return the compile-time form of a call: its epilogue, and the tile shape that the cost model chooses."""
    experts, k, n = call.w.shape
    device = torch.cuda.get_device_properties(call.x.device)
    epilogue = call.epilogue
    dtype: Any = str(call.x.dtype).removeprefix("torch.")
    groups = Groups(call.pairs, experts, n, k, dtype, epilogue)
    # The Hopper kernel reads all experts' weights as one matrix: a partial step of k would read the next expert's rows.
    has_whole_steps = call.w.stride(1) == 1 or k % 64 == 0
    is_half = call.x.dtype != torch.float32 and call.out_dtype != torch.float32
    kernel: Any = "hopper" if device.major == HOPPER and is_half and has_whole_steps else "portable"
    config = grouped_shape(groups, kernel, device.multi_processor_count)
    return ExpertsForm(call.pairs, config, epilogue)


def launch_grouped(form: ExpertsForm, tensors: ExpertTensors) -> None:
    """Compute `tensors.out` on the current stream. `table` and `head` of `tensors` are allocated here."""
    device = tensors.x.device
    experts, _, n = tensors.w.shape
    tiles = table_rows(form.rows, experts, n, form.config)
    table = torch.empty(tiles, COLUMNS, dtype=torch.int32, device=device)
    tensors = tensors._replace(table=table, head=torch.empty(2, dtype=torch.int32, device=device))
    key = (device, form, *(None if one is None else _signature(one) for one in _flat(tensors)))
    with torch.cuda.device(device):
        _cached(key, lambda: GroupedLaunch(form, tensors))(tensors, torch.cuda.current_stream().cuda_stream)


def outer(x: torch.Tensor, g: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return x[group].T @ g[group] of every group, `[experts, k, n]`; by torch._grouped_mm where it can."""
    x, g = x.contiguous(), g.contiguous()
    experts, k, n = offs.shape[0], x.shape[1], g.shape[1]
    major = torch.cuda.get_device_properties(x.device).major
    if x.dtype == torch.bfloat16 and major >= HOPPER and k % 8 == 0 and n % 8 == 0 and x.shape[0]:
        product: torch.Tensor = grouped_mm(x.t(), g, offs=offs)
        return product
    out = torch.empty(experts, k, n, dtype=x.dtype, device=x.device)
    tile = OUTER_TILE_FP32 if x.dtype == torch.float32 else OUTER_TILE
    programs = experts * -(-k // tile["BLOCK_K"]) * -(-n // tile["BLOCK_N"])
    if programs:
        arguments = (x, g, offs, out, experts, k, n, *tile.values(), "ieee")
        outer_kernel[(programs,)](*arguments, num_warps=8, num_stages=3)
    return out


def clear(x: torch.Tensor, offs: torch.Tensor) -> None:
    """Zero the rows of x that belong to no group."""
    if x.numel():
        clear_rest_kernel[(128,)](x, offs, offs.shape[0], *x.shape, 1024, num_warps=4)


def _cached(key: Any, make: Any) -> Any:
    """Return a launch from the cache, or make it and drop the oldest one of MOST_BOUND."""
    launch = _BOUND.get(key)
    if launch is None:
        if len(_BOUND) >= MOST_BOUND:
            _BOUND.pop(next(iter(_BOUND)))
        launch = _BOUND[key] = make()
    return launch


def _signature(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0  # what a launch specialises for


def _flat(tensors: ExpertTensors) -> tuple[Any, ...]:
    return (*tensors[:-1], *(tensors.arriving or ()))


def _stand_ins(example: ExpertTensors) -> ExpertTensors:
    own: list[Any] = [None if one is None else _stand_in(one) for one in example[:-1]]
    arriving = example.arriving and ArrivingTensors(*map(_stand_in, example.arriving))
    return ExpertTensors._make([*own, arriving])


def _stand_in(tensor: torch.Tensor) -> Moving:
    return Moving(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
