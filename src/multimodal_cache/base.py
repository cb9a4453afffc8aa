"""What a multimodal cache is: the abstract base, its keys and its values.

The names and signatures are those of SGLang's ``sglang.srt.mem_cache.multimodal_cache``.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class EmbeddingTypeError(TypeError, AssertionError):
    """The value given to ``set`` can't be cached: it holds no tensor, or one of unknown size.

    It is an ``AssertionError`` too, because that is what the reference raises.
    """


@dataclass(kw_only=True)
class EmbeddingResult:
    """What an encoder made of one item, or of one list of items.

    Servers subclass it with more fields; the cache keeps the class and all the fields.

    Attributes:
        embedding: The encoder's output, usually ``[num_tokens, hidden]``.
    """

    embedding: torch.Tensor


class CombinedHash(int):
    """The key of a list of items: an int that remembers which items it stands for.

    Its value is exactly ``hash(tuple(mm_hashes))``, and it compares, hashes, prints and
    formats as that int. ``hash`` of a tuple collides by construction (``hash(-1) ==
    hash(-2)``, and ints wrap at ``2**61 - 1``), so a cache that keeps the items can tell
    apart two lists that share a hash.

    Args:
        mm_hashes: The keys of the single items, in the order in which the model sees them.

    Raises:
        TypeError: An item isn't an int, or is itself a ``CombinedHash``, whose own items
            would then be hidden from the comparison.
        ValueError: There are no items; ``combine_hashes`` returns None for that.
    """

    _mm_hashes: tuple[int, ...]

    def __new__(cls, mm_hashes: Iterable[SupportsIndex]) -> CombinedHash:  # noqa: D102
        items = tuple([single_key(item) for item in _in_order(mm_hashes)])
        if not items:
            raise ValueError("mm_hashes must hold an item or more, got none")
        return cls._of(items)

    @classmethod
    def _of(cls, items: tuple[int, ...]) -> CombinedHash:
        self = int.__new__(cls, hash(items))
        self._mm_hashes = items
        return self

    @property
    def mm_hashes(self) -> tuple[int, ...]:
        """The keys of the single items."""
        return self._mm_hashes

    def __reduce__(self) -> tuple[type[CombinedHash], tuple[tuple[int, ...]]]:
        return type(self), (self._mm_hashes,)


class MultimodalCache(abc.ABC):
    """A cache of encoder outputs under integer keys.

    A subclass defines ``get``, ``set``, ``has``, ``free``, ``clear`` and ``available_size``.
    Two things it has to mind itself: a key can be None, which stands for no key; and the keys of
    two lists can be equal, so that it should compare ``CombinedHash.mm_hashes`` before it
    takes an entry for a hit. The allocator that ``set`` and ``free`` are handed is the server's
    KV-pool allocator, for caches that keep their entries in that pool.

    A subclass may have a ``generation``, an attribute or a property, that ``clear`` changes and
    that can be read without waiting. Its ``set`` must then take the keyword ``generation``, the
    one in which an encode began, and refuse what isn't of the current one: ``CachedEncoder``
    passes it. Without it, what was begun before a ``clear`` is cached after it.
    """

    @staticmethod
    def combine_hashes(
        mm_hashes: Iterable[SupportsIndex | None] | None,
    ) -> CombinedHash | None:
        """Makes one key for a list of items.

        The order counts, because the order of the images changes what the model attends to.

        Args:
            mm_hashes: The key of each item; None where an item has no key.

        Returns:
            The key, or None if there are no items or one of them has no key.

        Raises:
            TypeError: ``mm_hashes`` isn't an ordered iterable, or an item isn't an int (a
                bool, float, str or tensor, say), or is itself a ``CombinedHash``.
        """
        items = item_keys(mm_hashes)
        return None if items is None else CombinedHash._of(items)

    @abc.abstractmethod
    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> EmbeddingResult | None:
        """Returns what is cached for this list of items, or None."""

    def get_single(self, mm_hash: int) -> EmbeddingResult | None:
        """Returns what is cached for one item by itself, or None.

        The reference has it in one of its caches only, so it isn't abstract.

        Raises:
            NotImplementedError: The subclass doesn't define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} doesn't define get_single(mm_hash), which looks one item up "
            "by its own key; CachedEncoder needs it"
        )

    @abc.abstractmethod
    def set(self, mm_hash: int, embedding: Any, mm_embedding_allocator: Any) -> bool:
        """Caches an embedding; returns whether it is now in the cache."""

    @abc.abstractmethod
    def has(self, mm_hash: int) -> bool:
        """Returns whether the key is in the cache."""

    @abc.abstractmethod
    def free(self, mm_hash: int, mm_embedding_allocator: Any) -> bool:
        """Drops one entry; returns whether it was there."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Drops every entry."""

    @abc.abstractmethod
    def available_size(self) -> int:
        """Returns the number of entries, despite its name, as in the reference."""


def split_key(mm_hash: SupportsIndex | None) -> tuple[int | None, tuple[int, ...] | None]:
    """Returns a key as a plain int (or None), and the items it says that it stands for.

    Raises:
        TypeError: ``mm_hash`` is neither None nor an int.
    """
    if mm_hash is None or type(mm_hash) is int:
        return mm_hash, None
    if isinstance(mm_hash, CombinedHash):
        return hash(mm_hash._mm_hashes), mm_hash._mm_hashes
    return as_int("mm_hash", mm_hash), None


def item_keys(mm_hashes: Iterable[SupportsIndex | None] | None) -> tuple[int, ...] | None:
    """Returns the keys of a list of items as plain ints, or None if there is no key for it.

    Raises:
        TypeError: As ``combine_hashes``.
    """
    if mm_hashes is None:
        return None
    items = _in_order(mm_hashes)
    for item in items:
        if type(item) is not int:
            break
    else:
        return items or None  # type: ignore[return-value]  # all of them are plain ints
    keys = tuple([single_key(item) for item in items if item is not None])
    return keys if len(keys) == len(items) else None


_ADVICE = {
    "mm_hash": "hash_feature makes one, int(digest, 16) one of a hex digest, "
    "combine_hashes one of a list",
    "an item of mm_hashes": "hash_feature makes one, int(digest, 16) one of a hex digest",
    "max_size": "give a number of bytes, such as 4 * 2**30",
    "host_size": "give a number of bytes, such as 64 * 2**30",
}
"""What to give in place of what isn't an int, by the name of the argument."""


def as_int(name: str, value: Any) -> int:
    """Returns any integer as a plain int.

    NumPy integers and other types with ``__index__`` are integers. Bools, NumPy's too, and
    tensors are not, though they may have the method: they are never meant as a key or a size.

    Raises:
        TypeError: ``value`` isn't an integer; the message calls it ``name``.
    """
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_, torch.Tensor)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    message = f"{name} must be an int, got {type(value).__name__}"
    raise TypeError(f"{message}: {_ADVICE[name]}" if name in _ADVICE else message)


def as_size(name: str, value: Any) -> int:
    """Checks an argument that is a number of bytes, as ``as_int`` does.

    Raises:
        TypeError: It isn't an int.
        ValueError: It is negative.
    """
    size = as_int(name, value)
    if size < 0:
        raise ValueError(f"{name} must be 0 or more bytes, got {size}")
    return size


def single_key(item: Any, name: str = "an item of mm_hashes") -> int:
    """Returns the key of a single item as a plain int.

    Raises:
        TypeError: ``item`` isn't an int, or is the ``CombinedHash`` of several items; the
            message calls it ``name``.
    """
    if isinstance(item, CombinedHash):
        raise TypeError(
            f"{name} must be the key of a single item, "
            f"got the CombinedHash of {len(item.mm_hashes)} items"
        )
    return as_int(name, item)


def ordered_items(
    name: str, items: Iterable[T], expected: str = "a list", *, advice: str = ""
) -> tuple[T, ...]:
    """Returns the items, in the order in which they come.

    Raises:
        TypeError: ``items`` isn't an ordered iterable, or is text, which isn't a list of items,
            or a mapping, which has more than its keys; the message calls it ``name``, and ends
            with the ``advice``.
    """
    if isinstance(items, (list, tuple)):
        return tuple(items)
    if not isinstance(items, (str, bytes, bytearray, set, frozenset, Mapping)):
        try:
            iterator = iter(items)
        except TypeError:
            pass
        else:
            return tuple(iterator)
    raise TypeError(f"{name} must be {expected}, got {type(items).__name__}{advice}")


def _in_order(mm_hashes: Iterable[T]) -> tuple[T, ...]:
    expected = "a list of ints or another ordered iterable (for one key [key], or get_single)"
    return ordered_items("mm_hashes", mm_hashes, expected)
