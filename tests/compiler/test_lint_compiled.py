"""The rules, on kernels compiled now: what Triton makes of right and of wrong source code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import triton
from msgspec.structs import replace

from campaigns.lint.authored_cases import Author, authored_case
from campaigns.lint.lint_all import main
from campaigns.lint.lint_case import SCALED, SUM, Case, Variant
from campaigns.lint.lint_cases import add_case, copy_case, norm_case, reduction_case
from campaigns.lint.lint_matmul import matmul_case
from campaigns.lint.lint_packed import begin_case, packed_case, tell_case, wait_case
from campaigns.lint.lint_tiles import FINISHED
from campaigns.lint.spills import beyond
from overweave.compat.versions import numbers
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig, ReduceConfig
from overweave.schedules.tiles.shape import (
    GATED,
    GATED_FLOAT8,
    PACKED,
    SUMS,
    SUMS_FINISHED,
    TileShape,
    row_shape,
    shapes,
)
from tests.compiler.annotated import ROWS
from tests.compiler.cases import (
    KEPT,
    KEPT_FROM,
    NOTIFIES,
    REDUCES,
    bare,
    edit,
    matmul_notifies,
    reduce_waits,
    rules,
    spills,
)
from tests.compiler.listing import ATOMICS, Listing
from tools.aot import Compiled, Source, compile_kernel
from tools.ptx_lint.contract import Contract
from tools.ptx_lint.lint import lint
from tools.ptx_lint.ptx import Instruction, registers
from tools.ptx_lint.subject import Subject

pytestmark = pytest.mark.slow
HOPPER = MatmulConfig(kernel="hopper")
SHIPPED = shapes("bfloat16", "hopper")[0].config  # one of those whose spills are known (campaigns/lint/spills.py)
SWIGLU = Epilogue(activation="silu", gate=True)
SCALED_SWIGLU = replace(SWIGLU, scaling="rows")


@cache
def hopper() -> tuple[Compiled, Contract]:
    source, contract = matmul_case("bfloat16", HOPPER, Variant())
    return compile_kernel(source), contract


@pytest.mark.parametrize("name", KEPT)
def test_kept_ptx_is_what_triton_makes_today(name: str, golden: Callable[[str, str], None]) -> None:
    """Of another Triton than that whose PTX is kept, only that it is right as well."""
    source, contract = KEPT[name]
    compiled = compile_kernel(source)
    if numbers(triton.__version__) == KEPT_FROM:
        golden(f"compiler/{name}.ptx", bare(compiled.ptx))
    assert lint(compiled, contract) == ()


def without_barriers(ptx: str) -> str:
    """Without the barriers that Triton 3.9 sets before a release where the source has none."""
    listing = Listing(ptx)
    (release,) = listing.having("release")
    stored = listing.last_before(release, "st" if listing.having("st", "global") else "wait_group")
    return listing.without(barriers) if (barriers := listing.between(stored, release, "bar")) else ptx


def without_drains(ptx: str) -> str:
    """With bulk stores that are waited for as Triton 3.6 does: until they have read what they store."""
    return ptx.replace("cp.async.bulk.wait_group \t", "cp.async.bulk.wait_group.read \t")


@pytest.mark.parametrize(
    ("source", "contract", "found"),
    [
        (matmul_notifies(scope="gpu"), NOTIFIES, {"system-scope"}),
        (reduce_waits("endless"), REDUCES, {"deadline"}),
        (reduce_waits("atomic"), REDUCES, {"deadline"}),
        (reduce_waits("plain"), REDUCES, {"declared-counts", "guarded-order"}),  # the compiler deleted the loop
        (reduce_waits("volatile"), REDUCES, {"declared-counts", "guarded-order", "wait-loop"}),
        (reduce_waits("none"), REDUCES, {"declared-counts", "guarded-order"}),
        (spills(registers=96), Contract(), {"spills"}),
    ],
    ids=lambda value: value.config if isinstance(value, Source) else "",
)
def test_wrong_source_is_found(source: Source, contract: Contract, found: set[str]) -> None:
    assert rules(lint(compile_kernel(source), contract)) == found


@pytest.mark.parametrize(
    ("source", "unmended", "found"),
    [
        (matmul_notifies(barrier=False), without_barriers, {"barrier-before-release"}),
        (matmul_notifies(bulk=True, barrier=False), without_barriers, {"barrier-before-release"}),
        (matmul_notifies(bulk=True, drains=False), without_drains, {"bulk-completion"}),
    ],
)
def test_wrong_source_that_a_newer_triton_mends_is_found(
    source: Source, unmended: Callable[[str], str], found: set[str]
) -> None:
    compiled = compile_kernel(source)
    assert rules(lint(compiled, NOTIFIES)) == (found if unmended(compiled.ptx) == compiled.ptx else set())
    assert rules(lint(replace(compiled, ptx=unmended(compiled.ptx)), NOTIFIES)) == found


@pytest.mark.parametrize(
    "case",
    [
        begin_case(),
        tell_case(),
        wait_case(),
        reduction_case("bfloat16", 4, traced=False),
        reduction_case("bfloat16", 4, traced=False, told=4),
        reduction_case("bfloat16", 8, traced=False, config=SUMS_FINISHED, epilogue=FINISHED),
        packed_case("bfloat16", 4, replace(PACKED[0], exchange="two_shot"), epilogue=FINISHED),
        norm_case("bfloat16", 4, row_shape(4096, 8192, 132), has_residual=True),
        copy_case(traced=False, ragged=True),
        matmul_case("bfloat16", MatmulConfig(), Variant(is_transposed=True)),
        matmul_case("float32", MatmulConfig(block_m=64, block_n=64, block_k=16, warps=4, stages=2), Variant()),
        pytest.param(matmul_case("bfloat16", HOPPER, Variant(), weights=3), marks=pytest.mark.nightly),
        pytest.param(matmul_case("bfloat16", SHIPPED, SUM, FINISHED, addends=3), marks=pytest.mark.nightly),
        *(matmul_case("bfloat16", GATED[kernel][0].config, Variant(), SWIGLU) for kernel in GATED),
        *(
            pytest.param(
                matmul_case(FLOAT8, GATED_FLOAT8[kernel][0].config, SCALED, SCALED_SWIGLU), marks=pytest.mark.nightly
            )
            for kernel in GATED_FLOAT8
        ),
    ],
    ids=lambda case: f"{case.source.name} {case.source.config}",
)
def test_our_kernels_pass(case: Case) -> None:
    compiled = compile_kernel(case.source)
    assert beyond(compiled, lint(compiled, case.contract)) == ()


def test_the_specialised_kernel_passes() -> None:
    assert lint(*hopper()) == ()


@pytest.mark.parametrize("way", ["spread.push", "spread.push mover=tiles"])
def test_a_store_in_a_loop_passes(tmp_path: Path, way: str) -> None:
    """Told of once, behind the loop; what goes to peers is stored at each of them in every turn."""
    (tmp_path / "rows.py").write_text(ROWS)
    numbers, types = {"ROWS": 1024, "N": 4096}, dict.fromkeys(("x_ptr", "y_ptr", "z_ptr"), "*fp32")
    author = Author("running", numbers, {"BLOCK": 256}, types, ({"Y": way},), 0, {"num_warps": 4})
    case = authored_case(tmp_path, str(tmp_path / "rows"), author, {"Y": way})
    assert lint(compile_kernel(case.source), case.contract) == ()


def test_pushes_move_16_bytes_at_once_and_several_are_under_way() -> None:
    for ragged in (False, True):
        text = compile_kernel(copy_case(traced=False, ragged=ragged).source).ptx
        loads, stores = ([m.start() for m in re.finditer(rf"{way}\.global\.v4\.b32", text)] for way in ("ld", "st"))
        assert len(loads) == len(stores) == 4
        assert max(loads) < min(stores)


@pytest.mark.parametrize("tile", SUMS, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_a_sum_asks_for_all_its_operands_before_it_adds_any(tile: ReduceConfig) -> None:
    """A barrier stands between, which loads do not cross; without it the assembler saves registers by turns."""
    source = reduction_case("bfloat16", 4, traced=False, config=tile, told=4).source
    text = compile_kernel(replace(source, attrs={**source.attrs, "n": 16})).ptx
    loads = [m.start() for m in re.finditer(r"ld\.global\.v4\.b32", text)]
    added = text.index("add.f32")
    assert len(loads) == 4 * tile.block_m * tile.block_n // (8 * 32 * tile.warps)
    assert max(loads) < text.index("bar.sync", max(loads)) < added


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("announced-order", (r"sys\.release", "sys.relaxed")),
        ("system-scope", (r"sys\.release", "gpu.release")),
        # The next barrier on the way stands where a wait was void, which says nothing of waits that were not.
        ("guarded-order", (r"bar\.red\.and\.pred reached, 0, reached;", "")),
    ],
)
def test_seeded_violation_in_a_push_is_found(rule: str, change: tuple[str, str]) -> None:
    source, contract = copy_case(traced=False, ragged=False)
    compiled = compile_kernel(source)
    assert rule in rules(lint(replace(compiled, ptx=edit(compiled.ptx, change)), contract))


def slipped_below_its_release(listing: Listing, data: Instruction) -> str:
    """The text with what is stored or added behind the release that announces it."""
    return listing.moved(data, listing.having("add", "release", roots=ATOMICS)[-1])


def test_a_store_below_its_release_is_found() -> None:
    source, contract = copy_case(traced=False, ragged=False)
    compiled = compile_kernel(source)
    listing = Listing(compiled.ptx)
    late = slipped_below_its_release(listing, listing.having("st", "global", "v4")[0])
    assert "announced-order" in rules(lint(replace(compiled, ptx=late), contract))


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("announced-order", lambda listing, _: listing.text.replace("sys.release", "sys.relaxed")),
        ("announced-order", lambda listing, adds: slipped_below_its_release(listing, adds[0])),
        ("system-scope", lambda listing, adds: listing.rewritten(adds, lambda text: text.replace(".sys", ".gpu"))),
    ],
    ids=["relaxed", "late", "scope"],
)
def test_seeded_violation_in_a_remote_add_is_found(
    rule: str, change: Callable[[Listing, list[Instruction]], str]
) -> None:
    """Numbers that are added are data as what is stored is; no order of theirs is a signal's."""
    source, contract = add_case("bfloat16", traced=False, ragged=False)
    compiled = compile_kernel(source)
    assert not lint(compiled, contract)
    listing = Listing(compiled.ptx)
    adds = listing.having("global", "sys", "relaxed", "add", "v4", "f32", roots=ATOMICS)
    assert len(adds) == 4
    assert rule in rules(lint(replace(compiled, ptx=change(listing, adds)), contract))


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("bulk-completion", (r"cp\.async\.bulk\.wait_group 0;", "")),
        ("bulk-completion", (r"wait_group 0;", "wait_group.read 0;")),
        ("shared-base", (r"staged\[\d+\]", "staged[32800]")),
        ("announced-order", (r"sys\.release", "sys.relaxed")),
    ],
)
def test_seeded_violation_in_a_bulk_push_is_found(rule: str, change: tuple[str, str]) -> None:
    source, contract = copy_case(traced=False, ragged=False, path="bulk")
    compiled = compile_kernel(source)
    assert not lint(compiled, contract)
    assert rule in rules(lint(replace(compiled, ptx=edit(compiled.ptx, change)), contract))


PARTITION_BARRIER = r"bar\.sync\s+[02], 128;"
GAP = r"(?:\s*\.loc[^\n]*|\$L__tmp\d+:|\s*//[^\n]*|\n)*"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("bulk-completion", (r"cp\.async\.bulk\.wait_group 0;", "")),
        ("barrier-before-release", (rf"{PARTITION_BARRIER}{GAP}(\s*bra\.uni)", r"\1")),
        ("proxy-fence", (r"fence\.proxy\.async\.shared::cta;", "")),
        ("proxy-fence", (r"fence\.proxy\.async\.global;", "")),
        ("deadline", (r"@other bra spin", "bra spin")),
        ("wait-loop", (r"setp\.ge\.s32 reached", "setp.lt.s32 reached")),
        ("announced-order", (r"mbarrier\.try_wait\.parity[\w.:]*\.b64", "mov.pred")),
        ("system-scope", (r"sys\.release", "gpu.release")),
    ],
)
def test_seeded_violation_in_a_partition_is_found(rule: str, change: tuple[str, str]) -> None:
    compiled, contract = hopper()
    text = compiled.ptx
    if rule == "barrier-before-release" and "bra" in change[0]:  # the barrier behind the other branch goes too
        text = edit(text, (rf"(fence\.proxy\.async\.shared::cta;.{{1,400}}?){PARTITION_BARRIER}", r"\1"))
    assert rule in rules(lint(replace(compiled, ptx=edit(text, change)), contract))


def test_a_partition_that_tells_before_all_its_threads_know_of_the_stores_is_found() -> None:
    compiled, contract = hopper()
    listing = Listing(compiled.ptx)
    (release,) = listing.having("add", "release", roots=ATOMICS)
    drain = listing.last_before(release, "bulk", "wait_group")
    early = listing.without(listing.between(drain, release, "bar"))
    assert "barrier-before-release" in rules(lint(replace(compiled, ptx=early), contract))


@pytest.mark.parametrize(
    ("config", "variant", "epilogue", "weights"),
    [
        (HOPPER, Variant(), Epilogue(), 1),
        pytest.param(HOPPER, Variant(), Epilogue(), 3, marks=pytest.mark.nightly),
        pytest.param(GATED["hopper"][0].config, Variant(two_sources=False), SWIGLU, 1, marks=pytest.mark.nightly),
    ],
)
def test_what_a_program_waits_for_first_is_under_way_before_its_barriers_are_made(
    config: MatmulConfig, variant: Variant, epilogue: Epilogue, weights: int
) -> None:
    source, _ = matmul_case("bfloat16", config, variant, epilogue, weights=weights)
    compiled = compile_kernel(source)
    begun, _, _ = compiled.ptx.partition("mbarrier.init")
    maps = [int(at) for at in re.findall(r"prefetch\.param\.tensormap \[\w+_param_(\d+)\]", begun)]
    moved = {name for name, kind in source.signature.items() if str(kind).startswith("tensordesc")}
    assert {compiled.pointers[at] for at in maps} == moved
    assert "atom.relaxed.gpu.global" in begun
    # One that adds is made by a warp together, which waits for it there and then; the producer's others are.
    claims = re.findall(r"ATOMG\.E\.(INC|ADD)\.STRONG\.GPU", disassembled(compiled))
    assert sorted(claims) == ["ADD", "INC"]


def disassembled(compiled: Compiled) -> str:
    """The instructions of a kernel's code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        return subprocess.run(
            [triton.knobs.nvidia.nvdisasm.path, "-c", file.name], check=True, capture_output=True, text=True
        ).stdout


@cache
def hopper_sum() -> tuple[Compiled, Contract]:
    config = MatmulConfig(kernel="hopper", block_n=128, stages=5)
    source, contract = matmul_case("bfloat16", config, Variant(two_sources=False), addends=3)
    return compile_kernel(source), contract


def test_192_columns_are_multiplied_in_two_accumulators_without_a_pause() -> None:
    config = MatmulConfig(kernel="hopper", block_n=192, split_n=3, stages=4)
    source, contract = matmul_case("bfloat16", config, Variant(is_transposed=True))
    compiled = compile_kernel(source)
    assert lint(compiled, contract) == ()
    # Two consumers, four steps of 16. In 128 columns: whole tiles, and two rectangles; in 64: whole tiles, and one.
    found = Counter(re.findall(r"wgmma\.mma_async\S+\.m64(n\d+)k16", compiled.ptx))
    assert found == {"n128": 2 * 4 * 2, "n64": 2 * 4 * 2}
    # Each main loop waits for the step before; behind it for its own: two groups of products a step, or one.
    waits = Counter(re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", compiled.ptx))
    assert (waits["2"], waits["1"]) == (2, 4)


def place_of(verb: str, source: str) -> list[str]:
    """The address registers of the mbarrier instructions that were compiled from a line of a file."""
    subject = Subject(*hopper_sum())
    items = (item for item in subject.function.instructions if item.opcode.startswith(f"mbarrier.{verb}"))
    return [item.operands[-2 if verb == "try_wait" else -1] for item in items if source in item.source]


def test_tiles_that_add_pass_and_load_16_bytes_at_once() -> None:
    compiled, contract = hopper_sum()
    assert lint(compiled, contract) == ()
    # Two consumers, two strips each, three addends, 64 x 64 elements over 128 threads.
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.ptx)) == 2 * 2 * 3 * 4


@pytest.mark.parametrize("fault", ["a consumer does not listen", "it listens to another", "told before the wait"])
def test_addends_read_without_hearing_of_the_wait_are_found(fault: str) -> None:
    compiled, contract = hopper_sum()
    text = compiled.ptx
    (told,) = place_of("arrive", "tile_end.py")
    heard, other = place_of("try_wait", "tile_end.py")
    if fault == "a consumer does not listen":
        listing = Listing(text)
        deaf = [item for item in listing.having("mbarrier", "try_wait") if heard in item.operands]
        text = listing.rewritten(deaf, lambda wait: "mov.pred complete, 1;")
    elif fault == "it listens to another":
        (empty, *_) = place_of("try_wait", "consumer.py:")
        text = edit(text, (rf"(complete, ){re.escape(other)}", rf"\g<1>{empty}"))
    else:
        arrival = rf"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, {re.escape(told)};"
        found = re.search(arrival, text)
        assert found is not None
        text = edit(text, (arrival, ""), (r"(mov\.u64 start, %globaltimer;)", rf"{found[0]}\n\1"))
    found_rules = lint(replace(compiled, ptx=text), contract)
    assert "guarded-order" in rules(found_rules)


@pytest.mark.nightly
def test_an_addend_that_is_loaded_in_bulk_is_guarded() -> None:
    """The storer waits and loads: two halves of two rectangles, of which a narrow tile has one."""
    source, contract = matmul_case(
        "bfloat16", MatmulConfig(kernel="hopper", split_n=2), Variant(two_sources=False), addends=1
    )
    compiled = compile_kernel(source)
    assert lint(compiled, contract) == ()
    subject = Subject(compiled, contract)
    loads = [access for access in subject.shared if access.kind == "bulk_load" and "addend_tiles" in access.pointers]
    assert len(loads) >= 4
    unfenced = edit(compiled.ptx, (r"fence\.proxy\.async\.global;", "", 1))  # the storer's comes first
    assert "proxy-fence" in rules(lint(replace(compiled, ptx=unfenced), contract))
    incomplete = edit(compiled.ptx, (r"cp\.async\.bulk\.wait_group 0;", ""))
    assert "bulk-completion" in rules(lint(replace(compiled, ptx=incomplete), contract))


def test_campaign_prints_a_line_per_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "begin"]) == 0
    printed = capsys.readouterr().out
    assert "begin_kernel" in printed
    assert f"1 kernels compiled for sm_90a with Triton {triton.__version__}, 0 findings" in printed


@pytest.mark.parametrize(
    ("dtype", "shape", "epilogue"),
    [
        ("bfloat16", GATED["hopper"][0], SWIGLU),
        *(pytest.param(FLOAT8, shape, SCALED_SWIGLU, marks=pytest.mark.nightly) for shape in GATED_FLOAT8["hopper"]),
    ],
)
def test_a_gated_tile_loads_its_columns_of_both_weights_in_every_step(
    dtype: Dtype, shape: TileShape, epilogue: Epilogue
) -> None:
    """Neither descriptor depends on the step: the loads of the loop name parameters."""
    source, _ = matmul_case(dtype, shape.config, SCALED._replace(two_sources=False), epilogue)
    compiled = compile_kernel(source)
    listing = Listing(compiled.ptx)
    moved = {item.operands[0]: item.operands[1] for item in listing.items if item.root in ("mov", "cvta", "cvt")}

    def parameter(register: str) -> str:
        while register in moved:
            register = moved[register]
        return compiled.pointers[int(register.rsplit("_", 1)[1])]

    loads = listing.having("bulk", "tensor", "mbarrier::complete_tx::bytes")
    assert [parameter(registers(item.operands[1])[0]) for item in loads] == ["a_shard", "a_shard", "b", "b_1"]
