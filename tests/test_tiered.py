"""What TieredCache does beyond the plain class: its two tiers, one by one."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import random
import re
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from test_ownership import Deepstack, Frozen

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


# Values: what is brought back is what was given, with memory of its own


Pair = namedtuple("Pair", "first second")


def push_out(cache: TieredCache, key: int) -> None:
    """Makes a key leave the device alone, also one of no bytes."""
    MultiModalStaticCache._remove(cache, key)
    assert key in cache
    assert key not in cache.mm_cache


def brought_back(value: Any, **options: Any) -> tuple[TieredCache, Any]:
    """Stores a value, and gets it back from the host."""
    cache = TieredCache(10**6, 10**6, **options)
    assert cache.set(1, value)
    before = vars(cache.host.mm_cache[1]).copy()
    push_out(cache, 1)
    found = cache.get_single(1)
    assert found is cache.mm_cache[1] is cache.get_single(1)
    assert cache.stats().host_hits == 1
    assert vars(cache.host.mm_cache[1]) == before
    assert recount(cache) == cache.current_size
    assert recount(cache.host) == cache.host.current_size
    cache.check()
    return cache, found


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    one, other = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


BYTES = torch.arange(64, dtype=torch.uint8)
VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "bfloat16": lambda: torch.arange(32.0).to(torch.bfloat16).reshape(4, 8),
    "float8": lambda: BYTES.clone().view(torch.float8_e4m3fn),
    "complex64": lambda: torch.arange(8.0).to(torch.complex64),
    "bool": lambda: torch.arange(8) % 3 == 0,
    "sub-byte": lambda: BYTES.clone().view(torch.uint4),
    "part of a sub-byte": lambda: BYTES.clone()[8:24].view(torch.uint4),
    "uint4": lambda: BYTES.clone().view(torch.uint4),
    "0-d": lambda: torch.tensor(5.0),
    "empty": lambda: torch.zeros(0, 64),
    "slice": lambda: torch.arange(64.0).reshape(8, 8)[2:5],
    "columns": lambda: torch.arange(64.0).reshape(8, 8)[:, 2:5],
    "transposed": lambda: torch.arange(64.0).reshape(4, 16).T,
    "expanded": lambda: torch.arange(4.0).reshape(1, 4).expand(16, 4),
    "with a graph": lambda: torch.arange(4.0, requires_grad=True) * 2,
    "leaf": lambda: torch.arange(4.0, requires_grad=True),
    "inference": lambda: torch.inference_mode()(lambda: torch.arange(4.0) * 2)(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
    "numpy": lambda: torch.from_numpy(np.arange(4.0)),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("copy_all", [False, True])
def test_a_tensor_comes_back_as_it_was(kind: str, copy_all: bool) -> None:
    tensor = VALUES[kind]()
    cache, found = brought_back(EmbeddingResult(embedding=tensor), copy=copy_all)
    assert same_bytes(found.embedding, tensor)
    assert not found.embedding.requires_grad
    assert cache.current_size == cache.host.current_size == tensor.nbytes
    assert found.embedding.is_contiguous()
    addresses = {
        value.untyped_storage().data_ptr()
        for value in (tensor, found.embedding, cache.host.mm_cache[1].embedding)
    }
    assert len(addresses) == 3 or not tensor.nbytes


def test_the_first_value_is_stored_on_the_device_as_it_is() -> None:
    value = full_of(1)
    cache = TieredCache(40, 80)
    assert cache.set(1, value)
    assert cache.get_single(1) is value
    part = EmbeddingResult(embedding=torch.arange(100.0)[:10])
    cache.set(2, part)
    assert cache.get_single(2) is not part
    assert kept_bytes(cache.mm_cache[2]) == 40


@pytest.mark.parametrize("copy_all", [False, True])
def test_the_host_copy_is_not_the_buffer_that_the_encoder_uses_again(copy_all: bool) -> None:
    buffer = torch.full((10,), 1.0)
    cache = TieredCache(40, 80, copy=copy_all)
    cache.set(1, EmbeddingResult(embedding=buffer))
    buffer.fill_(2)
    assert number_of(cache.get_single(1)) == (1 if copy_all else 2)
    push_out(cache, 1)
    assert number_of(cache.get_single(1)) == 1


def test_a_result_with_many_tensors_comes_back_with_its_fields() -> None:
    batch = torch.arange(100.0)
    label, notes = object(), [1, 2]
    value = Deepstack(
        embedding=batch[:2],
        layers=[batch[2:4], torch.arange(7.0)],
        extra=OrderedDict(a=batch[4:6], b={"c": [(batch[6:8],)]}, notes=notes, n=5),
        pair=Pair(batch[8:10], Frozen(batch[10:12])),
        label=label,
    )
    cache, found = brought_back(value)
    assert cache.current_size == cache.host.current_size == 4 * (6 * 2 + 7)
    assert type(found) is Deepstack
    assert found.label is label
    assert found.extra["notes"] is notes
    assert type(found.extra) is OrderedDict
    assert list(found.extra) == ["a", "b", "notes", "n"]
    assert type(found.pair) is Pair
    assert type(found.pair.second) is Frozen
    assert found.pair.second.size is value.pair.second.size
    for ours, theirs in [
        (found.embedding, value.embedding),
        (found.layers[0], value.layers[0]),
        (found.layers[1], value.layers[1]),
        (found.extra["a"], value.extra["a"]),
        (found.extra["b"]["c"][0][0], value.extra["b"]["c"][0][0]),
        (found.pair.first, value.pair.first),
        (found.pair.second.embedding, value.pair.second.embedding),
    ]:
        assert same_bytes(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_a_tensor_that_stands_twice_comes_back_as_one() -> None:
    tensor = torch.arange(10.0)
    cache, found = brought_back(Deepstack(embedding=tensor, layers=[tensor]))
    assert found.embedding is found.layers[0]
    assert cache.current_size == cache.host.current_size == 40


def test_a_storage_that_tensors_share_is_charged_to_the_host_for_each() -> None:
    tensor = torch.arange(10.0)
    cache = TieredCache(100, 100)
    assert cache.set(1, Deepstack(embedding=tensor, layers=[tensor.view(2, 5)]))
    assert (cache.current_size, cache.host.current_size) == (40, 80)
    assert (recount(cache), recount(cache.host)) == (40, 80)
    push_out(cache, 1)
    assert cache.get_single(1) is not None
    assert cache.current_size == recount(cache) == 80
    cache.check()


@pytest.mark.parametrize("kind", UNCOUNTABLE)
@pytest.mark.parametrize("key", [1, 3, None])
@pytest.mark.filterwarnings("ignore")  # torch warns about the prototypes among these
def test_a_tensor_that_can_not_be_counted_is_refused(kind: str, key: int | None) -> None:
    cache = two_tiers(40, 80, 1, 2)
    before = cache.stats()
    with pytest.raises(EmbeddingTypeError, match="^embedding can't be cached"):
        cache.set(key, EmbeddingResult(embedding=UNCOUNTABLE[kind]()))
    assert (keys(cache), keys(cache.host), cache.stats()) == ([2], [1, 2], before)


def test_a_result_that_can_not_be_copied_is_refused_since_the_host_copies() -> None:
    class Uncopyable(EmbeddingResult):
        def __copy__(self) -> Any:
            raise TypeError("there is but one")

    value = Uncopyable(embedding=torch.zeros(10))
    assert MultiModalStaticCache(40).set(1, value)
    cache = two_tiers(40, 80, 2)
    with pytest.raises(EmbeddingTypeError, match="there is but one"):
        cache.set(1, value)
    assert keys(cache) == keys(cache.host) == [2]


# Sizes


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.levelname for record in caplog.records} <= {"WARNING"}
    return [record.getMessage() for record in caplog.records]


def test_what_is_larger_than_the_device_is_in_the_host_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = two_tiers(40, 200, 1)
    for key in (2, 3):
        assert cache.set(key, full_of(key, 11))
    assert (keys(cache), keys(cache.host)) == ([1], [1, 2, 3])
    assert messages(caplog) == [
        "an embedding of 44 bytes is in host memory alone: it is larger than max_size, 40 bytes, "
        "so each hit of such an embedding copies it; this is said once"
    ]
    found = [cache.get_single(2), cache.get_single(2)]
    assert [number_of(each) for each in found] == [2, 2]
    assert found[0] is not found[1]
    assert keys(cache) == [1]
    stats = cache.stats()
    assert (stats.hits, stats.host_hits, stats.rejections, stats.evictions) == (2, 2, 0, 0)
    assert len(caplog.records) == 1
    cache.check()


def test_what_became_too_large_for_the_device_is_told_by_the_lookup(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = two_tiers(40, 80, ONE)
    cache.resize(39)
    assert number_of(cache.get([5])) == number_of(cache.get([5])) == ONE % 1000
    (message,) = messages(caplog)
    assert message.startswith("an embedding of 40 bytes is in host memory alone: it is larger")


def test_what_is_larger_than_the_host_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    cache = two_tiers(40, 80, 1, 2)
    before = cache.stats()
    for key in (3, 4):
        assert cache.set(key, full_of(key, 21)) is False
    assert deltas(before, cache.stats()) == {"rejections": 2}
    assert (keys(cache), keys(cache.host)) == ([2], [1, 2])
    assert messages(caplog) == [
        "an embedding of 84 bytes was not cached, since it is larger than host_size, 80 bytes: "
        "no such embedding will be; this is said once"
    ]
    assert cache.set(ONE, full_of(5))
    assert cache.set(OTHER, full_of(6, 21)) is False
    assert number_of(cache.get([5])) == 5
    assert cache.stats().collisions == 1


def test_a_device_that_is_off_leaves_all_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    cache = two_tiers(0, 80, 1, 2)
    assert cache.set(3, result(0, 64))
    assert (keys(cache), keys(cache.host)) == ([3], [1, 2, 3])
    assert [number_of(cache.get_single(key)) for key in (1, 2)] == [1, 2]
    assert cache.stats().host_hits == 2
    assert caplog.records == []


def test_a_cache_of_nothing_refuses_what_has_a_byte(caplog: pytest.LogCaptureFixture) -> None:
    cache = TieredCache(0, 0)
    assert cache.set(1, full_of(1)) is False
    assert cache.set(2, result(0, 64)) is True
    assert cache.get_single(1) is None
    assert cache.get_single(2) is not None
    assert keys(cache) == keys(cache.host) == [2]
    assert caplog.records == []


def test_resize_leaves_the_host_alone() -> None:
    cache = two_tiers(120, 160, 1, 2, 3)
    before = cache.stats()
    cache.max_size = 50
    assert (keys(cache), keys(cache.host)) == ([3], [1, 2, 3])
    assert deltas(before, cache.stats()) == {"evictions": 2, "evicted_bytes": 80}
    assert cache.host.max_size == 160
    cache.check()


# Out of memory

NO_MEMORY = [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: out of memory")]


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 1000
) -> Iterator[list[int]]:
    """Lets copies to the host and back fail a number of times; yields how many are left."""
    left = [times]
    real = tiered.copy_out

    def fail(*arguments: Any) -> Any:
        left[0] -= 1
        return real(*arguments) if left[0] < 0 else raise_(error)

    with monkeypatch.context() as patched:
        patched.setattr(tiered, "copy_out", fail)
        yield left


@pytest.mark.parametrize("error", NO_MEMORY, ids=["CUDA", "CPU"])
def test_without_memory_for_the_host_copy_nothing_is_cached(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = two_tiers(40, 120, 1, 2, 3)
    before = cache.stats()
    with failing(monkeypatch, error):
        assert cache.set(4, full_of(4)) is False
    assert deltas(before, cache.stats()) == {"rejections": 1}
    assert (keys(cache), keys(cache.host)) == ([3], [2, 3])
    assert messages(caplog) == [f"an embedding of 40 bytes was not cached: {error}"]
    assert cache.set(4, full_of(4))
    cache.check()


@pytest.mark.parametrize("error", NO_MEMORY, ids=["CUDA", "CPU"])
def test_without_memory_on_the_device_set_stores_in_the_host_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = two_tiers(40, 120, 1)
    before = cache.stats()
    part = EmbeddingResult(embedding=torch.full((100,), 2.0)[:10])
    clone = torch.Tensor.clone
    clones = iter([clone, lambda *_, **__: raise_(error)])  # the first is for the host
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", lambda *a, **o: next(clones)(*a, **o))
        assert cache.set(2, part) is True
    assert deltas(before, cache.stats()) == {
        "insertions": 1, "evictions": 1, "evicted_bytes": 40,
    }  # fmt: skip
    assert (keys(cache), keys(cache.host)) == ([], [1, 2])
    assert messages(caplog) == [f"an embedding of 40 bytes is in host memory alone: {error}"]
    assert number_of(cache.get_single(2)) == 2
    cache.check()


@pytest.mark.parametrize("error", NO_MEMORY, ids=["CUDA", "CPU"])
def test_without_memory_on_the_device_a_repeated_set_is_still_true(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = two_tiers(40, 120, 1, 2)
    with failing(monkeypatch, error):
        assert cache.set(1, full_of(100)) is True
    assert (keys(cache), keys(cache.host)) == ([], [2, 1])
    assert messages(caplog) == [f"an embedding of 40 bytes is in host memory alone: {error}"]
    assert number_of(cache.get_single(1)) == 1


@pytest.mark.parametrize("error", NO_MEMORY, ids=["CUDA", "CPU"])
def test_a_lookup_tries_a_second_time_for_this_call_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = two_tiers(40, 120, 1, 2)
    before = cache.stats()
    with failing(monkeypatch, error, times=1):
        assert number_of(cache.get_single(1)) == 1
    after = cache.stats()
    assert deltas(before, after) == {"hits": 1, "evictions": 1, "evicted_bytes": 40}
    assert after.host_hits == 1
    assert (keys(cache), keys(cache.host)) == ([], [2, 1])
    assert caplog.records == []
    cache.check()


@pytest.mark.parametrize("error", NO_MEMORY, ids=["CUDA", "CPU"])
@pytest.mark.parametrize("get", [lambda c: c.get([5]), lambda c: c.get_single(ONE)])
def test_a_lookup_without_memory_even_for_this_call_is_a_miss(
    get: Callable[[TieredCache], object],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = two_tiers(40, 120, ONE, 2)
    before = cache.stats()
    with failing(monkeypatch, error) as left:
        assert get(cache) is None
    after = cache.stats()
    assert left == [1000 - 2]
    assert deltas(before, after) == {"misses": 1, "evictions": 1, "evicted_bytes": 40}
    assert after.host_hits == 0
    assert keys(cache.host) == [ONE, 2]
    assert messages(caplog) == [
        f"an embedding of 40 bytes is in host memory alone: it can't be copied back: {error}"
    ]
    assert get(cache) is not None
    cache.check()


def test_another_error_of_a_copy_is_raised_and_the_books_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = two_tiers(40, 120, 1, 2)
    with failing(monkeypatch, RuntimeError("assert")):
        for call in (lambda: cache.get_single(1), lambda: cache.set(1, full_of(1))):
            with pytest.raises(RuntimeError, match="^assert$"):
                call()
    cache.check()
    assert not cache._lock._is_owned()  # type: ignore[attr-defined]
    assert number_of(cache.get_single(1)) == 1


def test_running_out_of_real_memory_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache = two_tiers(40, 2**51, 1)
    enormous = torch.zeros(1).expand(2**48)  # a pebibyte, once it is copied
    assert cache.set(2, EmbeddingResult(embedding=enormous)) is False
    assert (keys(cache.host), cache.stats().rejections) == ([1], 1)
    (message,) = messages(caplog)
    assert message.startswith("an embedding of 1125899906842624 bytes was not cached: ")


def test_nothing_is_logged_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log handler may take its time, or a lock of its own."""
    held: list[tuple[str, bool]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            owned = cache._lock._is_owned()  # type: ignore[attr-defined]
            held.append((record.getMessage().partition(":")[0], owned))

    cache = two_tiers(40, 80, on_evict=lambda key, value: raise_(OSError()))
    logger, handler = logging.getLogger("multimodal_cache"), Handler()
    logger.addHandler(handler)
    try:
        cache.set(1, full_of(1, 21))
        cache.set(2, full_of(2, 11))
        cache.set(3, full_of(3))
        cache.set(4, full_of(4))
        with failing(monkeypatch, NO_MEMORY[0]):
            cache.get_single(3)
            cache.set(3, full_of(3))
        with failing(monkeypatch, NO_MEMORY[0]):
            cache.set(5, full_of(5))
    finally:
        logger.removeHandler(handler)
    assert held == [
        ("an embedding of 84 bytes was not cached, since it is larger than host_size, 80 bytes",
         False),
        ("an embedding of 44 bytes is in host memory alone", False),
        ("on_evict failed for the key 0x2", False),
        ("an embedding of 40 bytes is in host memory alone", False),
        ("an embedding of 40 bytes is in host memory alone", False),
        ("on_evict failed for the key 0x4", False),
        ("an embedding of 40 bytes was not cached", False),
    ]  # fmt: skip


# Calling back: what is dropped may run a finalizer that uses the cache, and so may the garbage
# collector at any allocation, such as that of a copy


def tracked(call: Callable[[], object], size: int = 10) -> EmbeddingResult:
    """A result that makes a call when it is dropped."""
    value = full_of(0, size)
    weakref.finalize(value.embedding, call).atexit = False
    return value


def stay_consistent(cache: TieredCache) -> None:
    cache.check()
    assert set(keys(cache)) <= set(keys(cache.host))
    assert recount(cache) == cache.current_size <= cache.max_size
    assert recount(cache.host) == cache.host.current_size <= cache.host.max_size


@contextmanager
def meddling_copies(
    monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], object]
) -> Iterator[list[str]]:
    """Makes a call once while a copy is made: in the middle, as the collector may."""
    made: list[str] = []
    real = tiered.copy_out

    def copy_out(*arguments: Any) -> torch.Tensor:
        copied = real(*arguments)
        made.append("copy")
        if len(made) == 1:
            meddle()
        return copied

    with monkeypatch.context() as patched:
        patched.setattr(tiered, "copy_out", copy_out)
        yield made


MEDDLING: dict[str, Callable[[TieredCache], object]] = {
    "clear": lambda cache: cache.clear(),
    "free": lambda cache: cache.free(1),
    "free another": lambda cache: cache.free(2),
    "set": lambda cache: cache.set(1, full_of(8)),
    "set another": lambda cache: cache.set(8, full_of(8)),
    "free and set": lambda cache: (cache.free(1), cache.set(1, full_of(8))),
    "clear and set": lambda cache: (cache.clear(), cache.set(1, full_of(8))),
    "set what fills the host": lambda cache: cache.set(8, full_of(8, 30)),
    "get_single": lambda cache: cache.get_single(1),
    "get_single of another": lambda cache: cache.get_single(2),
    "resize": lambda cache: cache.resize(0),
    "check": lambda cache: cache.check(),
}


@pytest.mark.parametrize("name", MEDDLING)
@pytest.mark.parametrize("call", ["get_single", "set", "set of another"])
def test_a_call_while_a_copy_is_made(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = two_tiers(40, 120, 1, 2)
    clears: list[int] = []

    def meddle() -> None:
        MEDDLING[name](cache)
        cache.check()
        clears.append(cache.generation)

    with meddling_copies(monkeypatch, meddle) as made:
        if call == "get_single":
            assert number_of(cache.get_single(1)) == 1
        elif call == "set":
            assert cache.set(1, full_of(9)) is (1 in cache)
        else:
            assert cache.set(3, full_of(3)) is (3 in cache)
    assert made
    stay_consistent(cache)
    numbers_held = [number_of(value) for value in cache.mm_cache.values()]
    behind = [number_of(cache.host.mm_cache[key]) for key in cache.mm_cache]
    assert numbers_held == behind
    if "clear" in name:
        assert clears == [1]
        assert set(numbers_held) <= {3, 8, 9}, "it was there before the clear"


def test_what_was_taken_from_the_host_before_a_clear_is_not_on_the_device_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = two_tiers(40, 120, 1, 2)
    with meddling_copies(monkeypatch, cache.clear) as made:
        assert number_of(cache.get_single(1)) == 1
    assert len(made) == 2  # one for the device, which is refused, and one for this call alone
    assert (keys(cache), keys(cache.host)) == ([], [])
    assert cache.stats().host_hits == 1
    cache.check()


def test_not_even_if_the_key_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = two_tiers(40, 120, 1, 2)

    def replace() -> None:
        cache.clear()
        cache.set(1, full_of(8, 20))  # in the host alone

    with meddling_copies(monkeypatch, replace):
        assert number_of(cache.get_single(1)) == 1
    assert (keys(cache), keys(cache.host)) == ([], [1])
    assert number_of(cache.get_single(1)) == 8
    cache.check()


def test_a_lookup_is_not_answered_with_another_list_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = two_tiers(40, 120, ONE, 2)
    with meddling_copies(monkeypatch, lambda: cache.set(OTHER, full_of(8))):
        assert number_of(cache.get([5])) == ONE % 1000
    assert cache.get([5]) is None
    assert number_of(cache.get([5 + WRAP])) == 8
    cache.check()


@pytest.mark.parametrize("again", [False, True])
def test_a_clear_between_the_look_at_the_host_and_the_device(again: bool) -> None:
    """The garbage collector may run there, since what brings an entry back is allocated."""
    cache = two_tiers(40, 120, 1, 2)

    class Clearing(dict[int, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            cache.host._entries = entries
            entries.update(self)
            cache.clear()
            if again:
                cache.set(1, full_of(8, 20))
            return found

    entries: dict[int, Any] = {}
    cache.host._entries = Clearing(cache.host._entries)
    assert number_of(cache.get_single(1)) == 1
    assert (keys(cache), keys(cache.host)) == ([], [1] if again else [])
    cache.check()


@pytest.mark.parametrize("name", MEDDLING)
@pytest.mark.parametrize("tier", ["device", "both"])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.set(3, full_of(3)),
        lambda cache: cache.set(3, full_of(3, 30)),
        lambda cache: cache.set(OTHER, full_of(7)),
        lambda cache: cache.get_single(2),
        lambda cache: cache.resize(0),
        lambda cache: cache.free(ONE),
        lambda cache: cache.clear(),
    ],
)
def test_a_call_while_something_is_dropped(
    call: Callable[[TieredCache], object], tier: str, name: str
) -> None:
    cache = TieredCache(40, 120)
    calls: list[str] = []

    def finalize() -> None:
        calls.append(name)
        if len(calls) == 1:
            MEDDLING[name](cache)
        stay_consistent(cache)

    for key in (1, 2):
        cache.set(key, full_of(key))
    cache.set(ONE, tracked(finalize))
    if tier == "both":
        copied = cache.host.mm_cache[ONE].embedding
        weakref.finalize(copied, finalize).atexit = False
        del copied
    call(cache)
    stay_consistent(cache)
    if name == "clear" and calls:
        held = {number_of(value) for value in cache.mm_cache.values()}
        assert held.isdisjoint({0, 1, 2}), "it was there before the clear"
    cache.clear()
    assert len(calls) == (2 if tier == "both" else 1)
    stay_consistent(cache)


def test_a_finalizer_that_clears_beats_a_bring_back() -> None:
    """What makes room for the copy is dropped, and clears: nothing old is there afterwards."""
    cache = TieredCache(40, 120)
    cache.set(1, full_of(1))
    cache.set(2, tracked(cache.clear))
    assert number_of(cache.get_single(1)) == 1
    assert (keys(cache), keys(cache.host), cache.generation) == ([], [], 1)
    assert cache.stats().host_hits == 1
    cache.check()


def test_a_set_whose_entry_a_finalizer_clears_says_so() -> None:
    cache = TieredCache(40, 120)
    cache.set(1, tracked(cache.clear))
    assert cache.set(2, full_of(2)) is False
    assert (keys(cache), keys(cache.host)) == ([], [])
    assert cache.set(2, full_of(2)) is True


def test_a_set_whose_entry_is_freed_before_it_is_on_the_device_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = two_tiers(40, 120, 1)
    admit = cache.host._admit

    def admit_and_free(*arguments: Any) -> Any:
        stored = admit(*arguments)
        cache.free(2)
        return stored

    monkeypatch.setattr(cache.host, "_admit", admit_and_free)
    assert cache.set(2, full_of(2)) is False
    assert (keys(cache), keys(cache.host)) == ([1], [1])
    cache.check()


def test_a_result_of_an_older_generation_is_refused_by_both() -> None:
    cache = TieredCache(40, 40)
    cache.set(1, tracked(cache.clear))
    assert cache.set(2, full_of(2), generation=cache.generation) is False
    assert (keys(cache), keys(cache.host)) == ([], [])


@pytest.mark.parametrize("drop", [lambda cache: cache.free(1), lambda cache: cache.clear()])
def test_what_is_freed_is_dropped_when_the_lock_is_released(
    drop: Callable[[TieredCache], object],
) -> None:
    cache = TieredCache(40, 120)
    held: list[bool] = []

    def note() -> None:
        held.append(cache._lock._is_owned())  # type: ignore[attr-defined]

    cache.set(1, tracked(note))
    weakref.finalize(cache.host.mm_cache[1].embedding, note).atexit = False
    drop(cache)
    assert held == [False, False]


def test_what_leaves_is_dropped_in_both() -> None:
    cache = TieredCache(40, 80)
    watched = []
    for key in (1, 2, 3):
        value = full_of(key)
        cache.set(key, value)
        watched.append((weakref.ref(value.embedding), weakref.ref(cache.host.mm_cache[key])))
        del value
    assert [(one() is None, other() is None) for one, other in watched] == [
        (True, True), (True, False), (False, False),
    ]  # fmt: skip


def test_a_dropped_cache_frees_both_tiers_at_once() -> None:
    def fill() -> list[Callable[[], object]]:
        cache = two_tiers(80, 120, 1, ONE, 2, on_evict=lambda *_: None)
        cache.get_single(1)
        cache.get([5])
        held = [*cache.mm_cache.values(), *cache.host.mm_cache.values()]
        return [weakref.ref(cache), weakref.ref(cache.host), *map(weakref.ref, held)]

    gc.collect()
    gc.disable()
    try:
        assert [left() for left in fill()] == [None] * 7
    finally:
        gc.enable()


def test_host_memory_that_outlives_its_cache_still_works() -> None:
    cache = two_tiers(40, 80, 1, 2)
    host = cache.host
    del cache
    assert host.free(1)
    host.clear()
    assert (len(host), host.current_size) == (0, 0)
    host.check()


def test_finalizers_that_the_garbage_collector_runs_leave_the_books_right() -> None:
    cache = TieredCache(100, 200)
    rng = random.Random(0)
    actions: list[Callable[[], object]] = [
        lambda: cache.clear(),
        lambda: cache.free(rng.randrange(9)),
        lambda: cache.set(rng.randrange(9), full_of(1, rng.randrange(1, 30))),
        lambda: cache.resize(rng.choice([50, 100])),
        lambda: cache.get_single(rng.randrange(9)),
    ]

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            weakref.finalize(self, rng.choice(actions)).atexit = False

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(1000):
            Cycle()
            cache.set(rng.randrange(9), EmbeddingResult(embedding=torch.zeros(60)[:20]))
            cache.get([rng.randrange(9)])
            cache.get_single(rng.randrange(9))
            cache.resize(rng.choice([50, 100]))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    stay_consistent(cache)


# Around a CachedEncoder


def encoder_of(
    max_size: int, host_size: int, **options: Any
) -> tuple[TieredCache, EncoderOfNumbers, CachedEncoder[Any]]:
    cache, encode = TieredCache(max_size, host_size), EncoderOfNumbers(tokens=10)
    return cache, encode, CachedEncoder(cache, encode, key=int, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_images_that_left_the_device_are_not_encoded_again(asynchronous: bool) -> None:
    cache, encode, encoder = encoder_of(80, 400)

    def call(features: list[int]) -> list[float]:
        if asynchronous:
            return numbers(asyncio.run(encoder.encode_async(features)))
        return numbers(encoder(features))

    images = list(range(10))
    assert call(images) == images
    assert (len(keys(cache)), len(cache)) == (2, 10)
    assert call(images[::-1]) == images[::-1]
    assert call([3, 99, 5]) == [3, 99, 5]
    assert encode.calls == [images, [99]]
    stats = encoder.stats()
    assert (stats.hits, stats.encoded) == (12, 11)
    assert cache.stats().host_hits == 10
    cache.check()


def test_an_entry_of_another_length_is_dropped_from_both() -> None:
    cache, encode, encoder = encoder_of(40, 400)
    encoder([1, 2], num_tokens=[10, 10])
    encode.tokens = 7
    assert numbers(encoder([1], num_tokens=[7])) == [1]
    assert encoder.stats().row_mismatches == 1
    assert cache.host.mm_cache[1].embedding.shape == (7, 1)
    assert numbers(encoder([1], num_tokens=[7])) == [1]
    assert encode.calls == [[1, 2], [1]]
    cache.check()


def test_what_was_encoded_before_a_clear_is_in_neither_tier() -> None:
    cache = TieredCache(80, 400)

    def encode(features: list[int]) -> torch.Tensor:
        if features == [1]:
            cache.clear()
        return torch.full((len(features), 10, 1), float(features[0]))

    encoder = CachedEncoder(cache, encode, key=int)
    encoder([2])
    assert numbers(encoder([1])) == [1]
    assert (keys(cache), keys(cache.host)) == ([], [])
    assert numbers(encoder([2])) == [2]
    assert keys(cache.host) == [2]


# Other devices: first as told by tensors that say they are elsewhere, then on CUDA itself


class Far(torch.Tensor):
    """Says that it is on a CUDA device, though its memory is the CPU's."""

    is_cpu, is_cuda, device = False, True, torch.device("cuda", 0)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def record_stream(self, stream: object) -> None:
        """Has no memory that a stream could use again."""


class Stream:
    """A stream that says what it is to wait for."""

    def __init__(self, told: list[tuple[Any, ...]], name: str) -> None:
        self.told, self.name = told, name

    def wait_event(self, event: object) -> None:
        self.told.append(("wait", self.name))


class Elsewhere(Far):
    """Says that it is on a device of another kind."""

    is_cuda, device = False, torch.device("mps")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Lets such tensors be copied, and returns a list of what the device is told."""
    told: list[tuple[Any, ...]] = []
    empty_like, copy_ = torch.empty_like, torch.Tensor.copy_

    def empty(source: torch.Tensor, *, device: Any, pin_memory: bool, **options: Any) -> Any:
        kind = torch.device(device).type
        told.append(("allocate", kind, pin_memory))
        made = empty_like(source.as_subclass(torch.Tensor), **options)
        return made.as_subclass({"cpu": torch.Tensor, "cuda": Far, "mps": Elsewhere}[kind])

    def copy_into(made: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        told.append(("copy", non_blocking))
        return copy_(made, source)

    class Event:
        def record(self, stream: Stream) -> None:
            told.append(("record", stream.name))

    one = Stream(told, "one")
    monkeypatch.setattr(torch, "empty_like", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_into)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: one)
    return told


def test_copies_of_cuda_tensors_are_pinned_and_wait_for_nobody_but_each_other(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TieredCache(20, 100)
    value = EmbeddingResult(embedding=torch.arange(5.0).as_subclass(Far))
    assert cache.set(1, value)
    assert cache.get_single(1) is value
    assert told == [
        ("allocate", "cpu", True), ("copy", True), ("record", "one"), ("record", "one"),
    ]  # fmt: skip
    push_out(cache, 1)
    told.clear()
    two = Stream(told, "two")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: two)
    found = cache.get_single(1)
    assert found is not None
    assert told == [
        ("wait", "two"), ("allocate", "cuda", False), ("copy", True), ("record", "two"),
    ]  # fmt: skip
    assert type(found.embedding) is Far
    assert found.embedding.tolist() == [0, 1, 2, 3, 4]
    assert cache.get_single(1) is found
    assert len(told) == 4
    cache.check()


def test_a_slice_of_a_cuda_tensor_is_copied_to_the_host_without_its_batch(
    told: list[tuple[Any, ...]],
) -> None:
    cache = TieredCache(0, 100)
    batch = torch.arange(100.0).reshape(5, 20).T.as_subclass(Far)
    assert cache.set(1, EmbeddingResult(embedding=batch[3:5].as_subclass(Far)))
    held = cache.host.mm_cache[1].embedding
    assert held.is_contiguous()
    assert kept_bytes(cache.host.mm_cache[1]) == 40
    assert held.tolist() == batch[3:5].tolist()


def test_copies_of_other_devices_are_plain(told: list[tuple[Any, ...]]) -> None:
    cache = TieredCache(20, 20)
    assert cache.set(1, EmbeddingResult(embedding=torch.arange(5.0).as_subclass(Elsewhere)))
    assert told == [("allocate", "cpu", False), ("copy", False)]
    assert cache.host.current_size == 20
    push_out(cache, 1)
    told.clear()
    found = cache.get_single(1)
    assert found is not None
    assert told == [("allocate", "mps", False), ("copy", False)]
    assert type(found.embedding) is Elsewhere
    assert found.embedding.tolist() == [0, 1, 2, 3, 4]
    cache.check()


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("size", "charged"), [(0, 0), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**20 + 1, 2**21)]
)
def test_pinned_memory_is_charged_as_torch_rounds_it(size: int, charged: int) -> None:
    cache = TieredCache(size, 2**22)
    tensor = torch.ones(size, dtype=torch.int8).as_subclass(Far)
    assert cache.set(1, EmbeddingResult(embedding=tensor))
    assert (cache.current_size, cache.host.current_size) == (size, charged)
    push_out(cache, 1)
    assert cache.get_single(1) is not None
    assert (cache.current_size, cache.host.current_size) == (size, charged)


@pytest.mark.usefixtures("told")
def test_what_the_host_would_round_beyond_its_size_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = TieredCache(65, 127)
    tensor = torch.ones(65, dtype=torch.int8).as_subclass(Far)
    assert cache.set(1, EmbeddingResult(embedding=tensor)) is False
    (message,) = messages(caplog)
    assert "an embedding of 128 bytes was not cached, since it is larger than host_size" in message


@needs_cuda
def test_on_cuda_the_host_copy_is_pinned_and_charged_as_rounded() -> None:
    cache = TieredCache(80, 1000)
    for key in range(3):
        value = torch.full((10,), float(key), device="cuda")
        assert cache.set(key, EmbeddingResult(embedding=value))
        assert key == 0 or number_of(cache.get_single(key - 1)) == key - 1
    assert len(cache.mm_cache) == 2
    for held in cache.host.mm_cache.values():
        assert held.embedding.is_cpu
        assert held.embedding.is_pinned()
    assert cache.host.current_size == 3 * 64
    for key in range(3):
        found = cache.get_single(key)
        assert number_of(found) == key
        assert found is not None
        assert found.embedding.is_cuda
    torch.cuda.synchronize()
    assert [number_of(held) for held in cache.host.mm_cache.values()] == [0, 1, 2]
    cache.check()


@needs_cuda
def test_on_cuda_what_goes_back_waits_for_what_was_written_on_another_stream() -> None:
    cache = TieredCache(2**20, 2**23)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(writer):
        value = torch.zeros(2**18, device="cuda")
        torch.cuda._sleep(100_000_000)  # the writer is late, but the reader is not held up here
        value.fill_(7)
        assert cache.set(1, EmbeddingResult(embedding=value))
        cache.set(2, EmbeddingResult(embedding=torch.zeros(2**18, device="cuda")))
    assert keys(cache) == [2]
    with torch.cuda.stream(reader):
        found = cache.get_single(1)
        assert number_of(found) == 7
    assert cache.stats().host_hits == 1
    torch.cuda.synchronize()


@needs_cuda
def test_on_cuda_nothing_is_synchronised() -> None:
    cache = TieredCache(2**20, 2**23)
    values = [torch.full((2**18,), float(n), device="cuda") for n in range(3)]
    batch = torch.zeros(4, 1000, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for key, value in enumerate(values):
            assert cache.set(key, EmbeddingResult(embedding=value))
        assert cache.set(9, EmbeddingResult(embedding=batch[1]))
        found = [cache.get_single(key) for key in range(3)]
        cache.clear()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert [number_of(each) for each in found] == [0, 1, 2]
