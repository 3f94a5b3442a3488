"""Lazy tensors: their values are computed when they are first read.

To autograd they are ordinary tensors, with a grad_fn, a version and hooks, and a view of one is a view. An operation
that reads one, in Python or below, comes to `__torch_dispatch__` and gets the values.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.compat.torch_names import disabled_torch_function_impl, pytree


class Deferred(torch.Tensor):
    """A tensor without memory of its own, whose subclass implements `computed`."""

    # Shape, dtype and device are read as fast as those of any tensor.
    __torch_function__ = disabled_torch_function_impl

    def computed(self, reader: str) -> torch.Tensor:
        """The values, contiguous, computed at the first call. reader: the function that asks for them."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run a function on the values. An in-place function returns the lazy tensor that it was called with."""
        lazy_of_values: dict[int, Deferred] = {}

        def values(tensor: Deferred) -> torch.Tensor:
            computed = tensor.computed(str(func))
            lazy_of_values[id(computed)] = tensor
            return computed

        args, kwargs = pytree.tree_map_only(Deferred, values, (args, kwargs or {}))
        results = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: lazy_of_values.get(id(each), each), results)

    # Methods that read memory without torch's dispatcher.

    def data_ptr(self) -> int:
        """Where the values lie."""
        return self.computed("data_ptr").data_ptr()

    def untyped_storage(self) -> Any:
        """The memory of the values."""
        return self.computed("untyped_storage").untyped_storage()

    def tolist(self) -> Any:
        """The values as a list."""
        return self.computed("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array; raises for a tensor that requires grad, as torch does."""
        return self.view_as(self).numpy(force=force)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version
