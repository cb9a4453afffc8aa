"""Every method is atomic."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import WRAP, recount

from multimodal_cache import EmbeddingResult, MultiModalStaticCache, static_cache
from multimodal_cache._ownership import Replacements, replace_tensors
from multimodal_cache.tiered import TieredCache

combine = MultiModalStaticCache.combine_hashes
THREADS = 8
TIME_LIMIT = 60.0  # only a hang takes that long


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(params=[True, False], ids=["with a GIL", "without a GIL"], autouse=True)
def gil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether hits may do without the lock; that they may not can be tried on every Python."""
    if request.param and static_cache._HITS_TAKE_THE_LOCK:
        pytest.skip("this Python has no GIL")
    monkeypatch.setattr(static_cache, "_HITS_TAKE_THE_LOCK", not request.param)
    has_gil: bool = request.param
    return has_gil


def run_together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Runs ``work(n)`` on several threads at once; raises what the first of them raised."""
    barrier = threading.Barrier(threads, timeout=TIME_LIMIT)
    errors: list[BaseException] = []

    def target(n: int) -> None:
        try:
            barrier.wait()
            work(n)
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    pool = [threading.Thread(target=target, args=(n,), daemon=True) for n in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(TIME_LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def make_cache(max_size: int, host_size: int | None, **options: Any) -> MultiModalStaticCache:
    """Returns a plain cache, or one of two tiers."""
    if host_size is None:
        return MultiModalStaticCache(max_size, **options)
    return TieredCache(max_size, host_size, **options)


def whole(cache: Any) -> MultiModalStaticCache:
    """Returns the tier that holds all."""
    return getattr(cache, "host", cache)  # type: ignore[no-any-return]


TIERS = pytest.mark.parametrize(
    "host_size", [None, 400, 600], ids=["plain", "as much in the host", "more in the host"]
)


@TIERS
def test_case_26_eight_threads_on_a_tiny_cache(  # cachetools #80, boltons #52
    device: str, host_size: int | None
) -> None:
    """Each entry holds its own key, so that a wrong answer is seen."""
    lost: list[int] = []
    cache = make_cache(400, host_size, on_evict=lambda mm_hash, _: lost.append(mm_hash))
    lists = [[-1], [-2], [5], [5 + WRAP], [1, 2], [2, 1]]
    batch = torch.arange(16.0, device=device).repeat_interleave(16).reshape(16, 16)

    def work(n: int) -> None:
        rng = random.Random(n)
        for _ in range(1500):
            key, size = rng.randrange(16), rng.randrange(1, 16)
            listed = rng.choice(lists)
            action = rng.randrange(10)
            if action < 3:
                cache.set(key, EmbeddingResult(embedding=batch[key, :size]))
            elif action < 5:
                own = torch.full((size,), float(lists.index(listed)), device=device)
                cache.set(combine(listed), EmbeddingResult(embedding=own))
            elif action < 7:
                found = cache.get_single(key)
                assert found is None or found.embedding[0] == key
            elif action < 8:
                found = cache.get(listed)
                assert found is None or found.embedding[0] == lists.index(listed)
            elif action < 9:
                cache.free(key)
            else:
                cache.resize(rng.choice([200, 400]))
                assert cache.has(key) in (True, False)
                cache.check()
            if rng.random() < 0.005:
                cache.clear()

    run_together(work)
    cache.check()
    assert cache.current_size == recount(cache) <= 400
    assert whole(cache).current_size <= (host_size or 400)
    assert device == "cuda" or whole(cache).current_size == recount(whole(cache))
    assert len(lost) == whole(cache).stats().evictions > 0
    assert (cache.stats().host_hits > 0) is (host_size is not None)


@pytest.mark.filterwarnings("ignore:Lease:ResourceWarning")
@TIERS
@pytest.mark.parametrize("frees", [False, True], ids=["nobody frees", "others free"])
def test_what_a_thread_leases_stays_beside_all_that_others_do(
    host_size: int | None, frees: bool
) -> None:
    """Each entry holds its own key. Half of the leases are forgotten instead of released."""
    cache = make_cache(400, host_size)

    def work(n: int) -> None:
        rng = random.Random(n)
        for k in range(400):
            mm_hashes = [rng.randrange(12), rng.randrange(12)]
            lease = cache.lease(mm_hashes)
            for key in [*mm_hashes, rng.randrange(12, 24)]:
                size = rng.randrange(1, 16)
                cache.set(key, EmbeddingResult(embedding=torch.full((size,), float(key))))
            there = [key for key in mm_hashes if cache.has(key)]
            for _ in range(3):
                found = cache.get_single(rng.randrange(24))
                assert found is None or found.embedding.ne(found.embedding[0]).sum() == 0
            if n == 0:
                cache.check()
                stats = cache.stats()
                assert stats.leased_bytes <= stats.current_size <= stats.max_size
            if n == 1:
                resize_if_it_may_be(cache, rng.choice([200, 400]))
            if frees and k % 8 == n:
                cache.free(rng.choice(mm_hashes)) if rng.random() < 0.9 else cache.clear()
            assert frees or all(cache.get_single(key) is not None for key in there)
            if rng.random() < 0.5:
                lease.release()

    run_together(work)
    assert cache.stats().leased_bytes == whole(cache).stats().leased_bytes == 0
    cache.check()
    for tier in (cache, whole(cache)):
        assert (tier._leased, list(tier._ended)) == ({}, [])
        assert tier.current_size == recount(tier)
    cache.resize(0)
    assert cache.current_size == 0


def resize_if_it_may_be(cache: MultiModalStaticCache, max_size: int) -> None:
    try:
        cache.resize(max_size)
    except ValueError as error:
        assert "the bytes leased" in str(error)  # noqa: PT017 - it may also not be raised


def test_one_of_several_threads_that_release_a_lease_ends_it() -> None:
    cache = MultiModalStaticCache(400)
    cache.set(1, EmbeddingResult(embedding=torch.zeros(100)))
    other = cache.lease([1])
    rounds = [cache.lease([1]) for _ in range(200)]
    run_together(lambda _: [lease.release() for lease in rounds] and None)
    assert cache.stats().leased_bytes == 400
    assert cache.set(2, EmbeddingResult(embedding=torch.zeros(1))) is False
    other.release()
    assert cache.set(2, EmbeddingResult(embedding=torch.zeros(1))) is True
    assert cache._leased == {}


class CountingLock:
    """A lock that counts how often it is taken, also by who has it, and how often not given back.

    Attributes:
        turns: How often it was taken by somebody who hadn't it.
    """

    def __init__(self) -> None:
        self.taken = self.held = self.turns = 0

    def acquire(self) -> bool:
        self.taken += 1
        self.turns += not self.held
        self.held += 1
        return True

    def release(self) -> None:
        self.held -= 1

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


CALLS: list[tuple[int, Callable[[MultiModalStaticCache], object]]] = [
    (0, lambda cache: cache.get([2])),
    (0, lambda cache: cache.get_single(1)),
    (0, lambda cache: cache.current_size),
    (0, len),
    (1, lambda cache: cache.get([1])),
    (1, lambda cache: cache.get([])),
    (1, lambda cache: cache.get_single(9)),
    (1, lambda cache: cache.get_single(combine([2]))),
    (1, lambda cache: cache.set(2, EmbeddingResult(embedding=torch.zeros(1)))),
    (1, lambda cache: cache.has(1)),
    (1, lambda cache: cache.free(1)),
    (2, lambda cache: cache.lease([1]).release()),
    (1, lambda cache: cache.clear()),
    (1, lambda cache: cache.resize(1)),
    (1, lambda cache: cache.stats()),
    (1, lambda cache: cache.check()),
]


@pytest.mark.parametrize(("times", "call"), CALLS)
def test_a_hit_takes_no_lock_and_all_else_takes_it_once_and_gives_it_back(
    times: int, call: Callable[[MultiModalStaticCache], object], gil: bool
) -> None:
    cache = MultiModalStaticCache(400)
    for key in (1, combine([2])):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))
    lock = cache._lock = CountingLock()  # type: ignore[assignment]
    found = call(cache)
    if isinstance(found, EmbeddingResult) and not gil:
        times = 1
    assert (lock.taken, lock.held) == (times, 0)


@pytest.mark.parametrize("hit", [lambda cache: cache.get_single(1), lambda cache: cache.get([2])])
def test_a_hit_is_not_held_up_by_a_copy_under_the_lock(
    hit: Callable[[MultiModalStaticCache], object], gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GIL it is, since it needs the lock then."""
    cache = MultiModalStaticCache(400)
    for key in (1, combine([2])):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))
    copying, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def copy(value: EmbeddingResult, replacements: Replacements) -> EmbeddingResult:
        copying.set()
        assert go_on.wait(TIME_LIMIT)
        order.append("copy")
        return replace_tensors(value, replacements)

    class Lock:
        """The cache's lock; lets the copy go on when somebody waits for it."""

        def __enter__(self) -> None:
            if not lock.acquire(blocking=False):
                go_on.set()
                assert lock.acquire(timeout=TIME_LIMIT)

        def __exit__(self, *error: object) -> None:
            lock.release()

    lock = cache._lock
    cache._lock = Lock()  # type: ignore[assignment]
    monkeypatch.setattr(static_cache, "replace_tensors", copy)

    def work(n: int) -> None:
        if n == 0:
            assert cache.set(3, EmbeddingResult(embedding=torch.zeros(9)[:1]))
            return
        assert copying.wait(TIME_LIMIT)
        assert hit(cache) is not None
        order.append("hit")
        go_on.set()

    run_together(work, threads=2)
    assert order == (["hit", "copy"] if gil else ["copy", "hit"])
    assert cache.has(3)


@pytest.mark.parametrize(("times", "call"), CALLS)
def test_a_hit_of_the_device_takes_no_lock_and_all_else_holds_one_all_the_time(
    times: int, call: Callable[[MultiModalStaticCache], object], gil: bool
) -> None:
    """One lock for both tiers, taken again inside perhaps, but never let go in the middle."""
    cache = TieredCache(400, 400)
    for key in (1, combine([2])):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))
    lock = cache._lock = cache.host._lock = CountingLock()  # type: ignore[assignment]
    found = call(cache)
    if isinstance(found, EmbeddingResult) and not gil:
        times = 1
    assert (lock.turns, lock.held) == (times, 0)


def test_a_hit_of_the_host_takes_the_lock_once() -> None:
    cache = TieredCache(4, 400)
    for key in (1, combine([2]), 3):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))
    lock = cache._lock = cache.host._lock = CountingLock()  # type: ignore[assignment]
    assert cache.get_single(1) is not None
    assert (lock.turns, lock.held) == (1, 0)
    assert cache.get([2]) is not None
    assert (lock.turns, lock.held) == (2, 0)


@TIERS
def test_no_update_of_a_counter_is_lost(host_size: int | None) -> None:
    cache = make_cache(10_000, host_size and 10_000)
    cache.set(1, EmbeddingResult(embedding=torch.zeros(1)))
    rounds = 2000

    def work(n: int) -> None:
        for k in range(rounds):
            cache.get_single(1)
            cache.get([9])
            cache.set(1000 + n * rounds + k, EmbeddingResult(embedding=torch.zeros(1)))

    run_together(work)
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (THREADS * rounds, THREADS * rounds)
    assert stats.insertions == THREADS * rounds + 1
    evictions = whole(cache).stats().evictions
    assert stats.insertions - evictions == stats.entries == len(cache)


@TIERS
def test_one_of_several_threads_that_free_an_entry_is_told_so(host_size: int | None) -> None:
    cache = make_cache(1000, host_size and 10_000)
    cache.resize(1000 if host_size else 10_000)
    for key in range(500):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))
    freed = [0] * THREADS

    def work(n: int) -> None:
        for key in range(500):
            freed[n] += cache.free(key)

    run_together(work)
    assert sum(freed) == 500
    assert cache.current_size == 0


@TIERS
def test_a_snapshot_is_of_one_moment(host_size: int | None) -> None:
    cache = make_cache(4096, host_size and 4096)
    batch = torch.zeros(64, 256)

    def work(n: int) -> None:
        for k in range(300):
            if n % 2:
                cache.set(n * 1000 + k, EmbeddingResult(embedding=batch[k % 64]))
                continue
            stats = cache.stats()
            assert stats.entries * 1024 == stats.current_size <= 4096
            stats = whole(cache).stats()
            assert stats.insertions - stats.evictions == stats.entries
            cache.check()

    run_together(work)
    assert recount(cache) == cache.current_size == 4096


@TIERS
def test_a_check_beside_hits_finds_nothing_broken(host_size: int | None) -> None:
    """A hit reorders `mm_cache` without the lock, so `check` must walk it in one step."""
    cache = make_cache(4 * 500, host_size and 4 * 500)
    for key in range(500):
        cache.set(key, EmbeddingResult(embedding=torch.zeros(1)))

    def work(n: int) -> None:
        rng = random.Random(n)
        for _ in range(300):
            if n == 0:
                cache.check()
            else:
                for _ in range(20):
                    assert cache.get_single(rng.randrange(500)) is not None

    run_together(work)
    assert cache.stats().hits == (THREADS - 1) * 300 * 20


def test_a_callback_may_take_a_lock_that_callers_hold() -> None:
    """It would deadlock if on_evict ran under the cache's lock."""
    outer = threading.Lock()

    def on_evict(mm_hash: int, value: EmbeddingResult) -> None:
        if not holding.seen:
            with outer:
                pass

    class Holding(threading.local):
        seen = False

    holding = Holding()
    cache = MultiModalStaticCache(40, on_evict=on_evict)

    def work(n: int) -> None:
        for k in range(300):
            value = EmbeddingResult(embedding=torch.zeros(10))
            if n % 2:
                cache.set(n * 1000 + k, value)
                continue
            with outer:
                holding.seen = True
                cache.set(n * 1000 + k, value)
                holding.seen = False

    run_together(work)
    cache.check()
