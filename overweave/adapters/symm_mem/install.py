"""`install`: programs that call torch's fused symmetric-memory operators run overweave, without a change."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch

from overweave.adapters import report as reports
from overweave.adapters.report import Site, site
from overweave.adapters.symm_mem import gradients
from overweave.adapters.symm_mem.forms import FORMS, FusedOperator
from overweave.compat.torch_names import OpOverload, dispatch_has_kernel_for_dispatch_key, is_test_mode, pytree
from overweave.errors import InputError, MachineError
from overweave.process_settings import current
from overweave.runtime.library.library import wants_torch

# Whether overweave supports a call is decided once for each signature: shapes, strides, dtypes, options. Calls that it
# does not support run the kernel that was registered before.


class Layout(NamedTuple):
    """Sizes and strides of a tensor, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def meta_layouts(operator: OpOverload, arguments: Sequence[object], options: dict[str, object]) -> list[Layout]:
    """Return the layouts of all result tensors that the Meta kernel gives: compiled graphs assert them."""
    arguments, options = pytree.tree_map_only(torch.Tensor, _without_data, (tuple(arguments), options))
    leaves = pytree.tree_leaves(operator(*arguments, **options))
    return [Layout(tuple(each.shape), each.stride()) for each in leaves if isinstance(each, torch.Tensor)]


def with_strides(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor with the strides of a layout: the same, a view or a copy."""
    own = tensor.stride()
    if own == layout.stride:
        return tensor
    matters = [index for index, extent in enumerate(layout.shape) if extent != 1]
    if all(own[index] == layout.stride[index] for index in matters):
        return tensor.as_strided(layout.shape, layout.stride)
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


MAX_SIGNATURES = 4096
Original = Callable[..., Any]


class Decision(NamedTuple):
    """Whether overweave runs a call. obstacle: why not; empty if it does. layouts: of the results."""

    obstacle: str
    layouts: tuple[Layout, ...] = ()


@dataclass
class FusedKernelEntry:
    """overweave's kernel of a fused operator on one device type. original: `call_boxed` of the kernel that it replaces.

    is_strict: whether an unsupported call is an error. decisions: signature -> decision.
    """

    form: FusedOperator
    original: Original
    is_strict: bool
    decisions: dict[object, Decision] = field(default_factory=dict)

    def __call__(self, keys: object, *arguments: Any, **options: Any) -> Any:
        """Run the operator by overweave, or by the original if the call is unsupported. keys: of the dispatcher.

        Raises InputError for an unsupported call if is_strict, and what the call raises.
        """
        if wants_torch() or is_test_mode():
            return self.original(keys, *arguments, **options)
        counts, decision = site(self.form.name), self._decide(arguments, options)
        if decision.obstacle:
            return self._fall_through(counts, decision.obstacle, keys, *arguments, **options)
        with torch.no_grad(), torch.amp.autocast_mode.autocast(_device(arguments), enabled=False):
            results = self.form.compute(*arguments, **options)
        counts.by_overweave += 1
        return _with_meta_strides(self.form.operator, results, decision.layouts)

    def _decide(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Decision:
        """Return the decision for the signature of a call, from the cache if it was met before."""
        key = (*map(_signature_of, arguments), *map(_signature_of, options.items()))
        decision = self.decisions.get(key)
        if decision is None:
            if len(self.decisions) >= MAX_SIGNATURES:
                self.decisions.clear()
            obstacle = self.form.obstacle(*arguments, **options)
            layouts = () if obstacle else tuple(meta_layouts(self.form.operator, arguments, options))
            decision = self.decisions[key] = Decision(obstacle, layouts)
        return decision

    def _fall_through(self, counts: Site, reason: str, keys: object, *arguments: Any, **options: Any) -> Any:
        """Run the original kernel, and count the reason. Raises InputError if is_strict."""
        if self.is_strict:
            cure = "Change the call, or leave strict= out: torch's kernel answers it then"
            raise InputError(f"answer symm_mem::{self.form.name}", f"overweave does not take {reason}", cure)
        counts.by_torch[reason] += 1
        return self.original(keys, *arguments, **options)


def _signature_of(argument: Any) -> object:
    """Return the part of an argument that a decision depends on: of a tensor its metadata."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device.type
    if isinstance(argument, (list, tuple)):
        return tuple(map(_signature_of, argument))
    return argument


def _device(arguments: tuple[Any, ...]) -> str:
    return str(arguments[0].device.type)


def _with_meta_strides(operator: Any, results: list[torch.Tensor | None], layouts: tuple[Layout, ...]) -> Any:
    """Return the results with the strides of the Meta kernel's, in the structure that the operator returns."""
    remaining_layouts = iter(layouts)
    restrided = [None if each is None else with_strides(each, next(remaining_layouts)) for each in results]
    return restrided[0] if len(operator._schema.returns) == 1 else (restrided[0], restrided[1:])


DEVICES = ("CUDA", "CPU")
ENVIRONMENT = "OVERWEAVE_INSTALL"
_WITH_GRADIENT = {"fused_all_gather_matmul": gradients.gather, "fused_matmul_reduce_scatter": gradients.scatter}


class _Installation(NamedTuple):
    """An installation. library: owns the registrations. kernel_names: (operator, device) -> the dispatcher's text for
    overweave's kernel, by which a later override is noticed.

    graphs: whether Inductor's graphs are fused, too. by_user: by a call of `install`, not by OVERWEAVE_INSTALL.
    """

    library: torch.library.Library
    kernels: list[FusedKernelEntry]
    kernel_names: dict[tuple[str, str], str]
    graphs: bool
    by_user: bool


_INSTALLATIONS: list[_Installation] = []  # at most one


def install(strict: bool = False, graphs: bool = False) -> None:
    """Replace the kernels of torch's fused symmetric-memory operators, on GPUs and on CPUs, until `uninstall`.

    These are `torch.ops.symm_mem.fused_all_gather_matmul`, `fused_matmul_reduce_scatter`,
    `fused_all_gather_scaled_matmul` and `fused_scaled_matmul_reduce_scatter`: what Inductor's asynchronous tensor
    parallelism emits, and torchtitan's `dist_gemm`, with rows of two dimensions. Results have torch's values and
    strides, and the first two operators get gradients, which torch's drop.
    A call that overweave does not support (a last dimension, float64, a mean in float16, a fake group, torch's own test
    mode) runs torch's kernel; on a CPU torch has none, and its plain collectives run. `overweave.report()` counts both,
    with reasons.
    strict: such a call raises InputError, but for torch's test mode.
    graphs: also fuse Inductor's graphs: gathers that matmuls read, and sums over ranks of matmuls, including a batch of
    one, biases, several products and all-reduces. torch's own pass runs before, if it is on.

    The variable OVERWEAVE_INSTALL=1 (or =strict, =graphs, =strict,graphs) installs when torch is imported, in
    unmodified programs; a later call of `install` replaces that. Raises InputError where `install` was called before,
    MachineError for a torch without these operators. Source: torch.distributed._symmetric_memory.
    """
    _install(strict, graphs, by_user=True)


def uninstall() -> None:
    """Restore the kernels that `install` replaced.

    Raises InputError if overweave is not installed, or if another kernel was registered over one of overweave's.
    """
    if not _INSTALLATIONS:
        raise InputError("uninstall", "overweave is not installed", "Call install() first")
    replaced = _overridden(_INSTALLATIONS[0])
    if replaced:
        name, where = next(iter(replaced.items()))
        raise InputError("uninstall", f"{name} is answered by a kernel {where}", "Take that registration back first")
    _remove()


def report() -> reports.Report:
    """Return how many calls of torch's operators overweave ran in this process, how many torch did, and why, and what
    is set by `ow.settings`."""
    replaced = _overridden(_INSTALLATIONS[0]) if _INSTALLATIONS else {}
    chosen = current()
    return reports.Report(bool(_INSTALLATIONS), dict(reports.SITES), replaced, str(chosen) if chosen.words else "")


def install_by_environment(value: str) -> None:
    """Install as the value of OVERWEAVE_INSTALL says: `1`, `strict`, `graphs` or `strict,graphs`. Raises InputError."""
    words = value.split(",")
    if not {*words} <= {"1", "strict", "graphs"}:
        raise InputError(ENVIRONMENT, f"got {value[:40]!r}", "Set it to 1, strict, graphs, strict,graphs or 0")
    if not _INSTALLATIONS:
        _install("strict" in words, "graphs" in words, by_user=False)


def _install(strict: bool, graphs: bool, by_user: bool) -> None:
    """Register kernels and gradients of all fused operators, and the Inductor pass if graphs."""
    if _INSTALLATIONS and (_INSTALLATIONS[0].by_user or not by_user):
        raise InputError("install", "overweave is installed already", "Call uninstall() before, or leave this call out")
    if _INSTALLATIONS:
        _remove()
    library, kernels = torch.library.Library("symm_mem", "IMPL"), []
    for form in FORMS:
        for device in DEVICES:
            kernel = FusedKernelEntry(form, _current_kernel(form, device), strict)
            kernels.append(kernel)
            _register_kernel(library, form.name, kernel, device)
        _register_kernel(
            library, form.name, _WITH_GRADIENT.get(form.name) or gradients.without_gradient(form.name), "Autograd"
        )
    kernel_names = {
        (form.name, device): str(torch.library.get_kernel(form.operator, device))
        for form in FORMS
        for device in DEVICES
    }
    if graphs:
        _fusion().register()
    _INSTALLATIONS.append(_Installation(library, kernels, kernel_names, graphs, by_user))


def _remove() -> None:
    """Undo the installation."""
    if _INSTALLATIONS[0].graphs:
        _fusion().unregister()
    _INSTALLATIONS.pop().library._destroy()


def _fusion() -> Any:
    """Import the Inductor pass, for graphs=True only: torch's compiler takes seconds to import, and sets an environment
    variable for its cache.
    """
    return import_module("overweave.adapters.inductor.fusion")


def _current_kernel(form: FusedOperator, device: str) -> Original:
    """Return the registered kernel of an operator. Without one for the device the Meta kernel, which runs plain torch.

    Raises MachineError for a torch without the operator.
    """
    if not hasattr(torch.ops.symm_mem, form.name):
        found, cure = (
            f"torch {torch.__version__} has no symm_mem::{form.name}",
            "Use torch 2.10 or newer, with torch.distributed",
        )
        raise MachineError("install", found, cure)
    name = form.operator.name()
    key = device if dispatch_has_kernel_for_dispatch_key(name, device) else "Meta"
    kernel: Original = torch.library.get_kernel(name, key).call_boxed
    return kernel


def _register_kernel(library: torch.library.Library, name: str, kernel: Any, key: str) -> None:
    """Override a kernel of an operator, without torch's warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(name, kernel, key, with_keyset=key in DEVICES, allow_override=True)


def _overridden(installed: _Installation) -> dict[str, str]:
    """Return operator and device -> source line of the kernel that has overridden overweave's since `install`."""
    overridden = {}
    for (name, device), name_at_install in installed.kernel_names.items():
        current = _kernel_name(name, device)
        if current != name_at_install:
            overridden[f"symm_mem::{name} on {device}"] = current.partition("debug='")[2].rstrip("')") or current
    return overridden


def _kernel_name(name: str, device: str) -> str:
    """Return the dispatcher's description of an operator's kernel, with the source line that registered it."""
    return str(torch.library.get_kernel(f"symm_mem::{name}", device))
