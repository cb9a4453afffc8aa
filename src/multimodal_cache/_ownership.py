"""What memory a result keeps alive, and how to make it own exactly what it needs.

A tensor is a window on a storage, and the storage stays whole as long as any window on it
does: one cached row keeps its whole batch in memory. So a result is stored in two steps,
between which the cache makes room: ``plan_ownership`` says how many bytes the stored result
will keep alive and which of its tensors must be replaced for that; ``replace_tensors`` does it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch

from multimodal_cache.base import EmbeddingResult, EmbeddingTypeError

T = TypeVar("T")
Replacements = dict[int, Callable[[], torch.Tensor]]  # by the id of the tensor replaced


def plan_ownership(result: Any, *, copy_all: bool) -> tuple[int, Replacements]:
    """Plans how to store a result; changes nothing.

    A tensor stays as it is when it covers all of a storage that torch allocated; otherwise
    it is copied. One that stays but keeps more than its storage alive (a graph, a gradient,
    Python attributes) is detached from that.

    Args:
        result: An ``EmbeddingResult``, or another object that holds a tensor in its own
            attribute ``embedding``. The tensors in all of its attributes count, also those
            inside lists, tuples, dicts and dataclasses there.
        copy_all: Copy every tensor.

    Returns:
        The bytes of storage that the stored result will keep alive, each storage once; and
        what makes the tensors to be stored in place of those that can't be.

    Raises:
        EmbeddingTypeError: ``result`` isn't such an object, or has a tensor whose memory
            can't be counted.
    """
    nbytes = 0
    replacements: Replacements = {}
    tensors = _tensors(result)
    kept: set[tuple[torch.device, int]] | None = set() if len(tensors) > 1 else None
    for tensor in tensors:
        storage = _countable_storage(tensor)
        if copy_all or not _is_all_of_an_allocation(tensor, storage):
            _require_readable(tensor, storage)
            replacements[id(tensor)] = functools.partial(_copy, tensor)
        else:
            if _keeps_more_than_storage(tensor):
                replacements[id(tensor)] = tensor.detach
            if kept is not None:
                memory = (storage.device, storage.data_ptr())
                if memory in kept:
                    continue
                kept.add(memory)
        nbytes += tensor.nbytes
    return nbytes, replacements


def replace_tensors(result: T, replacements: Replacements) -> T:
    """Returns a shallow copy of a result, with its tensors replaced and all else the same.

    Raises:
        RuntimeError: Torch could not copy a tensor, for want of memory perhaps.
    """
    new = {key: replacement() for key, replacement in replacements.items()}
    return _map_attributes(lambda tensor: new.get(id(tensor), tensor), result)


def _get_tensor_size(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements: element size times number of elements."""
    return tensor.element_size() * tensor.numel()


def _countable_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    if (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
        # A subclass that defines it may wrap other tensors.
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    ):
        try:
            return tensor.untyped_storage()
        except NotImplementedError:  # a stand-in for a tensor, as inside torch.func.vmap
            pass
    raise EmbeddingTypeError(
        "the tensors of an embedding must be dense and have memory of their own (not sparse, "
        "quantised, nested, meta or of a subclass with __torch_dispatch__), got a "
        f"{type(tensor).__name__} with layout={tensor.layout}, dtype={tensor.dtype}, "
        f"is_nested={tensor.is_nested}, device={tensor.device}"
    )


def _is_all_of_an_allocation(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor fills its storage, and the storage is all of an allocation of torch.

    A storage that isn't resizable is a window on memory that came from elsewhere (NumPy,
    DLPack, a mapped file): how much of it stays alive with the window is unknown.
    """
    return (
        storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and not (storage.is_shared() and tensor.device.type == "cpu")  # CUDA's always is
    )


def _keeps_more_than_storage(tensor: torch.Tensor) -> bool:
    """Whether a graph, a gradient or Python attributes hang on the tensor."""
    if tensor.requires_grad or tensor.grad is not None or tensor.__dict__:
        return True
    base = tensor._base  # a view made under no_grad has none of them, but this may
    return base is not None and _keeps_more_than_storage(base)


def _require_readable(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """Refuses a tensor whose storage was shrunk or freed: to copy it would crash the process."""
    if tensor.numel() == 0:
        return
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + reach + 1) * tensor.element_size()
    if end > storage.nbytes():
        raise EmbeddingTypeError(
            f"the tensors of an embedding must have their memory, got one that needs {end} "
            f"bytes of a storage of {storage.nbytes()}"
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    source = tensor.detach()
    try:
        return source.clone(memory_format=torch.contiguous_format)
    except NotImplementedError:  # the sub-byte dtypes can't be copied, but their bytes can
        as_bytes = source.view(torch.uint8)
        return as_bytes.clone(memory_format=torch.contiguous_format).view(source.dtype)


def _tensors(result: Any) -> Collection[torch.Tensor]:
    """Returns the distinct tensors of a result."""
    attributes = result.__dict__ if type(result) is EmbeddingResult else _attributes(result)
    embedding = attributes.get("embedding")
    if not isinstance(embedding, torch.Tensor) or isinstance(result, (list, tuple, dict)):
        raise EmbeddingTypeError(
            "embedding must be an EmbeddingResult, or another object that holds a tensor in "
            f"its own attribute 'embedding', got {_describe(result)}"
        )
    if len(attributes) == 1:
        return (embedding,)
    found: dict[int, torch.Tensor] = {}
    try:
        _map_attributes(lambda tensor: found.setdefault(id(tensor), tensor), result)
    except RecursionError:
        raise EmbeddingTypeError(
            f"the fields of an embedding must not contain themselves, got {type(result).__name__}"
        ) from None
    return found.values()


def _describe(result: Any) -> str:
    name = type(result).__name__
    if not hasattr(result, "embedding"):
        return name
    return f"{name} with an embedding of type {type(result.embedding).__name__}"


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Puts ``function(tensor)`` for each tensor in a value; returns the value if none changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    rebuild: Callable[[Any, list[Any]], Any]
    if isinstance(value, dict):
        old, rebuild = list(value.values()), _rebuild_dict
    elif isinstance(value, (list, tuple)):
        old, rebuild = list(value), _rebuild_sequence
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_attributes(function, value)
    else:
        return value
    new = [_map_tensors(function, item) for item in old]
    return value if _same_objects(old, new) else rebuild(value, new)


def _map_attributes(function: Callable[[torch.Tensor], torch.Tensor], record: T) -> T:
    old = _attributes(record)
    new = {name: _map_tensors(function, value) for name, value in old.items()}
    if _same_objects(old.values(), new.values()):
        return record
    twin = copy.copy(record)
    for name, value in new.items():
        if value is not old[name]:
            object.__setattr__(twin, name, value)  # a frozen dataclass has no other way
    return twin


def _same_objects(old: Iterable[object], new: Iterable[object]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _rebuild_dict(value: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    twin = copy.copy(value)
    twin.update(zip(value, items, strict=True))
    return twin


def _rebuild_sequence(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = items
        return twin
    make = getattr(value, "_make", type(value))  # a named tuple's constructor takes its fields
    return make(items)


def _attributes(record: object) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(record, "__dict__", {})
    slots = _slots(type(record))  # type: ignore[arg-type]  # a class is hashable
    if not slots:
        return attributes
    return attributes | {name: getattr(record, name) for name in slots if hasattr(record, name)}


@functools.lru_cache(maxsize=64)
def _slots(cls: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and name != "__dict__"
    )
