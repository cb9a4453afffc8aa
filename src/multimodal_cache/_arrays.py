"""The serialised forms of buffers, arrays and tensors: bytes, or a dtype, a shape and elements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from multimodal_cache._hashing import (
    INLINE_BYTES,
    PARALLEL_BYTES,
    Bytes,
    content,
    content_of_parts,
    count,
    type_name,
)
from multimodal_cache._tensors import (
    dense_storage,
    plain_tensor,
    require_memory,
    torch_has_none,
)

NUMPY_NAMES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""The dtypes that NumPy and torch share, by the name that both give them."""

PIECE_BYTES = PARALLEL_BYTES
"""What isn't contiguous is copied in pieces of about that size."""

# Buffers


def serialise_view(value: memoryview, _: object = None) -> bytes:
    if value.suboffsets:  # NumPy would take the pointers for elements
        raise TypeError("memoryviews must not have suboffsets: give a copy")
    # ctypes gives the format of a byte to packed structures too.
    if value.ndim != 1 or value.itemsize != 1 or value.format.lstrip("@=<>!") != "B":
        try:
            array = np.asarray(value)
        except (BufferError, ValueError, RuntimeError, RuntimeWarning):
            raise TypeError(
                f"memoryviews must have a format that NumPy knows, got {value.format!r}"
            ) from None
        return serialise_array(array)
    if not value.c_contiguous:
        return b"b" + content_of_parts(_parts_of_view(value), parallel=value.nbytes > PIECE_BYTES)
    if value.format != "B":  # "<B", as ctypes has it, is the same but not to BLAKE3
        value = np.frombuffer(value, np.uint8).data
    return b"b" + content(value)


def _parts_of_view(view: memoryview) -> Iterator[Bytes]:
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES].tobytes()


# Arrays and tensors

_FIXED_DTYPES = {np.dtype(char).num: char for char in "?bBhHiIlLqQefdFD"}
_FLEXIBLE_DTYPES = {np.dtype(char).num for char in "SUmM"}
"""By NumPy's number: those of other packages have other numbers, whatever their kind is."""

_NUMPY_DIMENSIONS = 32
"""So many have the arrays of every NumPy."""


def serialise_numpy_scalar(value: np.generic, _: object = None) -> bytes:
    return serialise_array(np.asarray(value))


def serialise_array(array: np.ndarray, _: object = None) -> bytes:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"arrays must not be masked, got {type_name(array)}: fill it or give its parts"
            )
        array = np.asarray(array)  # a subclass may have its own shape
    spelling = _FIXED_DTYPES.get(array.dtype.num) or _flexible_dtype(array)
    header, little_endian = _numpy_header(spelling, array.shape)
    return header + _elements(array, little_endian)


def _flexible_dtype(array: np.ndarray[Any, Any]) -> str:
    """Returns the spelling of a dtype that has a size or a unit."""
    if array.dtype.num not in _FLEXIBLE_DTYPES:
        raise TypeError(
            "arrays must have a boolean, integer, float, complex, fixed-width string or time dtype "
            "(no object, structured, longdouble or ml_dtypes one), got "
            f"{type_name(array)} with dtype {array.dtype}"
        )
    return str(array.dtype.str)


def serialise_tensor(tensor: torch.Tensor, _: object = None) -> bytes:
    # What outside_graphs does, in half the time: a small tensor takes a few microseconds in all.
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_serialise_tensor)(tensor)  # type: ignore[no-untyped-call,no-any-return]
    return _serialise_tensor(tensor)


def _serialise_tensor(tensor: torch.Tensor) -> bytes:
    storage = dense_storage(tensor)
    if type(tensor) is not torch.Tensor:
        tensor = plain_tensor(tensor)
    require_memory(tensor, storage)
    header, little_endian, view = _torch_header(tensor.dtype, tensor.shape)
    if view or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        tensor = _viewed(tensor, view)
    if not tensor.is_cpu:  # pragma: no cover  # needs a GPU
        tensor = tensor.contiguous().cpu()  # contiguous first, so that it is copied once
    if tensor.ndim > _NUMPY_DIMENSIONS:
        tensor = tensor.reshape(-1)
    return header + _elements(tensor.numpy(), little_endian)


def _viewed(
    tensor: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Returns the elements as NumPy can have them."""
    try:
        resolved = tensor.detach().resolve_conj().resolve_neg()
        return view(resolved) if view else resolved
    except (AssertionError, RuntimeError) as error:
        # That is FakeTensorMode, and dtypes that torch can't negate.
        if isinstance(error, RuntimeError) and not torch_has_none(error):
            raise
        raise TypeError(
            f"tensors must have elements that can be read, got dtype={tensor.dtype}, "
            f"requires_grad={tensor.requires_grad}, is_neg={tensor.is_neg()}: {error}"
        ) from None


def _elements(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> bytes:
    as_it_is = array.dtype == little_endian and array.dtype.kind != "b"
    if as_it_is and array.nbytes <= INLINE_BYTES:
        return content(array.tobytes())
    if array.nbytes <= PIECE_BYTES or (as_it_is and array.flags.c_contiguous):
        return content(_in_memory(array, little_endian))
    parts = (_in_memory(piece, little_endian) for piece in _pieces(array))
    return content_of_parts(parts, parallel=True)


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the elements in C order, in arrays of few bytes."""
    if array.nbytes <= PIECE_BYTES or not array.ndim:
        yield array
    elif len(array) == 1:
        yield from _pieces(array[0])
    else:
        rows = max(1, PIECE_BYTES * len(array) // array.nbytes)
        for start in range(0, len(array), rows):
            yield from _pieces(array[start : start + rows])


def _in_memory(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> Bytes:
    elements = np.ascontiguousarray(array, little_endian)
    if little_endian.kind == "b":
        numbers = elements.view(np.uint8)
        elements = numbers != 0 if numbers.max(initial=0) > 1 else elements
    if elements.nbytes <= INLINE_BYTES:
        return elements.tobytes()  # an element of no bytes has no view
    return elements.reshape(-1).view(np.uint8).data


# What doesn't depend on the elements is remembered: it takes longer than all the rest.


@functools.lru_cache(maxsize=1024)
def _numpy_header(spelling: str, shape: tuple[int, ...]) -> tuple[bytes, np.dtype[Any]]:
    """Returns what stands before the elements, and their dtype in little-endian order.

    By the spelling of a dtype, for NumPy says of some that they are equal which aren't the same.
    """
    dtype = np.dtype(spelling)
    return _header(dtype.name, shape), dtype.newbyteorder("<")


@functools.lru_cache(maxsize=1024)
def _torch_header(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[bytes, np.dtype[Any], Callable[[torch.Tensor], torch.Tensor] | None]:
    """Returns what stands before the elements, their dtype in NumPy, and how to view them so.

    That is None where NumPy has the dtype too.
    """
    name = str(dtype).removeprefix("torch.")
    numpy_name = name
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    if dtype is torch.complex32:
        numpy_name, view = "float16", torch.view_as_real
    elif name not in NUMPY_NAMES:
        numpy_name = f"int{8 * dtype.itemsize}"
        view = operator.methodcaller("view", getattr(torch, numpy_name))
    return _header(name, shape), np.dtype(numpy_name).newbyteorder("<"), view


def _header(dtype_name: str, shape: tuple[int, ...]) -> bytes:
    sizes = [count(size) for size in shape]
    return b"".join((b"a", content(dtype_name.encode()), count(len(sizes)), *sizes))
