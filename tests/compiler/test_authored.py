"""Compiled kernels run on CPU ranks, pass the lint, and lose its approval with any one of their waits or signals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton

from campaigns.lint.authored_cases import AUTHORS, authored_case
from campaigns.lint.lint_authored import main
from overweave.compiler.emit.emit import load_generated
from tests import forked
from tools.aot import compile_kernel
from tools.ptx_lint.lint import lint

pytestmark = pytest.mark.slow


FILES = {  # which, in how many parts, and what of them is chosen
    "authored_table": (48, ""),
    "authored_calls authored_spelled authored_forms": (24, ""),
    "untruths/exact_on_ranks": (24, "-3]"),
}


@pytest.mark.parametrize(
    ("files", "part"),
    [
        pytest.param(files, f"{part}/{parts}", marks=pytest.mark.nightly if part > 1 else ())
        for files, (parts, _) in FILES.items()
        for part in range(1, parts + 1)
    ],
)
def test_compiled_kernels_are_right_on_ranks(files: str, part: str):
    """Each in a process of its own, which imports torch and triton once. Short: the first part."""
    chosen = FILES[files][1]
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--part={part}"]
    command += [f"-k{chosen}"] * bool(chosen)  # as one word: `-3]` alone would be taken for an option
    command += [f"tests/compiler/{name}.py" for name in files.split()]
    cases = forked.run(*command, timeout=290)
    allowed = [0, pytest.ExitCode.NO_TESTS_COLLECTED][: 1 if part.startswith("1/") else 2]  # fewer cases than parts
    assert cases.returncode in allowed, cases.stdout[-4000:] + cases.stderr[-2000:]


@pytest.mark.parametrize("file", AUTHORS)
def test_fused_kernels_pass_the_lint(tmp_path: Path, file: str):
    """Short: the matmul in every third way, others in their first and last. `campaigns.lint_authored` tries all."""
    ways = AUTHORS[file].exchanges
    for way in ways[::3] if file == "matmul" else (ways[0], ways[-1]):
        source, contract = authored_case(tmp_path, file, AUTHORS[file], way)
        assert lint(compile_kernel(source), contract) == (), way


def test_the_campaign_goes_over_what_is_asked_for(capsys: pytest.CaptureFixture[str]):
    assert main(["--only", "rms_norm_kernel OUT=spread.push pieces"]) == 0
    assert f"1 kernels compiled for sm_90a with Triton {triton.__version__}, 0 findings" in capsys.readouterr().out


WAIT = r"overweave_verdict = overweave_lang\.wait_for_tile\([^)]*\)"


@pytest.mark.parametrize(
    ("file", "exchanges", "change", "rules"),
    [
        ("matmul", 0, (WAIT, "overweave_verdict = 1"), {"declared-counts", "guarded-order"}),
        ("persistent", 0, (WAIT, "overweave_verdict = 1"), {"declared-counts", "guarded-order"}),
        ("attention", 0, (r"overweave_lang\.wait_for_tile\([^)]*\)", "1"), {"declared-counts", "guarded-order"}),
        ("matmul", 3, (r"overweave_lang\.announce_tile\([^)]*\)", "pass"), {"declared-counts", "announced-order"}),
        ("persistent", 3, (r"overweave_lang\.complete_bulk_stores\(\)", "pass"), {"bulk-completion"}),
    ],
)
def test_without_a_line_of_the_protocol_the_lint_refuses(
    tmp_path: Path, file: str, exchanges: int, change: tuple[str, str], rules: set[str]
):
    author = AUTHORS[file]
    source, contract = authored_case(tmp_path, file, author, author.exchanges[exchanges])
    path = next(tmp_path.glob("*.py"))
    broken, count = re.subn(*change, path.read_text())
    assert count == 1
    source = type(source)(
        load_generated(tmp_path, author.name, broken),
        source.signature,
        source.constexprs,
        source.attrs,
        source.options,
        source.config,
    )
    assert rules <= {finding.rule for finding in lint(compile_kernel(source), contract)}


@pytest.mark.parametrize("file", AUTHORS)
def test_it_compiles_with_every_number_a_one(tmp_path: Path, file: str):
    """A launch makes a number that is one a constant, not a tensor: one tile, one part, one block, a group of one."""
    author = AUTHORS[file]
    source, _ = authored_case(tmp_path, file, author, author.exchanges[0])
    numbers = [name for name, kind in source.signature.items() if kind in ("i32", "i64")]
    ones = type(source)(
        source.kernel,
        {name: kind for name, kind in source.signature.items() if name not in numbers},
        {**source.constexprs, **dict.fromkeys(numbers, 1)},
        {name: power for name, power in source.attrs.items() if name not in numbers},
        source.options,
        source.config,
    )
    assert compile_kernel(ones).ptx
