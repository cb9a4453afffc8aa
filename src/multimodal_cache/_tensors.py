"""What kind of memory a tensor has, for those who must count it or read it byte by byte."""

from __future__ import annotations

import torch


def dense_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the storage that holds all the elements of a tensor.

    Returns:
        None where there is no such storage: for sparse, quantised, nested, meta and
        uninitialised tensors, and those of a subclass with ``__torch_dispatch__``, which may
        wrap other tensors.
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
            return tensor.untyped_storage()
        except NotImplementedError:  # a stand-in for a tensor, as inside torch.func.vmap
            pass
        except ValueError:  # torch.nn.UninitializedParameter
            pass
    return None


def bytes_reached(tensor: torch.Tensor) -> int:
    """Returns how many bytes of its storage a tensor needs, counted from the storage's start.

    To read a tensor whose storage has fewer, since it was shrunk or freed, would crash the
    process.
    """
    reach = tensor.numel()
    if reach and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((n - 1) * step for n, step in steps)
    return int(tensor.storage_offset() + reach) * tensor.element_size() if reach else 0


def describe(tensor: torch.Tensor) -> str:
    """Says of what kind a tensor is, for the message of an error."""
    return (
        f"{type(tensor).__name__} with layout={tensor.layout}, dtype={tensor.dtype}, "
        f"is_nested={tensor.is_nested}, device={tensor.device}"
    )
