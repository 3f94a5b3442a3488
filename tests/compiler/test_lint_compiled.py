"""The rules, on kernels compiled now: what Triton makes of right and of wrong source code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from msgspec.structs import replace

from campaigns.lint_all import main
from campaigns.lint_cases import Case, Variant, begin_case, matmul_case, reduction_case
from overweave.compiler.aot import Compiled, Source, compile_kernel
from overweave.compiler.lint import lint
from overweave.compiler.lint_contract import Contract
from overweave.ir.plan import MatmulConfig
from tests.compiler.cases import (
    KEPT,
    NOTIFIES,
    REDUCES,
    bare,
    edit,
    matmul_notifies,
    reduce_waits,
    rules,
    spills,
)

pytestmark = pytest.mark.slow
HOPPER = MatmulConfig(kernel="hopper")


@cache
def hopper() -> tuple[Compiled, Contract]:
    source, contract = matmul_case("bfloat16", HOPPER, Variant())
    return compile_kernel(source), contract


@pytest.mark.parametrize("name", KEPT)
def test_kept_ptx_is_what_triton_makes_today(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"compiler/{name}.ptx", bare(compile_kernel(KEPT[name][0]).ptx))


@pytest.mark.parametrize(
    ("source", "contract", "found"),
    [
        (matmul_notifies(barrier=False), NOTIFIES, {"barrier-before-release"}),
        (matmul_notifies(bulk=True, barrier=False), NOTIFIES, {"barrier-before-release"}),
        (matmul_notifies(bulk=True, drains=False), NOTIFIES, {"bulk-completion"}),
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
    "case",
    [
        begin_case(),
        reduction_case("bfloat16", 4, traced=False),
        matmul_case("bfloat16", MatmulConfig(), Variant(is_transposed=True)),
        matmul_case("float32", MatmulConfig(block_m=64, block_n=64, block_k=16, warps=4, stages=2), Variant()),
    ],
    ids=lambda case: f"{case.source.name} {case.source.config}",
)
def test_our_kernels_pass(case: Case) -> None:
    assert lint(compile_kernel(case.source), case.contract) == ()


def test_the_specialised_kernel_passes() -> None:
    assert lint(*hopper()) == ()


PARTITION_BARRIER = r"bar\.sync\s+[02], 128;"
GAP = r"(?:\s*\.loc[^\n]*|\$L__tmp\d+:|\s*//[^\n]*|\n)*"


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("bulk-completion", (r"cp\.async\.bulk\.wait_group 0;", "")),
        ("barrier-before-release", (r"(wait_group 0;.{0,300}?)bar\.warp\.sync\s+-1;", r"\1")),
        ("barrier-before-release", (rf"{PARTITION_BARRIER}{GAP}(\s*bra\.uni)", r"\1")),
        ("proxy-fence", (r"fence\.proxy\.async\.shared::cta;", "")),
        ("proxy-fence", (r"fence\.proxy\.async\.global;", "")),
        ("deadline", (r"@other bra spin", "bra spin")),
        ("wait-loop", (r"setp\.ge\.s32 reached", "setp.lt.s32 reached")),
        ("announced-order", (r"mbarrier\.try_wait\.parity\.shared\.b64", "mov.pred")),
        ("system-scope", (r"sys\.release", "gpu.release")),
    ],
)
def test_seeded_violation_in_a_partition_is_found(rule: str, change: tuple[str, str]) -> None:
    compiled, contract = hopper()
    text = compiled.ptx
    if rule == "barrier-before-release" and "bra" in change[0]:  # the barrier behind the other branch goes too
        text = edit(text, (rf"(fence\.proxy\.async\.shared::cta;.{{1,400}}?){PARTITION_BARRIER}", r"\1"))
    assert rule in rules(lint(replace(compiled, ptx=edit(text, change)), contract))


def test_campaign_prints_a_line_per_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "begin"]) == 0
    printed = capsys.readouterr().out
    assert "begin_kernel" in printed
    assert "1 kernels compiled for sm_90a, 0 findings" in printed
