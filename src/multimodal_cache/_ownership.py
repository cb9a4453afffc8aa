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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch

from multimodal_cache._modes import outside_graphs
from multimodal_cache._tensors import (
    QUANTISED,
    dense_storage,
    plain_tensor,
    require_memory,
    torch_has_none,
)
from multimodal_cache.base import EmbeddingResult, EmbeddingTypeError

T = TypeVar("T")
_Tensor = torch.Tensor  # quicker than to look it up in torch's large namespace
Replacements = dict[int, Callable[[], torch.Tensor]]  # by the id of the tensor replaced
# Says of a tensor that must be copied how many bytes its copy takes, and what makes it.
Copier = Callable[[torch.Tensor], tuple[int, Callable[[], torch.Tensor]]]

# Such as XPU, whose storages don't say that they are shared.
_HAS_OTHER_DEVICES = torch.get_device_module() not in (torch.cpu, torch.cuda)

_NOT_RECORDS = (list, tuple, dict, type)
"""Their instances hold more than their attributes, which would go uncounted."""


def copy_beside(tensor: torch.Tensor) -> tuple[int, Callable[[], torch.Tensor]]:
    """Plans a copy on the device of the tensor itself."""
    return tensor.nbytes, functools.partial(copy_out, tensor)


def plan_ownership(
    result: Any, copy_all: bool, copier: Copier = copy_beside
) -> tuple[int, Replacements | None]:
    """Plans how to store a result; changes nothing.

    A tensor stays as it is when it covers all of a storage that torch allocated; otherwise
    it is copied. One that stays but keeps more than its storage alive (a graph, a gradient,
    Python attributes) is detached from that.

    Args:
        result: An ``EmbeddingResult``, or another object that holds a tensor in its own
            attribute ``embedding``. The tensors in all of its attributes count, also those
            inside lists, tuples, dicts and dataclasses there.
        copy_all: Copy every tensor.
        copier: Plans the copies, which may be elsewhere.

    Returns:
        The bytes of storage that the stored result will keep alive, each storage once; and
        what makes the tensors to be stored in place of those that can't be. None in place of that
        is for a result on the CPU that can be stored as it is.

    Raises:
        EmbeddingTypeError: ``result`` isn't such an object, or has a tensor whose memory
            can't be counted, or can't be rebuilt with other tensors where it must be.
    """
    # First the usual result, one tensor that can be stored as it is. Most of the time of a `set`
    # goes into questions to torch, so here are as few as tell; what they leave takes more care.
    cls = type(result)
    if not copy_all and (cls is EmbeddingResult or _holds_all_in_dict(cls)):  # type: ignore[arg-type]
        try:
            attributes = result.__dict__
            tensor = attributes["embedding"]
            if type(tensor) is _Tensor and len(attributes) == 1:
                storage = tensor.untyped_storage()
                nbytes = len(storage)  # quicker than to ask for it by name
                if (
                    nbytes == tensor.nbytes
                    and storage.data_ptr()  # neither freed nor without memory (meta, a stand-in)
                    and storage.resizable()
                    and not ((shared := storage.is_shared()) and tensor.is_cpu)
                    and tensor.dtype not in QUANTISED
                    and not tensor.is_nested
                    and not tensor.requires_grad
                    and tensor.grad is None
                    and not tensor.__dict__
                    and tensor._base is None
                ):
                    # What is on CUDA is always shared: on the CPU this is no question more.
                    elsewhere = shared or (_HAS_OTHER_DEVICES and not tensor.is_cpu)
                    return nbytes, {} if elsewhere else None
        except (AttributeError, KeyError, RuntimeError):  # no storage (sparse, torch.func), maybe
            pass
    return _plan_with_care(result, copy_all, copier)


@outside_graphs
def _plan_with_care(
    result: Any, copy_all: bool, copier: Copier = copy_beside
) -> tuple[int, Replacements | None]:
    """Plans for results of all kinds."""
    total = 0
    replacements: Replacements = {}
    kept = set()
    tensors = tensors_in(result)
    for tensor in tensors:
        try:
            storage = dense_storage(tensor)
            nbytes = tensor.nbytes
            copied = copy_all or not _is_whole_allocation(storage, nbytes)
            if copied:
                require_memory(tensor, storage)
        except TypeError as error:
            raise EmbeddingTypeError(f"embedding can't be cached: {error}") from None
        if copied:
            _require_allowed(copy_out, tensor)
            nbytes, replacements[id(tensor)] = copier(tensor)
        else:
            if _keeps_more_than_storage(tensor):
                _require_allowed(_detach, tensor)
                replacements[id(tensor)] = functools.partial(_detach, tensor)
            if len(tensors) > 1:  # one has nothing to share with; sets are slow
                memory = (storage.device, storage.data_ptr())
                if memory in kept:
                    continue
                kept.add(memory)
        total += nbytes
    if replacements and not _has_only_its_embedding(result):
        _rehearse(result, replacements)
    if not replacements and all(tensor.is_cpu for tensor in tensors):
        return total, None
    return total, replacements


def replace_tensors(result: Any, replacements: Replacements) -> Any:
    """Returns a shallow copy of a result, with its tensors replaced and all else the same.

    Where nothing is replaced, it is the result itself.

    Raises:
        RuntimeError: Torch could not copy a tensor, for want of memory perhaps.
    """
    if not replacements:
        return result
    new = {key: replacement() for key, replacement in replacements.items()}
    if _has_only_its_embedding(result):
        twin = object.__new__(type(result))
        (twin.embedding,) = new.values()
        return twin
    return _rebuild(result, new)


# One tensor


def _is_whole_allocation(storage: torch.UntypedStorage, nbytes: int) -> bool:
    """Whether a tensor of so many bytes fills its storage, and that is an allocation of torch.

    A storage that isn't resizable is a window on memory that came from elsewhere (NumPy,
    DLPack, a mapped file): how much of it stays alive with the window is unknown.
    """
    return (
        storage.nbytes() == nbytes
        and storage.resizable()
        and not (storage.is_shared() and storage.device.type == "cpu")  # CUDA's always is
    )


def _keeps_more_than_storage(tensor: torch.Tensor) -> bool:
    """Whether a graph, a gradient or Python attributes hang on the tensor.

    A view made under ``no_grad`` has none of them itself, but the tensor that it was made
    from may, and that may have been given another storage since.
    """
    if tensor.requires_grad or tensor.grad is not None or tensor.__dict__:
        return True
    if type(tensor) is not torch.Tensor and _attributes(tensor):
        return True
    base = tensor._base
    return base is not None and (
        _keeps_more_than_storage(base)
        or base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    )


def copy_out(
    tensor: torch.Tensor, clone: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Copies a tensor into memory of its own, contiguous, without a graph.

    Args:
        tensor: Any that is dense.
        clone: Makes the copy; by default one on the same device.
    """
    source = tensor.detach() if tensor.requires_grad else tensor
    clone = clone or _clone
    try:
        return clone(source)
    except RuntimeError as error:  # the sub-byte dtypes can't be copied, but their bytes can
        if not torch_has_none(error):
            raise
        return clone(source.view(torch.uint8)).view(source.dtype)


def _clone(source: torch.Tensor) -> torch.Tensor:
    if source.is_contiguous():
        return source.clone()  # quicker than to ask for what it has
    return source.clone(memory_format=torch.contiguous_format)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _require_allowed(replace: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    """Refuses a tensor whose class doesn't let it be replaced, before anything is evicted."""
    cls = type(tensor)
    if cls is not torch.Tensor and cls is not torch.nn.Parameter:
        try:
            made = replace(_small_one_like(tensor))
        except Exception as error:
            raise EmbeddingTypeError(
                f"a {cls.__name__} that must be copied or detached must allow it, but to do so "
                f"failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, torch.Tensor):
            raise EmbeddingTypeError(
                f"a {cls.__name__} that must be copied or detached must become a tensor, but "
                f"became {type(made).__name__}"
            )


def _small_one_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same class with the same attributes, but of few elements.

    It is contiguous where the tensor is, since copies are asked for in other words then.
    """
    plain = plain_tensor(tensor)
    size = [min(n, 2) for n in plain.shape]
    small = plain.new_empty(size) if plain.is_contiguous() else plain.new_empty([*size, 2])[..., 0]
    small = small.requires_grad_(plain.requires_grad).as_subclass(type(tensor))
    vars(small).update(vars(tensor))
    for name in _slots(type(tensor)):
        if hasattr(tensor, name):
            object.__setattr__(small, name, getattr(tensor, name))
    return small


# All the tensors of a result


def tensors_in(result: Any) -> Collection[torch.Tensor]:
    """Returns the distinct tensors of a result."""
    attributes = {}
    if not isinstance(result, _NOT_RECORDS):
        attributes = _attributes(result)
    embedding = attributes.get("embedding")
    if not isinstance(embedding, torch.Tensor):
        raise EmbeddingTypeError(
            "embedding must be an EmbeddingResult, or another object with a tensor in its "
            f"own attribute 'embedding' (no property, no container), got {_describe(result)}"
        )
    if len(attributes) == 1:
        return (embedding,)
    parts = (part for _, parts in _walk(result) for part in parts)
    return {id(part): part for part in parts if isinstance(part, torch.Tensor)}.values()


def _has_only_its_embedding(result: Any) -> bool:
    """Whether a result holds nothing else and is copied without care, as the usual ones are."""
    cls = type(result)
    return _copies_plainly(cls) and len(result.__dict__) == 1  # type: ignore[arg-type]


def _describe(result: Any) -> str:
    name = type(result).__name__
    if not isinstance(result, EmbeddingResult):
        return name
    return f"{name} with {type(vars(result).get('embedding')).__name__} there"


def _walk(result: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yields each container in a result with what it holds, the result itself first."""
    seen = {id(result): result}  # kept, so that no id is used again meanwhile
    ahead = [(result, list(_attributes(result).values()))]
    while ahead:
        container, parts = ahead.pop()
        yield container, parts
        for part in parts:
            if id(part) not in seen and not isinstance(part, torch.Tensor):
                seen[id(part)] = part
                if inner := _parts(part):
                    ahead.append((part, inner))


def _parts(value: Any) -> list[Any]:
    """Returns what a container holds; nothing for what isn't one of those looked into."""
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif _is_dataclass_instance(value):
        parts = []
    else:
        return []
    if type(value) not in (dict, list, tuple):
        parts += _attributes(value).values()
    return parts


def _rehearse(result: Any, replacements: Replacements) -> None:
    """Refuses a result that can't be rebuilt, before anything is evicted for it."""
    stand_in = torch.empty(0)
    try:
        twin = _rebuild(result, dict.fromkeys(replacements, stand_in))
    except Exception as error:
        raise EmbeddingTypeError(
            f"a {type(result).__name__} with a tensor that must be copied or detached must be "
            f"copyable, but to copy it failed: {type(error).__name__}: {error}"
        ) from error
    held = {id(part) for _, parts in _walk(twin) for part in parts}
    if type(twin) is not type(result) or held & {id(result), *replacements}:
        raise EmbeddingTypeError(
            f"a {type(result).__name__} with a tensor that must be copied or detached must be "
            "copyable, but its copy is of another type or still holds that tensor"
        )


def _rebuild(result: Any, new: dict[int, torch.Tensor]) -> Any:
    """Copies a result with new tensors in it, as the graph that it is, without recursion.

    What holds none of the tensors replaced, at any depth, is in the copy itself.

    Args:
        result: A result; it may contain itself.
        new: The new tensors, by the ids of those that they replace.
    """
    holders = _holders(result, new)
    twins: dict[int, Any] = dict(new)  # by the ids of what they stand for
    for holder in holders.values():
        if not isinstance(holder, tuple):
            twins[id(holder)] = _shallow_copy(holder)
    # A tuple is made of its items. No tuple is among its own but by way of what can be changed.
    ahead = [holder for holder in holders.values() if isinstance(holder, tuple)]
    while ahead:
        holder = ahead.pop()
        if id(holder) in twins:
            continue
        if missing := [item for item in holder if id(item) in holders and id(item) not in twins]:
            ahead += [holder, *missing]
        else:
            twins[id(holder)] = _remade_tuple(holder, twins)
    for holder in holders.values():
        if not isinstance(holder, tuple):
            _refill(twins[id(holder)], holder, twins)
    return twins[id(result)]


def _holders(result: Any, replaced: Iterable[int]) -> dict[int, Any]:
    """Returns the containers from which a tensor with one of these ids is reached, by id."""
    held_by = defaultdict(list)
    for container, parts in _walk(result):
        for part in parts:
            held_by[id(part)].append(container)
    holders = {}
    ahead = list(replaced)
    while ahead:
        for holder in held_by.pop(ahead.pop(), ()):
            holders[id(holder)] = holder
            ahead.append(id(holder))
    return holders


def _remade_tuple(value: Any, twins: dict[int, Any]) -> Any:
    make = getattr(value, "_make", type(value))  # a named tuple's constructor takes its fields
    twin = make([twins.get(id(item), item) for item in value])
    if getattr(value, "__dict__", None):
        vars(twin).update(vars(value))
    return twin


def _refill(twin: Any, value: Any, twins: dict[int, Any]) -> None:
    """Puts twins into a shallow copy of a list, dict or record."""
    if isinstance(value, list):
        twin[:] = [twins.get(id(item), item) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            if id(item) in twins:
                twin[key] = twins[id(item)]
    else:
        for name, part in _attributes(value).items():
            if id(part) in twins:
                try:
                    setattr(twin, name, twins[id(part)])
                except (AttributeError, TypeError, ValueError):  # as frozen classes raise
                    object.__setattr__(twin, name, twins[id(part)])


def _shallow_copy(value: T) -> T:
    twin = copy.copy(value)
    if twin is value:
        raise TypeError(f"copy.copy returns a {type(value).__name__} itself")
    return twin


def _is_dataclass_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _attributes(record: object) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(record, "__dict__", {})
    slots = _slots(type(record))  # type: ignore[arg-type]  # a class is hashable
    if not slots:
        return attributes
    return attributes | {name: getattr(record, name) for name in slots if hasattr(record, name)}


@functools.lru_cache(maxsize=64)
def _holds_all_in_dict(cls: type) -> bool:
    """Whether all that an instance of the class holds is in its ``__dict__``."""
    return (
        cls.__dictoffset__ != 0 and not issubclass(cls, _NOT_RECORDS) and not _slots(cls)  # type: ignore[arg-type]  # a class is hashable
    )


@functools.lru_cache(maxsize=64)
def _copies_plainly(cls: type) -> bool:
    """Whether to copy an instance of the class is to copy its ``__dict__``, and no more."""
    return _holds_all_in_dict(cls) and all(
        getattr(cls, name, None) is getattr(object, name, None) for name in _COPYING
    )


_COPYING = [
    "__copy__", "__getstate__", "__new__", "__reduce__", "__reduce_ex__", "__setattr__",
    "__setstate__",
]  # fmt: skip


@functools.lru_cache(maxsize=64)
def _slots(cls: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in cls.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
        and name != "__dict__"  # SimpleNamespace's is a member too
    )
