"""`compile`: an annotated single-GPU Triton kernel and a schedule -> the fused distributed kernel, ready to call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import torch

from overweave.compiler.emit.emit import (
    Weaving,
    can_select_source,
    can_store_at_peers,
    emit,
    load_generated,
    shape_parameters,
)
from overweave.compiler.emit.fuse import kernel_of, weaving_of
from overweave.compiler.frontend.rectangles import check_addresses
from overweave.compiler.frontend.soundness import check_exchanged
from overweave.compiler.frontend.source.kernel import AnnotatedKernel
from overweave.errors import InputError, OverweaveError
from overweave.ir.dtype import Dtype, MovedDtype
from overweave.ir.footprint import Operand, TileSpace
from overweave.ir.plan import Plan
from overweave.ir.shards import shard_rows
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.memory.outside_modes import outside_modes_and_pools
from overweave.ops.author import arguments as asked_arguments
from overweave.ops.author.arguments import MOVED, check_dtype, passed, where_of
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

OPTIONS = (*asked_arguments.LAUNCH_OPTIONS, "tile_group")
Schedules = ScheduleChoice | Mapping[str, ScheduleChoice]


def compile(kernel: Any, schedule: Schedules, *, check: bool | None = None) -> FusedKernel:
    """Fuses an annotated Triton kernel with the communication of its tensors.

    kernel: a `@triton.jit` function whose file holds directives (docs/directives.md), or `"FILE.py:NAME"`.
    schedule: how tensors are exchanged, `{"A": "all_gather.push pieces=2", "C": "reduce_scatter.ring"}`; one schedule
    alone means the first tensor that is read, or written. A tensor is exchanged along its first dimension. In place of
    a name, a `Gather` lists the moves of a tensor's chunks by hand, a `Reduction` or `AllToAll` those of others.
    check: whether the first call of a kernel on a machine tries its directives: it is interpreted on a smaller problem,
    in a process of its own, for at most 10 s, and every address is held against them; by default on CPUs alone.

    Returns a callable with the kernel's own parameters, and `group`.
    A call takes Triton's options of a launch by name, and `tile_group`: how many blocks of rows run together, column by
    column (by default 8); the order of tiles in the kernel's own text is not kept.
    Its numbers are those of the whole problem; an exchanged tensor is this rank's shard of rows, as torch.chunk deals
    them. Every rank calls it. Calls whose tensors come back are launched as one graph each. A tile waits for the rows
    that it reads, and for nobody else; a call raises RankMismatch where ranks differ, and PeerError.
    Raises DirectiveError for what cannot be compiled, with file, line, text and cure, and InputError for the rest.
    SOURCE: AutoOverlap, sections 4 and 5.
    """
    return FusedKernel(kernel_of(*where_of(kernel)), schedule, check)


class FusedKernel:
    """A kernel with its schedule. A call plans, proves, writes and binds once for each combination of numbers.

    checked: whether its directives were tried, `checked` or `not checked` with the reason.
    """

    def __init__(self, kernel: AnnotatedKernel, schedule: Schedules, check: bool | None = None) -> None:
        self.kernel, self._check = kernel, check
        self.checked = f"{NOT_CHECKED}: no call has asked for it"
        loads = [load.directive.tensor for load in kernel.loads]
        self.wanted = wanted_of(loads, [store.directive.tensor for store in kernel.stores], schedule)
        asked_arguments.check_asked(kernel.source.name, self.wanted)
        sides = {tensor: transport_of(words).side for tensor, words in self.wanted.items()}
        read = {tensor for tensor, side in sides.items() if side == GATHER}
        check_exchanged(kernel, read, sides.keys() - read)
        path_of_slices(self.wanted.values())
        self._away  # noqa: B018 - refuses what cannot be
        self._key = object()  # of its calls, which the group keeps (ops/call/prepared.py)

    def __call__(self, *arguments: Any, group: GroupLike = None, **named: Any) -> None:
        """Runs the fused kernel on this rank.

        Raises RankMismatch where ranks call differently, ScheduleError for tiles that no table can tell, PeerError.
        """
        check_untraced(self.kernel.source.name)
        tensors = map(tensor_of, (*arguments, *named.values()))
        first = next((tensor for tensor in tensors if tensor is not None), None)
        if is_away(first):
            run_on(first.device, self, *arguments, group=group, **named)
            return
        resolved = group_of(group)
        with resolved.lock:
            self._call(resolved, arguments, named)

    def _call(self, resolved: Group, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        try:
            given, options = by_name(self.kernel, arguments, named)
        except InputError as error:
            raise refuse(resolved, error) from None
        try:
            key: CallKey = (self._key, *map(_signature_of, given.values()), *options.items())
        except RuntimeError:  # a tensor that lies nowhere
            _prepare(self, resolved, given, options)  # says which
            raise
        calls = calls_of(resolved)
        try:
            call = calls.get(key)
        except TypeError:
            raise refuse(resolved, asked_arguments.unusable(self.kernel.source.name, given)) from None
        is_new = call is None
        if call is None:
            Board.of(resolved).user_calls += 1
            call = _prepare(self, resolved, given, options)
            calls.put(key, call)
        call(given, None if is_new else b"")

    def __getitem__(self, grid: object) -> None:
        """Raises InputError: how many programs run is for the schedule to say."""
        raise InputError(f"launch {self.kernel.source.name}[...]", "a grid", "Call it as a function, without a grid")

    def plan(
        self,
        numbers: Mapping[str, int],
        world_size: int,
        dtype: Dtype | Mapping[str, MovedDtype] = "bfloat16",
        rank: int | None = None,
        tile_group: int = TILE_GROUP,
    ) -> Plan:
        """The proven plan of a call. numbers: the kernel's integers. dtype: of what is exchanged, or by tensor.

        Raises InputError for what is no call, and ScheduleError.
        """
        asked_arguments.check_on_paper(self.kernel.source, numbers, world_size, dtype)
        space = self.kernel.space(numbers)
        plan = author_plan(space, self.wanted, world_size, dtype, rank, self.chosen, tile_group)
        verify_plan(plan, MachineLimits(), rank=rank).raise_if_refused()
        return plan

    @property
    def chosen(self) -> str | None:
        """The tensor whose own shard tiles can read where the caller has it; what lies elsewhere is copied first.

        A tile reads rows of one block of it, which are one rank's: not all of them, nor part by part.
        """
        cut = {axis.name for axis in self.kernel.axes if not axis.is_streamed}
        for said in (access.directive for access in self.kernel.loads):
            is_woven = said.tensor in self.wanted and transport_of(self.wanted[said.tensor]).is_woven
            if is_woven and said.dims[0].names & cut and can_select_source(self.kernel, said.tensor):
                return said.tensor
        return None

    @property
    def _away(self) -> str | None:
        """The tensor that tiles store at peers. Raises InputError where the kernel's stores cannot."""
        found = [
            tensor
            for tensor, words in self.wanted.items()
            if transport_of(words).side != GATHER and movers_of(words).intersection(CARRYING_TILES)
        ]
        if len(found) > 1:
            raise InputError(f"store {' and '.join(found)} at peers", "a tile tells one place", "Let tiles store one")
        if found and not can_store_at_peers(self.kernel, found[0]):
            reason = "it is stored through a descriptor, or in several statements: no pointer leads to a peer"
            raise InputError(f"store {found[0]} at peers", reason, "Use mover=copy_engine")
        return found[0] if found else None

    def try_directives(self, given: Mapping[str, Any]) -> None:
        """Holds what the kernel touches against its directives, if that is asked for. Raises DirectiveError."""
        if self._check if self._check is not None else _device(given).type == "cpu":
            before, self.checked = self.checked, check_footprint(self.kernel, given)
            if self.checked not in (before, CHECKED):
                message = f"overweave: {self.kernel.source.name}: its directives are read, but {self.checked}"
                warnings.warn(message, RuntimeWarning, stacklevel=6)

    def source(self) -> str:
        """The text of the fused kernel's module, as `weaving` says. It imports and runs by itself."""
        return emit(self.kernel, self.weaving())

    def weaving(self) -> Weaving:
        """What tiles wait for and announce, for two ranks or more whose shards are whole tiles."""
        streamed = {axis.name for axis in self.kernel.axes if axis.is_streamed}
        woven = {tensor for tensor, words in self.wanted.items() if transport_of(words).is_woven}
        loads = [load.directive for load in self.kernel.loads if load.directive.tensor in woven]
        late = {load.tensor for load in loads if load.dims[0].names & streamed}
        return Weaving(
            waited_tensors=frozenset(load.tensor for load in loads) - late,
            dual_source=self.chosen,
            waits_in_loop=bool(late),
            notifies=any(store.directive.tensor in woven for store in self.kernel.stores),
            push_path=path_of_slices(self.wanted.values()),
            stored_at_peers=self._away,
            exchanges=tuple((tensor, str(how)) for tensor, how in self.wanted.items()),
        )


@outside_modes_and_pools
def _prepare(fused: FusedKernel, group: Group, given: Mapping[str, Any], options: Mapping[str, int]) -> AgreedCall:
    """One combination of numbers, tensors and options: planned, proven, agreed on by all ranks, and bound."""
    name = fused.kernel.source.name
    try:
        asked_arguments.check_options(name, options)
        asked_arguments.check_memory(name, given)
        numbers = asked_arguments.numbers_of(given)
        check_addresses(fused.kernel, fused.kernel.source.default_numbers | asked_arguments.constants_of(given))
        fused.try_directives(given)
        space, wanted = fused.kernel.space(numbers), fused.wanted
        operands = _exchanged(space, wanted)
        rows = {one.tensor: _own_rows(one, wanted, group) for one in operands}
        dtype = _check_tensors(fused.kernel, operands, given, (rows, wanted))
        others = [one for one in (*space.loads, *space.stores) if one.tensor not in rows]
        asked_arguments.check_others(name, others, given)
        plan = fused.plan(numbers, group.world_size, dtype, group.rank, options.get("tile_group", TILE_GROUP))
        weaving = weaving_of(plan, space, wanted)
        text = emit(fused.kernel, weaving)
        function = load_generated(cache_folders()["overweave"] / "kernels", name, text)
    except OverweaveError as error:
        raise refuse(group, error) from None
    signature, board = _shared(plan, space, wanted, text), Board.of(group)
    board.agree(signature)
    places = buffers_of_tensors(plan, space, wanted)
    chosen = next((name for name, (tensor, _) in places.items() if tensor == weaving.dual_source), None)
    away = next((store for store in space.stores if store.tensor == weaving.stored_at_peers), None)
    launch = {name: value for name, value in options.items() if name in asked_arguments.LAUNCH_OPTIONS}
    persistent, shapes = fused.kernel.tile_loop is not None, shape_parameters(fused.kernel)
    kernel = AuthoredKernel(function, space, places, chosen, away, persistent, launch, shapes)
    is_on_gpu = _device(given).type == "cuda"
    try:
        bound = load("gpu author" if is_on_gpu else "host author").bind(plan, group, kernel, given)
    except BaseException as error:
        board.report_failure(error, name)
        raise

    return AgreedCall(name, signature, bound, bound if is_on_gpu else None, board=board)


def _shared(plan: Plan, space: TileSpace, wanted: Mapping[str, ScheduleChoice], text: str) -> bytes:
    """Readable, and different for calls that differ in anything that all ranks share; other numbers may differ."""
    words = " ".join(f"{tensor}={how}" for tensor, how in wanted.items())
    sizes = " ".join(f"{axis.name}={axis.extent}/{axis.block}" for axis in space.axes)
    digest = blake2b(msgspec.json.encode(plan.schedule) + text.encode(), digest_size=6).hexdigest()
    return f"compiled {space.kernel} {words} {sizes} {plan.realization.dtype} #{digest}".encode()


def by_name(
    kernel: AnnotatedKernel, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The kernel's arguments in the order of its parameters, and the options of its launch. Raises InputError."""
    names = kernel.source.parameters
    asked = f"call {kernel.source.name}({', '.join(names)})"
    options = {name: value for name, value in named.items() if name in OPTIONS and name not in names}
    given = dict(zip(names, arguments, strict=False))
    for name, value in named.items():
        if name in options:
            continue
        if name not in names or name in given:
            is_twice = name in given
            cure = "Pass it once, by place or by name" if is_twice else f"Options: {', '.join(OPTIONS)}, group"
            raise InputError(asked, f"{name} is {'given twice' if is_twice else 'unknown'}", cure)
        given[name] = value
    if len(arguments) > len(names):
        raise InputError(asked, f"{len(arguments)} arguments", f"Pass at most {len(names)}")
    chosen = (
        kernel.source.defaults - kernel.source.autotuned
    )  # alone, a tuned kernel has another number than its default
    missing = [name for name in names if name not in given and name not in chosen]
    if missing:
        cure = "Pass every parameter that has no default; overweave.compile_auto chooses those of configs"
        raise InputError(asked, f"{', '.join(missing)} is missing", cure)
    return {name: given[name] for name in names if name in given}, options


def _exchanged(space: TileSpace, wanted: Mapping[str, ScheduleChoice]) -> list[Operand]:
    sides = {tensor: transport_of(words).side for tensor, words in wanted.items()}
    loads = [one for one in space.loads if sides.get(one.tensor) == GATHER]
    return loads + [one for one in space.stores if sides.get(one.tensor, GATHER) != GATHER]


def _own_rows(operand: Operand, wanted: Mapping[str, ScheduleChoice], group: Group) -> int:
    """Rows of an exchanged tensor that this rank passes: its shard, or all that it exchanges or gets."""
    transport = transport_of(wanted[operand.tensor])
    if transport.is_traded or transport.gathers_sums:
        return operand.rows
    if transport.side == SPREAD:
        return group.world_size * operand.rows
    lo, hi = shard_rows(operand.rows, group.world_size, group.rank)
    return hi - lo


def _check_tensors(
    kernel: AnnotatedKernel, operands: list[Operand], given: Mapping[str, Any], call: tuple[Any, Any]
) -> dict[str, MovedDtype]:
    """The dtypes of exchanged tensors, each of which has the rows that this rank should pass, row-major. Or InputError.

    call: the rows of each, and its schedule.
    """
    rows, wanted = call
    dtypes: dict[str, torch.dtype] = {}
    for operand in operands:
        own, tensor = rows[operand.tensor], tensor_of(given.get(operand.parameter))
        of_whom, cure = passed(operand, own)
        asked = f"{kernel.source.name}: {operand.parameter}, {of_whom} [{own}, {operand.cols}] of {operand.tensor}"
        if tensor is None:
            raise InputError(asked, f"got {type(given.get(operand.parameter)).__name__}", "Pass a tensor")
        if tensor.numel() != own * operand.cols or not tensor.is_contiguous():
            found = f"got {list(tensor.shape)} with strides {tensor.stride()}"
            raise InputError(asked, found, cure)
        if tensor.data_ptr() % ALIGNED_BYTES and tensor.device.type == "cuda":
            found = f"it begins {tensor.data_ptr() % ALIGNED_BYTES} bytes behind a multiple of {ALIGNED_BYTES}"
            raise InputError(asked, found, "Pass a copy of it")
        dtypes[operand.tensor] = tensor.dtype
        check_dtype(kernel.source.name, operand, tensor.dtype, is_summed(transport_of(wanted[operand.tensor])))
    sums = {str(dtypes[name]) for name, how in wanted.items() if is_summed(transport_of(how))}
    if len(sums) > 1:
        cure = "Let a collective add one of them, or write both in one dtype"
        raise InputError(
            f"{kernel.source.name}: add tensors over ranks", f"they are of {', '.join(sorted(sums))}", cure
        )
    return {name: MOVED[dtype] for name, dtype in dtypes.items()}


def _signature_of(value: Any) -> Any:
    """What of an argument decides how it is bound."""
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


def _device(given: Mapping[str, Any]) -> torch.device:
    return next(tensor.device for tensor in map(tensor_of, given.values()) if tensor is not None)
