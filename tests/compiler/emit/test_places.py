"""Where tiles load and store: by the blocks that the schedule gives them, and at peers once for each place."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.compiler.frontend.symbols.directives import is_directive
from overweave.ir.tile_order import APPLY
from tests.compiler.annotated import ROWS, SCALE, STREAMED, fused, refusal

GATHER, AWAY = "all_gather.push", "spread.push mover=tiles"
STORE, ABOVE = "    # @overweave.store Y", "    # @overweave.load X"
PERSISTENT = (
    ("    # @overweave.tile_id\n    pid = tl.program_id(0)\n", "    begin = tl.program_id(0)\n    other = begin - 4\n"),
    (
        "    # @overweave.dispatch begin",
        "    # @overweave.tile_id persistent\n    for pid in range(begin, M, 4):\n    # @overweave.dispatch begin",
    ),
)


def persistent(body_of: str = SCALE) -> str:
    """The same kernel as a loop over tiles, with a second number beside the loop's own."""
    for old, new in PERSISTENT:
        body_of = body_of.replace(old, new, 1)
    head, loop = body_of.split("range(begin, M, 4):\n")
    lines = (f"    {line}" if line else line for line in loop.split("\n"))
    return head + "range(begin, M, 4):\n" + "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ((STORE, f"    at += pid // tl.cdiv(N, BLOCK_N)\n{STORE}"), "is computed from a program id"),
        ((STORE, f"    at = at + (pid // N) * N\n{STORE}"), "is computed from a program id"),
        (("tl.load(x_ptr + at)", "tl.load(x_ptr + at, mask=rows[:, None] < pid)"), "is computed from a program id"),
        (("tl.store(y_ptr + at, x)", "tl.store(y_ptr + at, x + pid)"), "is computed from a program id"),
        ((STORE, f"    tl.store(z_ptr + pid, 1.0)\n{STORE}"), "kernel.py:27: tl.store(z_ptr + pid, 1.0): its address"),
        (
            ("    # @overweave.dispatch end\n", "    tl.store(z_ptr, 1.0)\n    # @overweave.dispatch end\n"),
            "region stores",
        ),
        (
            ("    # @overweave.dispatch end\n", "    tl.atomic_add(z_ptr, 1)\n    # @overweave.dispatch end\n"),
            "region stores",
        ),
        (
            (
                "    # @overweave.dispatch end\n",
                "    # @overweave.load Z=z_ptr[M]\n    pid_m += tl.load(z_ptr)\n    # @overweave.dispatch end\n",
            ),
            "stands in the dispatch region",
        ),
        (("    rows = ", "    N = N * 2\n    rows = "), "N is assigned"),
        (("    rows = ", "    BLOCK_M = 8\n    rows = "), "BLOCK_M is assigned"),
        (("rows[:, None] * N", "0 * N"), "is not computed from pid_m, which is the block along M"),
        (("tl.load(x_ptr + at)", "tl.load(x_ptr + cols)"), "is not computed from pid_m"),
        (("tl.store(y_ptr + at, x)", "tl.store(y_ptr + rows, x)"), "is not computed from pid_n"),
        (("at = rows[:, None] * N", "at = tl.load(z_ptr + rows)[:, None] * N"), "is not computed from pid_m"),
        (("z_ptr, M", "group, M"), "a parameter is called group"),
        (("N, BLOCK_M", "N, *, BLOCK_M"), "can only be named"),
        (("N, BLOCK_M", "N, *others, BLOCK_M"), "can only be named"),
        (("tl.store(y_ptr + at, x)", "(y_ptr + at).store(x)"), "a method of a pointer"),
        (("tl.store(y_ptr + at, x)", "(y_ptr + at).store(x, mask=x > 0)"), "a method of a pointer"),
    ],
)
def test_a_place_that_no_block_tells_is_refused(tmp_path: Path, change: tuple[str, str], found: str):
    assert found in refusal(tmp_path, SCALE, GATHER, change)


@pytest.mark.slow
def test_numbers_that_stay_what_they_are_are_welcome(tmp_path: Path):
    fused(tmp_path, SCALE, GATHER, ("    rows = ", "    N = tl.multiple_of(N, 8)\n    rows = "))
    fused(tmp_path, SCALE, GATHER, (STORE, f"    tl.store(z_ptr + pid_m, 1.0)\n    pid_m = pid_m * BLOCK_M\n{STORE}"))
    fused(tmp_path, SCALE, GATHER, ("tl.store(y_ptr + at, x)", "tl.store(y_ptr + at, x + pid_n)"))
    fused(tmp_path, SCALE, GATHER, ("tl.program_id(0)", "tl.program_id(0).to(tl.int64)"))


@pytest.mark.slow
def test_a_loop_over_tiles_may_number_them_again(tmp_path: Path):
    """As the Triton tutorial's persistent matmul does: it reckons the blocks of the store from a second number."""
    text = persistent()
    fused(tmp_path, text, GATHER)
    again = "        other += 4\n        pid_m = other // tl.cdiv(N, BLOCK_N)\n"
    again += "        pid_n = other % tl.cdiv(N, BLOCK_N)\n"
    place = "        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)\n        at = rows[:, None] * N + cols[None, :]\n"
    said = refusal(tmp_path, text, GATHER, (f"    {STORE}", f"{again}{place}    {STORE}"))
    assert "is computed from a program id" in said
    begin = "        # @overweave.dispatch begin\n        # @overweave.pid_map M=pid_m N=pid_n\n"
    framed = f"{begin}{again}        # @overweave.dispatch end\n"
    source = fused(tmp_path, text, GATHER, (f"    {STORE}", f"{framed}{place}    {STORE}")).source()
    assert source.count("pid_n = pid % overweave_lang.blocks(N, BLOCK_N)") == 2
    other = framed.replace("other += 4", "other += 5")
    said = refusal(tmp_path, text, GATHER, (f"    {STORE}", f"{other}{place}    {STORE}"))
    assert "the blocks are not those of the first region" in said


def test_a_pointer_that_is_made_before_the_tile_is_known_reads_one_place(tmp_path: Path):
    early = (
        ("    # @overweave.tile_id\n", "    base = x_ptr + 0\n    # @overweave.tile_id\n"),
        ("tl.load(x_ptr", "tl.load(base"),
    )
    assert fused(tmp_path, SCALE, GATHER).dual_source == "X"
    assert fused(tmp_path, SCALE, GATHER, *early).dual_source is None


def test_only_the_annotated_store_is_repeated_and_moved(tmp_path: Path):
    """Inside a loop that adds up: to run all of it once for every place would add up that often."""
    text = fused(tmp_path, ROWS, AWAY).source()
    assert text.count("total += ") == 1
    assert "        for overweave_place in range(overweave_count):\n" in text
    assert "            tl.store((y_ptr + at) + overweave_away, total)\n        tl.store(z_ptr + at, total)\n" in text
    both = ("        tl.store(y_ptr + at, total)\n", "        tl.store(y_ptr + at, total); total += 1\n")
    assert "store Y at peers" in refusal(tmp_path, ROWS, AWAY, both)


@pytest.mark.parametrize(
    "change",
    [
        ("@triton.jit\ndef scale", "# @overweave.axis Q block=BLOCK_M\n@triton.jit\ndef scale"),
        ("@triton.jit\ndef scale", "@triton.jit\n# @overweave.axis Q block=BLOCK_M\ndef scale"),
        ("def scale(x_ptr", "def scale(  # @overweave.axis Q block=BLOCK_M\n    x_ptr"),
        ("BLOCK_N: tl.constexpr):", "BLOCK_N: tl.constexpr):  # @overweave.axis Q block=BLOCK_M"),
        ("tl.load(x_ptr", "tl.load(\n        # @overweave.load X=x_ptr[M, N]\n        x_ptr"),
        ("    rows = ", "    # @overweave.dispatch end\n    rows = "),
    ],
)
def test_no_directive_goes_unread(tmp_path: Path, change: tuple[str, str]):
    assert "@overweave." in refusal(tmp_path, SCALE, GATHER, change)


@pytest.mark.parametrize(
    "comment",
    ["# overweave claims tiles. So it goes.", "# see overweave.compile", "# overweave", "# @param x", "# @over here"],
)
def test_prose_is_no_directive(comment: str):
    assert not is_directive(comment)


@pytest.mark.parametrize(
    "comment",
    [
        "# overweave.axis M",
        "#@overweave.Axis",
        "#  @ overweave.load A",
        "# x @overweave.",
        "# @overweve.load A=a_ptr[M, K]",
        "# @overweave load A=a_ptr[M, K]",
        "# @Overweave.load A=a_ptr[M, K]",
        "# @OVERWEAVE.axis M block=1",
        "# @overwaeve.tile_id",
        "# @overweaver.stream S",
    ],
)
def test_what_is_nearly_a_directive_is_one(comment: str):
    assert is_directive(comment)


def test_tile_sizes_may_be_defaults(tmp_path: Path):
    """What a call leaves out has the number that the kernel says."""
    sized = ("BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr", "BLOCK_M: tl.constexpr = 16, BLOCK_N: tl.constexpr = 0x20")
    kernel = fused(tmp_path, SCALE, GATHER, sized)
    sizes = [axis.block for axis in kernel.kernel.space({"M": 64, "N": 64}).axes]
    assert sizes == [16, 32]
    assert kernel.plan({"M": 64, "N": 64, "BLOCK_M": 32}, 2).tile_orders[0].rows[0].kind == APPLY


def test_what_is_stored_in_a_streamed_loop_does_not_keep_it_from_waiting(tmp_path: Path):
    inside = ("        turns += 1\n", "        # @overweave.store O=o_ptr[Q]\n        tl.store(o_ptr + rows, total)\n")
    behind = ("    # @overweave.store O=o_ptr[Q]\n    tl.store(o_ptr + rows, total / turns)\n", "")
    text = fused(tmp_path, STREAMED, GATHER, inside, behind).source()
    assert "overweave_arrived = overweave_lang.wait_for_tile(" in text
    assert "            tl.store(o_ptr + rows, overweave_lang.voided(total, overweave_verdict))\n" in text


def test_what_is_stored_above_a_wait_has_no_verdict(tmp_path: Path):
    early = (ABOVE, f"    # @overweave.store Z=z_ptr[M, N]\n    tl.store(z_ptr + at, 1.0)\n{ABOVE}")
    text = fused(tmp_path, SCALE, GATHER, early).source()
    assert "tl.store(z_ptr + at, 1.0)" in text
    assert "tl.store(y_ptr + at, overweave_lang.voided(x, overweave_verdict))" in text
    assert text.index("overweave_verdict = ") < text.index("overweave_lang.voided")
    last = (f"{STORE}=y_ptr[M, N]\n", "")
    both = fused(tmp_path, SCALE, {"X": GATHER, "Z": "spread.push"}, early, last).source()
    assert "tl.store(z_ptr + at, 1.0)" in both
    assert both.index("x = tl.load(") < both.index("finish_tile(")  # as it is proven: all waits, then the signal


def test_nothing_is_loaded_or_stored_above_the_tile(tmp_path: Path):
    whole = (
        "    # @overweave.tile_id\n",
        "    # @overweave.load Z=z_ptr[N]\n    z = tl.load(z_ptr)\n    # @overweave.tile_id\n",
    )
    assert "stands above the tile's number" in refusal(tmp_path, SCALE, GATHER, whole)


def test_one_wait_stands_above_all_that_is_waited_for(tmp_path: Path):
    """Also where a part is read before the whole: the loop over parts goes on with the verdict."""
    store = "    # @overweave.store O=o_ptr[Q]\n"
    behind = (store, f"    # @overweave.load Q=q_ptr[Q, D]\n    total += tl.load(q_ptr + rows * D)\n{store}")
    alone = ("    q = tl.load(q_ptr + rows[:, None] * D + tl.arange(0, D)[None, :])\n", "    q = 1.0\n")
    text = fused(tmp_path, STREAMED, {"K": GATHER, "Q": GATHER}, alone, behind).source()
    first, part = (
        text.index("overweave_verdict = overweave_lang.wait"),
        text.index("overweave_verdict & overweave_arrived"),
    )
    assert first < part
    assert "overweave_verdict = 1" not in text
