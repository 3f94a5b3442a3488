"""Stand-ins for missing libraries: what is built against one loads with it, and calls what it asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.stub_libraries import Asked, main, stubs_of

NEEDS = "int answer(void); int asked(void) { return answer(); }\n"
VERSIONED = "VERSION_2 { global: answer; };\n"


def test_symbols_go_to_the_library_whose_version_or_prefix_they_have() -> None:
    asked = Asked(
        frozenset({"libcudart.so.12", "libcuda.so.1", "libgone.so.3"}),
        {"libcudart.so.12": "libcudart.so.12", "GONE_1": "libgone.so.3", "GLIBC_2.2": "libc.so.6"},
        frozenset({("cudaFree", "libcudart.so.12"), ("cuInit", ""), ("cudaOwn", ""), ("read", "GLIBC_2.2")}),
        frozenset({"cudaOwn"}),
    )
    missing = ["libcuda.so.1", "libcudart.so.12", "libgone.so.3"]
    assert {name: dict(symbols) for name, symbols in stubs_of(asked, missing)} == {
        "libcuda.so.1": {"": ["cuInit"]},
        "libcudart.so.12": {"libcudart.so.12": ["cudaFree"]},
        "libgone.so.3": {"GONE_1": []},  # asked for by its version alone
    }


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "readelf", "nm"))), reason="no gcc and binutils here")
def test_what_needs_a_library_that_is_not_there_loads_with_its_stand_in(tmp_path: Path) -> None:
    folder, out = tmp_path / "package", tmp_path / "stubs"
    folder.mkdir()
    (tmp_path / "needs.c").write_text(NEEDS)
    (tmp_path / "answer.c").write_text("int answer(void) { return 42; }\n")
    (tmp_path / "answer.map").write_text(VERSIONED)
    there = tmp_path / "libanswer_of_nobody.so.2"
    shared = ["gcc", "-shared", "-fPIC", "-o"]
    versioned = [f"-Wl,--version-script,{tmp_path / 'answer.map'}", f"-Wl,-soname,{there.name}"]
    subprocess.run([*shared, there, tmp_path / "answer.c", *versioned], check=True)
    subprocess.run([*shared, folder / "libneeds.so", tmp_path / "needs.c", there], check=True)
    there.unlink()
    code = f"import ctypes; print(ctypes.CDLL({str(folder / 'libneeds.so')!r}).asked())"

    def run(path: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env={"LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=False)

    assert there.name in run("").stderr
    assert main([str(folder), str(out)]) == 0
    assert [path.name for path in out.iterdir()] == [there.name]
    assert run(str(out)).stdout == "0\n"
