"""``CachedEncoder`` under threads and tasks: nothing is encoded twice at once, and nobody hangs.

The time limits only end a test that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest
import torch
from back_ends import MemoryStore
from encoders import (
    LIMIT,
    AsyncEncoder,
    GatedEncoder,
    WaitingFlights,
    gated,
    joined,
    limited,
    settle,
    wait_for,
)
from hypothesis import given
from hypothesis import strategies as st
from support import EncoderOfNumbers, numbers

from multimodal_cache import CachedEncoder, EmbeddingResult, MultiModalStaticCache, _calls
from multimodal_cache._calls import Batch, Call
from multimodal_cache._flights import Flights
from multimodal_cache._gate import Gate, require_no_running_loop
from multimodal_cache._turns import Turns

# Threads


def test_many_threads_that_want_one_image_encode_it_once() -> None:
    with gated() as (encoder, encode, run):
        first = run(encoder, [1])
        wait_for(encode.begun)
        others = [run(encoder, [1, 1]) for _ in range(20)]
        joined(encoder, 20)
        encode.gate.set()
        (embedding,) = first.result(LIMIT)
        for other in others:
            assert all(row is embedding for row in other.result(LIMIT))
    assert encode.calls == [[1]]
    assert encoder.stats().coalesced == 40
    assert encoder._flights.by_key == {}


def test_other_images_go_on_while_one_is_encoded() -> None:
    with gated() as (encoder, encode, run):
        slow = run(encoder, [1])
        wait_for(encode.begun)
        encoder._cache.set(5, EmbeddingResult(embedding=torch.full((2, 1), 5.0)), None)
        assert numbers(encoder([5])) == [5]  # a hit
        other = run(encoder, [2])
        wait_for(encode.begun)  # another encode has begun
        assert not slow.done()
        encode.gate.set()
        assert numbers(slow.result(LIMIT) + other.result(LIMIT)) == [1, 2]


def test_calls_that_overlap_do_not_wait_in_a_circle() -> None:
    with gated() as (encoder, encode, run):
        one = run(encoder, [1, 2])
        wait_for(encode.begun)
        other = run(encoder, [2, 3])
        wait_for(encode.begun)  # it encodes 3 before it waits for 2
        encode.gate.set()
        assert numbers(one.result(LIMIT) + other.result(LIMIT)) == [1, 2, 2, 3]
    assert encode.calls == [[1, 2], [3]]


def test_an_error_goes_to_those_who_wait_and_is_not_remembered() -> None:
    error = OSError("no such image")
    with gated() as (encoder, encode, run):
        encode.fail[1] = error
        first = run(encoder, [1])
        wait_for(encode.begun)
        others = [run(encoder, [1]) for _ in range(3)]
        joined(encoder, 3)
        encode.gate.set()
        assert first.exception(LIMIT) is error
        for other in others:
            assert repr(other.exception(LIMIT)) == repr(error)
        assert numbers(encoder([1])) == [1]
    assert encode.calls == [[1], [1]]
    assert encoder.stats().failures == 1


def test_a_bad_image_does_not_fail_those_who_want_its_neighbour() -> None:
    error = OSError("no such image")
    with gated() as (encoder, encode, run):
        encode.fail[1] = error
        bad = run(encoder, [1, 2])
        wait_for(encode.begun)
        good = run(encoder, [2, 3])
        wait_for(encode.begun)
        encode.gate.set()
        assert bad.exception(LIMIT) is error
        assert numbers(good.result(LIMIT)) == [2, 3]
    assert encode.calls == [[1, 2], [3], [2]]


def test_those_who_wait_for_an_interrupted_encode_try_again() -> None:
    interrupt = KeyboardInterrupt()
    with gated() as (encoder, encode, run):
        encode.fail[1] = interrupt
        first = run(encoder, [1])
        wait_for(encode.begun)
        others = [run(encoder, [1]) for _ in range(3)]
        joined(encoder, 3)
        encode.gate.set()
        assert first.exception(LIMIT) is interrupt
        for other in others:
            assert numbers(other.result(LIMIT)) == [1]
    assert encode.calls == [[1], [1]]
    assert encoder._flights.by_key == {}


def test_an_error_about_a_length_is_not_shared_with_other_lengths() -> None:
    with gated() as (encoder, encode, run):
        wrong = run(encoder, [1], None, [99])
        wait_for(encode.begun)
        same = run(encoder, [1], None, [99])
        right = run(encoder, [1], None, [2])
        joined(encoder, 2)
        encode.gate.set()
        assert isinstance(wrong.exception(LIMIT), ValueError)
        assert str(same.exception(LIMIT)) == str(wrong.exception(LIMIT))
        assert numbers(right.result(LIMIT)) == [1]


def test_an_embedding_of_another_length_than_wanted_is_encoded_again() -> None:
    with gated() as (encoder, encode, run):
        first = run(encoder, [1])
        wait_for(encode.begun)
        other = run(encoder, [1], None, [3])
        joined(encoder)
        encode.tokens = 3
        encode.gate.set()
        assert first.result(LIMIT)[0].shape == (2, 1)
        assert other.result(LIMIT)[0].shape == (3, 1)
    assert encoder.stats().row_mismatches == 1


def test_what_lands_between_the_look_and_the_claim_is_not_encoded_again() -> None:
    encode = EncoderOfNumbers()
    cache = MultiModalStaticCache(10_000)
    encoder = CachedEncoder(cache, encode, key=int)
    look_up = cache.get_single
    ahead = [lambda: encoder([1])]

    def missed(mm_hash: Any) -> Any:
        found = look_up(mm_hash)
        if ahead:
            ahead.pop()()  # another call encodes it meanwhile
        return found

    cache.get_single = missed  # type: ignore[method-assign]
    assert numbers(encoder([1])) == [1]
    assert encode.calls == [[1]]


def test_a_call_after_clear_does_not_join_an_encode_from_before() -> None:
    with gated() as (encoder, encode, run):
        old = run(encoder, [1])
        wait_for(encode.begun)
        encoder._cache.clear()
        new = run(encoder, [1])
        wait_for(encode.begun)
        late = run(encoder, [1])
        joined(encoder, 2)  # the new one has found the old flight, and left it alone
        encode.gate.set()
        assert numbers(old.result(LIMIT) + new.result(LIMIT)) == [1, 1]
        assert late.result(LIMIT)[0] is new.result(LIMIT)[0]
        assert old.result(LIMIT)[0] is not new.result(LIMIT)[0]
        assert encoder([1])[0] is new.result(LIMIT)[0]
    assert encode.calls == [[1], [1]]
    assert encoder._flights.by_key == {}


def test_a_call_inside_encode_that_would_wait_is_an_error() -> None:
    def encode(features: list[Any]) -> torch.Tensor:
        return torch.stack([torch.ones(2, 1) * inner(feature) for feature in features])

    def inner(feature: float) -> float:
        if feature == 1:
            (nested,) = encoder([2])  # goes
            return nested[0, 0].item()
        if feature == 3:
            encoder([2])  # a hit, or an encode of its own
            encoder([4])
            encoder([3])
        return feature

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=int)
    assert numbers(encoder([1])) == [2]
    with pytest.raises(RuntimeError, match="a call from inside encode would have to wait"):
        encoder([3])
    with pytest.raises(RuntimeError, match="a call from inside encode would have to wait"):
        asyncio.run(encoder.encode_async([3]))
    assert encoder._flights.by_key == {}


def test_a_task_that_encode_starts_and_does_not_await_may_wait_for_it() -> None:
    tasks: list[asyncio.Future[Any]] = []
    gates: list[asyncio.Future[None]] = []

    async def encode(features: list[Any]) -> torch.Tensor:
        tasks.append(asyncio.ensure_future(encoder.encode_async([1], [1])))
        gates.append(asyncio.get_running_loop().create_future())
        await gates[-1]
        return EncoderOfNumbers()(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        call = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await settle()
        assert not tasks[0].done()  # it waits
        gates[0].set_result(None)
        assert (await tasks[0])[0] is (await call)[0]

    limited(main())
    assert (len(gates), encoder._gate._inside) == (1, set())


@pytest.mark.parametrize("as_task", [False, True])
def test_code_that_a_coroutine_encode_awaits_may_not_wait_for_it(as_task: bool) -> None:
    async def encode(features: list[Any]) -> torch.Tensor:
        inner = encoder.encode_async([1], [1])
        await (asyncio.ensure_future(inner) if as_task else inner)
        return EncoderOfNumbers()(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    with pytest.raises(RuntimeError, match="a call from inside encode would have to wait"):
        limited(encoder.encode_async([1], [1]))
    assert (encoder._flights.by_key, encoder._gate._inside) == ({}, set())


@pytest.mark.parametrize("plain", [True, False])
def test_what_encode_leaves_behind_is_not_inside_it(plain: bool) -> None:
    """A server, a timer or a task that it has started, in a copy of its context."""
    left: list[contextvars.Context] = []

    def encode(features: list[Any]) -> torch.Tensor:
        left.append(contextvars.copy_context())
        return EncoderOfNumbers()(features)

    async def encode_later(features: list[Any]) -> torch.Tensor:
        return encode(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode if plain else encode_later)
    limited(encoder.encode_async([1], [1]))
    with gated() as (other, gate, run):
        other._gate = encoder._gate
        call = run(other, [2])
        wait_for(gate.begun)
        waiting = run(left[0].run, other, [2])
        joined(other)
        gate.gate.set()
        assert numbers(call.result(LIMIT) + waiting.result(LIMIT)) == [2, 2]


def test_a_thread_that_encode_starts_is_not_inside_it() -> None:
    encode = GatedEncoder()
    started: list[Future[Any]] = []

    def encode_and_start(features: list[Any]) -> torch.Tensor:
        run = contextvars.copy_context().run
        started.append(pool.submit(run, encoder, [1], [1]))
        return encode(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode_and_start)
    encoder._flights.by_key = WaitingFlights()
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(encoder, [1], [1])
        wait_for(encode.begun)
        joined(encoder)
        encode.gate.set()
        assert started[0].result(LIMIT)[0] is call.result(LIMIT)[0]


def test_a_synchronous_call_on_a_running_loop_that_would_wait_is_an_error() -> None:
    with gated() as (encoder, encode, run):
        other = run(encoder, [1])
        wait_for(encode.begun)

        async def main() -> None:
            with pytest.raises(RuntimeError, match="await encode_async"):
                encoder([1])

        asyncio.run(main())
        encode.gate.set()
        other.result(LIMIT)

    async def hit() -> list[torch.Tensor]:
        return encoder([1])

    assert numbers(asyncio.run(hit())) == [1]


def test_a_synchronous_call_on_a_running_loop_waits_for_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And those who wait for what it has claimed encode that themselves."""
    others: list[Future[Any]] = []

    def when_another_waits() -> None:
        if not others:
            others.append(run(encoder, [2]))
            joined(encoder)
        require_no_running_loop()

    monkeypatch.setattr(_calls, "require_no_running_loop", when_another_waits)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="await encode_async"):
            encoder([2])

    with gated(max_concurrency=1) as (encoder, encode, run):
        first = run(encoder, [1])
        wait_for(encode.begun)
        run(asyncio.run, main()).result(LIMIT)
        encode.gate.set()
        assert numbers(first.result(LIMIT) + others[0].result(LIMIT)) == [1, 2]
    assert (encoder._flights.by_key, encoder.stats().failures) == ({}, 0)
    assert encoder._gate._turns._free == 1


def test_a_callback_of_the_cache_that_calls_the_encoder_does_not_hang() -> None:
    """It runs inside the call whose flights it would wait for."""
    errors = []

    def on_evict(mm_hash: int, evicted: EmbeddingResult) -> None:
        try:
            encoder([mm_hash], [mm_hash])
        except RuntimeError as error:
            errors.append(str(error))

    cache = MultiModalStaticCache(8, on_evict=on_evict)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    assert numbers(encoder([1, 2], [1, 2])) == [1, 2]
    assert len(errors) == 1
    assert "inside encode" in errors[0]
    assert encoder._flights.by_key == {}


def test_the_cache_is_never_called_under_the_lock_of_the_encoder() -> None:
    """A finalizer that runs under the lock of the cache may ask for the statistics."""
    asked = []

    class Asking(MultiModalStaticCache):
        def get_single(self, mm_hash: Any) -> Any:
            ask()
            return super().get_single(mm_hash)

        def set(self, *arguments: Any, **options: Any) -> bool:
            ask()
            return super().set(*arguments, **options)

        def free(self, *arguments: Any) -> bool:
            ask()
            return super().free(*arguments)

    def ask() -> None:
        with ThreadPoolExecutor(1) as pool:
            asked.append(pool.submit(encoder.stats).result(LIMIT))
        if len(asked) == 1:
            encoder._flights.landings += 1  # so that it looks again

    cache = Asking(10_000)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    assert numbers(encoder([1], [1])) == [1]
    assert numbers(encoder([1], [1], [2])) == [1]
    encoder._encode = EncoderOfNumbers(tokens=3)
    assert numbers(encoder([1], [1], [3])) == [1]
    assert len(asked) == 7


def test_two_threads_that_find_an_entry_of_the_wrong_length_encode_once() -> None:
    with gated() as (encoder, encode, run):
        encoder._cache.set(1, EmbeddingResult(embedding=torch.zeros(9, 1)), None)
        first = run(encoder, [1], None, [2])
        wait_for(encode.begun)
        other = run(encoder, [1], None, [2])
        joined(encoder)
        encode.gate.set()
        assert first.result(LIMIT)[0] is other.result(LIMIT)[0]
    assert encode.calls == [[1]]
    assert encoder.stats().row_mismatches == 1


def test_a_landing_that_is_interrupted_goes_on() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers())

    class Interrupting(dict[int, Any]):
        def __delitem__(self, key: int) -> None:
            if key == 2 and not interrupted:
                interrupted.append(key)
                raise KeyboardInterrupt
            super().__delitem__(key)

    interrupted: list[int] = []
    encoder._flights.by_key = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        encoder([1, 2, 3], [1, 2, 3])
    assert encoder._flights.by_key == {}
    assert numbers(encoder([1, 2, 3], [1, 2, 3])) == [1, 2, 3]
    assert encoder.stats().encoded == 3


# asyncio


@pytest.mark.parametrize("count", [40, 1000])
def test_many_tasks_that_want_one_image_encode_it_once(count: int) -> None:
    """And the loop stays responsive, and no thread is parked for each."""
    encode = GatedEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([1], [1])) for _ in range(count)]
        ticks = 0
        while not encode.begun.acquire(blocking=False):
            ticks += 1
            await asyncio.sleep(0)
        for _ in range(10):  # the loop goes on while the encode and all the tasks wait
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        assert threading.active_count() < 40
        encode.gate.set()
        embeddings = await asyncio.gather(*tasks)
        assert all(rows[0] is embeddings[0][0] for rows in embeddings)

    limited(main())
    assert encode.calls == [[1]]
    assert encoder.stats().coalesced == count - 1


def test_keys_are_made_off_the_loop() -> None:
    threads = []

    def key(feature: Any) -> int:
        threads.append(threading.current_thread())
        return int(feature)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers(), key=key)
    assert numbers(limited(encoder.encode_async([1, 2]))) == [1, 2]
    assert threading.current_thread() not in threads


def test_a_cancelled_task_does_not_cancel_the_encode() -> None:
    encode = GatedEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        leader = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await encode.begins()
        waiter = asyncio.ensure_future(encoder.encode_async([1], [1]))
        patient = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await asyncio.sleep(0)
        leader.cancel()
        waiter.cancel()
        await asyncio.wait([leader, waiter])
        assert leader.cancelled()
        assert waiter.cancelled()
        encode.gate.set()
        assert numbers(await patient) == [1]

    limited(main())
    assert encode.calls == [[1]]
    assert encoder._flights.by_key == {}
    assert encoder._cache.get_single(1) is not None


def test_a_coroutine_function_encodes_without_gradients_and_lets_others_have_them() -> None:
    encode = AsyncEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([n], [n])) for n in (1, 2)]
        await settle()
        assert torch.is_grad_enabled()
        for gate in encode.gates:
            gate.set_result(None)
            await settle()
            assert torch.is_grad_enabled()
        assert numbers([(await task)[0] for task in tasks]) == [1, 2]

    limited(main())
    assert encode.grad_modes == [False] * 4


class Asks:
    """An awaitable that is told something, and then fails, without gradients all along."""

    def __await__(self) -> Iterator[str]:
        assert not torch.is_grad_enabled()
        answer = yield "what?"
        assert not torch.is_grad_enabled()
        try:
            yield f"{answer}?"
        except OSError:
            assert not torch.is_grad_enabled()
            return "done"


class Plain:
    """An awaitable without ``send`` and ``throw``."""

    def __await__(self) -> Iterator[str]:
        return iter(["what?"])


async def awaits(awaitable: Any) -> Any:
    return await Gate(None).without_grad(awaitable)


def test_awaiting_without_gradients_is_like_awaiting() -> None:
    task = awaits(Asks())
    assert task.send(None) == "what?"
    assert torch.is_grad_enabled()
    assert task.send("this") == "this?"
    assert torch.is_grad_enabled()
    with pytest.raises(StopIteration) as stop:
        task.throw(OSError("no such image"))
    assert stop.value.value == "done"


def test_only_tasks_are_remembered_as_awaited() -> None:
    """A bare yield gives None, which is also the current task where there is none."""

    class Bare:
        def __await__(self) -> Iterator[Any]:
            yield None
            yield ["unhashable"]

    gate = Gate(None)

    async def awaits_bare() -> None:
        await gate.without_grad(Bare())

    task = awaits_bare()
    assert task.send(None) is None
    assert gate._inside == set()
    assert task.send(None) == ["unhashable"]
    assert gate._inside == set()
    task.close()


def test_what_can_not_be_thrown_into_is_left() -> None:
    task = awaits(Plain())
    assert task.send(None) == "what?"
    with pytest.raises(OSError, match="no such image"):
        task.throw(OSError("no such image"))
    task = awaits(Plain())
    task.send(None)
    task.close()


def test_a_coroutine_function_outlives_its_caller_and_its_errors_are_shared() -> None:
    encode = AsyncEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([1], [1])) for _ in range(3)]
        await settle()
        tasks[0].cancel()
        await settle()
        encode.gates[0].set_exception(OSError("no such image"))
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        for task in tasks[1:]:
            with pytest.raises(OSError, match="no such image"):
                task.result()
        again = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await settle()
        encode.gates[1].set_result(None)
        assert numbers(await again) == [1]

    limited(main())
    assert len(encode.calls) == 2


def test_the_end_of_a_loop_lands_its_flights() -> None:
    """A thread that waits for them tries again."""
    encode = AsyncEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    encoder._flights.by_key = WaitingFlights()
    waiting: list[Future[Any]] = []

    def in_another_loop() -> Any:
        async def main() -> Any:
            task = asyncio.ensure_future(encoder.encode_async([1], [1]))
            while len(encode.gates) < 2:
                await asyncio.sleep(0)
            encode.gates[1].set_result(None)
            return await task

        return limited(main())

    with ThreadPoolExecutor(1) as pool:

        async def main() -> None:
            begun = asyncio.ensure_future(encoder.encode_async([1], [1]))
            await settle()
            waiting.append(pool.submit(in_another_loop))
            flights = encoder._flights.by_key
            assert isinstance(flights, WaitingFlights)
            while not flights.joined.acquire(blocking=False):
                await asyncio.sleep(0)
            begun.cancel()  # and the loop ends, with the encode in it

        limited(main())
        assert numbers(waiting[0].result(LIMIT)) == [1]
    assert len(encode.calls) == 2
    assert encoder._flights.by_key == {}


def test_a_task_that_is_cancelled_before_its_encode_began_lands_its_flights() -> None:
    encode = AsyncEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        task = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await asyncio.sleep(0)
        for each in asyncio.all_tasks() - {asyncio.current_task(), task}:
            if "Batch.encode_async" in repr(each):
                each.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert encoder._flights.by_key == {}

    limited(main())
    assert encode.calls == []
    assert encoder.stats().failures == 0


def test_an_encode_that_can_not_be_begun_lands_its_flights() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers())
    encoder._executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        limited(encoder.encode_async([1], [1]))
    assert (encoder._flights.by_key, encoder.stats().failures) == ({}, 0)
    assert numbers(encoder([1], [1])) == [1]


def test_a_loop_that_ends_during_a_plain_encode_leaves_nothing_behind() -> None:
    encode = GatedEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    async def main() -> None:
        task = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await encode.begins()
        task.cancel()

    limited(main())
    encode.gate.set()
    encoder._executor.shutdown()
    assert (encoder._tasks, encoder._flights.by_key) == (set(), {})
    assert encoder._cache.get_single(1) is not None


def test_a_key_function_may_raise_anything() -> None:
    def key(feature: Any) -> int:
        raise StopIteration

    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers(), key=key)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        limited(encoder.encode_async([1]))


def test_what_has_landed_need_not_be_waited_for() -> None:
    """So it is no error where waiting would be one."""
    with gated() as (encoder, encode, run):
        other = run(encoder, [1])
        wait_for(encode.begun)

        def encode_both(features: list[Any]) -> torch.Tensor:
            encode.gate.set()
            other.result(LIMIT)
            return EncoderOfNumbers()(features)

        async def main() -> list[torch.Tensor]:
            encoder._encode = encode_both
            return encoder([1, 2])

        assert numbers(limited(main())) == [1, 2]


def test_threads_of_the_loop_may_all_wait_for_one_encode() -> None:
    encode = EncoderOfNumbers()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    go_on = threading.Event()

    def wait_then_call() -> list[torch.Tensor]:
        assert go_on.wait(LIMIT)
        return encoder([1], [1])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, wait_then_call)
        task = asyncio.ensure_future(encoder.encode_async([1], [1]))
        await asyncio.sleep(0)  # the flight is claimed; the loop's only thread is taken
        go_on.set()
        assert numbers(await task + await busy) == [1, 1]

    limited(main())
    assert encode.calls == [[1]]


def test_an_interrupt_before_the_encode_lands_its_flights(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers())

    def interrupted(batch: Batch, encode: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Batch, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encoder([1], [1])
    assert (encoder._flights.by_key, encoder.stats().failures) == ({}, 0)
    assert numbers(encoder([1], [1])) == [1]


def test_a_batch_lands_no_flight_but_its_own() -> None:
    """However late: its call may have claimed others since."""
    flights = Flights(MultiModalStaticCache(10_000))
    call = Call(flights, Gate(None), [1, 2], [1, 2], [None, 3])
    first = call.next_batch()
    assert first is not None
    first.land_without(None)
    second = call.next_batch()
    assert second is not None
    first.land_without(None)
    assert [flight for _, flight in second.claimed] == [*flights.by_key.values()]
    second.land_without(None)
    assert flights.by_key == {}


def test_threads_and_loops_share_flights() -> None:
    with gated() as (encoder, encode, run):
        first = run(limited_call, encoder)
        wait_for(encode.begun)
        others = [run(limited_call, encoder), run(limited_call, encoder), run(encoder, [1])]
        joined(encoder, 3)
        encode.gate.set()
        rows = [future.result(LIMIT)[0] for future in (first, *others)]
        assert all(row is rows[0] for row in rows)
    assert encode.calls == [[1]]


def limited_call(encoder: CachedEncoder) -> Any:
    return limited(encoder.encode_async([1], [1]))


def test_a_synchronous_call_with_a_coroutine_function_is_an_error() -> None:
    class Encode:
        async def __call__(self, features: list[Any]) -> list[torch.Tensor]:
            return []

    async def encode(features: list[Any]) -> list[torch.Tensor]:
        return []

    for function in (encode, Encode()):
        encoder = CachedEncoder(MultiModalStaticCache(100), function)
        with pytest.raises(TypeError, match="await encode_async"):
            encoder([1])


# torch's modes


def modes() -> dict[str, Any]:
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtypes": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
    }


@contextlib.contextmanager
def autocast_dtype(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Sets what autocast takes, and doesn't enable it."""
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device, before)


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        lambda: autocast_dtype("cpu", torch.float16),
        lambda: autocast_dtype("cuda", torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
        lambda: torch.autocast("cpu", cache_enabled=False),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        torch.inference_mode,
        lambda: torch.device("meta"),
    ],
)
def test_a_plain_encode_has_the_modes_of_its_caller_in_any_thread(mode: Any) -> None:
    seen: list[dict[str, Any]] = []

    def encode(features: list[Any]) -> torch.Tensor:
        seen.append(modes())
        return torch.ones(1, 2, 4, device="cpu")

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=int)

    async def main() -> None:
        with mode():
            await encoder.encode_async([2])

    with mode():
        encoder([1])
        expected = modes()
    limited(main())
    assert seen == [{**expected, "grad": False}] * 2
    encoder._executor.submit(lambda: seen.append(modes())).result(LIMIT)
    assert seen[-1] == modes()  # the thread is as it was


def test_a_mode_that_is_left_while_the_key_is_made_counts() -> None:
    """It is that of the moment in which the call began."""
    seen: list[bool] = []
    begun = threading.Event()

    def key(feature: Any) -> int:
        assert begun.wait(LIMIT)
        return int(feature)

    def encode(features: list[Any]) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return EncoderOfNumbers()(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=key)

    async def main() -> None:
        with torch.autocast("cpu"):
            task = asyncio.ensure_future(encoder.encode_async([1]))
            await asyncio.sleep(0)
        begun.set()
        await task

    limited(main())
    assert seen == [True]


# How many encode at once


class Counting(EncoderOfNumbers):
    """Counts how many encode at once; each waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.running = self.most = 0
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def enter(self) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def leave(self) -> None:
        with self.lock:
            self.running -= 1

    def __call__(self, features: list[Any]) -> torch.Tensor:
        self.enter()
        self.begun.release()
        assert self.go_on.acquire(timeout=LIMIT)
        self.leave()
        return super().__call__(features)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_encodes_run_at_once_than_the_limit_in_threads_and_tasks(limit: int) -> None:
    encode = Counting()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=int, max_concurrency=limit)

    async def main() -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([n])) for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(encoder, [n]) for n in range(4, 8)]
            for _ in range(8):
                while not encode.begun.acquire(blocking=False):
                    await asyncio.sleep(0)
                assert encode.running <= limit
                encode.go_on.release()
            rows = [(await task)[0] for task in tasks] + [c.result(LIMIT)[0] for c in calls]
        assert numbers(rows) == [*range(8)]

    limited(main())
    assert encode.most == limit
    assert encoder._gate._turns._free == limit


def test_coroutine_functions_take_turns_and_pass_them_on() -> None:
    encode = AsyncEncoder()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, max_concurrency=1)

    async def main() -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([n], [n])) for n in range(3)]
        await settle()
        assert len(encode.gates) == 1
        encode.gates[0].set_result(None)
        await settle()
        assert len(encode.gates) == 2
        encode.gates[1].set_exception(OSError("no such image"))
        await settle()
        encode.gates[2].set_result(None)
        await asyncio.wait(tasks)
        assert numbers(tasks[0].result() + tasks[2].result()) == [0, 2]
        assert isinstance(tasks[1].exception(), OSError)

    limited(main())
    assert encoder._gate._turns._free == 1


def nested_await(encoder: Any) -> Any:
    async def encode(features: list[int]) -> torch.Tensor:
        if features == [1]:
            await encoder[0].encode_async([2])
        return torch.zeros(len(features), 1, 1)

    return encode


def nested_task(encoder: Any) -> Any:
    async def encode(features: list[int]) -> torch.Tensor:
        if features == [1]:
            await asyncio.create_task(encoder[0].encode_async([2]))
        return torch.zeros(len(features), 1, 1)

    return encode


def nested_loop(encoder: Any) -> Any:
    def encode(features: list[int]) -> torch.Tensor:
        if features == [1]:
            asyncio.run(encoder[0].encode_async([2]))
        return torch.zeros(len(features), 1, 1)

    return encode


@pytest.mark.parametrize("nested", [nested_await, nested_task, nested_loop])
def test_an_encode_from_inside_through_asyncio_needs_no_turn(nested: Any) -> None:
    encoders: list[CachedEncoder] = []
    cache = MultiModalStaticCache(10_000)
    encoders.append(CachedEncoder(cache, nested(encoders), key=int, max_concurrency=1))

    async def call() -> None:
        with encoders[0] as encoder:
            await asyncio.wait_for(encoder.encode_async([1]), 60)

    asyncio.run(call())
    assert 1 in cache
    assert 2 in cache


def test_an_encode_from_inside_through_asyncio_needs_no_thread_that_others_have() -> None:
    def encode(features: list[int]) -> torch.Tensor:
        for feature in features:
            if feature:
                limited(encoder.encode_async([feature - 1]))
        return EncoderOfNumbers()(features)

    with CachedEncoder(MultiModalStaticCache(10_000), encode, key=int) as encoder:
        encoder._executor = ThreadPoolExecutor(1)
        assert numbers(limited(encoder.encode_async([3]))) == [3]
        assert encoder.stats().encoded == 4


def test_who_is_interrupted_while_it_waits_for_its_turn_takes_none() -> None:
    turns = Turns(1)
    with turns.taken() as first:
        assert first.done()
        with contextlib.suppress(KeyboardInterrupt), turns.taken() as second:
            assert not second.done()
            raise KeyboardInterrupt
        with turns.taken(nested=True) as nested:
            assert nested.done()
    assert turns._free == 1
    with turns.taken() as third:
        assert third.done()


def test_an_encode_inside_an_encode_needs_no_turn_of_its_own() -> None:
    def encode(features: list[Any]) -> torch.Tensor:
        if features == [1]:
            encoder([2])
        return EncoderOfNumbers()(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=int, max_concurrency=1)
    assert numbers(encoder([1])) == [1]
    assert numbers(limited(encoder.encode_async([2, 1]))) == [2, 1]


# The end


def test_a_closed_encoder_refuses_calls() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers(), key=int)
    with encoder as entered:
        assert entered is encoder
        limited(encoder.encode_async([1]))
    for _ in range(2):
        encoder.close()
    with pytest.raises(RuntimeError, match="this CachedEncoder is closed"):
        encoder([1])
    with pytest.raises(RuntimeError, match="this CachedEncoder is closed"):
        limited(encoder.encode_async([1]))
    assert encoder.stats().calls == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("CachedEncoder")]


@pytest.mark.parametrize("wait", [True, False])
def test_close_lets_an_encode_end_and_begins_no_other(wait: bool) -> None:
    encode = Counting()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=int, max_concurrency=1)

    async def main() -> None:
        running = asyncio.ensure_future(encoder.encode_async([1]))
        while not encode.begun.acquire(blocking=False):
            await asyncio.sleep(0)
        queued = asyncio.ensure_future(encoder.encode_async([2]))
        while 2 not in encoder._flights.by_key:
            await asyncio.sleep(0)
        if wait:
            with ThreadPoolExecutor(1) as pool:
                closing = pool.submit(encoder.close)
                while not encoder._gate.closed:
                    await asyncio.sleep(0)
                assert not closing.done()
                encode.go_on.release()
        else:
            encoder.close(wait=False)
            encode.go_on.release()
        assert numbers(await running) == [1]
        with pytest.raises(RuntimeError, match="this CachedEncoder is closed"):
            await queued

    limited(main())
    assert encode.calls == [[1]]
    assert (encoder._flights.by_key, encoder.stats().failures) == ({}, 0)


def test_an_encode_may_close_its_encoder() -> None:
    def encode(features: list[Any]) -> torch.Tensor:
        encoder.close()
        return EncoderOfNumbers()(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    assert numbers(limited(encoder.encode_async([1], [1]))) == [1]


# Any order of things


class Fetches(Executor):
    """Runs fetches when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, function, arguments))
        return future

    def keys(self, generation: Any) -> set[int]:
        """Returns what is being fetched."""
        return {n for _, _, (asked, began) in self.waiting if began == generation for n in asked}

    def run(self, index: int) -> tuple[set[int], Any]:
        """Runs one; returns what it has found, and the generation in which it began."""
        future, fetch, (keys, generation) = self.waiting.pop(index % len(self.waiting))
        found = fetch(keys)
        if future.set_running_or_notify_cancel():
            future.set_result(found)
        return set(found), generation


class Schedule:
    """Runs overlapping calls, failures, cancellations and clears in a given order.

    With a store, what it holds is taken from it, damaged, and fetched in a given order too.
    """

    def __init__(self, store: MemoryStore | None) -> None:
        self.cache = MultiModalStaticCache(200)  # room for 25 of 8 bytes
        self.encoder = CachedEncoder(self.cache, self.encode, store=store)
        self.store = store
        self.fetches = Fetches()
        self.encoder._executor.shutdown()
        self.encoder._executor = self  # type: ignore[assignment]
        self.fetched: tuple[set[int], Any] | None = None  # by this action
        self.running: list[tuple[int, list[int], asyncio.Future[bool]]] = []
        self.tasks: list[tuple[list[int], asyncio.Future[list[torch.Tensor]]]] = []
        self.failing: set[int] = set()

    def submit(self, fetch: Any, keys: list[int]) -> Future[Any]:
        """Begins a fetch, as the encoder's executor."""
        generation = self.cache.generation
        assert not set(keys) & self.fetches.keys(generation), "fetched twice at once"
        for other_generation, others, _ in self.running:
            if other_generation == generation:
                assert not set(keys) & set(others), "fetched while it is encoded"
        return self.fetches.submit(fetch, keys, generation)

    async def encode(self, features: list[int]) -> torch.Tensor:
        generation = self.cache.generation
        if self.fetched is not None:  # what is left of a fetch is encoded at once
            found, generation = self.fetched
            assert not set(features) & found, "encoded though it was fetched"
        for other_generation, others, _ in self.running:
            if other_generation == generation:
                assert not set(features) & set(others), "encoded twice at once"
        if generation == self.cache.generation:
            assert not [n for n in features if self.cache.has(n)], "encoded though it is cached"
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (generation, features, ended)
        self.running.append(entry)
        try:
            well = await ended
        finally:
            self.running.remove(entry)
        if not well:
            raise OSError(f"can't encode {features}")
        return torch.stack([torch.full((2, 1), float(n)) for n in features])

    def do(self, action: str, index: int, keys: list[int]) -> None:
        if action == "call":
            task = asyncio.ensure_future(self.encoder.encode_async(keys, keys))
            self.tasks.append((keys, task))
        elif action in ("succeed", "fail") and self.running:
            ended = self.running[index % len(self.running)][2]
            if not ended.done():
                ended.set_result(action == "succeed")
        elif action == "cancel" and self.tasks:
            self.tasks[index % len(self.tasks)][1].cancel()
        elif action == "clear":
            self.cache.clear()
        elif action == "fetch" and self.fetches.waiting:
            self.fetched = self.fetches.run(index)
        elif action in ("lose", "damage") and self.store is not None:
            for name in list(self.store.values)[index : index + 1]:
                self.store.values[name] = None if action == "lose" else b"damaged"

    async def do_and_settle(self, action: str, index: int, keys: list[int]) -> None:
        self.fetched = None
        self.do(action, index, keys)
        await settle()
        if self.store is not None:
            self.store.written()

    async def run(self, actions: list[tuple[str, int, list[int]]]) -> None:
        for action in actions:
            await self.do_and_settle(*action)
        while self.running or self.fetches.waiting:
            await self.do_and_settle("fetch" if self.fetches.waiting else "succeed", 0, [])
        for keys, task in self.tasks:
            await asyncio.wait([task], timeout=LIMIT)
            assert task.done(), "a call hangs"
            if not task.cancelled() and task.exception() is None:
                assert numbers(task.result()) == keys
            elif not task.cancelled():
                assert isinstance(task.exception(), OSError)
        assert self.encoder._flights.by_key == {}
        assert self.encoder._tasks == set()
        for key, entry in self.cache.mm_cache.items():
            assert numbers([entry.embedding]) == [key]
        self.cache.check()
        if self.store is not None:
            for key, rows in self.store.fetch(range(5)).items():
                assert numbers([rows]) == [key]


Actions: TypeAlias = list[tuple[str, int, list[int]]]


def actions_of(*kinds: str) -> st.SearchStrategy[Actions]:
    return st.lists(
        st.tuples(
            st.sampled_from(["call", "call", "call", "succeed", "fail", "cancel", "clear", *kinds]),
            st.integers(0, 5),
            st.lists(st.integers(0, 4), min_size=1, max_size=4),
        ),
        max_size=25,
    )


@given(actions_of())
def test_any_order_of_calls_failures_cancellations_and_clears(actions: Actions) -> None:
    asyncio.run(Schedule(None).run(actions))


@given(actions_of("fetch", "fetch", "fetch", "lose", "damage"))
def test_any_order_of_these_and_of_fetches(actions: Actions) -> None:
    with MemoryStore() as store:
        asyncio.run(Schedule(store).run(actions))


def test_threads_in_any_order() -> None:
    """Eight threads want overlapping images from a tiny cache that is cleared now and then."""
    cache = MultiModalStaticCache(40)

    def encode(features: list[int]) -> torch.Tensor:
        return torch.stack([torch.full((2, 1), float(n)) for n in features])

    encoder = CachedEncoder(cache, encode, key=int)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(200):
            keys = torch.randint(0, 8, (3,), generator=generator).tolist()
            assert numbers(encoder(keys)) == keys
            if step % 50 == 49:
                cache.clear()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result(LIMIT)
    stats = encoder.stats()
    assert stats.hits + stats.encoded + stats.coalesced == 8 * 200 * 3
    assert encoder._flights.by_key == {}
    cache.check()
