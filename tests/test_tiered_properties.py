"""Two tiers against two plain models, and against two real caches, under random calls."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)
from support import kept_bytes, keys, recount, tensors_of
from test_properties import KINDS, LISTS, Entry, Model, SharedRules

from multimodal_cache import CombinedHash, EmbeddingResult, MultiModalStaticCache
from multimodal_cache.leases import Lease
from multimodal_cache.tiered import TieredCache

combine = MultiModalStaticCache.combine_hashes


def numbered(kind: str, size: int, number: int) -> EmbeddingResult:
    """Returns a value of which each byte is the number; a bool has one bit of it."""
    value = KINDS[kind][0](size)
    for tensor in tensors_of(value):
        tensor.untyped_storage().fill_(number % 2 if tensor.dtype == torch.bool else number)
    return value


def bytes_of(value: EmbeddingResult) -> list[list[int]]:
    """Returns the bytes of each tensor in a value."""
    return [
        tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors_of(value)
    ]


def test_values_of_all_kinds_can_be_told_apart() -> None:
    for kind in KINDS:
        assert bytes_of(numbered(kind, 3, 7)) != bytes_of(numbered(kind, 3, 8))


class TwoTiers:
    """The whole is a model of the host's size; the device one that is given what it missed."""

    def __init__(self, max_size: int, host_size: int) -> None:
        self.device = Model(max_size)
        self.whole = Model(host_size)
        self.host_hits = 0

    @property
    def entries(self) -> OrderedDict[int, Entry]:
        return self.whole.entries

    def look_up(self, key: int) -> Entry | None:
        entry = self.whole.look_up(key)
        if entry is None:
            return None
        found = self.device.look_up(key)
        if found is None:
            self.host_hits += 1
            found = entry._replace(same=False)
            self.device.set(self.whole_key(key), found)
        return found

    def set(self, key: int, entry: Entry) -> bool:
        present, _ = self.whole.find(key)
        if not self.whole.set(key, entry):
            return False
        self.lose_what_left()
        self.device.set(key, present._replace(same=False) if present else entry)
        return True

    def free(self, key: int) -> None:
        del self.whole.entries[key]
        self.lose_what_left()

    def lose_what_left(self) -> None:
        for key, entry in list(self.device.entries.items()):
            held = self.whole.entries.get(key)
            if held is None or held.items != entry.items:
                del self.device.entries[key]

    def resize(self, max_size: int) -> None:
        self.device.max_size = max_size
        self.device.make_room(0)

    def clear(self) -> None:
        self.whole.entries.clear()
        self.device.entries.clear()
        self.whole.generation += 1

    def lease(self, mm_hashes: list[int]) -> None:
        self.device.leases.append(mm_hashes)
        self.whole.leases.append(mm_hashes)

    def release(self, number: int) -> None:
        self.device.release(number)
        self.whole.release(number)

    def whole_key(self, key: int) -> int:
        """The key as the whole knows it: with the items, if it has any."""
        items = self.whole.entries[key].items
        return int(key) if items is None else CombinedHash(items)

    @property
    def counts(self) -> dict[str, int]:
        of_the_device = {name: self.device.counts[name] for name in ("evictions", "evicted_bytes")}
        return self.whole.counts | of_the_device | {"host_hits": self.host_hits}


class TieredMachine(SharedRules):
    some_keys = SharedRules.some_keys

    @initialize(max_size=st.integers(0, 40), behind=st.integers(0, 60), copy=st.booleans())
    def begin(self, max_size: int, behind: int, copy: bool) -> None:
        self.evicted: list[tuple[int, list[list[int]]]] = []
        self.copy = copy
        self.cache = TieredCache(
            max_size,
            max_size + behind,
            copy=copy,
            on_evict=lambda key, value: self.evicted.append((key, bytes_of(value))),
        )
        self.model = TwoTiers(max_size, max_size + behind)
        self.leases: list[Lease] = []
        self.values: dict[int, list[list[int]]] = {}
        self.left: list[tuple[int, list[list[int]]]] = []
        self.number = 0
        self.changed: list[EmbeddingResult] = []

    @rule(
        key=some_keys,
        kind=st.sampled_from(sorted(KINDS)),
        size=st.integers(0, 44),
        stale=st.sampled_from([None, None, None, False, True]),
    )
    def set(self, key: int, kind: str, size: int, stale: bool | None) -> None:
        self.number = self.number % 100 + 1
        value = numbered(kind, size, self.number)
        whole = self.model.whole
        generation = None if stale is None else whole.generation - stale
        done = self.cache.set(key, value, generation=generation)
        items = key.mm_hashes if isinstance(key, CombinedHash) else None
        entry = Entry(size, items, value, KINDS[kind][1] and not self.copy)
        inserted = whole.counts["insertions"]
        evicted = len(whole.evicted)
        assert done is (not stale and self.model.set(key, entry))
        self.left += [(gone, self.values[gone]) for gone in whole.evicted[evicted:]]
        if whole.counts["insertions"] > inserted:
            self.values[int(key)] = bytes_of(value)

    @rule(key=some_keys, of_the_host=st.booleans(), largest=st.booleans(), over=st.integers(-1, 1))
    def set_at_the_limit(self, key: int, of_the_host: bool, largest: bool, over: int) -> None:
        tier = self.model.whole if of_the_host else self.model.device
        room = tier.max_size if largest else tier.max_size - tier.size
        assume(room + over >= 0)
        self.set(key, "slice", room + over, stale=None)

    @rule(key=some_keys)
    def get_single(self, key: int) -> None:
        self.same_as(key, self.cache.get_single(key), self.model.look_up(key))

    @rule(items=st.sampled_from(LISTS))
    def get(self, items: list[int]) -> None:
        key = combine(items)
        assert key is not None
        self.same_as(key, self.cache.get(items), self.model.look_up(key))

    @rule()
    def look_nothing_up(self) -> None:
        assert self.cache.get([]) is self.cache.get_single(None) is None
        self.model.whole.counts["misses"] += 2

    @rule(key=some_keys)
    def has(self, key: int) -> None:
        present = self.model.whole.find(key)[0] is not None
        assert self.cache.has(key) is (key in self.cache) is present

    @rule(key=some_keys)
    def free(self, key: int) -> None:
        present = self.model.whole.find(key)[0] is not None
        assert self.cache.free(key) is present
        if present:
            self.model.free(key)

    @precondition(lambda self: self.model.device.entries)
    @rule()
    def change_an_entry_afterwards(self) -> None:
        """What becomes of a result on the device doesn't reach the host."""
        key, entry = next(iter(self.model.device.entries.items()))
        stored = self.cache.mm_cache[key]
        stored.embedding = torch.zeros(500)
        self.model.device.entries[key] = entry._replace(value=stored, same=True)
        self.changed.append(stored)

    @rule(mm_hashes=st.lists(some_keys | st.none(), max_size=3))
    def lease(self, mm_hashes: list[int | None]) -> None:
        self.leases.append(self.cache.lease(mm_hashes))
        self.model.lease([key for key in mm_hashes if key is not None])

    @rule(max_size=st.integers(0, 110))
    def resize(self, max_size: int) -> None:
        if max_size > self.model.whole.max_size:
            with pytest.raises(ValueError, match="^host_size must be max_size or more"):
                self.cache.resize(max_size)
            return
        if max_size < self.model.device.leased_bytes:
            with pytest.raises(ValueError, match="the bytes leased"):
                self.cache.resize(max_size)
            return
        self.cache.resize(max_size)
        self.model.resize(max_size)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.clear()

    def same_as(self, key: int, found: EmbeddingResult | None, entry: Entry | None) -> None:
        assert (found is None) is (entry is None)
        if found is not None and entry is not None:
            assert type(found) is type(entry.value)
            assert (found is entry.value) is entry.same
            if not self.was_changed(found):
                assert bytes_of(found) == self.values[key]

    def was_changed(self, value: EmbeddingResult) -> bool:
        return any(value is changed for changed in self.changed)

    @invariant()
    def books_agree(self) -> None:
        cache, device, whole = self.cache, self.model.device, self.model.whole
        cache.check()
        assert keys(cache) == list(device.entries)
        assert keys(cache.host) == list(whole.entries)
        assert len(cache) == cache.available_size() == len(whole.entries)
        assert (cache.current_size, cache.max_size) == (device.size, device.max_size)
        assert (cache.host.current_size, cache.host.max_size) == (whole.size, whole.max_size)
        assert cache.generation == whole.generation
        assert [key for key, _ in self.evicted] == whole.evicted
        assert self.evicted == self.left

    @invariant()
    def stats_agree(self) -> None:
        stats, counts = self.cache.stats(), self.model.counts
        assert {name: getattr(stats, name) for name in counts} == counts
        assert (stats.entries, stats.current_size) == (
            len(self.model.device.entries), self.model.device.size,
        )  # fmt: skip
        of_the_host = self.cache.host.stats()
        assert stats.leased_bytes == self.model.device.leased_bytes
        assert of_the_host.leased_bytes == self.model.whole.leased_bytes
        for name in ("evictions", "evicted_bytes"):
            assert getattr(of_the_host, name) == self.model.whole.counts[name]

    @invariant()
    def what_is_kept_is_what_is_charged(self) -> None:
        for key, value in self.cache.mm_cache.items():
            if not self.was_changed(value):
                assert kept_bytes(value) == self.model.device.entries[key].nbytes
                assert bytes_of(value) == self.values[key]
        for key, value in self.cache.host.mm_cache.items():
            assert kept_bytes(value) == self.model.whole.entries[key].nbytes
            assert bytes_of(value) == self.values[key]

    def teardown(self) -> None:
        for lease in getattr(self, "leases", []):
            lease.release()


TestTieredMachine = TieredMachine.TestCase


class Call(NamedTuple):
    """A lookup of a key, and a ``set`` of so many bytes if it misses: as a server does."""

    key: int
    nbytes: int
    method: str


class TwoCaches:
    """DESIGN's sentence, with real caches: the device is given what it missed."""

    def __init__(self, max_size: int, host_size: int) -> None:
        self.whole = MultiModalStaticCache(host_size, copy=True, on_evict=self.lose)
        self.device = MultiModalStaticCache(max_size)

    def lose(self, key: int, value: EmbeddingResult) -> None:
        self.device.free(key)

    def get_single(self, key: int) -> tuple[bool, bool]:
        """Returns whether the whole hits, and whether the device answers."""
        found = self.whole.get_single(key)
        if found is None:
            return False, False
        on_device = self.device.get_single(key) is not None
        if not on_device:
            self.give(key, found)
        return True, on_device

    def set(self, key: int, value: EmbeddingResult) -> bool:
        items = self.whole.stats().collisions
        done = self.whole.set(key, value)
        if done and self.whole.stats().collisions > items:
            self.device.free(int(key))
        if done:
            self.give(key, self.whole.mm_cache[key])
        return done

    def give(self, key: int, value: EmbeddingResult) -> None:
        self.device.set(key, EmbeddingResult(embedding=value.embedding.clone()))

    def free(self, key: int) -> bool:
        return self.whole.free(key) and (self.device.free(key) or True)

    def clear(self) -> None:
        self.whole.clear()
        self.device.clear()


TWO_LISTS = [key for items in LISTS[:4] if (key := combine(items)) is not None]
CALLS = st.lists(
    st.builds(
        Call,
        st.integers(0, 7) | st.sampled_from(TWO_LISTS),
        st.integers(0, 30),
        st.sampled_from(["get_single"] * 6 + ["set"] * 3 + ["free", "clear"]),
    ),
    max_size=60,
)


@given(calls=CALLS, max_size=st.integers(0, 60), behind=st.integers(0, 100))
def test_each_tier_hits_as_one_cache_of_its_size_would(
    calls: list[Call], max_size: int, behind: int
) -> None:
    cache = TieredCache(max_size, max_size + behind)
    two = TwoCaches(max_size, max_size + behind)
    for number, (key, nbytes, method) in enumerate(calls, 1):
        value = EmbeddingResult(embedding=torch.full((nbytes,), number, dtype=torch.int8))
        if method == "clear":
            cache.clear()
            two.clear()
        elif method == "free":
            assert cache.free(key) is two.free(key)
        elif method == "set":
            assert cache.set(key, value) is two.set(key, value)
        else:
            before = cache.stats()
            found = cache.get_single(key)
            after = cache.stats()
            hits, on_device = two.get_single(key)
            assert (found is not None) is hits
            assert after.hits - before.hits == hits
            assert after.host_hits - before.host_hits == (hits and not on_device)
            if found is None:
                assert cache.set(key, value) is two.set(key, value)
            else:
                assert torch.equal(found.embedding, two.whole.mm_cache[key].embedding)
        assert keys(cache) == keys(two.device)
        assert keys(cache.host) == keys(two.whole)
    cache.check()
    whole, device, stats = two.whole.stats(), two.device.stats(), cache.stats()
    assert (stats.hits, stats.misses) == (whole.hits, whole.misses)
    assert stats.host_hits == whole.hits - device.hits
    assert (stats.insertions, stats.rejections) == (whole.insertions, whole.rejections)
    assert (stats.collisions, stats.evictions) == (whole.collisions, device.evictions)
    assert recount(cache) == cache.current_size == two.device.current_size
    assert recount(cache.host) == cache.host.current_size == two.whole.current_size
