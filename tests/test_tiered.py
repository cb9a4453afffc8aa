"""What TieredCache does beyond the plain class: its two tiers, one by one."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import re
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    UNCOUNTABLE,
    WRAP,
    EncoderOfNumbers,
    deltas,
    kept_bytes,
    keys,
    numbers,
    recount,
    result,
)

from multimodal_cache import (
    CachedEncoder,
    CombinedHash,
    EmbeddingResult,
    EmbeddingTypeError,
    MultiModalStaticCache,
    tiered,
)
from multimodal_cache.tiered import TieredCache

combine = MultiModalStaticCache.combine_hashes
ONE, OTHER = combine([5]), combine([5 + WRAP])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def full_of(number: int, size: int = 10) -> EmbeddingResult:
    """Returns a result of numbers, 4 bytes each."""
    return EmbeddingResult(embedding=torch.full((size,), float(number)))


def two_tiers(max_size: int, host_size: int, *mm_hashes: int, **options: Any) -> TieredCache:
    """Returns a cache with an entry of 40 bytes for each key, full of the key's number."""
    cache = TieredCache(max_size, host_size, **options)
    for mm_hash in mm_hashes:
        assert cache.set(mm_hash, full_of(mm_hash % 1000))
    return cache


def number_of(found: EmbeddingResult | None) -> float | None:
    """Returns the number that a result is full of."""
    if found is None:
        return None
    assert (found.embedding == found.embedding[0]).all()
    return found.embedding[0].item()


def raise_(error: BaseException) -> Any:
    raise error


# Construction


@pytest.mark.parametrize("bad", [1.0, True, "1", None, torch.tensor(5)])
def test_a_size_that_is_no_int_is_named(bad: Any) -> None:
    name = type(bad).__name__
    with pytest.raises(TypeError, match=f"^max_size must be an int, got {name}: give"):
        TieredCache(bad, 10)
    with pytest.raises(TypeError, match=f"^host_size must be an int, got {name}: give"):
        TieredCache(10, bad)
    with pytest.raises(TypeError, match=f"^max_size must be an int, got {name}: give"):
        TieredCache(10, 10).resize(bad)


def test_a_negative_size_is_named() -> None:
    with pytest.raises(ValueError, match="^max_size must be 0 or more bytes, got -1$"):
        TieredCache(-1, 10)
    with pytest.raises(ValueError, match="^host_size must be 0 or more bytes, got -2$"):
        TieredCache(10, -2)
    with pytest.raises(ValueError, match="^max_size must be 0 or more bytes, got -1$"):
        TieredCache(10, 10).resize(-1)


def test_the_host_holds_what_the_device_holds_so_it_is_no_smaller() -> None:
    message = (
        "host_size must be max_size or more, since the host holds what the device holds, "
        "got host_size=9 and max_size=10"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TieredCache(10, 9)
    cache = two_tiers(80, 120, 1, 2)
    for resize in (cache.resize, partial(setattr, cache, "max_size")):
        with pytest.raises(ValueError, match="got host_size=120 and max_size=121$"):
            resize(121)
    assert (cache.max_size, keys(cache)) == (80, [1, 2])
    cache.resize(120)
    assert (cache.max_size, cache.host.max_size) == (120, 120)


def test_a_callback_that_can_not_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="^on_evict must be callable, got int$"):
        TieredCache(10, 10, on_evict=5)  # type: ignore[arg-type]


def test_options_are_keyword_only_and_integers_of_numpy_are_sizes() -> None:
    with pytest.raises(TypeError, match="positional"):
        TieredCache(10, 20, True)  # type: ignore[misc]
    cache = TieredCache(np.int64(10), np.int64(20))  # type: ignore[arg-type]
    assert (cache.max_size, cache.host.max_size) == (10, 20)
    assert type(cache.host.max_size) is int


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_can_be_neither_pickled_nor_copied(duplicate: Any) -> None:
    with pytest.raises(TypeError, match="TieredCache holds a lock"):
        duplicate(two_tiers(40, 80, 1))


def test_repr_says_entries_bytes_and_budget_of_both() -> None:
    assert repr(two_tiers(40, 120, 1, 2)) == (
        "TieredCache(entries=1, current_size=40, max_size=40, "
        "host_entries=2, host_current_size=80, host_size=120)"
    )


# What is about the whole, and what about the device


def test_what_left_the_device_is_in_the_cache() -> None:
    cache = two_tiers(40, 120, 1, 2, 3)
    assert (keys(cache), keys(cache.host)) == ([3], [1, 2, 3])
    assert len(cache) == cache.available_size() == 3
    assert cache.has(1)
    assert 1 in cache
    assert not cache.has(4)
    assert (cache.current_size, cache.host.current_size) == (40, 120)
    assert [number_of(cache.get_single(key)) for key in (1, 2, 3)] == [1, 2, 3]


def test_the_generation_is_one() -> None:
    cache = two_tiers(40, 120, 1, 2)
    assert cache.generation == cache.host.generation == 0
    began = cache.generation
    cache.free(1)
    assert cache.set(1, full_of(1), generation=began)
    cache.clear()
    assert cache.generation == cache.host.generation == 1
    assert not cache.set(1, full_of(1), generation=began)
    assert cache.set(1, full_of(1), generation=np.int64(1))
    with pytest.raises(TypeError, match="^generation must be an int, got str$"):
        cache.set(1, full_of(1), generation="1")  # type: ignore[arg-type]


def test_free_and_clear_forget_in_both() -> None:
    cache = two_tiers(80, 120, 1, 2, 3)
    assert cache.free(1, None)
    assert cache.free(3, mm_embedding_allocator=object())
    assert not cache.free(3)
    assert (keys(cache), keys(cache.host), cache.current_size) == ([2], [2], 40)
    cache.clear()
    assert (keys(cache), keys(cache.host)) == ([], [])
    assert cache.current_size == cache.host.current_size == 0
    cache.check()


def test_what_leaves_the_host_leaves_the_device() -> None:
    cache = two_tiers(120, 120, 1, 2, 3)
    before = cache.stats()
    assert cache.set(4, full_of(4, 20))
    assert (keys(cache), keys(cache.host)) == ([3, 4], [3, 4])
    assert deltas(before, cache.stats()) == {"insertions": 1}  # it fell out, and made no room
    assert cache.host.stats().evictions == 2
    cache.check()


def test_a_lookup_in_host_by_hand_finds_the_copy() -> None:
    cache = two_tiers(40, 120, 1, ONE)
    held = cache.host.get_single(1)
    assert held is cache.host.mm_cache[1]
    assert cache.host.get([5]) is cache.host.mm_cache[ONE]
    assert number_of(held) == 1


@pytest.mark.parametrize("bad", [True, 1.0, "1", torch.tensor(1), object()])
def test_a_key_that_is_no_int_is_refused_by_every_method(bad: Any) -> None:
    cache = two_tiers(40, 80, 1)
    calls: list[Callable[[], object]] = [
        lambda: cache.set(bad, result(1)),
        lambda: cache.get_single(bad),
        lambda: cache.get([bad]),
        lambda: cache.has(bad),
        lambda: bad in cache,
        lambda: cache.free(bad),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="must be an int, got"):
            call()
    assert keys(cache) == keys(cache.host) == [1]


def test_none_is_no_key() -> None:
    cache = two_tiers(40, 80)
    assert cache.set(None, full_of(1)) is False
    assert cache.get_single(None) is cache.get([]) is cache.get([1, None]) is None
    assert not cache.has(None)
    assert not cache.free(None)
    assert (len(cache), cache.stats().misses) == (0, 3)


# check


def spoiled(change: Callable[[Any], object]) -> str:
    cache = two_tiers(120, 200, 1, ONE)
    cache.check()
    change(cache)
    with pytest.raises(AssertionError) as caught:
        cache.check()
    return str(caught.value)


def test_check_says_which_promise_is_broken_and_in_which_tier() -> None:
    of_the_device = spoiled(lambda cache: setattr(cache, "_current_size", 81))
    assert of_the_device == (
        "TieredCache(entries=2, current_size=81, max_size=120, host_entries=2, "
        "host_current_size=80, host_size=200) breaks invariant "
        "1: current_size is the sum of what the entries are charged"
    )
    of_the_host = spoiled(lambda cache: setattr(cache.host, "_current_size", 79))
    assert of_the_host.endswith(
        "breaks invariant 1: current_size is the sum of what the entries are charged "
        "(in host memory)"
    )
    assert "4: what is held" in spoiled(lambda cache: cache.mm_cache.pop(1))
    both = spoiled(lambda cache: (cache.mm_cache.pop(1), cache.host.mm_cache.pop(1)))
    assert both.count("4: what is held is what is charged") == 2


def test_check_says_if_the_device_holds_what_the_host_does_not() -> None:
    def forget(cache: Any) -> None:
        cache.host._device = lambda: None
        cache.free(1)

    assert spoiled(forget).endswith("invariant 5: what the device holds, the host holds")

    def take_for_another(cache: Any) -> None:
        value, key, nbytes, _, use = cache._entries[ONE]
        cache._entries[int(ONE)] = (value, key, nbytes, None, use)
        cache._by_items.clear()

    assert spoiled(take_for_another).endswith("invariant 5: what the device holds, the host holds")


# Recency


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, key: cache.get([5]) is not None,
        lambda cache, key: cache.get_single(key) is not None,
        lambda cache, key: cache.get_single(int(key)) is not None,
        lambda cache, key: cache.set(key, full_of(9)),
        lambda cache, key: cache.set(key, full_of(9, 1000)),
    ],
)
@pytest.mark.parametrize("max_size", [40, 120])
def test_each_hit_refreshes_both(use: Callable[[TieredCache, int], bool], max_size: int) -> None:
    """Whether the device answers (120 bytes hold all), or the host (40 bytes hold one)."""
    cache = two_tiers(max_size, 120, ONE, 1, 2)
    assert use(cache, ONE)
    assert keys(cache.host) == [1, 2, ONE]
    assert keys(cache) == [1, 2, ONE][-max_size // 40 :]
    assert number_of(cache.get([5])) == ONE % 1000
    cache.set(3, full_of(3))
    assert keys(cache.host) == [2, ONE, 3]
    cache.check()


def test_a_device_hit_keeps_an_entry_in_the_host() -> None:
    cache = two_tiers(80, 120, 1, 2)
    for key in range(3, 20):
        assert number_of(cache.get_single(1)) == 1
        cache.set(key, full_of(key))
    assert 1 in cache.mm_cache
    assert cache.stats().host_hits == 0


def test_has_refreshes_nothing() -> None:
    cache = two_tiers(80, 120, 1, 2, 3)
    assert cache.has(1)
    assert cache.has(2)
    assert (keys(cache), keys(cache.host)) == ([2, 3], [1, 2, 3])


def test_a_key_that_only_the_host_has_is_present() -> None:
    cache = two_tiers(40, 120, 1, 2)
    before = cache.stats()
    assert cache.set(1, full_of(100))
    assert (keys(cache), keys(cache.host)) == ([1], [2, 1])
    assert number_of(cache.mm_cache[1]) == number_of(cache.host.mm_cache[1]) == 1  # type: ignore[arg-type]
    assert deltas(before, cache.stats()) == {"evictions": 1, "evicted_bytes": 40}
    cache.check()


# Counters


def test_a_copy_back_is_a_host_hit_and_no_insertion() -> None:
    cache = two_tiers(40, 120, 1, 2)
    before = cache.stats()
    assert number_of(cache.get_single(1)) == 1
    after = cache.stats()
    assert deltas(before, after) == {"hits": 1, "evictions": 1, "evicted_bytes": 40}
    assert (before.host_hits, after.host_hits) == (0, 1)
    cache.get_single(1)
    assert deltas(after, cache.stats()) == {"hits": 1}
    assert cache.stats().host_hits == 1
    assert (cache.stats().entries, cache.stats().current_size, cache.stats().max_size) == (
        1, 40, 40,
    )  # fmt: skip


def test_a_plain_cache_has_no_host_hits() -> None:
    cache = MultiModalStaticCache(40)
    cache.set(1, full_of(1))
    cache.get_single(1)
    assert cache.stats().host_hits == 0


def test_a_colliding_set_drops_the_other_list_from_both() -> None:
    heard: list[Any] = []
    cache = two_tiers(120, 120, 1, ONE, 2, on_evict=lambda *entry: heard.append(entry))
    before = cache.stats()
    assert cache.set(OTHER, full_of(7))
    assert deltas(before, cache.stats()) == {"insertions": 1, "collisions": 1}
    assert keys(cache) == keys(cache.host) == [1, 2, ONE]
    assert cache.get([5]) is None
    assert number_of(cache.get([5 + WRAP])) == 7
    assert heard == []
    cache.check()


def test_a_colliding_set_of_what_only_the_host_takes_leaves_nothing_on_the_device() -> None:
    cache = two_tiers(40, 120, ONE)
    assert cache.set(OTHER, full_of(7, 20))
    assert (keys(cache), keys(cache.host)) == ([], [ONE])
    assert number_of(cache.get([5 + WRAP])) == 7
    cache.check()


@pytest.mark.parametrize("on_device", [True, False])
def test_a_colliding_lookup_counts_once(on_device: bool) -> None:
    cache = two_tiers(40, 120, *([1, ONE] if on_device else [ONE, 1]))
    before = cache.stats()
    assert cache.get([5 + WRAP]) is cache.get_single(OTHER) is None
    assert not cache.has(OTHER)
    assert not cache.free(OTHER)
    assert deltas(before, cache.stats()) == {"misses": 2, "collisions": 2}
    assert number_of(cache.get([5])) == ONE % 1000
    assert cache.stats().host_hits == (not on_device)


# on_evict


def test_on_evict_hears_what_leaves_the_whole_with_the_copy_of_the_host() -> None:
    heard: list[tuple[int, EmbeddingResult]] = []
    cache = two_tiers(40, 120, ONE, 1, 2, on_evict=lambda *entry: heard.append(entry))
    assert heard == []
    cache.resize(0)
    cache.resize(40)
    cache.get_single(1)
    cache.free(2)
    assert heard == []
    copies = list(cache.host.mm_cache.values())
    cache.set(3, full_of(3, 30))
    assert [(key, number_of(value)) for key, value in heard] == [(ONE, ONE % 1000), (1, 1)]
    assert all(value is held for (_, value), held in zip(heard, copies, strict=True))
    assert isinstance(heard[0][0], CombinedHash)
    assert heard[0][0].mm_hashes == (5,)
    cache.clear()
    assert len(heard) == 2


def test_on_evict_runs_when_the_lock_is_released_and_may_call_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def on_evict(key: int, value: EmbeddingResult) -> None:
        held.append(cache._lock._is_owned())  # type: ignore[attr-defined]
        assert not cache.has(key)
        if key == 1:
            cache.set(1, value)
        else:
            raise OSError("the disk is full")

    held: list[bool] = []
    cache = two_tiers(40, 80, 1, 2, on_evict=on_evict)
    assert cache.set(3, full_of(3))
    assert (held, keys(cache.host)) == ([False, False], [3, 1])
    assert number_of(cache.get_single(1)) == 1
    assert [record.getMessage() for record in caplog.records] == ["on_evict failed for the key 0x2"]
    cache.check()


def test_on_evict_hears_what_made_room_for_a_copy_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    cache = two_tiers(40, 80, 1, 2, on_evict=lambda key, value: heard.append(key))
    monkeypatch.setattr(tiered, "copy_out", lambda *_: raise_(RuntimeError("assert")))
    with pytest.raises(RuntimeError, match="^assert$"):
        cache.set(3, full_of(3))
    assert (heard, keys(cache.host), cache.stats().rejections) == ([1], [2], 0)
    cache.check()
