"""The statistics: which call moves which counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import deltas, filled, result

from multimodal_cache import CacheStats, MultiModalStaticCache

combine = MultiModalStaticCache.combine_hashes


def test_a_new_cache_has_counted_nothing() -> None:
    stats = MultiModalStaticCache(10).stats()
    assert stats == CacheStats(
        hits=0, misses=0, insertions=0, inserted_bytes=0, evictions=0, evicted_bytes=0,
        rejections=0, rejected_bytes=0, collisions=0, entries=0, current_size=0, max_size=10,
    )  # fmt: skip
    assert stats.hit_rate == 0.0


def test_each_counter_moves_by_its_own_calls_only() -> None:
    cache = MultiModalStaticCache(100)

    def moved(call: Callable[[], object]) -> dict[str, int]:
        before = cache.stats()
        call()
        return deltas(before, cache.stats(), "inserted_bytes", "rejected_bytes")

    assert moved(lambda: cache.set(1, result(10))) == {"insertions": 1, "inserted_bytes": 40}
    assert moved(lambda: cache.set(1, result(10))) == {}
    assert moved(lambda: cache.set(2, result(15))) == {"insertions": 1, "inserted_bytes": 60}
    assert moved(lambda: cache.get_single(1)) == {"hits": 1}
    assert moved(lambda: cache.get_single(9)) == {"misses": 1}
    assert moved(lambda: cache.get([9])) == {"misses": 1}
    assert moved(lambda: cache.set(3, result(26))) == {"rejections": 1, "rejected_bytes": 104}
    assert moved(lambda: cache.has(1)) == {}
    assert moved(lambda: 9 in cache) == {}
    assert moved(lambda: cache.set(4, result(25))) == {
        "insertions": 1,
        "inserted_bytes": 100,
        "evictions": 2,
        "evicted_bytes": 100,
    }
    assert moved(lambda: cache.resize(99)) == {"evictions": 1, "evicted_bytes": 100}
    assert moved(lambda: cache.set(combine([1]), result(1))) == {
        "insertions": 1,
        "inserted_bytes": 4,
    }
    assert moved(lambda: cache.get([1])) == {"hits": 1}
    assert moved(lambda: cache.free(combine([1]))) == {}
    assert moved(lambda: cache.clear()) == {}


def test_a_snapshot_says_what_is_held_and_stays_as_it_was() -> None:
    cache = filled(120, 1, 2)
    cache.get_single(1)
    cache.get_single(1)
    cache.get_single(1)
    cache.get_single(7)
    stats = cache.stats()
    cache.clear()
    assert (stats.entries, stats.current_size, stats.max_size) == (2, 80, 120)
    assert stats.hit_rate == 0.75
    with pytest.raises(AttributeError):
        stats.hits = 0  # type: ignore[misc]
