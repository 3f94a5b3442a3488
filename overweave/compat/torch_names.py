"""Torch's private names and those that move, from 2.10 to 2.15: the one place that knows them.

`from overweave.compat.torch_names import pytree` finds what the torch at hand has, and imports no more than that name
needs. Nothing else in the library spells what is private to torch, or asks for its version. A name is the last of
torch's, without the underscore in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from overweave.compat.versions import Home, Names, find, first_found

FROM_2_10 = "2.10 on"
Paths = Mapping[str, tuple[str, ...]]  # by module; an empty path is the module itself

# Where they stand in every version up to the newest that is known.
_PATHS: Paths = {
    "torch._C": (
        "DispatchKey",
        "DispatchKeySet",
        "_TorchDispatchModeKey",
        "_AutoDispatchBelowAutograd",
        "_ExcludeDispatchKeyGuard",
        "_any_requires_grad",
        "_are_functorch_transforms_active",
        "_disabled_torch_function_impl",
        "_dispatch_has_kernel_for_dispatch_key",
        "_dispatch_tls_is_dispatch_key_included",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_tf32",
        "_get_dispatch_mode",
        "_get_tracing_state",
        "_is_any_autocast_enabled",
        "_len_torch_dispatch_stack",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_tf32",
    ),
    "torch": (
        "Tensor._make_wrapper_subclass",
        "_scaled_mm",
        "_grouped_mm",
    ),
    "torch._ops": ("OpOverload",),
    "torch.cuda": ("_sleep",),
    "torch.ops": (
        "_c10d_functional",
        "aten._flash_attention_forward",
        "aten._flash_attention_backward",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_cudnn_attention_backward",
    ),
    "torch.distributed.tensor.experimental": ("context_parallel",),
    "torch.distributed.tensor.experimental._attention": ("set_rotate_method",),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor", "all_to_all_single_autograd"),
    "torch.distributed._symmetric_memory": (
        "",
        "_maybe_convert_scalar_types_to_dtypes",
    ),
    "torch.distributed.distributed_c10d": (
        "_get_process_group_store",
        "_resolve_process_group",
        "_world",
    ),
    "torch.utils._python_dispatch": (
        "_disable_current_modes",
        "_get_current_dispatch_mode_stack",
    ),
    "torch.utils._pytree": ("",),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch._guards": ("detect_fake_mode",),
    "torch._dynamo.backends.common": ("aot_autograd",),
    "torch._dynamo": ("reset",),
    "torch._functorch.aot_autograd": ("make_boxed_func",),
    "torch._functorch.partitioners": ("min_cut_rematerialization_partition",),
    "torch._inductor.compile_fx": ("compile_fx",),
    "torch._inductor.config": ("",),
    "torch._inductor.custom_graph_pass": (
        "CustomGraphPass",
        "get_hash_for_files",
    ),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.fx_passes.post_grad": (
        "post_grad_passes",
        "view_to_reshape",
    ),
    "torch._inductor.pattern_matcher": ("stable_topological_sort",),
    "torch._inductor.virtualized": ("V",),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
}
# Of torch built for CUDA; None in a CPU's torch.
_PATHS_OF_CUDA: Paths = {
    "torch._C": ("_cuda_getDevice", "_cuda_getCurrentRawStream"),
    "torch._C._dynamo.guards": ("_empty_strided_cuda",),
}
# What torch sets anew: what is found is asked for the value of now, without a function of Python.
_PATHS_OF_VALUES: Paths = {
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.profiler": ("_is_profiler_enabled",),
    "torch.distributed._symmetric_memory": ("_is_test_mode",),
}


def _named(paths: Paths) -> Iterator[tuple[str, tuple[Home, ...]]]:
    for module, each in paths.items():
        for path in each:
            yield f"{module}.{path}".rstrip(".").rpartition(".")[2].lstrip("_"), (Home(FROM_2_10, module, path),)


NAMES: Names = dict(_named(_PATHS)) | {
    # 2.13 renamed the flat collectives, and warns about the old names at every call.
    "all_gather_single": (
        Home("2.13 on", "torch.distributed", "all_gather_single"),
        Home("2.10 to 2.12", "torch.distributed", "all_gather_into_tensor"),
    ),
    "reduce_scatter_single": (
        Home("2.13 on", "torch.distributed", "reduce_scatter_single"),
        Home("2.10 to 2.12", "torch.distributed", "reduce_scatter_tensor"),
    ),
}
OF_CUDA, VALUES = dict(_named(_PATHS_OF_CUDA)), dict(_named(_PATHS_OF_VALUES))


def __getattr__(name: str) -> Any:
    """The name that this torch has. Raises MachineError where it has none of those that are known."""
    if name in OF_CUDA:
        found = find(OF_CUDA[name])
    elif name in VALUES:
        first_found(VALUES, name, "torch", torch.__version__)
        found = partial(getattr, find(home._replace(path="") for home in VALUES[name]), VALUES[name][0].path)
    else:
        found = first_found(NAMES, name, "torch", torch.__version__)
    globals()[name] = found
    return found
