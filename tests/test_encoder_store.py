"""``CachedEncoder`` with a store: what others have encoded is fetched, and what is encoded offered.

The time limits only end a test that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from back_ends import MemoryStore
from encoders import AsyncEncoder, GatedEncoder, WaitingFlights, joined, limited, settle, wait_for
from servers import LIMIT
from support import EncoderOfNumbers, numbers

from multimodal_cache import CachedEncoder, EmbeddingResult, MultiModalStaticCache
from multimodal_cache.stores import EmbeddingStore, _format

Ask = Callable[..., list[torch.Tensor]]


def in_thread(encoder: CachedEncoder, *arguments: Any) -> list[torch.Tensor]:
    return encoder(*arguments)


def in_task(encoder: CachedEncoder, *arguments: Any) -> list[torch.Tensor]:
    return asyncio.run(encoder.encode_async(*arguments))


class Coroutine(EncoderOfNumbers):
    """The same as a coroutine function."""

    async def __call__(self, features: list[Any]) -> torch.Tensor:  # type: ignore[override]
        return super().__call__(features)


WAYS = {
    "a call": (in_thread, EncoderOfNumbers),
    "encode_async": (in_task, EncoderOfNumbers),
    "encode_async, a coroutine function": (in_task, Coroutine),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[Ask, EncoderOfNumbers]:
    ask, kind = WAYS[request.param]
    return ask, kind()


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as store:
        yield store
        store.gate.set()


def name(key: int) -> str:
    return _format.name_of(_format.name_prefix("test"), key)


def put(store: MemoryStore, *keys: int, rows: int = 2) -> None:
    """Has the store hold what ``EncoderOfNumbers`` makes of each key."""
    for key in keys:
        store.values[name(key)] = _format.pack(name(key), torch.full((rows, 1), float(key)), None)


def new(encode: Any, store: EmbeddingStore | None, **options: Any) -> CachedEncoder:
    return CachedEncoder(MultiModalStaticCache(10_000), encode, key=int, store=store, **options)


@contextlib.contextmanager
def gated(store: MemoryStore) -> Iterator[tuple[CachedEncoder, GatedEncoder, Any]]:
    """As the one of ``encoders``, with a store."""
    encode = GatedEncoder()
    encoder = new(encode, store)
    encoder._flights.by_key = WaitingFlights()
    with ThreadPoolExecutor(32) as pool:
        try:
            yield encoder, encode, pool.submit
        finally:
            encode.gate.set()
            store.gate.set()


def test_what_was_encoded_elsewhere_is_fetched_and_not_encoded(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    with new(encode, store) as one, new(encode, store) as other:
        assert numbers(ask(one, [1, 2, 1])) == [1, 2, 1]
        store.written()
        assert numbers(ask(other, [2, 1, 1])) == [2, 1, 1]
        assert numbers(ask(other, [1, 2])) == [1, 2]  # hits
        assert encode.calls == [[1, 2]]
        stats = other.stats()
        assert (stats.fetched, stats.coalesced, stats.hits, stats.encoded) == (2, 1, 2, 0)
        assert (stats.fetched_tokens, stats.coalesced_tokens, stats.hit_tokens) == (4, 2, 4)
        assert stats.hit_rate == 1
        assert store.reads == [[name(1), name(2)], [name(2), name(1)]]
        assert store.stats().written == 2  # what was fetched isn't offered


def test_what_the_store_has_not_is_encoded_in_one_call_and_offered(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    put(store, 2, 4)
    with new(encode, store) as encoder:
        assert numbers(ask(encoder, [1, 2, 3, 4])) == [1, 2, 3, 4]
        assert encode.calls == [[1, 3]]
        store.written()
        assert store.writes == [[name(1)], [name(3)]]
        assert (encoder.stats().fetched, encoder.stats().encoded) == (2, 2)
        assert encoder._flights.by_key == {}


def test_only_what_has_a_flight_is_fetched_and_offered(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    with new(encode, store) as encoder:
        assert numbers(ask(encoder, [1, 2, 3], [None, 2, 3])) == [1, 2, 3]
        store.written()
        assert store.reads == [[name(2), name(3)]]
        assert store.writes == [[name(2)], [name(3)]]
        assert numbers(ask(encoder, [5], [None])) == [5]
        assert len(store.reads) == 1


def test_two_lengths_of_one_key_are_fetched_once(store: MemoryStore) -> None:
    put(store, 1, rows=3)

    def encode(features: list[int]) -> list[torch.Tensor]:
        return [torch.full((2, 1), float(n)) for n in features]

    encoder = new(encode, store)
    three, two = encoder([1, 1], None, [3, 2])
    assert (three.shape, two.shape) == ((3, 1), (2, 1))
    assert store.reads == [[name(1)]]
    store.written()
    assert store.writes == []


def test_an_embedding_of_another_length_is_a_miss_and_written_over(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    put(store, 1, rows=5)
    with new(encode, store) as encoder:
        (rows,) = ask(encoder, [1], None, [2])
        assert rows.shape == (2, 1)
        assert encoder.stats().fetched == 0
        store.written()
        assert store.fetch([1])[1].shape == (2, 1)


def test_a_cached_embedding_of_another_length_gives_way_to_what_is_fetched(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    put(store, 1)
    with new(encode, store) as encoder:
        encoder._cache.set(1, EmbeddingResult(embedding=torch.zeros(7, 1)), None)
        (rows,) = ask(encoder, [1], None, [2])
        assert ask(encoder, [1], None, [2])[0] is rows
    assert encode.calls == []
    assert (encoder.stats().row_mismatches, encoder.stats().fetched) == (1, 1)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1), (0, 1)])
def test_what_was_offered_by_hand_is_taken_as_rows_or_not_at_all(
    shape: tuple[int, ...], store: MemoryStore
) -> None:
    tensor = torch.full(shape, 1.0)
    store.values[name(1)] = _format.pack(name(1), tensor, None)
    (rows,) = new(EncoderOfNumbers(), store)([1], None, [shape[0] if shape else 2])
    assert rows.ndim == 2


# Flights


def test_what_many_threads_want_is_fetched_once(store: MemoryStore) -> None:
    put(store, 1)
    store.on_get = lambda asked: (store.hang(), store.values[asked])[1]
    with gated(store) as (encoder, encode, run):
        first = run(encoder, [1])
        wait_for(store.hanging)
        others = [run(encoder, [1]) for _ in range(20)]
        joined(encoder, 20)
        store.gate.set()
        (embedding,) = first.result(LIMIT)
        assert all(other.result(LIMIT)[0] is embedding for other in others)
    assert encode.calls == []
    assert len(store.reads) == 1
    assert (encoder.stats().fetched, encoder.stats().coalesced) == (1, 20)


def test_what_is_fetched_lands_before_the_rest_is_encoded(store: MemoryStore) -> None:
    put(store, 2)
    with gated(store) as (encoder, encode, run):
        slow = run(encoder, [1, 2])
        wait_for(encode.begun)
        assert numbers(encoder([2])) == [2]  # a hit
        assert not slow.done()
        encode.gate.set()
        assert numbers(slow.result(LIMIT)) == [1, 2]
    assert encode.calls == [[1]]


def test_a_fetch_takes_no_turn(store: MemoryStore) -> None:
    put(store, 2)
    encode = GatedEncoder()
    encoder = new(encode, store, max_concurrency=1)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(encoder, [1])
        wait_for(encode.begun)
        assert numbers(encoder([2])) == [2]
        encode.gate.set()
        assert numbers(slow.result(LIMIT)) == [1]


def test_an_error_after_a_partial_fetch_is_about_what_was_left(store: MemoryStore) -> None:
    error = OSError("no such image")
    put(store, 2)
    with gated(store) as (encoder, encode, run):
        encode.fail[1] = error
        bad = run(encoder, [1, 2])
        wait_for(encode.begun)
        waits = run(encoder, [1])
        joined(encoder)
        encode.gate.set()
        assert bad.exception(LIMIT) is error
        assert repr(waits.exception(LIMIT)) == repr(error)  # nothing but 1 was left to encode
        assert numbers(encoder([2])) == [2]
        store.written()
        assert store.writes == []
        assert (encoder.stats().failures, encoder.stats().fetched) == (1, 1)
        assert encoder._flights.by_key == {}


def test_what_is_fetched_during_clear_is_returned_and_not_cached(store: MemoryStore) -> None:
    put(store, 1)
    store.on_get = lambda asked: (store.hang(), store.values[asked])[1]
    with gated(store) as (encoder, encode, run):
        old = run(encoder, [1])
        wait_for(store.hanging)
        encoder._cache.clear()
        new_call = run(encoder, [1])
        wait_for(store.hanging)  # it doesn't wait for that one
        store.gate.set()
        assert numbers(old.result(LIMIT) + new_call.result(LIMIT)) == [1, 1]
        assert encoder([1])[0] is new_call.result(LIMIT)[0]
        assert encode.calls == []
        assert len(store.reads) == 2


def test_what_is_encoded_during_clear_is_not_offered(store: MemoryStore) -> None:
    with gated(store) as (encoder, encode, run):
        old = run(encoder, [1])
        wait_for(encode.begun)
        encoder._cache.clear()
        encode.gate.set()
        assert numbers(old.result(LIMIT)) == [1]
        store.written()
        assert store.writes == []


def test_a_call_inside_encode_may_fetch(store: MemoryStore) -> None:
    put(store, 2)

    def encode(features: list[int]) -> torch.Tensor:
        (nested,) = encoder([2])
        return nested.unsqueeze(0) * 10

    encoder = new(encode, store)
    assert numbers(encoder([1])) == [20]


# Stores that fail, are closed and interrupted


@pytest.mark.parametrize("fault", ["raises", "hangs", "lies", "is closed", "knows nothing"])
def test_with_a_store_that_fails_all_is_encoded_once_in_time(
    way: tuple[Ask, EncoderOfNumbers], fault: str
) -> None:
    ask, encode = way
    store = MemoryStore(timeout=0.05)
    put(store, 1, 2)

    def fail(*_: object) -> Any:
        raise OSError("refused")

    if fault == "raises":
        store.on_get = store.on_set = fail
    elif fault == "hangs":
        store.on_get = store.on_set = store.hang
    elif fault == "lies":
        store.on_get = lambda asked: store.values[name(1 if asked == name(2) else 2)]
    elif fault == "is closed":
        store.close()
    else:
        store.values.clear()
    with new(encode, store) as encoder:
        began = time.monotonic()
        for _ in range(3):
            assert numbers(ask(encoder, [1, 2])) == [1, 2]
        assert time.monotonic() - began < 30
        assert [n for call in encode.calls for n in call] == [1, 2]
        assert encoder.stats().fetched == 0
    store.gate.set()
    store.close()


def test_a_store_that_is_closed_meanwhile_fails_nothing(store: MemoryStore) -> None:
    store.on_get = store.hang
    with gated(store) as (encoder, encode, run):
        encode.gate.set()
        call = run(encoder, [1])
        wait_for(store.hanging)
        store.close(0)
        store.gate.set()
        assert numbers(call.result(LIMIT)) == [1]


def test_an_interrupted_fetch_leaves_nothing_claimed(store: MemoryStore) -> None:
    def interrupt(keys: object) -> Any:
        raise KeyboardInterrupt

    encoder = new(EncoderOfNumbers(), store)
    store.fetch = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        encoder([1])
    del store.fetch
    assert encoder._flights.by_key == {}
    assert numbers(encoder([1])) == [1]
    assert encoder.stats().failures == 0


def test_a_call_cancelled_during_its_fetch_is_finished_for_others(
    way: tuple[Ask, EncoderOfNumbers], store: MemoryStore
) -> None:
    ask, encode = way
    if ask is in_thread:
        return
    put(store, 1)
    store.on_get = lambda asked: (store.hang(), store.values.get(asked))[1]
    encoder = new(encode, store)

    async def main() -> None:
        first = asyncio.ensure_future(encoder.encode_async([1, 2], [1, 2]))
        while not store.hanging.acquire(blocking=False):
            await asyncio.sleep(0)
        other = asyncio.ensure_future(encoder.encode_async([2, 1], [2, 1]))
        await settle()
        first.cancel()
        await settle()
        assert first.cancelled()
        store.gate.set()
        assert numbers(await other) == [2, 1]

    limited(main())
    assert encode.calls == [[2]]
    assert (encoder.stats().fetched, encoder.stats().coalesced) == (1, 2)
    assert encoder._flights.by_key == {}


def test_a_loop_that_ends_during_a_fetch_leaves_nothing_claimed(store: MemoryStore) -> None:
    store.on_get = store.hang
    encoder = new(Coroutine(), store)

    async def main() -> None:
        task = asyncio.ensure_future(encoder.encode_async([1], [1]))
        while not store.hanging.acquire(blocking=False):
            await asyncio.sleep(0)
        assert not task.done()

    limited(main())  # it cancels what is left
    assert encoder._flights.by_key == {}
    store.gate.set()
    store.on_get = None
    assert numbers(in_task(encoder, [1])) == [1]


def test_an_encoder_that_is_closed_before_its_fetch_says_so(store: MemoryStore) -> None:
    encoder = new(Coroutine(), store)

    def key(feature: int) -> int:
        encoder.close()
        return feature

    encoder._key = key
    with pytest.raises(RuntimeError, match="closed"):
        in_task(encoder, [1])
    assert encoder._flights.by_key == {}


def test_the_loop_goes_on_during_the_fetch_of_a_coroutine_function(store: MemoryStore) -> None:
    store.on_get = store.hang
    encode = AsyncEncoder()
    encoder = new(encode, store)

    async def main() -> None:
        task = asyncio.ensure_future(encoder.encode_async([1], [1]))
        while not store.hanging.acquire(blocking=False):
            await asyncio.sleep(0)
        store.gate.set()
        while not encode.gates:
            await asyncio.sleep(0)
        encode.gates[0].set_result(None)
        assert numbers(await task) == [1]

    limited(main())


@pytest.mark.parametrize("store", [{}, MemoryStore, "redis://localhost"], ids=str)
def test_what_is_no_store_is_refused(store: Any) -> None:
    with pytest.raises(TypeError, match="store must be an EmbeddingStore or None, got "):
        new(EncoderOfNumbers(), store)


def test_many_threads_on_two_encoders_share_a_store() -> None:
    """Two servers with tiny caches that are cleared now and then."""

    def encode(features: list[int]) -> torch.Tensor:
        return torch.stack([torch.full((2, 1), float(n)) for n in features])

    with MemoryStore() as store:
        encoders = [
            CachedEncoder(MultiModalStaticCache(40), encode, key=int, store=store) for _ in range(2)
        ]

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for step in range(60):
                keys = torch.randint(0, 8, (3,), generator=generator).tolist()
                assert numbers(encoders[seed % 2](keys)) == keys
                if step % 50 == 49:
                    encoders[seed % 2]._cache.clear()

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(work, seed) for seed in range(8)]:
                future.result(LIMIT)
        stats = [encoder.stats() for encoder in encoders]
        total = sum(each.hits + each.fetched + each.encoded + each.coalesced for each in stats)
        assert total == 8 * 60 * 3
        assert store.stats().corrupt == store.stats().errors == 0
        assert all(encoder._flights.by_key == {} for encoder in encoders)
