"""What MultiModalStaticCache does beyond the contract of the reference."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import WRAP, deltas, filled, keys, recount, result

from multimodal_cache import (
    CombinedHash,
    EmbeddingResult,
    EmbeddingTypeError,
    MultimodalCache,
    MultiModalStaticCache,
)

GIVE_BYTES = ": give a number of bytes, such as 4 * 2**30"
NOT_KEYS = [True, 1.0, "1", torch.tensor(1), np.True_, [1], object()]
combine = MultimodalCache.combine_hashes


# Construction


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (-1, ValueError, "max_size must be 0 or more bytes, got -1"),
        (1.0, TypeError, f"max_size must be an int, got float{GIVE_BYTES}"),
        (True, TypeError, f"max_size must be an int, got bool{GIVE_BYTES}"),
        ("1", TypeError, f"max_size must be an int, got str{GIVE_BYTES}"),
        (None, TypeError, f"max_size must be an int, got NoneType{GIVE_BYTES}"),
        (torch.tensor(5), TypeError, f"max_size must be an int, got Tensor{GIVE_BYTES}"),
    ],
)
def test_a_bad_budget_is_named(bad: Any, error: type[Exception], message: str) -> None:
    cache = filled(120, 1, 2)
    message = f"^{re.escape(message)}$"
    with pytest.raises(error, match=message):
        MultiModalStaticCache(bad)
    with pytest.raises(error, match=message):
        cache.resize(bad)
    with pytest.raises(error, match=message):
        cache.max_size = bad
    assert (keys(cache), cache.max_size) == ([1, 2], 120)


def test_a_numpy_integer_is_a_budget() -> None:
    cache = MultiModalStaticCache(np.int64(40))
    assert (cache.max_size, type(cache.max_size)) == (40, int)


def test_a_callback_that_can_not_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="^on_evict must be callable, got int$"):
        MultiModalStaticCache(10, on_evict=5)  # type: ignore[arg-type]


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        MultiModalStaticCache(10, True)  # type: ignore[misc]


def test_current_size_and_generation_can_not_be_assigned() -> None:
    cache = filled(120, 1)
    for name in ("current_size", "generation"):
        with pytest.raises(AttributeError):
            setattr(cache, name, 0)


def test_a_budget_of_zero_means_off() -> None:
    cache = MultiModalStaticCache(0)
    assert cache.set(1, result(1, dtype=torch.int8)) is False
    assert cache.set(2, result(0)) is True
    assert (keys(cache), cache.current_size) == ([2], 0)


# Keys


@pytest.mark.parametrize("bad", NOT_KEYS, ids=lambda bad: type(bad).__name__)
def test_a_key_that_is_no_int_is_refused_by_every_method(bad: Any) -> None:
    cache = filled(120, 1)
    calls: list[Callable[[], object]] = [
        lambda: cache.set(bad, result(1)),
        lambda: cache.get_single(bad),
        lambda: cache.has(bad),
        lambda: bad in cache,
        lambda: cache.free(bad, None),
    ]
    message = (
        f"mm_hash must be an int, got {type(bad).__name__}: hash_feature makes one, "
        "int(digest, 16) one of a hex digest, combine_hashes one of a list"
    )
    for call in calls:
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            call()
    with pytest.raises(TypeError, match="an item of mm_hashes must be an int"):
        cache.get([bad])
    with pytest.raises(TypeError, match="an item of mm_hashes must be an int"):
        cache.get((1, bad))
    assert keys(cache) == [1]


@pytest.mark.parametrize("same", [np.int64(1), np.uint8(1), np.array(1)])
def test_integers_of_other_types_are_the_same_key(same: Any) -> None:
    cache = MultiModalStaticCache(120)
    assert cache.set(same, result(10))
    assert {type(key) for key in cache.mm_cache} == {int}
    stored = cache.get_single(1)
    assert cache.get_single(same) is stored is not None
    assert cache.has(same)
    assert same in cache
    assert cache.free(same)
    assert len(cache) == 0
    cache.set(combine([same]), result(10))
    assert cache.get([1]) is cache.get([same]) is cache.get((same,)) is not None


@pytest.mark.parametrize("wide", [2**64, -(2**70), 2**256 - 1])
def test_keys_may_be_of_any_width(wide: int) -> None:
    cache = filled(120, wide)
    assert cache.get_single(wide) is not None
    assert cache.get_single(wide % WRAP) is None


def test_none_is_never_stored_and_never_found() -> None:
    cache = MultiModalStaticCache(120)
    before = cache.stats()
    assert cache.set(None, result(10)) is False
    assert cache.has(None) is False
    assert None not in cache
    assert cache.free(None) is False
    assert deltas(before, cache.stats()) == {}
    assert cache.get_single(None) is None
    for nothing in ([], (), None, [None], [1, None]):
        assert cache.get(nothing) is None
    assert deltas(before, cache.stats()) == {"misses": 6}
    with pytest.raises(EmbeddingTypeError):
        cache.set(None, "junk")  # type: ignore[arg-type]


def test_no_key_is_not_the_key_that_it_would_hash_to() -> None:
    cache = filled(120, hash(()), hash(None))
    assert cache.get([]) is None
    assert cache.get([1, None]) is None
    assert cache.get(None) is None
    assert cache.get_single(None) is None


# Collisions

ONE, OTHER = combine([5]), combine([5 + WRAP])


def test_another_list_under_the_same_int_is_not_found() -> None:
    cache = filled(120, ONE)
    before = cache.stats()
    assert cache.has(OTHER) is False
    assert OTHER not in cache
    assert cache.free(OTHER) is False
    assert deltas(before, cache.stats()) == {}
    assert cache.get([5 + WRAP]) is None
    assert cache.get_single(OTHER) is None
    assert deltas(before, cache.stats()) == {"misses": 2, "collisions": 2}
    assert cache.get([5]) is cache.get_single(ONE) is not None
    assert cache.has(ONE)


def test_set_replaces_the_entry_it_collides_with() -> None:
    evicted: list[Any] = []
    cache = filled(120, 1, ONE, 2, on_evict=lambda *entry: evicted.append(entry))
    before = cache.stats()
    newest = result(10)
    assert cache.set(OTHER, newest) is True
    assert deltas(before, cache.stats()) == {"insertions": 1, "collisions": 1}
    assert keys(cache) == [1, 2, ONE]
    assert cache.get([5 + WRAP]) is newest
    assert cache.get([5]) is None
    assert evicted == []
    cache.check()


def test_set_counts_the_room_of_the_entry_it_replaces() -> None:
    cache = filled(120, 1, ONE, 2)
    assert cache.set(OTHER, result(20)) is True
    assert keys(cache) == [2, ONE]
    assert cache.current_size == 120


def test_a_value_too_large_does_not_replace_the_entry_it_collides_with() -> None:
    cache = filled(120, ONE, 1)
    before = cache.stats()
    assert cache.set(OTHER, result(31)) is False
    assert deltas(before, cache.stats()) == {"rejections": 1, "collisions": 1}
    assert keys(cache) == [ONE, 1]
    assert cache.get([5]) is not None


@pytest.mark.parametrize("stored_under", [int(ONE), ONE])
def test_a_plain_int_says_nothing_about_its_items_and_is_trusted(stored_under: int) -> None:
    cache = filled(120, stored_under)
    entry = cache.mm_cache[ONE]
    asked = [int(ONE), ONE] if stored_under is ONE else [int(ONE), ONE, OTHER]
    for key in asked:
        assert cache.get_single(key) is entry
        assert cache.has(key)
        assert cache.set(key, result(1)) is True
        assert cache.get_single(key) is entry
    assert cache.get([5]) is entry
    assert cache.stats().collisions == 0
    assert cache.free(asked[-1]) is True
    cache.check()


def test_items_are_forgotten_with_their_entry() -> None:
    cache = filled(80, ONE)
    cache.free(ONE)
    assert cache.set(OTHER, result(10)) is True
    cache.set(1, result(20))  # evicts
    assert cache.set(ONE, result(10)) is True
    cache.clear()
    assert cache.set(OTHER, result(10)) is True
    assert cache.stats().collisions == 0
    cache.check()


# Recency and eviction


def test_a_refused_set_refreshes_nothing() -> None:
    cache = filled(120, 1, 2, 3)
    assert cache.set(4, result(31)) is False
    with pytest.raises(EmbeddingTypeError):
        cache.set(1, "junk")  # type: ignore[arg-type]
    assert keys(cache) == [1, 2, 3]


def test_a_present_key_is_refreshed_even_if_the_new_value_is_too_large() -> None:
    cache = filled(120, 1, 2)
    assert cache.set(1, result(1000)) is True
    assert keys(cache) == [2, 1]


def test_resize_evicts_down_to_the_new_budget_and_no_further() -> None:
    cache = filled(160, 1, 2, 3, 4)
    cache.get_single(1)
    cache.resize(80)
    assert (keys(cache), cache.max_size, cache.current_size) == ([4, 1], 80, 80)
    cache.max_size = 79
    assert keys(cache) == [1]
    cache.resize(1000)
    assert (keys(cache), cache.max_size) == ([1], 1000)
    assert cache.stats().evictions == 3
    cache.check()


def test_resize_to_zero_keeps_only_entries_of_no_bytes() -> None:
    cache = MultiModalStaticCache(100)
    cache.set(1, result(10))
    cache.set(2, result(0))
    cache.resize(0)
    assert keys(cache) == [2]


# on_evict


def test_on_evict_hears_of_each_entry_evicted_for_room_in_order() -> None:
    heard: list[tuple[int, EmbeddingResult]] = []
    cache = filled(120, 1, ONE, 3, on_evict=lambda *entry: heard.append(entry))
    one, two, three = cache.mm_cache.values()
    cache.set(4, result(20))
    assert [(key, value) for key, value in heard] == [(1, one), (ONE, two)]
    assert heard[1][1] is two
    assert isinstance(heard[1][0], CombinedHash)
    assert heard[1][0].mm_hashes == (5,)
    cache.resize(80)
    assert heard[2][0] == 3
    assert heard[2][1] is three


def test_evicted_results_live_until_the_callback_has_run() -> None:
    alive: list[bool] = []
    value = result(10)
    tensor = weakref.ref(value.embedding)
    cache = MultiModalStaticCache(
        40, on_evict=lambda key, evicted: alive.append(tensor() is evicted.embedding)
    )
    cache.set(1, value)
    del value
    cache.set(2, result(10))
    assert alive == [True]
    assert tensor() is None


def test_on_evict_does_not_hear_of_other_departures() -> None:
    heard: list[Any] = []
    cache = filled(120, ONE, 2, 3, on_evict=lambda *entry: heard.append(entry))
    cache.set(OTHER, result(10))
    cache.free(2)
    cache.set(4, result(1000))
    cache.clear()
    assert heard == []


def test_on_evict_runs_when_the_lock_is_released_and_the_entry_is_in() -> None:
    cache: MultiModalStaticCache

    def on_evict(mm_hash: int, value: EmbeddingResult) -> None:
        assert cache.free(mm_hash) is False
        seen.append((mm_hash, keys(cache), cache._lock._is_owned()))  # type: ignore[attr-defined]

    seen: list[Any] = []
    cache = filled(80, 1, 2, on_evict=on_evict)
    cache.set(3, result(10))
    cache.resize(40)
    assert seen == [(1, [2, 3], False), (2, [3], False)]


def test_on_evict_may_call_back() -> None:
    demoted = MultiModalStaticCache(1000)
    cache = filled(80, 1, 2, on_evict=demoted.set)
    cache.set(3, result(10))
    assert keys(demoted) == [1]

    again = filled(40, 1, on_evict=lambda key, value: again.set(key, value) if key == 1 else None)
    again.set(2, result(10))
    assert keys(again) == [1]
    again.check()


def test_what_on_evict_raises_is_logged_and_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    heard = []

    def on_evict(mm_hash: int, value: EmbeddingResult) -> None:
        heard.append(mm_hash)
        raise OSError("the disk is full")

    cache = filled(80, 1, 2, on_evict=on_evict)
    assert cache.set(3, result(20)) is True
    assert heard == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "on_evict failed for the key 0x1",
        "on_evict failed for the key 0x2",
    ]
    assert {record.name for record in caplog.records} == {"multimodal_cache.static_cache"}
    assert "the disk is full" in caplog.text


# clear and generations


def test_generation_counts_the_clears() -> None:
    cache = filled(120, 1)
    assert cache.generation == 0
    cache.clear()
    cache.resize(10)
    assert cache.generation == 1


def test_a_result_of_an_older_generation_is_refused() -> None:
    cache = MultiModalStaticCache(120)
    began = cache.generation
    assert cache.set(1, result(10), generation=began) is True
    cache.clear()
    before = cache.stats()
    assert cache.set(1, result(10), generation=began) is False
    assert len(cache) == 0
    cache.set(1, result(10), generation=np.int64(cache.generation))
    cache.set(2, result(10))
    assert cache.set(1, result(10), generation=began) is False
    assert cache.set(1, result(10), generation=cache.generation + 1) is False
    assert keys(cache) == [1, 2]
    assert deltas(before, cache.stats()) == {"insertions": 2}


def test_generations_are_compared_by_value() -> None:
    cache = MultiModalStaticCache(120)
    for _ in range(300):
        cache.clear()
    assert cache.set(1, result(10), generation=int("300")) is True


def test_a_generation_that_is_no_int_is_named() -> None:
    cache = MultiModalStaticCache(120)
    with pytest.raises(TypeError, match="^generation must be an int, got str$"):
        cache.set(1, result(10), generation="0")  # type: ignore[arg-type]


def test_clear_keeps_the_counters() -> None:
    cache = filled(80, 1, 2, 3)
    cache.get_single(3)
    before = cache.stats()
    cache.clear()
    assert deltas(before, cache.stats()) == {}
    cache.check()


# The object itself


def test_repr_says_entries_bytes_and_budget() -> None:
    assert repr(filled(120, 1, 2)) == (
        "MultiModalStaticCache(entries=2, current_size=80, max_size=120)"
    )


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_can_be_neither_pickled_nor_copied(duplicate: Any) -> None:
    with pytest.raises(TypeError, match="MultiModalStaticCache holds a lock"):
        duplicate(filled(120, 1))


def negative_charges(cache: Any) -> dict[str, Any]:
    charges = zip(cache._entries.values(), (-1, 0), strict=True)
    entries = [(value, key, nbytes, items, use) for (value, key, _, items, use), nbytes in charges]
    return {
        "_entries": {key: entry for entry in entries if (key := entry[1])},
        "_by_items": {items: entry for entry in entries if (items := entry[3])},
    }


def test_check_says_which_promise_is_broken() -> None:
    def spoil(change: Callable[[Any], object]) -> str:
        cache = filled(120, 1, ONE)
        cache.check()
        change(cache)
        with pytest.raises(AssertionError) as caught:
            cache.check()
        return str(caught.value)

    spoiled = spoil(lambda c: setattr(c, "_current_size", 81))
    assert spoiled.startswith(
        "MultiModalStaticCache(entries=2, current_size=81, max_size=120) breaks invariant 1: "
    )
    assert "sum" in spoiled
    assert "sum" in spoil(lambda c: setattr(c, "_current_size", 79))
    assert "from 0 to max_size" in spoil(lambda c: setattr(c, "_max_size", 79))
    negative = spoil(lambda c: c.__dict__.update(_current_size=-1, **negative_charges(c)))
    assert negative.endswith("breaks invariant 1: current_size is from 0 to max_size")
    assert "4: what is held" in spoil(lambda c: c.mm_cache.pop(1))
    assert "4: what is held" in spoil(lambda c: c.mm_cache.update({7: result(10)}))
    assert "4: what is held" in spoil(lambda c: c.mm_cache.update({1: result(10)}))
    hashes = {(n,): hash((n,)) for n in range(100)}

    def put(items: tuple[int, ...], cache: Any) -> None:
        cache._entries[1] = cache._by_items[items] = (cache.mm_cache[1], 1, 40, items, None)

    for items in (min(hashes, key=hashes.__getitem__), max(hashes, key=hashes.__getitem__)):
        assert "4: items" in spoil(partial(put, items))
    assert "4: items" in spoil(lambda c: c._by_items.clear())
    assert "4: items" in spoil(lambda c: c._by_items.update({(5, 6): c._entries[1]}))
    other = (result(10), int(ONE), 40, ONE.mm_hashes)
    assert "4: items" in spoil(lambda c: c._by_items.update({ONE.mm_hashes: other}))

    class Repeating(OrderedDict[int, EmbeddingResult]):
        def __iter__(self) -> Any:
            return iter([1, 1])

    class Longer(OrderedDict[int, EmbeddingResult]):
        def __len__(self) -> int:
            return super().__len__() + 1

    assert "3: " in spoil(lambda c: setattr(c, "mm_cache", Longer(c.mm_cache)))
    assert "3: " in spoil(lambda c: setattr(c, "mm_cache", Repeating(c.mm_cache)))


# Calling back: a tensor that is dropped may run a finalizer that uses the cache


def tracked(cache_call: Callable[[], object]) -> EmbeddingResult:
    """A result of 40 bytes that makes a call when it is dropped."""
    value = result(10)
    weakref.finalize(value.embedding, cache_call).atexit = False
    return value


def test_the_books_are_right_when_a_replaced_entry_stores_its_successor() -> None:
    cache = MultiModalStaticCache(1000)
    assert cache.set(ONE, tracked(lambda: cache.set(OTHER, result(20))))
    assert cache.set(OTHER, result(10))
    cache.check()
    assert cache.current_size == recount(cache) == 80


def test_the_books_are_right_when_a_dropped_entry_calls_back() -> None:
    cache = MultiModalStaticCache(120)
    calls: list[str] = []

    def on_drop(name: str) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            cache.check()
            cache.get_single(3)
            cache.stats()

        return call

    for key in (1, 2, 3):
        cache.set(key, tracked(on_drop(f"{key}")))
    cache.set(4, result(10))
    assert calls == ["1"]
    cache.free(2)
    assert calls == ["1", "2"]
    cache.resize(40)
    cache.set(ONE, tracked(on_drop("one")))
    cache.set(OTHER, tracked(on_drop("other")))
    assert calls == ["1", "2", "3", "one"]
    cache.clear()
    assert calls == ["1", "2", "3", "one", "other"]
    cache.check()


@pytest.mark.parametrize("drop", [lambda cache: cache.free(1), lambda cache: cache.clear()])
def test_what_is_freed_is_dropped_when_the_lock_is_released(drop: Any) -> None:
    """So that a finalizer which takes long, or takes another lock, holds nobody up."""
    cache = MultiModalStaticCache(120)
    held: list[bool] = []
    cache.set(1, tracked(lambda: held.append(cache._lock._is_owned())))  # type: ignore[attr-defined]
    drop(cache)
    assert held == [False]


def test_a_finalizer_sees_a_budget_that_holds_while_the_cache_shrinks() -> None:
    cache = MultiModalStaticCache(120)
    checked: list[int] = []

    def check() -> None:
        cache.check()
        checked.append(cache.current_size)

    for key in (1, 2, 3):
        cache.set(key, tracked(check))
    cache.resize(0)
    assert checked == [80, 40, 0]


def test_a_finalizer_that_refills_the_cache_does_not_push_it_over_its_budget() -> None:
    cache = MultiModalStaticCache(80)
    cache.set(1, tracked(lambda: cache.set(9, result(20))))
    cache.set(2, result(10))
    assert cache.set(3, result(15)) is True
    cache.check()
    assert keys(cache) == [3]
    assert recount(cache) == cache.current_size == 60


def test_a_finalizer_that_sets_the_same_key_is_first() -> None:
    cache = MultiModalStaticCache(40)
    first = result(5)
    cache.set(1, tracked(lambda: cache.set(2, first)))
    assert cache.set(2, result(10)) is True
    assert cache.get_single(2) is first
    cache.check()


def test_a_finalizer_that_clears_makes_the_result_stale() -> None:
    cache = MultiModalStaticCache(40)
    cache.set(1, tracked(lambda: cache.clear()))
    assert cache.set(2, result(10), generation=cache.generation) is False
    assert len(cache) == 0
    cache.set(1, tracked(lambda: cache.clear()))
    assert cache.set(2, result(10)) is True
    cache.check()


def test_a_finalizer_that_shrinks_the_cache_is_heeded() -> None:
    cache = MultiModalStaticCache(40)
    cache.set(1, tracked(lambda: cache.resize(39)))
    assert cache.set(2, result(10)) is False
    assert cache.max_size == 39
    cache.check()


class Meddling(OrderedDict[int, EmbeddingResult]):
    """Calls back from inside a lookup, as a finalizer may that the garbage collector runs there."""

    meddle: Callable[[], object] = staticmethod(lambda: None)

    def _meddle(self) -> None:
        meddle, self.meddle = self.meddle, lambda: None  # type: ignore[method-assign]
        meddle()

    def move_to_end(self, key: int, last: bool = True) -> None:
        self._meddle()
        super().move_to_end(key, last)

    def __iter__(self) -> Any:
        first = list(super().__iter__())
        self._meddle()
        return iter(first)


@pytest.mark.parametrize("get", [lambda c: c.get([5]), lambda c: c.get_single(int(ONE))])
def test_an_entry_freed_during_its_lookup_is_still_returned(get: Any) -> None:
    cache = filled(120, ONE)
    entry = cache.mm_cache[ONE]
    cache.mm_cache = Meddling(cache.mm_cache)
    cache.mm_cache.meddle = lambda: cache.free(ONE)  # type: ignore[attr-defined]
    assert get(cache) is entry
    assert (len(cache), cache.stats().hits) == (0, 1)
    cache.check()


def test_an_entry_stored_during_its_lookup_is_found() -> None:
    class Late(dict[Any, Any]):
        def get(self, items: Any, default: Any = None) -> Any:
            found = super().get(items, default)
            assert cache.set(ONE, result(10))
            return found

    cache = filled(120)
    cache._hits_by_items = Late()
    assert cache.get([5]) is cache.mm_cache[ONE]
    assert deltas(filled(120).stats(), cache.stats()) == {"hits": 1, "insertions": 1}
    cache.check()


def test_an_entry_freed_while_its_items_are_compared_is_stored_anew() -> None:
    class Freeing(MultiModalStaticCache):
        def _collides(self, key: int, items: Any) -> bool:
            collides = super()._collides(key, items)
            self.clear()
            return collides

    cache = Freeing(120)
    for _ in range(2):
        assert cache.set(ONE, result(10)) is True
        cache.check()
    assert list(cache.mm_cache) == [ONE]


@pytest.mark.parametrize("meddle", [lambda c: c.free(1), lambda c: c.clear()])
def test_an_entry_freed_while_it_is_being_evicted_is_not_evicted_twice(meddle: Any) -> None:
    cache = filled(80, 1, 2)
    cache.mm_cache = Meddling(cache.mm_cache)
    cache.mm_cache.meddle = lambda: meddle(cache)  # type: ignore[attr-defined]
    assert cache.set(3, result(10)) is True
    assert cache.stats().evictions == 0
    cache.check()


def test_a_cache_that_was_cleared_while_it_evicts_has_nothing_to_evict() -> None:
    class ClearedFirst(Meddling):
        def __iter__(self) -> Any:
            self._meddle()
            return super().__iter__()

    cache = filled(80, 1, 2)
    cache.mm_cache = ClearedFirst(cache.mm_cache)
    cache.mm_cache.meddle = cache.clear  # type: ignore[attr-defined]
    assert cache.set(3, result(10)) is True
    assert (keys(cache), cache.stats().evictions) == ([3], 0)
    cache.check()


def test_a_cache_that_was_changed_from_outside_says_so_and_does_not_hang() -> None:
    cache = filled(80, 1, 2)
    cache.mm_cache.clear()
    with pytest.raises(RuntimeError, match="^mm_cache was changed from outside"):
        cache.set(3, result(10))


@pytest.mark.parametrize("call", [lambda c: c.clear(), lambda c: c.set(77, result(1))])
def test_a_collection_between_the_last_look_and_the_insertion(call: Any) -> None:
    """CPython up to 3.11 collects where it allocates; an insertion once allocated a tuple.

    The finalizer of what is evicted makes that tuple's allocation the next to collect.
    """
    cache = MultiModalStaticCache(1000)
    spent: list[Any] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            call(cache)

    def arm() -> None:
        Garbage()
        gc.disable()
        spent.extend((n, n, n) for n in range(2100))  # more than the free list of 3-tuples
        gc.set_threshold(1)
        gc.enable()

    threshold = gc.get_threshold()
    evicted = result(250)
    weakref.finalize(evicted, arm).atexit = False
    cache.set(1, evicted)
    del evicted
    try:
        assert cache.set(77, result(4))
    finally:
        gc.set_threshold(*threshold)
    cache.check()
    assert recount(cache) == cache.current_size


def test_finalizers_that_the_garbage_collector_runs_leave_the_books_right() -> None:
    cache = MultiModalStaticCache(200)
    rng = random.Random(0)
    actions: list[Callable[[], object]] = [
        lambda: cache.clear(),
        lambda: cache.free(rng.randrange(9)),
        lambda: cache.set(rng.randrange(9), result(rng.randrange(30))),
        lambda: cache.resize(rng.choice([100, 200])),
        lambda: cache.get_single(rng.randrange(9)),
    ]

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, rng.choice(actions)).atexit = False

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(2000):
            Cycle()
            cache.set(rng.randrange(9), EmbeddingResult(embedding=torch.zeros(60)[:20]))
            cache.get([rng.randrange(9)])
            cache.resize(rng.choice([100, 200]))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    cache.check()
    assert recount(cache) == cache.current_size


def test_the_lookup_of_a_combined_key_is_not_diverted_by_a_subclass() -> None:
    class FallsBack(MultiModalStaticCache):
        def get(self, mm_hashes: Any, combined_hash: int | None = None) -> EmbeddingResult | None:
            return self.get_single(self.combine_hashes(mm_hashes))

    cache = FallsBack(80)
    cache.set(ONE, result(10))
    assert cache.get([5]) is not None
    assert cache.get([5 + WRAP]) is None


# Out of memory


def test_running_out_of_memory_is_a_warning_and_false(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(2**50 + 40, 1)
    enormous = torch.zeros(1).expand(2**48)  # a pebibyte, once it is copied
    with caplog.at_level(logging.WARNING):
        assert cache.set(2, EmbeddingResult(embedding=enormous)) is False
    assert (keys(cache), cache.stats().rejections) == ([1], 1)
    assert "an embedding of 1125899906842624 bytes was not cached" in caplog.text
    cache.check()


def test_nothing_is_logged_under_the_lock() -> None:
    """A log handler may take its time, or a lock of its own."""
    held: list[bool] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(cache._lock._is_owned())  # type: ignore[attr-defined]

    cache = filled(2**50, on_evict=lambda key, value: raise_(OSError()))
    logger, handler = logging.getLogger("multimodal_cache"), Handler()
    logger.addHandler(handler)
    try:
        cache.set(1, EmbeddingResult(embedding=torch.zeros(1).expand(2**48)))
        cache.set(2, result(1))
        cache.resize(0)
    finally:
        logger.removeHandler(handler)
    assert held == [False, False]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("out of memory")])
def test_an_accelerator_out_of_memory_is_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(80, 1, 2)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *args, **options: raise_(error))
    assert cache.set(3, EmbeddingResult(embedding=torch.zeros(20)[:10])) is False
    assert keys(cache) == [2]
    cache.check()


def test_another_error_while_copying_is_raised_and_the_books_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[int] = []
    cache = filled(80, 1, 2, on_evict=lambda key, value: heard.append(key))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *a, **o: raise_(RuntimeError("assert")))
    with pytest.raises(RuntimeError, match="^assert$"):
        cache.set(3, EmbeddingResult(embedding=torch.zeros(20)[:10]))
    assert (keys(cache), heard, cache.stats().rejections) == ([2], [1], 0)
    cache.check()


def raise_(error: Exception) -> Any:
    raise error


def test_what_leaves_the_cache_is_dropped() -> None:
    cache = MultiModalStaticCache(80)
    watched = {}
    for key in (1, 2):
        value = result(10)
        watched[key] = weakref.ref(value.embedding)
        cache.set(key, value)
        del value
    cache.set(3, result(10))
    assert watched[1]() is None
    cache.clear()
    gc.collect()
    assert watched[2]() is None


def test_a_budget_below_one_embedding_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = MultiModalStaticCache(50)
    for key in (1, 2):
        assert not cache.set(key, result(20))
        assert cache.set(10 + key, result(10))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "an embedding of 80 bytes was not cached" in record.getMessage()
    assert "larger than max_size, 50 bytes" in record.getMessage()


def test_a_cache_that_is_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = MultiModalStaticCache(0)
    assert not cache.set(1, result(20))
    assert not cache.set(None, result(20))
    assert caplog.records == []


def test_a_refusal_for_another_reason_is_no_matter_of_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = MultiModalStaticCache(50)
    generation = cache.generation
    cache.clear()
    assert not cache.set(1, result(10), generation=generation)
    assert caplog.records == []


def test_a_slice_of_a_quantised_dtype_is_refused_before_anything_is_evicted() -> None:
    """Torch has no copy for it, though its ``is_quantized`` is False."""
    cache = filled(80, 1, 2)
    embedding = torch.zeros(80, dtype=torch.int8)[:40].view(torch.qint8)
    with pytest.raises(EmbeddingTypeError, match="can't be cached: tensors must be dense"):
        cache.set(3, EmbeddingResult(embedding=embedding))
    assert keys(cache) == [1, 2]
