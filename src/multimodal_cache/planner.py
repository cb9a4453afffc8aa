"""The hit rate of a byte LRU at every size at once, from a record of what was requested.

The command ``python -m multimodal_cache plan TRACE`` prints and draws it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST_SIZE = 2**62
"""The most bytes that an item may have."""

DOUBLINGS = 12
"""How far below the footprint a grid begins."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPoint:
    """What a cache of one size makes of the requests.

    Attributes:
        size: The size of the cache, in bytes.
        hits: Requests that it answers.
        hit_bytes: The bytes that those hits save: what their items add up to.
        hit_rate: Hits per request, from 0.0 to 1.0.
        byte_hit_rate: The share of the requested bytes that hits save, from 0.0 to 1.0.
        entries: What it holds after the last request.
    """

    size: int
    hits: int
    hit_bytes: int
    hit_rate: float
    byte_hit_rate: float
    entries: int


def hit_curve(keys: Sequence[Hashable], sizes: Sequence[int], *, skip: int = 0) -> HitCurve:
    """Computes how many of the requests a cache answers, for every size of the cache.

    A request is a lookup and, if that misses, a ``set``. The curve is exact: at each size it
    equals a replay with a ``MultiModalStaticCache`` of that size, and with a ``TieredCache`` of
    that ``host_size``. A key that comes with another size is another key.

    It takes O(n log n): 10^6 requests take a second or two, and 200 MB.

    Args:
        keys: What was requested, in order: an array of ints, or any sequence of hashable keys.
        sizes: The bytes of each, from 0 to 2**62.
        skip: How many requests to leave uncounted at the beginning, while the cache fills.

    Raises:
        TypeError: The sizes aren't integers.
        ValueError: They are out of range or, all together, 2**63 bytes or more; there aren't as
            many of them as keys; or ``skip`` is negative.
    """
    nbytes = _sizes(sizes)
    numbers = _numbers(keys)
    if numbers.shape != nbytes.shape:
        raise ValueError(f"there must be a size for each key, got {numbers.size} and {nbytes.size}")
    if skip < 0:
        raise ValueError(f"skip must be 0 or more, got {skip}")
    return HitCurve(_items(numbers, nbytes), nbytes, skip)


class HitCurve:
    """What caches of all sizes make of the same requests. ``hit_curve`` makes one.

    Attributes:
        requests: How many there were, but for those that ``skip`` left out.
        requested_bytes: What their items add up to.
        items: How many different items there were; these and what follows with those left out.
        footprint: The bytes of all of them: no larger cache is any better.
        largest: The bytes of the largest.
        ceiling: The hit rate that no size passes, since the first request for an item is a miss.
    """

    def __init__(self, items: _Ints, sizes: _Ints, skip: int) -> None:
        self._items = items
        self._sizes = sizes
        self._skip = skip
        self._all = _Lru(items, sizes, skip)
        self.requests = max(len(items) - skip, 0)
        self.requested_bytes = int(sizes[skip:].sum())
        self.items = self._all.recent.size - 1
        self.footprint = int(self._all.recent[-1])
        self.largest = int(sizes.max(initial=0))
        self.ceiling = self._all.needs.size / self.requests if self.requests else 0.0

    def at(self, size: int) -> HitPoint:
        """Returns the point of the curve at a size in bytes.

        At once for a size that no item exceeds; below that it is computed again without the items
        that are larger, which such a cache refuses.

        Raises:
            ValueError: ``size`` is negative.
        """
        if size < 0:
            raise ValueError(f"size must be 0 or more, got {size}")
        lru = self._all
        if size < self.largest:
            fits = self._sizes <= size
            skip = int(np.count_nonzero(fits[: self._skip]))
            lru = _Lru(self._items[fits], self._sizes[fits], skip)
        hits, hit_bytes, entries = lru.at(min(size, self.footprint))
        return HitPoint(
            size=size,
            hits=hits,
            hit_bytes=hit_bytes,
            hit_rate=hits / self.requests if self.requests else 0.0,
            byte_hit_rate=hit_bytes / self.requested_bytes if self.requested_bytes else 0.0,
            entries=entries,
        )

    def grid(self, per_doubling: int = 1) -> list[int]:
        """Returns sizes for a table, or a drawing: twelve doublings up to the footprint.

        At most four of them are below the largest item, where a point takes long.
        """
        top = self.footprint.bit_length()
        bits = range(max(top - DOUBLINGS, 0), top)
        below = [2**bit for bit in bits if 2**bit < self.largest][-4:]
        steps = range(bits.start * per_doubling, bits.stop * per_doubling)
        above = sorted({int(2 ** (step / per_doubling)) for step in steps})
        sizes = below + [size for size in above if size >= self.largest]
        return [size for size in sizes if size < self.footprint] + [self.footprint]

    def size_reaching(self, percent: int) -> int:
        """Returns a size that reaches so many per cent of the ceiling, as does any larger one.

        It is the smallest one, unless there are items that are larger than it.

        Raises:
            ValueError: ``percent`` isn't from 0 to 100.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be from 0 to 100, got {percent}")
        needs = self._all.needs
        hits = -(-percent * needs.size // 100)
        return int(needs[hits - 1]) if hits else 0


class _Lru:
    """Caches of all sizes that no item exceeds.

    They evict the least recent until the rest fits. So they hold the longest prefix that fits of
    the items by last use, and a request is a hit where its item and those used since fit.

    Attributes:
        needs: For each request that isn't the first for its item: the size from which on it is a
            hit, in order.
        recent: The bytes of the items most recently used, of none, one, ... and all of them.
    """

    def __init__(self, items: _Ints, sizes: _Ints, skip: int) -> None:
        order = np.argsort(items, kind="stable")
        repeats = items[order[1:]] == items[order[:-1]]
        previous = np.full(len(items), -1)
        previous[order[1:][repeats]] = order[:-1][repeats]
        last = np.sort(order[np.append(~repeats, True)[: len(order)]])
        self.recent = _running_total(sizes[last[::-1]])
        again = np.flatnonzero(previous >= 0)
        needs = _needs(previous[again], again, sizes)
        counted = again >= skip
        needs, nbytes = needs[counted], sizes[again[counted]]
        order = np.argsort(needs)
        self.needs = needs[order]
        self._hit_bytes = _running_total(nbytes[order])

    def at(self, size: int) -> tuple[int, int, int]:
        """Returns the hits at a size, what they save, and the entries that are held at the end."""
        hits = int(np.searchsorted(self.needs, size, side="right"))
        entries = int(np.searchsorted(self.recent, size, side="right")) - 1
        return hits, int(self._hit_bytes[hits]), entries


def _needs(previous: _Ints, again: _Ints, sizes: _Ints) -> _Ints:
    """Returns the bytes of the different items used from after each ``previous`` to ``again``."""
    total = _running_total(sizes)
    # Of an item that was used several times in between, only the first use counts. The others are
    # those whose own previous use is in between as well.
    is_previous = np.zeros(len(sizes), np.bool_)
    is_previous[previous] = True
    ranks = (np.cumsum(is_previous) - 1)[previous]
    used_again = _weight_of_greater_before(ranks, sizes[again])
    return total[again + 1] - total[previous + 1] - used_again


def _weight_of_greater_before(ranks: _Ints, weights: _Ints) -> _Ints:
    """Returns, for each rank, the weight of all greater ones before it.

    The ranks, 0 to n - 1 in any order, are sorted by one bit after the other, the highest first,
    and otherwise stay in order. Of two that part at a bit, the greater one was before the other
    if it still is.
    """
    width = 1 << max(len(ranks) - 1, 0).bit_length()
    rank = np.arange(
        width, dtype=np.int32 if width < 2**31 else np.int64
    )  # ranks beyond those given come last and weigh nothing
    rank[: len(ranks)] = ranks
    weight = np.zeros(width, np.int64)
    weight[: len(ranks)] = weights
    found = np.zeros(width, np.int64)
    half = width // 2
    while half:
        high = rank & half != 0
        low = ~high
        passed = np.cumsum((weight * high).reshape(-1, 2 * half), axis=1).ravel()
        found += passed * low
        rank, weight, found = (
            # Each group of twice `half` has all its ranks: one half is high, the other is low.
            np.hstack((array[low].reshape(-1, half), array[high].reshape(-1, half))).ravel()
            for array in (rank, weight, found)
        )
        half //= 2
    return found[ranks]


def _running_total(sizes: _Ints) -> _Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _items(keys: npt.NDArray[Any], sizes: _Ints) -> _Ints:
    """Numbers the pairs of key and size."""
    order = np.lexsort((sizes, keys))
    keys, sizes = keys[order], sizes[order]
    items = np.zeros(len(order), np.int64)
    items[order[1:]] = np.cumsum((keys[1:] != keys[:-1]) | (sizes[1:] != sizes[:-1]))
    return items


def _numbers(keys: Sequence[Hashable]) -> npt.NDArray[Any]:
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "iu":
        return keys
    numbers: dict[Hashable, int] = {}  # NumPy would take some lists of ints for floats
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64)


def _sizes(sizes: Sequence[int]) -> _Ints:
    array = np.asarray(sizes)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"sizes must be integers, of 64 bits at most, got {array.dtype}")
    if array.size and not 0 <= array.min() <= array.max() <= LARGEST_SIZE:
        raise ValueError(f"sizes must be from 0 to 2**62, got {array.min()} to {array.max()}")
    array = array.astype(np.int64)
    if int((array >> 32).sum()) + (int((array & 0xFFFFFFFF).sum()) >> 32) >= 2**31:
        raise ValueError("sizes must add up to less than 2**63")
    return array
