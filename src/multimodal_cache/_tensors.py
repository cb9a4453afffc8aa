"""What kind of memory a tensor has, for those who must count it or read it byte by byte."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""By dtype, since a view may be of one and not be ``is_quantized``."""


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without its class, which may tell another shape, strides or dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


def torch_has_none(error: Exception) -> bool:
    """Whether torch raised it since it has no such operation for a dtype.

    It has a type for that only since 2.6; before, the message says it.
    """
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error)


def is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor that is neither sparse, nested nor without elements (meta)."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_meta
    )


def dense_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the storage that holds all the elements of a tensor.

    Raises:
        TypeError: There is no such storage. A subclass with ``__torch_dispatch__`` may wrap
            other tensors.
    """
    plain = tensor
    if type(tensor) is not torch.Tensor:
        if (
            type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            or is_lazy(tensor)  # torch.nn.UninitializedParameter
        ):
            raise _no_storage(tensor)
        plain = plain_tensor(tensor)
    if is_dense(plain) and plain.dtype not in QUANTISED:
        try:
            storage = plain.untyped_storage()
            storage.data_ptr()
        except RuntimeError:  # a stand-in, as inside torch.func.vmap and functionalize
            pass
        else:
            return storage
    raise _no_storage(plain)


def _no_storage(tensor: torch.Tensor) -> TypeError:
    return TypeError(
        "tensors must be dense and have memory of their own (not sparse, quantised, nested, meta, "
        f"uninitialised or of a subclass with __torch_dispatch__), got a {type(tensor).__name__} "
        f"with layout={tensor.layout}, dtype={tensor.dtype}, is_nested={tensor.is_nested}, "
        f"device={tensor.device}"
    )


def require_memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Refuses a tensor whose storage was shrunk or freed: to read it would crash the process.

    Raises:
        TypeError: The tensor reaches beyond the end of its storage.
    """
    if type(tensor) is not torch.Tensor:
        tensor = plain_tensor(tensor)
    reach = tensor.nbytes
    if reach and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = (1 + sum((n - 1) * step for n, step in steps)) * tensor.itemsize
    needed = tensor.storage_offset() * tensor.itemsize + reach
    if reach and needed > storage.nbytes():
        raise TypeError(
            f"tensors must have their memory, got one that needs {needed} bytes of a storage of "
            f"{storage.nbytes()}"
        )
