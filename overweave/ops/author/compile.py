"""`compile`: an annotated single-GPU Triton kernel and a schedule -> the fused distributed kernel, ready to call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import torch

from overweave.compiler.emit.emit import (
    FusionOptions,
    can_select_source,
    can_store_at_peers,
    emit,
    load_generated,
    shape_parameters,
)
from overweave.compiler.emit.fuse import fusion_options, kernel_of
from overweave.compiler.frontend.rectangles import check_addresses
from overweave.compiler.frontend.soundness import check_exchanged
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.errors import InputError, OverweaveError
from overweave.ir.dtype import Dtype, MovedDtype
from overweave.ir.exchange import addresses_peers
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import Plan
from overweave.ir.shards import shard_rows
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.memory.outside_modes import outside_modes_and_pools
from overweave.ops.author import arguments as argument_checks
from overweave.ops.author.arguments import EXCHANGED_DTYPES, check_dtype, expected_rows, kernel_location
from overweave.ops.author.trial import CHECKED, NOT_CHECKED, check_footprint
from overweave.ops.call.devices import ALIGNED_BYTES, is_away, run_on
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.ops.call.prepared import AgreedCall, CallKey, calls_of
from overweave.ops.call.surroundings import check_untraced
from overweave.runtime.authored import AuthoredKernel, buffers_of_tensors, tensor_of
from overweave.runtime.backends import load
from overweave.schedules.communication import CARRYING_TILES
from overweave.schedules.weave.author_plan import TILE_GROUP, author_plan, is_summed
from overweave.schedules.weave.transports import (
    GATHER,
    SPREAD,
    ScheduleChoice,
    movers_of,
    path_of_slices,
    transport_of,
    wanted_of,
)
from overweave.tuner.caches import cache_folders

OPTIONS = (*argument_checks.LAUNCH_OPTIONS, "tile_group")
Schedules = ScheduleChoice | Mapping[str, ScheduleChoice]


def compile(kernel: Any, schedule: Schedules, *, check: bool | None = None) -> FusedKernel:
    """Fuse an annotated Triton kernel with the communication of its tensors.

    kernel: a `@triton.jit` function whose file holds directives (docs/directives.md), or `"FILE.py:NAME"`.
    schedule: how tensors are exchanged, `{"A": "all_gather.push pieces=2", "C": "reduce_scatter.ring"}`; one schedule
    alone is that of the first tensor that is loaded, or stored. A tensor is exchanged along its first dimension.
    Instead of a name, a `Gather`, `Reduction` or `AllToAll` lists the moves of chunks one by one.
    check: whether the first call of a kernel on a machine tests its directives: it is interpreted on a smaller problem,
    in a process of its own, for at most 10 s, and every address is compared with them; by default on CPUs only.

    Returns a callable with the kernel's own parameters, and `group`.
    A call takes Triton's launch options by name, and `tile_group`: how many blocks of rows run together, column by
    column (by default 8); the kernel's own order of tiles (its swizzle) is not used.
    Integer arguments are those of the whole problem; of an exchanged tensor each rank passes its shard of rows, split
    as by torch.chunk. Every rank calls it. Calls with the same tensors as before replay one CUDA graph. A tile waits
    only for the rows that it reads. A call raises RankMismatch if ranks call differently, PeerError if a wait failed.
    Raises DirectiveError for directives that cannot be compiled, with file, line, text and cure; else InputError.
    SOURCE: AutoOverlap, sections 4 and 5.
    """
    return FusedKernel(kernel_of(*kernel_location(kernel)), schedule, check)


class FusedKernel:
    """A kernel with the schedules of its tensors. The first call with each combination of shapes, strides, dtypes and

    constants plans, verifies, emits, compiles and binds; later ones run.

    checked: whether its directives were tested: `checked`, or `not checked` with the reason.
    """

    def __init__(self, kernel: AnnotatedKernel, schedule: Schedules, check: bool | None = None) -> None:
        self.kernel, self._check = kernel, check
        self.checked = f"{NOT_CHECKED}: no call has asked for it"
        loads = [load.directive.tensor for load in kernel.loads]
        self.schedules = wanted_of(loads, [store.directive.tensor for store in kernel.stores], schedule)
        argument_checks.check_has_schedule(kernel.source.name, self.schedules)
        sides = {tensor: transport_of(words).side for tensor, words in self.schedules.items()}
        annotated = {tensor for tensor, side in sides.items() if side == GATHER}
        check_exchanged(kernel, annotated, sides.keys() - annotated)
        path_of_slices(self.schedules.values())
        self._peer_store_tensor  # noqa: B018 - raises for a kernel that cannot store to peers
        self._key = object()  # of its calls, which the group keeps (ops/call/prepared.py)

    def __call__(self, *arguments: Any, group: GroupLike = None, **keywords: Any) -> None:
        """Run the fused kernel on this rank.

        Raises RankMismatch if ranks call differently, ScheduleError if no tile table can describe the tiles, PeerError.
        """
        check_untraced(self.kernel.source.name)
        tensors = map(tensor_of, (*arguments, *keywords.values()))
        first = next((tensor for tensor in tensors if tensor is not None), None)
        if is_away(first):
            run_on(first.device, self, *arguments, group=group, **keywords)
            return
        resolved = group_of(group)
        with resolved.lock:
            self._call(resolved, arguments, keywords)

    def _call(self, resolved: Group, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Look up the bound call of these arguments, or prepare it, and run it. The caller holds the group's lock."""
        try:
            call_args, options = bind_arguments(self.kernel, arguments, keywords)
        except InputError as error:
            raise refuse(resolved, error) from None
        try:
            key: CallKey = (self._key, *map(_argument_key, call_args.values()), *options.items())
        except RuntimeError:  # a tensor without storage, such as a fake one
            _prepare(self, resolved, call_args, options)  # raises InputError that names it
            raise
        calls = calls_of(resolved)
        try:
            call = calls.get(key)
        except TypeError:
            raise refuse(resolved, argument_checks.unhashable_error(self.kernel.source.name, call_args)) from None
        is_new = call is None
        if call is None:
            Board.of(resolved).user_calls += 1
            call = _prepare(self, resolved, call_args, options)
            calls.put(key, call)
        call(call_args, None if is_new else b"")

    def __getitem__(self, grid: object) -> None:
        """Raise InputError: the schedule decides the grid."""
        raise InputError(f"launch {self.kernel.source.name}[...]", "a grid", "Call it as a function, without a grid")

    def plan(
        self,
        numbers: Mapping[str, int],
        world_size: int,
        dtype: Dtype | Mapping[str, MovedDtype] = "bfloat16",
        rank: int | None = None,
        tile_group: int = TILE_GROUP,
    ) -> Plan:
        """Return the verified plan of a call.

        numbers: the kernel's integer arguments. dtype: of the exchanged tensors, one or by name. rank: whose part of
        the plan is verified; None: all. Raises InputError for arguments that no call could have, and ScheduleError.
        """
        argument_checks.check_plan_arguments(self.kernel.source, numbers, world_size, dtype)
        space = self.kernel.space(numbers)
        plan = author_plan(space, self.schedules, world_size, dtype, rank, self.dual_source, tile_group)
        verify_plan(plan, MachineLimits(), rank=rank).raise_if_refused()
        return plan

    @property
    def dual_source(self) -> str | None:
        """The tensor that tiles can load from either buffer, the caller's shard or the receive buffer; None if none.

        Of any other gathered tensor the own shard is copied first. Each tile must load rows of one rank's shard only.
        """
        cut = {axis.name for axis in self.kernel.axes if not axis.is_streamed}
        for directive in (access.directive for access in self.kernel.loads):
            is_woven = directive.tensor in self.schedules and transport_of(self.schedules[directive.tensor]).is_woven
            if is_woven and directive.dims[0].names & cut and can_select_source(self.kernel, directive.tensor):
                return directive.tensor
        return None

    @property
    def _peer_store_tensor(self) -> str | None:
        """The tensor that tiles store to peers, or None. Raises InputError if the kernel's stores cannot do that."""
        found = [
            tensor
            for tensor, words in self.schedules.items()
            if transport_of(words).side != GATHER and movers_of(words).intersection(CARRYING_TILES)
        ]
        if len(found) > 1:
            raise InputError(f"store {' and '.join(found)} at peers", "a tile tells one place", "Let tiles store one")
        if found and not can_store_at_peers(self.kernel, found[0]):
            reason = "it is stored through a descriptor, or in several statements: no pointer leads to a peer"
            raise InputError(f"store {found[0]} at peers", reason, "Use mover=copy_engine")
        return found[0] if found else None

    def check_directives(self, call_args: Mapping[str, Any]) -> None:
        """Test the directives by an interpreted run if `check` asks for it. Raises DirectiveError, or warns."""
        if self._check if self._check is not None else _device(call_args).type == "cpu":
            before, self.checked = self.checked, check_footprint(self.kernel, call_args)
            if self.checked not in (before, CHECKED):
                message = f"overweave: {self.kernel.source.name}: its directives were parsed, but {self.checked}"
                warnings.warn(message, RuntimeWarning, stacklevel=6)

    def source(self) -> str:
        """Return the text of the fused kernel's module, for `fusion_options()`. It can be imported by itself."""
        return emit(self.kernel, self.fusion_options())

    def fusion_options(self) -> FusionOptions:
        """Return what to emit, as of two or more ranks whose shards are whole tiles."""
        streamed = {axis.name for axis in self.kernel.axes if axis.is_streamed}
        woven = {tensor for tensor, words in self.schedules.items() if transport_of(words).is_woven}
        loads = [load.directive for load in self.kernel.loads if load.directive.tensor in woven]
        late = {load.tensor for load in loads if load.dims[0].names & streamed}
        return FusionOptions(
            waited_tensors=frozenset(load.tensor for load in loads) - late,
            dual_source=self.dual_source,
            waits_in_loop=bool(late),
            notifies=any(store.directive.tensor in woven for store in self.kernel.stores),
            push_path=path_of_slices(self.schedules.values()),
            stored_at_peers=self._peer_store_tensor,
            exchanges=tuple((tensor, str(schedule)) for tensor, schedule in self.schedules.items()),
        )


@outside_modes_and_pools
def _prepare(fused: FusedKernel, group: Group, call_args: Mapping[str, Any], options: Mapping[str, int]) -> AgreedCall:
    """Plan, verify, emit and bind a call; all ranks agree on it. Collective.

    Raises InputError, DirectiveError or ScheduleError, of which peers are told, and RankMismatch.
    """
    name = fused.kernel.source.name
    try:
        argument_checks.check_options(name, options)
        argument_checks.check_tensors(name, call_args)
        numbers = argument_checks.integer_arguments(call_args)
        check_addresses(
            fused.kernel, fused.kernel.source.default_ints | argument_checks.non_tensor_arguments(call_args)
        )
        fused.check_directives(call_args)
        space, schedules = fused.kernel.space(numbers), fused.schedules
        operands = _exchanged_operands(space, schedules)
        rows = {one.tensor: _rows_to_pass(one, schedules, group) for one in operands}
        dtype = _exchanged_dtypes(fused.kernel, operands, call_args, (rows, schedules))
        others = [one for one in (*space.loads, *space.stores) if one.tensor not in rows]
        argument_checks.check_local_tensors(name, others, call_args)
        gathered = [one for one in space.loads if one.tensor in rows]
        argument_checks.check_stores(name, gathered, space.stores, call_args)
        plan = fused.plan(numbers, group.world_size, dtype, group.rank, options.get("tile_group", TILE_GROUP))
        if addresses_peers(plan.schedule):
            Board.of(group).islands.require_one(f"run {name} of {plan.name} on {group.world_size} ranks")
        fusion = fusion_options(plan, space, schedules)
        text = emit(fused.kernel, fusion)
        function = load_generated(cache_folders()["overweave"] / "kernels", name, text)
    except OverweaveError as error:
        raise refuse(group, error) from None
    signature, board = _call_signature(plan, space, schedules, text), Board.of(group)
    board.agree(signature)
    buffers = buffers_of_tensors(plan, space, schedules)
    dual_source = next((name for name, (tensor, _) in buffers.items() if tensor == fusion.dual_source), None)
    peer_store = next((store for store in space.stores if store.tensor == fusion.stored_at_peers), None)
    launch = {name: value for name, value in options.items() if name in argument_checks.LAUNCH_OPTIONS}
    persistent, shapes = fused.kernel.tile_loop is not None, shape_parameters(fused.kernel)
    kernel = AuthoredKernel(function, space, buffers, dual_source, peer_store, persistent, launch, shapes)
    is_on_gpu = _device(call_args).type == "cuda"
    try:
        bound = load("gpu author" if is_on_gpu else "host author").bind(plan, group, kernel, call_args)
    except BaseException as error:
        board.report_failure(error, name)
        raise

    return AgreedCall(name, signature, bound, bound if is_on_gpu else None, board=board)


def _call_signature(plan: Plan, space: TileSpace, schedules: Mapping[str, ScheduleChoice], text: str) -> bytes:
    """Return the signature that ranks compare: of the plan, the text and the dtypes, not of rank-local integers."""
    words = " ".join(f"{tensor}={schedule}" for tensor, schedule in schedules.items())
    sizes = " ".join(f"{axis.name}={axis.extent}/{axis.block}" for axis in space.axes)
    digest = blake2b(msgspec.json.encode(plan.schedule) + text.encode(), digest_size=6).hexdigest()
    return f"compiled {space.kernel} {words} {sizes} {plan.realization.dtype} #{digest}".encode()


def bind_arguments(
    kernel: AnnotatedKernel, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (parameter -> argument in the order of parameters, launch options). Raises InputError as Python would."""
    names = kernel.source.parameters
    asked = f"call {kernel.source.name}({', '.join(names)})"
    options = {name: value for name, value in keywords.items() if name in OPTIONS and name not in names}
    call_args = dict(zip(names, arguments, strict=False))
    for name, value in keywords.items():
        if name in options:
            continue
        if name not in names or name in call_args:
            is_twice = name in call_args
            cure = "Pass it once, by place or by name" if is_twice else f"Options: {', '.join(OPTIONS)}, group"
            raise InputError(asked, f"{name} is {'call_args twice' if is_twice else 'unknown'}", cure)
        call_args[name] = value
    if len(arguments) > len(names):
        raise InputError(asked, f"{len(arguments)} arguments", f"Pass at most {len(names)}")
    # The default of a parameter that `@triton.autotune` sets is not the value that the kernel runs with alone.
    optional = kernel.source.defaults - kernel.source.autotuned
    missing = [name for name in names if name not in call_args and name not in optional]
    if missing:
        cure = "Pass every parameter that has no default; overweave.compile_auto chooses those of configs"
        raise InputError(asked, f"{', '.join(missing)} is missing", cure)
    return {name: call_args[name] for name in names if name in call_args}, options


def _exchanged_operands(space: TileSpace, schedules: Mapping[str, ScheduleChoice]) -> list[Operand]:
    """Return the loads that are gathered, and the stores that are exchanged any other way."""
    sides = {tensor: transport_of(words).side for tensor, words in schedules.items()}
    loads = [one for one in space.loads if sides.get(one.tensor) == GATHER]
    return loads + [one for one in space.stores if sides.get(one.tensor, GATHER) != GATHER]


def _rows_to_pass(operand: Operand, schedules: Mapping[str, ScheduleChoice], group: Group) -> int:
    """Return how many rows of an exchanged tensor this rank passes: its shard's, all, or those of all ranks."""
    transport = transport_of(schedules[operand.tensor])
    if transport.is_traded or transport.gathers_sums:
        return operand.rows
    if transport.side == SPREAD:
        return group.world_size * operand.rows
    lo, hi = shard_rows(operand.rows, group.world_size, group.rank)
    return hi - lo


def _exchanged_dtypes(
    kernel: AnnotatedKernel, operands: list[Operand], call_args: Mapping[str, Any], call: tuple[Any, Any]
) -> dict[str, MovedDtype]:
    """Check the exchanged tensors and return their dtypes by name.

    call: (tensor -> the rows that this rank must pass, tensor -> schedule). Raises InputError for a tensor of another
    size, that is not row-major, unaligned, or whose dtype cannot be exchanged or added.
    """
    rows, schedules = call
    dtypes: dict[str, torch.dtype] = {}
    for operand in operands:
        own, tensor = rows[operand.tensor], tensor_of(call_args.get(operand.parameter))
        whose_rows, cure = expected_rows(operand, own)
        asked = f"{kernel.source.name}: {operand.parameter}, {whose_rows} [{own}, {operand.cols}] of {operand.tensor}"
        if tensor is None:
            raise InputError(asked, f"got {type(call_args.get(operand.parameter)).__name__}", "Pass a tensor")
        if tensor.numel() != own * operand.cols or not tensor.is_contiguous():
            found = f"got {list(tensor.shape)} with strides {tensor.stride()}"
            raise InputError(asked, found, cure)
        if tensor.data_ptr() % ALIGNED_BYTES and tensor.device.type == "cuda":
            found = f"it begins {tensor.data_ptr() % ALIGNED_BYTES} bytes after a multiple of {ALIGNED_BYTES}"
            raise InputError(asked, found, "Pass a copy of it")
        dtypes[operand.tensor] = tensor.dtype
        check_dtype(kernel.source.name, operand, tensor.dtype, is_summed(transport_of(schedules[operand.tensor])))
    sums = {str(dtypes[name]) for name, schedule in schedules.items() if is_summed(transport_of(schedule))}
    if len(sums) > 1:
        cure = "Let a collective add one of them, or write both in one dtype"
        raise InputError(
            f"{kernel.source.name}: add tensors over ranks", f"they are of {', '.join(sorted(sums))}", cure
        )
    return {name: EXCHANGED_DTYPES[dtype] for name, dtype in dtypes.items()}


def _argument_key(value: Any) -> Any:
    """Return the part of an argument that a bound call depends on: of a tensor all but its values and its address."""
    tensor = tensor_of(value)
    if tensor is None:
        return type(value), value
    described = [tuple(getattr(value, name, ())) for name in ("shape", "strides", "block_shape", "padding")]
    return (
        tensor.__class__,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() % 16 == 0,
        *described,
    )


def _device(call_args: Mapping[str, Any]) -> torch.device:
    return next(tensor.device for tensor in map(tensor_of, call_args.values()) if tensor is not None)
