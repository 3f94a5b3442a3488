"""Shape sets: the global matmuls of a comparison, as files of one form.

    {"operator": "all_gather_matmul", "source": "...", "note": "...", "cases": [{"name", "m", "n", "k"}, ...]}

`m` counts rows after the gather or before the scatter; `n` and `k` are the sizes before tensor parallelism. A case may
have `columns`, those of each of several weights, and `after`, its epilogue. Only `cases` is required. The sets of the
repository lie in `benchmarks/shapes/SET.OPERATOR.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import Epilogue, Norm, applied, told_apart
from overweave.ir.operators.forms import BIAS, GATE, NORM_EPS, REGISTERED, RESIDUAL, Activation
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import LONGEST_LIST, Problem
from overweave.schedules.catalog.forms import check_forms
from overweave.untrusted import check_keys, check_words, read_bytes

RMS_NORM = "rms_norm"
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
FP8_STEP = 16  # k and n of fp8 operands are multiples of it, for torch's scaled matmul and for 16-byte rows
_WORDS = (BIAS, *ACTIVATIONS, GATE, RESIDUAL, RMS_NORM)


def with_epilogue(problem: Problem, columns: tuple[int, ...] = (), after: str = "") -> Problem:
    """Return a bare problem with several weights and an epilogue. Raises InputError.

    columns: of each weight, if there are several. after: words joined by `+`: `bias`, an activation (`silu`, `gelu`,
    `gelu_tanh`), `gate`, `residual`, as the keywords of operators, or `residual+rms_norm`, as `ow.RmsNorm`; or names of
    epilogues that were registered.
    """
    check_sizes(problem, columns)
    words = [word for word in after.split("+") if word]
    known = (*_WORDS, *REGISTERED)
    unknown = [word for word in words if word not in known]
    if unknown or len(set(words)) < len(words):
        found = f"{unknown[0][:40]!r} is none" if unknown else "a word is there twice"
        raise InputError(f"{problem.operator} after {after[:60]!r}", found, f"Join some of {', '.join(known)} by +")
    activations = [word for word in ACTIVATIONS if word in words]
    if len(activations) > 1:
        raise InputError(f"{problem.operator} after {after}", " and ".join(activations), "Leave out one of them")
    norms, has_residual = RMS_NORM in words, RESIDUAL in words
    asked = f"{problem.operator}{f' after {after}' if words else ''}"
    forms = [each for name, each in REGISTERED.items() if name in words]
    more, rows = told_apart([applied(form, form.numbers.values(), problem.record.adds) for form in forms])
    inputs = [word for word in words if word != RESIDUAL or not norms]
    activation, scaling = activations[0] if activations else None, problem.epilogue.scaling
    epilogue = Epilogue.of(inputs, activation=activation, scaling=scaling, more=more)
    norm = Norm(eps=NORM_EPS, residual=has_residual) if norms else None
    whole = replace(problem, columns=columns if len(columns) > 1 else (), epilogue=epilogue, norm=norm, rows=rows)
    check_forms(asked, whole)
    return whole


def check_sizes(problem: Problem, columns: tuple[int, ...] = ()) -> None:
    """Raise InputError for fp8 of sizes that torch cannot multiply. columns: of each of several weights."""
    for n in columns or (problem.n,):
        if problem.dtype == FLOAT8 and (n % FP8_STEP or problem.k % FP8_STEP):
            raise unaligned(problem.operator, n, problem.k)


def unaligned(operator: str, n: int, k: int) -> InputError:
    """Return the error for fp8 operands of such sizes."""
    cure = f"Pad both to multiples of {FP8_STEP}, as torch._scaled_mm wants them"
    return InputError(f"{operator}: fp8 operands", f"k={k}, n={n}", cure)


def as_benchmarked(problem: Problem) -> Problem:
    """Return a bare problem in the form in which it is measured: fp8 scaled by rows, w stored as `[n, k]`, into
    bf16."""
    if problem.dtype != FLOAT8:
        return problem
    return replace(problem, b_is_transposed=True, epilogue=Epilogue(scaling="rows"), out_dtype="bfloat16")


def bare_product(problem: Problem) -> Problem:
    """Return the product alone, of one weight: the inverse of `with_epilogue`."""
    fields = problem.operator, problem.m, problem.n, problem.k, problem.world_size, problem.dtype
    operator, m, n, k, world_size, dtype = fields
    return as_benchmarked(Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype=dtype))


SETS = Path("benchmarks/shapes")
USUAL = ("mlp", "moe")  # the default sets: each operator has one of them
LARGEST_FILE_BYTES = 1 << 20
_CURE = 'Give a file such as {"cases": [{"name": "a", "m": 8192, "n": 14336, "k": 4096}]}'
# The names in commands and results.
DtypeWord = Literal["bf16", "fp16", "fp32", "fp8"]
DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": FLOAT8}
Extent = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveExtent = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Set = TypeVar("_Set")


class ShapeCase(Struct, frozen=True, forbid_unknown_fields=True):
    """One global matmul `[m, k] @ [k, n]`. columns: of each of several weights, n in all. after: its epilogue, in the
    words of `with_epilogue`."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    m: Extent
    n: PositiveExtent
    k: PositiveExtent
    columns: Annotated[tuple[PositiveExtent, ...], Meta(max_length=LONGEST_LIST)] = ()
    after: Annotated[str, Meta(max_length=128)] = ""

    def problem(self, operator: str, world_size: int, dtype: str) -> Problem:
        """Return one rank's problem. dtype: a key of DTYPES. Raises InputError."""
        record = operator_of(operator)
        parts, rows = record.parts(world_size), record.whole_rows(self.m, world_size)
        columns, k = tuple(-(-cols // parts["n"]) for cols in self.columns or (self.n,)), -(-self.k // parts["k"])
        bare = Problem(operator=operator, m=rows, n=sum(columns), k=k, world_size=world_size, dtype=DTYPES[dtype])
        return with_epilogue(as_benchmarked(bare), columns, self.after)


class ShapeSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A list of cases, their source, and the operator that they are for (any, if empty)."""

    cases: Annotated[tuple[ShapeCase, ...], Meta(min_length=1, max_length=10_000)]
    operator: str = ""
    source: str = ""
    note: str = ""


def read_shapes(name: str, operator: str) -> ShapeSet:
    """Return the shape set of a file, or the repository's set `name` for `operator`. Raises InputError for anything
    else."""
    shapes = read_set(name, operator, ShapeSet, _CURE)
    for case in shapes.cases:
        if case.columns and sum(case.columns) != case.n:
            found = f"{case.name}: columns {list(case.columns)} are not n={case.n}"
            raise InputError(f"shapes {name}", found, "Give n as the sum of all columns")
    check_names(f"shapes {name}", [case.name for case in shapes.cases])
    return shapes


def check_names(asked: str, names: list[str]) -> None:
    """Raise InputError if two cases share a name."""
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise InputError(asked, f"two cases share the name {twice}", "Name every case, and each of its numbers, once")


def read_set(name: str, kind: str, form: type[_Set], cure: str) -> _Set:
    """Return the content of a file, or of the repository's set `name` of a kind. cure: of the error for a bad file.
    Raises InputError if it cannot be read, or says in `operator` that it is meant for another kind."""
    path = _find(name, kind)
    subject = f"shapes {name}" if path == Path(name) else f"shapes {name}, {path}"
    try:
        data = read_bytes(path, LARGEST_FILE_BYTES)
        if len(data) > LARGEST_FILE_BYTES:
            raise InputError(subject, "it is larger than 1 MiB", cure)
        shapes = msgspec.json.decode(data, type=form)
        check_keys(data)
        check_words(msgspec.to_builtins(shapes))
        meant = getattr(shapes, "operator", "")  # sets of blocks do not say
        if meant not in ("", kind):
            raise InputError(f"shapes {name}", f"{path} is meant for {meant}", f"Give a set for {kind}")
        return shapes
    except InputError:
        raise
    except OSError as error:
        raise InputError(subject, error.strerror or str(error), "Give a file that can be read") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(subject, str(error)[:300], cure) from error


def set_names(operator: str) -> tuple[str, ...]:
    """Return the sets of the repository for `operator`."""
    ending = f".{operator}.json"
    names = {path.name.removesuffix(ending) for folder in _folders() for path in folder.glob(f"*{ending}")}
    return tuple(sorted(names))


def usual_set(operator: str) -> str:
    """Return the set that is read if none is named."""
    known = set_names(operator)
    return next((name for name in USUAL if name in known), USUAL[0])


def _folders() -> tuple[Path, ...]:
    """Return the folders of sets: below the working directory, and beside the package if it runs from a clone."""
    return SETS, Path(__file__).parents[3] / SETS


def _find(name: str, operator: str) -> Path:
    """Return the path of a file or set. Raises InputError."""
    for path in (Path(name), *(folder / f"{name}.{operator}.json" for folder in _folders())):
        if path.is_file():
            return path
    known = ", ".join(set_names(operator))
    sets = f"one of the sets: {known}" if known else f"work in a clone, whose {SETS} holds sets"
    raise InputError(f"shapes {name}", "there is no such file or set", f"Give a file, or {sets}")
