"""verify_schedule and verify_plan: all rules of a Schedule, and what a Plan adds to it, against a machine."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.dtype import ITEMSIZE_BYTES, SUM_DTYPE
from overweave.ir.launch.streams import kernels_on_own_streams, launch_obstacle
from overweave.ir.pause_gc import without_collection
from overweave.ir.plan import REDUCE_KERNEL, SIGNAL_CAPACITY, TILE_KERNEL, Plan
from overweave.ir.schedule import LIMIT, OUTPUT, Compute, Name, Operation, Reduce, Region, Schedule
from overweave.ir.verify.engines.assignment import check_engines
from overweave.ir.verify.engines.contract import check_contract
from overweave.ir.verify.engines.islands import check_islands
from overweave.ir.verify.engines.norm import check_norm, check_sum_epilogue
from overweave.ir.verify.engines.packed import check_packed, check_skinny
from overweave.ir.verify.engines.replays import check_replays
from overweave.ir.verify.lowering import check_tables
from overweave.ir.verify.residency import check_residency
from overweave.ir.verify.rules.blocks import check_extra_rows, check_permuted_engines
from overweave.ir.verify.rules.collectives import fold_collectives
from overweave.ir.verify.rules.counted import check_counted, check_counted_engines
from overweave.ir.verify.rules.coverage import check_coverage
from overweave.ir.verify.rules.deadlock import launch_order
from overweave.ir.verify.rules.form import check_form
from overweave.ir.verify.rules.graphs import Graph, build_graph
from overweave.ir.verify.rules.happens_before import past_of
from overweave.ir.verify.rules.reuse import check_reuse
from overweave.ir.verify.rules.values import check_scaling
from overweave.ir.verify.rules.verdict import TOO_LARGE, Enough, Findings, TooMuchWork, Verdict

BULK_ALIGNMENT_BYTES = 16
SHARED_BYTES_OF_A_BLOCK = 1024  # reserved by CUDA in each block's shared memory
REGISTERS_UNIT = 256  # allocation unit of a warp's registers


class MachineLimits(Struct, frozen=True, kw_only=True):
    """What one GPU can hold at once. The defaults are an H200's."""

    sms: int = 132
    registers_per_sm: int = 65536
    shared_bytes_per_sm: int = 233472
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32


class KernelResources(Struct, frozen=True, kw_only=True):
    """What the compiled kernel of a queue takes of an SM for each block, and how many blocks (programs) are
    launched."""

    queue: Name
    registers_per_thread: int
    shared_bytes: int
    threads: int
    programs: int

    def of_block(self) -> tuple[int, int, int, int]:
        """Return registers, shared bytes, threads and block slots that one block takes of an SM."""
        of_warp = -(-self.registers_per_thread * 32 // REGISTERS_UNIT) * REGISTERS_UNIT
        return -(-self.threads // 32) * of_warp, self.shared_bytes + SHARED_BYTES_OF_A_BLOCK, self.threads, 1


def verify_plan(
    plan: Plan, machine_limits: MachineLimits, footprints: tuple[KernelResources, ...] = (), rank: int | None = None
) -> Verdict:
    """Return whether the plan's schedule is proven, and that engines, tables, integers and SMs carry it out.

    footprints: of the compiled kernels; a kernel without one is not assumed to fit beside another. rank: check only
    this rank's tile tables, the only ones in the plan; None: every rank's.
    """
    verdict = verify_schedule(plan.schedule)
    if not verdict.ok:
        return verdict
    findings = Findings()
    try:
        graph = build_graph(fold_collectives(plan.schedule), findings)
        check_engines(plan, graph, findings)
        check_islands(plan, findings)
        check_permuted_engines(plan, findings)
        check_counted_engines(plan, findings)
        if not findings.refusals:
            check_replays(plan, graph, findings)
        _check_numbers(plan, graph, findings)
        _check_residual(plan, findings)
        _check_whole_rows(plan, findings)
        if not findings.refusals:
            check_sum_epilogue(plan, findings)
            check_norm(plan, findings)
        if not findings.refusals:
            check_tables(plan, graph, rank, findings)
            check_packed(plan, graph, findings)
            check_skinny(plan, findings)
            _check_sms_for_tiles(plan, machine_limits, findings)
            _check_held_kernels(plan, graph, findings)
            together = fit_together(machine_limits, footprints)
            check_residency(plan, graph, together, machine_limits.sms, findings)
        check_contract(plan, findings)
        _check_rounding(plan, verdict.added_to, findings)
    except Enough:
        pass
    except TooMuchWork as much:
        findings.add(TOO_LARGE, None, str(much))
    return findings.verdict(plan.name)


def fit_together(limits: MachineLimits, footprints: tuple[KernelResources, ...]) -> frozenset[str]:
    """Return the queues whose kernels surely have a block resident, however the blocks of the others are placed.
    Kernels claim tiles in table order, so one resident block makes progress. Proven for two kernels at most."""
    if len(footprints) == 1:
        return frozenset(footprint.queue for footprint in footprints)
    if len(footprints) != 2:
        return frozenset()
    one, other = footprints
    fits = _always_fits(limits, one, other) and _always_fits(limits, other, one)
    return frozenset((one.queue, other.queue)) if fits else frozenset()


def _always_fits(limits: MachineLimits, newcomer: KernelResources, resident: KernelResources) -> bool:
    """Whether the resident kernel has too few blocks to keep the newcomer's from every SM."""
    capacity = (limits.registers_per_sm, limits.shared_bytes_per_sm, limits.threads_per_sm, limits.blocks_per_sm)
    takes, needs = resident.of_block(), newcomer.of_block()
    if any(need > whole for need, whole in zip(needs, capacity, strict=True)):
        return False
    most_per_sm = min(whole // take for take, whole in zip(takes, capacity, strict=True) if take)
    to_block_one_sm = min(
        (whole - need) // take + 1 for take, need, whole in zip(takes, needs, capacity, strict=True) if take
    )
    return to_block_one_sm > most_per_sm or resident.programs // to_block_one_sm < limits.sms


def _check_held_kernels(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Refuse kernels on side streams that `launch_obstacle` refuses."""
    queues = kernels_on_own_streams(plan)
    for rank, positions in enumerate(graph.of_rank if queues else ()):
        operations = [graph.operations[position] for position in positions]
        for queue in queues:
            if obstacle := launch_obstacle(plan, operations, queue):
                findings.add("residency", None, f"queue {queue} on rank {rank}: {obstacle}")


def _check_sms_for_tiles(plan: Plan, limits: MachineLimits, findings: Findings) -> None:
    """Refuse a plan that leaves all SMs to pushes and library calls, and none to tiles."""
    if plan.sms_beside >= limits.sms:
        message = f"{plan.sms_beside} of {limits.sms} SMs are left to pushes and library calls, and none to tiles"
        findings.add("residency", None, message)


def _check_rounding(plan: Plan, added_to: frozenset[str], findings: Findings) -> None:
    """Check that sums which are added to again are of fp32, or that the realization allows their rounding.

    MEASURED: products of column cuts that are added in bf16 have 1.20, 1.40 and 1.57 times the error of one matmul (2,
    3 and 4 cuts, CPU).
    """
    rounded = sorted(name for name in added_to if ITEMSIZE_BYTES[plan.dtype_of(name)] < ITEMSIZE_BYTES[SUM_DTYPE])
    if not rounded:
        return
    message = f"sums in {', '.join(f'{name} ({plan.dtype_of(name)})' for name in rounded)} are added to again"
    if plan.realization.partial_sums == SUM_DTYPE:
        findings.add("rounding", None, f"{message}, and partial_sums is {SUM_DTYPE}")
    else:
        findings.notes.append(f"{message}: each addition rounds them")


def _check_residual(plan: Plan, findings: Findings) -> None:
    """Check that products with a residual are stored where their rows and columns are those of the result.

    The kernel reads the residual at the rows and columns where it stores. So it stores into the result itself, or every
    reader of the buffer moves it into the result in place.
    """
    operations = plan.schedule.operations if plan.problem.product_epilogue.reads_rows else ()
    results = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    for operation in operations:
        for part in operation.out if isinstance(operation, Compute) else ():
            if part.buffer not in results and not _is_moved_to_result(part.buffer, operations, results):
                findings.add("form", operation, "adds rows of a residual to a product that lies elsewhere", part)


def _is_moved_to_result(buffer: Name, operations: tuple[Operation, ...], results: set[Name]) -> bool:
    """Whether all readers of a buffer move it into a result, in the same rows and columns."""
    moves = [(each, one.out) for one in operations if isinstance(one, Reduce) for each in one.operands]
    moves = [(each, out) for each, out in moves if each.buffer == buffer]
    readers = sum(each.buffer == buffer for one in operations for each in one.reads)
    is_placed = all(out.buffer in results and (out.rows, out.cols) == (each.rows, each.cols) for each, out in moves)
    return len(moves) == readers and is_placed


def _check_whole_rows(plan: Plan, findings: Findings) -> None:
    """Refuse rows of an all-to-all that are not whole blocks, one for each rank."""
    problem = plan.problem
    if problem.m != problem.record.whole_rows(problem.m, problem.world_size):
        findings.add("form", None, f"the problem's {problem.m} rows are no whole blocks for {problem.world_size} ranks")


def _check_numbers(plan: Plan, graph: Graph, findings: Findings) -> None:
    """Check world size and dtype against the problem, strides for bulk-tensor loads, and 32-bit indices of kernels."""
    schedule, realization = plan.schedule, plan.realization
    if (schedule.world_size, realization.dtype) != (plan.problem.world_size, plan.problem.dtype):
        findings.add("form", None, f"the problem has {plan.problem.world_size} ranks and {plan.problem.dtype}")
    of_products = plan.problem.product_epilogue
    if of_products != of_products.part_epilogue and any(len(goal.terms) > 1 for goal in schedule.goal):
        findings.add("form", None, f"epilogue {of_products} of products that are parts of a sum")
    if graph.signals_per_rank > SIGNAL_CAPACITY:
        findings.add("width", None, f"{graph.signals_per_rank} signals; a slot of memory holds {SIGNAL_CAPACITY}")
    blocks = [(config.block_m, config.block_n) for config in (realization.matmul, realization.reduction) if config]
    block_m, block_n = (max(sizes) for sizes in zip(*blocks, strict=True)) if blocks else (0, 0)
    check_scaling(plan, findings)
    itemsizes = {buffer.name: buffer.itemsize_bytes(realization.dtype) for buffer in schedule.buffers}
    strides = {buffer.name: buffer.cols * itemsizes[buffer.name] for buffer in schedule.buffers}
    seen: set[tuple[str, int]] = set()
    for operation in schedule.operations:
        if realization.engine_by_queue.get(operation.queue) not in (TILE_KERNEL, REDUCE_KERNEL):
            continue
        for region in (*operation.reads, *operation.writes):
            if region.rows[1] + block_m > LIMIT or region.cols[1] + block_n > LIMIT:
                findings.add("width", operation, "a tile's last row or column needs more than 31 bits", region)
        if isinstance(operation, Compute):
            b_stride = (
                operation.b.shape[0] * itemsizes[operation.b.buffer]
                if plan.problem.b_is_transposed
                else strides[operation.b.buffer]
            )
            loads: list[tuple[Region, int]] = [(part, strides[part.buffer]) for part in operation.a]
            for region, stride in [*loads, (operation.b, b_stride)]:
                if stride % BULK_ALIGNMENT_BYTES and (region.buffer, region.rank) not in seen:
                    seen.add((region.buffer, region.rank))
                    message = (
                        f"rows are {stride} bytes apart; bulk-tensor loads need a multiple of {BULK_ALIGNMENT_BYTES}"
                    )
                    findings.add("alignment", operation, message, region)
        if isinstance(operation, Reduce):
            for region in operation.operands:
                begin = region.rows[0] * strides[region.buffer] + region.cols[0] * itemsizes[region.buffer]
                if begin % BULK_ALIGNMENT_BYTES:
                    message = (
                        f"an operand begins at byte {begin}; the kernel needs a multiple of {BULK_ALIGNMENT_BYTES}"
                    )
                    findings.add("alignment", operation, message, region)


# verify_schedule: the proof of a Schedule, pass by pass.


def verify_schedule(schedule: Schedule) -> Verdict:
    """Return whether the schedule is proven not to hang or race, to meet its goals, and to be repeatable on the same
    slot.

    Form and signal counts first, then deadlock, then values, races and reuse: a pass relies on those before it, so it
    is skipped if they refuse. Never raises for what the schedule says.
    """
    findings = Findings()
    try:
        with without_collection():  # MEASURED: a quarter of the time of 100,000 operations, and there is no garbage
            _prove(schedule, findings)
    except Enough:
        pass
    except TooMuchWork as error:
        findings.add(TOO_LARGE, None, str(error))
    return findings.verdict(schedule.name)


def _prove(schedule: Schedule, findings: Findings) -> None:
    """Run all passes in order; each adds its refusals to `findings`."""
    unfolded, schedule = schedule, check_form(schedule, findings)
    if findings.refusals:
        return
    check_counted(unfolded, findings)
    check_extra_rows(schedule, findings)
    graph = build_graph(schedule, findings)
    if findings.refusals:
        return
    order = launch_order(graph, findings)
    if order is None:
        return
    past = past_of(graph, order)
    check_reuse(graph, past, findings)
    check_coverage(graph, order, past, findings)
