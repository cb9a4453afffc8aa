"""Leases: nothing is evicted under the keys that somebody needs."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import WRAP, deltas, keys, recount, result

from multimodal_cache import EmbeddingResult, MultiModalStaticCache, leases
from multimodal_cache.leases import Lease
from multimodal_cache.tiered import TieredCache

combine = MultiModalStaticCache.combine_hashes
ONE, OTHER = combine([5]), combine([5 + WRAP])
assert ONE is not None
assert OTHER is not None

Make = Callable[..., MultiModalStaticCache]


def plain(max_size: int, *mm_hashes: int, **options: Any) -> MultiModalStaticCache:
    """Returns a cache with an entry of 40 bytes for each key."""
    return fill(MultiModalStaticCache(max_size, **options), *mm_hashes)


def tiered(max_size: int, *mm_hashes: int, **options: Any) -> MultiModalStaticCache:
    """Returns one whose host is as large, so that both tiers evict at once, like a plain cache."""
    return fill(TieredCache(max_size, max_size, **options), *mm_hashes)


def fill(cache: MultiModalStaticCache, *mm_hashes: int) -> MultiModalStaticCache:
    for mm_hash in mm_hashes:
        assert cache.set(mm_hash, result(10))
    return cache


@pytest.fixture(params=[plain, tiered])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """The types of what finalizers raised: here each ResourceWarning, as warnings are errors.

    (The traceback of what is raised holds the frame that the garbage collector came into, and that
    may hold the next lease.)
    """
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hooked: seen.append(hooked.exc_type))
    return seen


def leased(cache: MultiModalStaticCache) -> int:
    cache.check()
    return cache.stats().leased_bytes


# What is evicted, and what is refused


def test_the_least_recent_entry_that_is_not_leased_is_evicted(make: Make) -> None:
    cache = make(120, 1, 2, 3)
    with cache.lease([1, 3]):
        assert cache.set(4, result(10))
        assert sorted(cache.mm_cache) == [1, 3, 4]
        assert cache.set(5, result(10))
        assert sorted(cache.mm_cache) == [1, 3, 5]
        assert leased(cache) == 80
    assert leased(cache) == 0
    cache.check()


def test_a_leased_entry_that_is_met_at_the_old_end_moves_to_the_new_one(make: Make) -> None:
    cache = make(160, 1, 2, 3, 4)
    with cache.lease([1, 2]):
        cache.set(5, result(10))
        assert keys(cache._tiers()[-1]) == [4, 1, 2, 5]  # in a TieredCache the host evicts
        cache.set(6, result(10))
        assert keys(cache._tiers()[-1]) == [1, 2, 5, 6]


@pytest.mark.parametrize("size", [11, 30, 31, 1000])
def test_what_can_not_fit_beside_the_leased_bytes_is_refused_at_once(make: Make, size: int) -> None:
    cache = make(120, 1, 2, 3)
    with cache.lease([1, 3]):
        before = cache.stats()
        assert cache.set(4, result(size)) is False
        assert deltas(before, cache.stats()) == {"rejections": 1}
        assert keys(cache) == [1, 2, 3]


def test_what_just_fits_beside_the_leased_bytes_is_stored(make: Make) -> None:
    cache = make(120, 1, 2, 3)
    with cache.lease([1]):
        assert cache.set(4, result(20))
        assert (sorted(cache.mm_cache), leased(cache)) == ([1, 4], 40)


def test_where_all_is_leased_nothing_is_stored_but_what_is_there_is_present(make: Make) -> None:
    cache = make(120, 1, 2, 3)
    with cache.lease([1, 2, 3]):
        assert cache.set(4, result(1)) is False
        assert cache.set(1, result(1)) is True
        assert cache.set(5, result(0)) is True  # no bytes need no room
        assert cache.get_single(2) is not None
        assert keys(cache) == [3, 1, 5, 2]


def test_a_refusal_that_only_leases_cause_is_no_warning_of_the_size(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make(120, 1, 2, 3)
    with caplog.at_level(logging.DEBUG), cache.lease([1, 2, 3]):
        assert cache.set(4, result(30)) is False
        assert caplog.records == []
        assert cache.set(4, result(31)) is False
        assert len(caplog.records) == 1


def test_a_collision_does_not_replace_a_leased_entry(make: Make) -> None:
    cache = make(120, 1, ONE)
    first = cache.mm_cache[ONE]
    with cache.lease([ONE]):
        before = cache.stats()
        assert cache.set(OTHER, result(3)) is False
        assert deltas(before, cache.stats()) == {"rejections": 1, "collisions": 1}
        assert cache.mm_cache[ONE] is first
        assert cache.get([5]) is first
    assert cache.set(OTHER, result(3)) is True
    cache.check()


def test_a_collision_replaces_an_entry_beside_a_leased_one(make: Make) -> None:
    cache = make(80, 1, ONE)
    with cache.lease([1]):
        assert cache.set(OTHER, result(11)) is False
        assert keys(cache) == [1, ONE]
        assert cache.set(OTHER, result(10)) is True
        assert leased(cache) == 40


def test_a_budget_below_the_leased_bytes_is_refused(make: Make) -> None:
    cache = make(120, 1, 2, 3)
    with cache.lease([1, 3]):
        message = "^max_size must be 80 or more, the bytes leased, got 79$"
        for resize in (cache.resize, lambda size: setattr(cache, "max_size", size)):
            with pytest.raises(ValueError, match=message):
                resize(79)
        assert (keys(cache), cache.max_size, leased(cache)) == ([1, 2, 3], 120, 80)
        cache.resize(80)
        assert (keys(cache), cache.max_size, leased(cache)) == ([3, 1], 80, 80)
    cache.resize(0)
    assert keys(cache) == []
    cache.check()


# What is leased


def test_what_is_set_under_a_leased_key_later_is_held(make: Make) -> None:
    cache = make(80)
    with cache.lease([1]):
        assert leased(cache) == 0
        fill(cache, 1)
        assert leased(cache) == 40
        fill(cache, 2, 3)
        assert keys(cache) == [1, 3]
        assert cache.set(4, result(11)) is False


def test_free_and_clear_drop_leased_entries_and_the_lease_goes_on(make: Make) -> None:
    cache = make(80, 1, 2)
    drops: list[Callable[[], object]] = [lambda: cache.free(1), cache.clear]
    with cache.lease([1]):
        for drop in drops:
            drop()
            assert 1 not in cache
            assert leased(cache) == 0
            fill(cache, 1, 2, 3)
            assert (sorted(cache.mm_cache), leased(cache)) == ([1, 3], 40)
    fill(cache, 4, 5)
    assert (keys(cache), leased(cache)) == ([4, 5], 0)


def test_a_key_is_held_until_its_last_lease_ends(make: Make) -> None:
    cache = make(40, 1)
    held = [cache.lease([1, 2]), cache.lease([1]), cache.lease([1, 1])]
    for lease in held:
        assert cache.set(3, result(1)) is False
        assert leased(cache) == 40
        lease.release()
    assert leased(cache) == 0
    assert cache.set(3, result(10)) is True
    assert keys(cache) == [3]


def test_releasing_twice_does_nothing(make: Make) -> None:
    cache = make(80, 1, 2)
    first, second = cache.lease([1]), cache.lease([1])
    first.release()
    assert keys(cache) == [1, 2]
    first.release()
    with first:
        assert leased(cache) == 40
    second.release()
    assert (keys(cache), leased(cache)) == ([2, 1], 0)
    cache.get_single(2)
    second.release()
    assert keys(cache) == [1, 2]


def test_what_was_leased_last_becomes_the_most_recent(make: Make) -> None:
    cache = make(160, 1, 2, 3, 4)
    outer = cache.lease([2, 1])
    with cache.lease([1, 3, 9]):
        assert keys(cache) == [1, 2, 3, 4]
    assert keys(cache) == [1, 2, 4, 3]
    outer.release()
    assert keys(cache) == [4, 3, 2, 1]


def test_a_with_block_that_raises_ends_the_lease(make: Make) -> None:
    cache = make(40, 1)
    with pytest.raises(KeyError), cache.lease([1]):
        cache.mm_cache[2]
    assert leased(cache) == 0


def test_the_keys_are_a_tuple_of_ints_without_none(make: Make) -> None:
    cache = make(120, 1, ONE)
    key = (mm_hash for mm_hash in [None, np.int64(1), ONE, None, 2**70, 1])
    with cache.lease(key) as lease:
        assert lease.mm_hashes == (1, int(ONE), 2**70, 1)
        assert [type(mm_hash) for mm_hash in lease.mm_hashes] == [int] * 4
        assert leased(cache) == 80
    with cache.lease([]) as lease, cache.lease([None]) as other:
        assert lease.mm_hashes == other.mm_hashes == ()
        assert leased(cache) == 0


def test_a_lease_is_of_the_int(make: Make) -> None:
    cache = make(120, ONE)
    for key in (ONE, OTHER, int(ONE)):
        with cache.lease([key]):
            assert leased(cache) == 40
            assert cache.set(2, result(21)) is False


@pytest.mark.parametrize("bad", [1.0, "1", b"1", True, object(), [1]])
def test_a_bad_key_is_refused_before_anything_is_held(make: Make, bad: Any) -> None:
    cache = make(80, 1, 2)

    def generated() -> Iterator[Any]:
        yield 1
        assert leased(cache) == 0  # the keys are read without the lock, before the first is held
        yield bad

    for mm_hashes in ([1, bad, 2], generated()):
        with pytest.raises(TypeError, match="^mm_hash must be an int, got"):
            cache.lease(mm_hashes)
        assert leased(cache) == 0
        assert not cache._leased
    with pytest.raises(TypeError, match="not iterable"):
        cache.lease(1)  # type: ignore[arg-type]


def test_keys_that_can_not_be_read_hold_nothing(make: Make) -> None:
    cache = make(80, 1, 2)

    def generated() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="^no more$"):
        cache.lease(generated())
    assert not cache._leased


def test_repr_says_how_many_keys_and_whether_it_is_over(make: Make) -> None:
    lease = make(40).lease([1, None, 2])
    assert repr(lease) == "Lease(2 keys)"
    lease.release()
    assert repr(lease) == "Lease(2 keys, released)"


def test_a_cache_that_only_its_lease_knows_lives_until_then(make: Make) -> None:
    cache = make(40, 1)
    seen = weakref.ref(cache)
    lease = cache.lease([1])
    del cache
    assert seen() is not None
    lease.release()
    assert seen() is None


def test_check_says_if_the_leased_bytes_are_wrong(make: Make) -> None:
    cache = make(80, 1)
    cache._room -= 1
    with pytest.raises(AssertionError, match="invariant 2: leased_bytes is the sum of what leased"):
        cache.check()
    cache._room += 1
    with cache.lease([1]):
        cache._leased.clear()
        with pytest.raises(AssertionError, match="invariant 2: leased_bytes is the sum"):
            cache.check()


def test_an_eviction_costs_no_more_than_the_leased_entries_for_each_other() -> None:
    """Steps are moves to the new end: O(1 + leased / unleased) for each eviction."""

    class Counting(OrderedDict[int, EmbeddingResult]):
        moves = 0

        def move_to_end(self, key: int, last: bool = True) -> None:
            self.moves += 1
            super().move_to_end(key, last)

    for held, free in [(10, 10), (100, 10), (10, 100), (100, 1), (0, 10)]:
        cache = plain(40 * (held + free), *range(held + free))
        counting = cache.mm_cache = Counting(cache.mm_cache)
        sets = 5 * (held + free)
        with cache.lease(range(held)):
            for key in range(1000, 1000 + sets):
                assert cache.set(key, result(10))
            assert cache.stats().evictions == sets
            assert counting.moves <= (sets / free + 1) * held
            assert (counting.moves > 0) is (held > 0)
            assert all(key in cache.mm_cache for key in range(held))


# Every turn looks anew: what is dropped may run a finalizer that calls


def calls_when_dropped(call: Callable[[], object], size: int = 10) -> EmbeddingResult:
    value = result(size)
    weakref.finalize(value.embedding, call).atexit = False
    return value


def test_a_finalizer_that_leases_in_the_middle_of_a_set_is_heeded() -> None:
    held: list[Lease] = []
    cache = plain(120)
    cache.set(1, calls_when_dropped(lambda: held.append(cache.lease([2]))))
    fill(cache, 2, 3)
    before = cache.stats()
    assert cache.set(4, result(30)) is False
    assert deltas(before, cache.stats()) == {
        "evictions": 1, "evicted_bytes": 40, "rejections": 1,
    }  # fmt: skip
    assert (keys(cache), leased(cache)) == ([2, 3], 40)
    assert cache.set(4, result(20)) is True
    assert (sorted(cache.mm_cache), leased(cache)) == ([2, 4], 40)
    held[0].release()


def test_a_finalizer_that_leases_the_key_of_a_set_holds_its_value() -> None:
    held: list[Lease] = []
    cache = plain(40)
    cache.set(1, calls_when_dropped(lambda: held.append(cache.lease([2]))))
    assert cache.set(2, result(10)) is True
    assert leased(cache) == 40
    held[0].release()


def test_a_finalizer_that_stores_and_leases_the_other_list_again_is_heeded() -> None:
    held: list[Lease] = []
    cache = plain(80)

    def bring_back() -> None:
        cache.set(ONE, result(5))
        held.append(cache.lease([ONE]))

    cache.set(ONE, calls_when_dropped(bring_back))
    assert cache.set(OTHER, result(10)) is False
    assert cache.get([5]) is not None
    assert leased(cache) == 20
    held[0].release()


def test_a_finalizer_that_releases_in_the_middle_of_a_set_makes_room() -> None:
    cache = plain(120)
    lease = cache.lease([2])
    cache.set(1, calls_when_dropped(lease.release))
    fill(cache, 2)
    assert cache.set(4, result(20)) is True
    assert cache.set(5, result(30)) is True
    assert (keys(cache), leased(cache)) == ([5], 0)


def test_a_finalizer_that_leases_in_the_middle_of_a_resize_is_heeded() -> None:
    held: list[Lease] = []
    cache = plain(120)
    cache.set(1, calls_when_dropped(lambda: held.append(cache.lease([2, 3]))))
    fill(cache, 2, 3)
    with pytest.raises(ValueError, match="^max_size must be 80 or more, the bytes leased, got 79$"):
        cache.resize(79)
    assert (keys(cache), cache.max_size, leased(cache)) == ([2, 3], 120, 80)
    held[0].release()


def test_a_lease_forgotten_in_the_middle_of_a_resize_is_over(
    unraised: list[type[BaseException]],
) -> None:
    cache = plain(120)
    held = [cache.lease([2])]
    cache.set(1, calls_when_dropped(held.clear))
    fill(cache, 2, 3)
    cache.resize(79)
    assert (keys(cache), leased(cache)) == ([2], 0)  # its end made it the most recent
    assert len(unraised) == 1


# The finalizer


def test_a_lease_that_is_forgotten_warns_and_ends(make: Make) -> None:
    cache = make(80, 1, 2)
    lease = cache.lease([1, 2])
    with pytest.warns(ResourceWarning, match=r"^Lease\(2 keys\) was not released$"):
        del lease
    assert leased(cache) == 0
    assert keys(cache) == [1, 2]


def test_a_lease_that_was_released_or_never_begun_warns_of_nothing(
    make: Make, unraised: list[type[BaseException]]
) -> None:
    lease = make(40, 1).lease([1])
    lease.release()
    del lease
    Lease.__new__(Lease).__del__()
    assert unraised == []


def test_warnings_that_are_errors_do_no_harm(
    make: Make, unraised: list[type[BaseException]]
) -> None:
    cache = make(80, 1, 2)
    lease = cache.lease([1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
    assert unraised == [ResourceWarning]
    fill(cache, 3, 4)
    assert (keys(cache), leased(cache)) == ([3, 4], 0)


def test_it_has_ended_before_it_warns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(80, 1, 2)
    seen: list[int] = []
    monkeypatch.setattr(leases.warnings, "warn", lambda *_, **__: seen.append(leased(cache)))
    lease = cache.lease([1])
    del lease
    assert seen == [0]


def test_the_finalizer_takes_no_lock(make: Make, unraised: list[type[BaseException]]) -> None:
    cache = make(80, 1, 2)
    held = [cache.lease([1])]
    room = cache._room
    with cache._lock:
        thread = threading.Thread(target=held.clear, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waits for the lock"
        assert len(unraised) == 1
        assert cache._room == room  # no table was changed
    assert leased(cache) == 0


ENDS: dict[str, Callable[[MultiModalStaticCache], object]] = {
    "get, a miss": lambda cache: cache.get([77]),
    "get_single, a miss": lambda cache: cache.get_single(77),
    "set": lambda cache: cache.set(9, result(10)),
    "set, present": lambda cache: cache.set(2, result(10)),
    "has": lambda cache: cache.has(1),
    "free": lambda cache: cache.free(77),
    "resize": lambda cache: cache.resize(80),
    "lease": lambda cache: cache.lease([]).release(),
    "stats": lambda cache: cache.stats(),
    "check": lambda cache: cache.check(),
    "repr": repr,
}


@pytest.mark.parametrize("name", ENDS)
def test_every_call_under_the_lock_first_heeds_what_is_over(
    make: Make, name: str, unraised: list[type[BaseException]]
) -> None:
    cache = make(120, 1, 2)
    lease = cache.lease([1])
    del lease
    tiers = cache._tiers()
    assert [len(tier._ended) for tier in tiers] == [1] * len(tiers)
    ENDS[name](cache)
    assert not tiers[-1]._ended
    assert not tiers[-1]._leased
    if name not in ("has", "free"):  # in which the host alone takes part
        assert not cache._ended
        assert not cache._leased
        assert keys(cache)[:2] == ([1, 2] if name == "set, present" else [2, 1])
    cache.check()
    assert len(unraised) == 1


def test_an_end_makes_room_for_the_set_that_comes_next(
    make: Make, unraised: list[type[BaseException]]
) -> None:
    cache = make(80, 1, 2)
    lease = cache.lease([1, 2])
    del lease
    assert cache.set(3, result(20)) is True
    assert (keys(cache), len(unraised)) == ([3], 1)


@pytest.mark.parametrize("copied", [False, True])
def test_a_lease_may_be_dropped_by_what_an_eviction_drops(
    make: Make, copied: bool, unraised: list[type[BaseException]]
) -> None:
    cache = make(120)
    held = [cache.lease([2, 3])]
    cache.set(1, calls_when_dropped(held.clear))
    fill(cache, 2, 3)
    value = EmbeddingResult(embedding=torch.zeros(60)[:30]) if copied else result(30)
    assert cache.set(4, result(10)) is True
    assert cache.set(5, value) is True
    assert (keys(cache), leased(cache), len(unraised)) == ([5], 0, 1)
    assert cache.current_size == recount(cache) == 120


def test_a_lease_may_be_dropped_during_a_copy(
    unraised: list[type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from multimodal_cache import static_cache

    cache = plain(120, 1, 2)
    held = [cache.lease([1])]
    replace = static_cache.replace_tensors

    def dropping(*arguments: Any) -> EmbeddingResult:
        held.clear()
        return replace(*arguments)

    monkeypatch.setattr(static_cache, "replace_tensors", dropping)
    assert cache.set(3, EmbeddingResult(embedding=torch.zeros(60)[:10])) is True
    assert (keys(cache), leased(cache), len(unraised)) == ([2, 1, 3], 0, 1)


def test_leases_that_the_garbage_collector_drops_anywhere_leave_the_books_right(
    make: Make, unraised: list[type[BaseException]]
) -> None:
    """They are dropped in cycles, with a collection at each allocation."""

    class Cycle:
        def __init__(self, lease: Lease) -> None:
            self.itself, self.lease = self, lease

    cache = make(200)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for n in range(1500):
            Cycle(cache.lease([n % 9, n % 5]))
            cache.set(n % 9, EmbeddingResult(embedding=torch.zeros(60)[: n % 20]))
            cache.set([ONE, OTHER][n % 2], result(n % 13))
            if n % 7 == 0:
                cache.free(n % 5)
            cache.get([5])
            cache.resize([160, 200][n % 2] if cache.stats().leased_bytes <= 160 else 200)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert set(unraised) == {ResourceWarning}
    assert len(unraised) == 1500
    assert (leased(cache), cache._leased) == (0, {})
    assert recount(cache) == cache.current_size
    cache.resize(200)
    assert cache.set(99, result(50)) is True
    assert cache.current_size == 200
