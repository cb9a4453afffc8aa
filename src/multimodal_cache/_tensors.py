"""What kind of memory a tensor has, for those who must count it or read it byte by byte."""

from __future__ import annotations

import torch


def dense_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the storage that holds all the elements of a tensor.

    Raises:
        TypeError: There is no such storage. A subclass with ``__torch_dispatch__`` may wrap
            other tensors.
    """
    if (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
        and (
            type(tensor) is torch.Tensor
            or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
    ):
        try:
            storage = tensor.untyped_storage()
            storage.data_ptr()
        except RuntimeError:  # a stand-in, as inside torch.func.vmap and functionalize
            pass
        except ValueError:  # torch.nn.UninitializedParameter
            pass
        else:
            return storage
    raise TypeError(
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
