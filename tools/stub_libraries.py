"""Stand-ins for libraries that a package's own libraries need and this machine lacks, so that it can be imported.

    python tools/stub_libraries.py FOLDER_OF_LIBRARIES OUT

A PyTorch that is built for CUDA is loaded only where the libraries of CUDA are, whether or not a GPU is there. For each
library that is needed and missing, OUT gets one of that name with the symbols, and versions of symbols, that are asked
of it; each returns 0. With LD_LIBRARY_PATH=OUT the package is imported, sees no GPU, and computes on the CPU. It needs
gcc and binutils.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# Of symbols without a version, by which prefix the library that has them is known; the first that fits.
PREFIXES = {
    "nccl": "nccl",
    "cusparseLt": "cusparseLt",
    "cudnn": "cudnn",
    "cuFile": "cufile",
    "cufile": "cufile",
    "cuda": "cudart",
    "nvrtc": "nvrtc",
    "cublas": "cublas",
    "cupti": "cupti",
    "nvshmem": "nvshmem_host",
    "cu": "cuda",
}
NOTHING = ".globl {0}\n.type {0},@function\n{0}: xorl %eax,%eax\n ret\n"


class Asked(NamedTuple):
    """What libraries ask of others. needed: names of libraries. versions: of symbols, with the library that has each.
    symbols: name and version, or an empty one. defined: what they have themselves.
    """

    needed: frozenset[str]
    versions: Mapping[str, str]
    symbols: frozenset[tuple[str, str]]
    defined: frozenset[str]


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def asked_by(libraries: Iterable[Path]) -> Asked:
    needed, defined, symbols, versions = set(), set(), set(), {}
    for path in map(str, libraries):
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", told("readelf", "-dW", path)))
        of_file = ""
        for file, version in re.findall(r"File: (\S+)|Name: (\S+)\s+Flags", told("readelf", "-VW", path)):
            of_file = file or of_file
            if version:
                versions[version] = of_file
        for line in told("nm", "-D", "--with-symbol-versions", path).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            (symbols.add((name, version.lstrip("@"))) if kind == "U" else defined.add(name))
    return Asked(frozenset(needed), versions, frozenset(symbols), frozenset(defined))


def home_of(name: str, version: str, asked: Asked, missing: Iterable[str]) -> str:
    """The missing library that a symbol is in; empty where it is in none."""
    if version:
        return asked.versions.get(version, "")
    prefix = next((each for each in PREFIXES if name.startswith(each)), None)
    if prefix is None or name in asked.defined:
        return ""
    return next((library for library in missing if library.startswith(f"lib{PREFIXES[prefix]}.so")), "")


def is_here(library: str) -> bool:
    """Whether the loader finds a library, as those of every Linux."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def stubs_of(asked: Asked, missing: Iterable[str]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Each missing library, with its symbols by their version."""
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in missing}
    for version, library in asked.versions.items():
        if library in found:
            found[library][version] = []
    for name, version in sorted(asked.symbols):
        home = home_of(name, version, asked, missing)
        if home in found:
            found[home][version].append(name)
    return iter(found.items())


def build(library: str, symbols: Mapping[str, list[str]], out: Path) -> None:
    """Writes one, with gcc."""
    source, script = out / "stub.s", out / "stub.map"
    source.write_text(".text\n" + "".join(NOTHING.format(name) for names in symbols.values() for name in names))
    nodes = (
        f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};\n" for version, names in symbols.items()
        if version
    )  # fmt: skip
    script.write_text("".join(nodes))
    versioned = [f"-Wl,--version-script,{script}"] if script.stat().st_size else []
    told("gcc", "-shared", "-nostdlib", "-o", str(out / library), str(source), f"-Wl,-soname,{library}", *versioned)
    source.unlink()
    script.unlink()


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder, out = map(Path, arguments)
    libraries = sorted(path for path in folder.rglob("*.so*") if path.is_file() and out not in path.parents)
    asked = asked_by(libraries)
    missing = [name for name in sorted(asked.needed - {path.name for path in libraries}) if not is_here(name)]
    out.mkdir(parents=True, exist_ok=True)
    for library, symbols in stubs_of(asked, missing):
        build(library, symbols, out)
        print(f"{library}: {sum(map(len, symbols.values()))} symbols")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
