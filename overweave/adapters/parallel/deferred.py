"""Tensors that know how their values are computed and wait until somebody reads them.

To autograd they are tensors like others: they have a history, a version and hooks, and a view of one is a view. What
reads one, in Python or below it, comes to `__torch_dispatch__` and gets the values, which are computed once.
"""

from __future__ import annotations

from typing import Any

import torch

from overweave.compat.torch_names import disabled_torch_function_impl, pytree


class Deferred(torch.Tensor):
    """A tensor without memory of its own. A subclass says in `computed` what its values are."""

    # Shape, dtype and device are read as fast as those of any tensor.
    __torch_function__ = disabled_torch_function_impl

    def computed(self, reader: str) -> torch.Tensor:
        """The values, contiguous, computed at the first call. reader: the function that asks for them."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The function of the values. A function that changes them in place returns the tensor that it was given."""
        given: dict[int, Deferred] = {}

        def values(tensor: Deferred) -> torch.Tensor:
            found = tensor.computed(str(func))
            given[id(found)] = tensor
            return found

        args, kwargs = pytree.tree_map_only(Deferred, values, (args, kwargs or {}))
        results = func(*args, **kwargs)
        if not func._schema.is_mutable:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda each: given.get(id(each), each), results)

    # What reads memory past torch's dispatcher.

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
        """The values as an array; refused as torch refuses it for a tensor with a history."""
        return self.view_as(self).numpy(force=force)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version
