"""What is read on one stream was written on another, and its memory isn't used again meanwhile.

On a simulated accelerator, and on CUDA where there is one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from simulated import REUSED, UNWRITTEN, Accelerated, Accelerator

from multimodal_cache import (
    CachedEncoder,
    EmbeddingResult,
    MultiModalStaticCache,
    static_cache,
    tiered,
)
from multimodal_cache import _calls as calls
from multimodal_cache import _ownership as ownership
from multimodal_cache import _streams as streams
from multimodal_cache._flights import Flights
from multimodal_cache._gate import Gate
from multimodal_cache.tiered import TieredCache

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

STREAMS = (0, 1, 2)


@pytest.fixture
def monkeypatched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Puts the simulation in; each ``begin`` is a new accelerator."""
    empty_like = torch.empty_like

    def simulated_empty_like(source: torch.Tensor, **options: Any) -> torch.Tensor:
        if "device" not in options:
            return empty_like(source, **options)
        return Accelerated.accelerator.empty_like(source, **options)

    monkeypatch.setattr(
        streams,
        "module_of",
        lambda tensor: Accelerated.accelerator if isinstance(tensor, Accelerated) else None,
    )
    monkeypatch.setattr(tiered, "module_of", streams.module_of)
    monkeypatch.setattr(torch, "empty_like", simulated_empty_like)
    return monkeypatch


def begin() -> Accelerator:
    Accelerated.accelerator = Accelerator()
    return Accelerated.accelerator


@pytest.fixture
def accelerator(monkeypatched: pytest.MonkeyPatch) -> Accelerator:
    return begin()


def require_right_reads(accelerator: Accelerator, *first: int) -> None:
    accelerator.run(*first)
    assert accelerator.wrong == []


def value_of(accelerator: Accelerator, key: int, *, part: bool = False) -> EmbeddingResult:
    """Returns four numbers, of a tensor of their own or as a part of a batch."""
    tensor = accelerator.full(float(key), 8 if part else 4)
    return EmbeddingResult(embedding=tensor[:4] if part else tensor)


# Random schedules

CACHES: dict[str, Callable[[], MultiModalStaticCache]] = {
    "plain": lambda: MultiModalStaticCache(48),
    "copy": lambda: MultiModalStaticCache(48, copy=True),
    "tiered": lambda: TieredCache(32, 80),
    "host alone": lambda: TieredCache(0, 48),
}

streams_ = st.sampled_from(STREAMS)
keys_ = st.integers(1, 5)
STEPS = st.one_of(
    st.tuples(st.just("set"), streams_, keys_, streams_, st.booleans()),
    st.tuples(st.just("get"), streams_, keys_),
    st.tuples(st.just("free"), keys_),
    st.tuples(st.just("run"), streams_, st.integers(1, 4)),
)


def schedules(*kinds: str) -> st.SearchStrategy[Any]:
    steps = st.lists(STEPS, min_size=3, max_size=30)
    return st.tuples(steps, st.permutations(STREAMS), st.sampled_from(kinds))


Schedule = tuple[list[Any], list[int], str]


def set_value(
    accelerator: Accelerator,
    cache: MultiModalStaticCache,
    here: int,
    key: int,
    home: int,
    part: bool,
) -> None:
    """Writes a value on one stream, and sets it on another one, for which it is ready."""
    with accelerator.on(home):
        value = value_of(accelerator, key, part=part)
    if home != here:
        event = accelerator.Event()
        event.record(accelerator.stream(home))
        accelerator.stream(here).wait_event(event)
    with accelerator.on(here):
        cache.set(key, value)


def get_value(accelerator: Accelerator, cache: MultiModalStaticCache, here: int, key: int) -> None:
    """Launches a read of a hit, and lets go of the result."""
    with accelerator.on(here):
        found = cache.get_single(key)
        if found is not None:
            accelerator.read(found.embedding, float(key))


def play(schedule: Schedule) -> list[str]:
    """Returns the reads of a schedule that found something else."""
    steps, order, kind = schedule
    accelerator, cache = begin(), CACHES[kind]()
    for name, *arguments in steps:
        if name == "set":
            set_value(accelerator, cache, *arguments)
        elif name == "get":
            get_value(accelerator, cache, *arguments)
        elif name == "free":
            cache.free(*arguments)
        else:
            number, times = arguments
            for _ in range(times):
                accelerator.stream(number).step()
    cache.check()
    accelerator.run(*order)
    return accelerator.wrong


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schedules(*CACHES))
def test_no_schedule_reads_a_byte_unwritten_or_used_again(
    monkeypatched: pytest.MonkeyPatch, schedule: Schedule
) -> None:
    assert play(schedule) == []


def without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    init = streams.Mark.__init__

    def too_early(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._event.point.passed = True

    monkeypatch.setattr(streams.Mark, "__init__", too_early)


def wait_without_recording(mark: Any) -> None:
    stream = mark._module.current_stream(mark._device)
    stream.wait_event(mark._event)


class NeverWaited(streams.Mark):
    def wait(self) -> Any:
        return None


def without_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_cache, "use_here", lambda tensors: None)


# By what is taken out, and of the caches that it is taken from.
RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what is kept is recorded to the current stream, plain": without_recording,
    "what is copied from is recorded to the current stream, copy": without_recording,
    "what the host copies from is recorded to the current stream, host alone": without_recording,
    "what is kept as it is has its turn too, plain": lambda patch: patch.setattr(
        static_cache,
        "plan_ownership",
        lambda *args, **options: (lambda nbytes, replacements: (nbytes, replacements or None))(
            *ownership.plan_ownership(*args, **options)
        ),
    ),
    "the event is recorded after the copy, copy": without_marks,
    "a hit waits, plain": lambda patch: patch.setattr(
        streams.Mark,
        "wait",
        lambda mark: mark._module.current_stream(mark._device),
    ),
    "a hit records, plain": lambda patch: patch.setattr(
        streams.Mark, "wait", wait_without_recording
    ),
    "what goes back waits for the host, tiered": lambda patch: patch.setattr(
        tiered, "Mark", NeverWaited
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_without_any_one_rule_some_schedule_does(
    monkeypatched: pytest.MonkeyPatch, rule: str
) -> None:
    RULES[rule](monkeypatched)
    options = settings(
        max_examples=3000, phases=[Phase.generate], derandomize=True, database=None, deadline=None
    )
    try:
        found = find(
            schedules(rule.rpartition(", ")[2]),
            lambda schedule: bool(play(schedule)),
            settings=options,
            random=random.Random(0),
        )
    except NoSuchExample:
        pytest.fail("it isn't needed, or no schedule shows it")
    assert play(found)


# One by one


@pytest.mark.parametrize(
    ("device", "module"),
    [("cuda:0", torch.cuda), ("xpu:0", torch.xpu), ("cpu", None), ("mps", None), ("meta", None)],
)
def test_a_device_has_a_module_if_it_has_streams(device: str, module: Any) -> None:
    tensor: Any = SimpleNamespace(is_cpu=device == "cpu", device=torch.device(device))
    assert streams.module_of(tensor) is module


def test_on_the_cpu_an_entry_has_nothing_else_to_do_at_a_hit() -> None:
    cache = MultiModalStaticCache(1000)
    cache.set(1, EmbeddingResult(embedding=torch.zeros(4)))
    cache.set(2, EmbeddingResult(embedding=torch.zeros(8)[:4]))
    assert [entry[4] for entry in cache._entries.values()] == [None, None]


@pytest.mark.parametrize("way", ["quick, as on CUDA", "quick, as on XPU", "with care"])
def test_a_turn_is_planned_for_what_is_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    value = EmbeddingResult(embedding=torch.zeros(4))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    if way == "quick, as on CUDA":
        value.embedding.share_memory_()
    monkeypatch.setattr(ownership, "_HAS_OTHER_DEVICES", way == "quick, as on XPU")
    if way == "with care":
        assert ownership._plan_with_care(value, copy_all=False) == (16, {})
    else:
        assert ownership.plan_ownership(value, False) == (16, {})


def test_what_is_kept_is_the_object_itself(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    value = value_of(accelerator, 1)
    cache.set(1, value)
    assert cache.get_single(1) is value


def test_a_hit_on_the_same_stream_launches_nothing(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    cache.set(1, value_of(accelerator, 1))
    before = len(accelerator.stream(0)._queue)
    cache.get_single(1)
    assert len(accelerator.stream(0)._queue) == before


def test_each_device_has_a_stream_and_an_event(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    value = EmbeddingResult(embedding=accelerator.full(1.0, 4, device=0))
    value.other = accelerator.full(2.0, 4, device=1)
    cache.set(1, value)
    with accelerator.on(1):
        found = cache.get_single(1)
        assert found is value
        accelerator.read(found.embedding, 1.0)
        accelerator.read(found.other, 2.0)
    for device in (0, 1):
        while accelerator.stream(1, device).step():
            pass
    require_right_reads(accelerator)


@pytest.mark.parametrize("key", [7, MultiModalStaticCache.combine_hashes([7])])
def test_a_hit_of_each_kind_waits(accelerator: Accelerator, key: int) -> None:
    cache = MultiModalStaticCache(1000)
    cache.set(key, value_of(accelerator, 7))
    with accelerator.on(1):
        found = cache.get_single(7) or cache.get([7])
        assert found is not None
        accelerator.read(found.embedding, 7.0)
    require_right_reads(accelerator, 1)


def test_on_evict_can_read_on_its_own_stream(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(
        16, on_evict=lambda key, result: accelerator.read(result.embedding, float(key))
    )
    cache.set(1, value_of(accelerator, 1))
    with accelerator.on(1):
        cache.set(2, value_of(accelerator, 2))
    require_right_reads(accelerator, 1)


def test_the_books_are_right_when_a_hit_fails(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    cache.set(1, value_of(accelerator, 1))

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    accelerator.stream(1).wait_event = fail  # type: ignore[method-assign]
    with accelerator.on(1), pytest.raises(RuntimeError, match="the device is lost"):
        cache.get_single(1)
    cache.check()


# The encoder


def encode(numbers: list[Any]) -> list[torch.Tensor]:
    """Leaves to the current stream what another one has written."""
    accelerator = Accelerated.accelerator
    with accelerator.on(2):
        made = [accelerator.full(float(number), 2, 2) for number in numbers]
    event = accelerator.Event()
    event.record(accelerator.stream(2))
    accelerator.current_stream(made[0].device).wait_event(event)
    return made


def embed_in_a_worker(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    with accelerator.on(1), CachedEncoder(cache, encode) as encoder:
        made = asyncio.run(encoder.encode_async([3, 4], [3, 4]))
        for embedding, number in zip(made, (3.0, 4.0), strict=True):
            accelerator.read(embedding, number)
        cache.clear()


def embed_for_a_waiter(accelerator: Accelerator) -> None:
    cache = MultiModalStaticCache(1000)
    flights, gate = Flights(cache), Gate(None)
    first, waiter = (calls.Call(flights, gate, [3], [3], [None]) for _ in range(2))
    batch = first.next_batch()
    rest = waiter.next_batch()
    assert batch is not None
    assert rest is not None
    assert rest.claimed == []
    batch.encode(encode)
    cache.clear()
    with accelerator.on(1):
        for want, flight in waiter.awaited:
            waiter.take(want, flight, flight.landed.result())
        assert waiter.next_batch() is None
        for embedding in waiter.embeddings():
            accelerator.read(embedding, 3.0)


EMBED = {"a worker": embed_in_a_worker, "a waiter": embed_for_a_waiter}


def wrong_reads(embed: Callable[[Accelerator], None], *first: int) -> list[str]:
    accelerator = begin()
    embed(accelerator)
    accelerator.run(*first)
    return accelerator.wrong


@pytest.mark.parametrize("first", [(), (0,), (1,), (2,), (0, 2), (2, 0)])
@pytest.mark.parametrize("embed", EMBED.values(), ids=EMBED)
def test_what_another_thread_encoded_is_read_as_it_was_written(
    monkeypatched: pytest.MonkeyPatch, embed: Callable[[Accelerator], None], first: tuple[int, ...]
) -> None:
    assert wrong_reads(embed, *first) == []


ENCODER_RULES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "the caller waits": (
        lambda patch: patch.setattr(calls, "written_here", lambda tensors: None),
        1,
    ),
    "the caller records": (
        lambda patch: patch.setattr(streams.Mark, "wait", wait_without_recording),
        0,
    ),
    "what encode returned is recorded": (
        lambda patch: patch.setattr(calls, "use_here", lambda tensors: None),
        2,
    ),
}


@pytest.mark.parametrize("rule", ENCODER_RULES)
@pytest.mark.parametrize("embed", EMBED.values(), ids=EMBED)
def test_without_any_one_rule_what_another_thread_encoded_is_not(
    monkeypatched: pytest.MonkeyPatch, embed: Callable[[Accelerator], None], rule: str
) -> None:
    take_out, first = ENCODER_RULES[rule]
    take_out(monkeypatched)
    assert wrong_reads(embed, first) != []


# CUDA

CYCLES = 50_000_000  # some tens of milliseconds


def late(value: float, *shape: int) -> torch.Tensor:
    """Returns a tensor that the current stream fills late."""
    tensor = torch.full(shape, UNWRITTEN, device="cuda")
    torch.cuda._sleep(CYCLES)
    return tensor.fill_(value)


@needs_cuda
@pytest.mark.parametrize("kind", CACHES)
def test_cuda_reads_what_another_stream_writes_late(kind: str) -> None:
    cache = CACHES[kind]()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    late(0.0, 4)  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        assert cache.set(1, EmbeddingResult(embedding=late(1.0, 4)))
    with torch.cuda.stream(reader):
        found = cache.get_single(1)
        assert found is not None
        read = found.embedding + 0
    torch.cuda.synchronize()
    assert read.tolist() == [1.0] * 4


@needs_cuda
@pytest.mark.parametrize("kind", CACHES)
def test_cuda_doesn_t_use_again_what_a_late_read_needs(kind: str) -> None:
    cache = CACHES[kind]()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    late(0.0, 4)
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        cache.set(1, EmbeddingResult(embedding=torch.full((4,), 1.0, device="cuda")))
    with torch.cuda.stream(reader):
        found = cache.get_single(1)
        assert found is not None
        torch.cuda._sleep(CYCLES)
        read = found.embedding + 0
    del found
    cache.clear()
    with torch.cuda.stream(writer):
        others = [torch.full((4,), REUSED, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    assert read.tolist() == [1.0] * 4
    del others


@needs_cuda
def test_cuda_gives_what_a_worker_encodes_late() -> None:
    reader = torch.cuda.Stream()
    late(0.0, 4)
    torch.cuda.synchronize()

    def encode_late(numbers: list[Any]) -> list[torch.Tensor]:
        return [late(float(number), 2, 2) for number in numbers]

    cache = MultiModalStaticCache(1000)
    with torch.cuda.stream(reader), CachedEncoder(cache, encode_late) as encoder:
        (made,) = asyncio.run(encoder.encode_async([3], [3]))
        read = made + 0
    torch.cuda.synchronize()
    assert read.tolist() == [[3.0, 3.0], [3.0, 3.0]]
