"""What is read on one stream was written on another, and its memory isn't used again meanwhile.

On a simulated accelerator, and on CUDA where there is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from simulated import Accelerated, Accelerator

from multimodal_cache import (
    EmbeddingResult,
    MultiModalStaticCache,
    static_cache,
    tiered,
)
from multimodal_cache import _ownership as ownership
from multimodal_cache import _streams as streams
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
SCHEDULES = st.tuples(
    st.lists(STEPS, min_size=3, max_size=30), st.permutations(STREAMS), st.sampled_from([*CACHES])
)
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
@given(SCHEDULES)
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


RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "what is given is recorded to the current stream": lambda patch: patch.setattr(
        static_cache, "use_here", lambda tensors: None
    ),
    "what is kept as it is has its turn too": lambda patch: patch.setattr(
        static_cache,
        "plan_ownership",
        lambda *args, **options: (lambda nbytes, replacements: (nbytes, replacements or None))(
            *ownership.plan_ownership(*args, **options)
        ),
    ),
    "the event is recorded after the copy": without_marks,
    "a hit waits": lambda patch: patch.setattr(
        streams.Mark,
        "wait",
        lambda mark: mark._module.current_stream(mark._device),
    ),
    "a hit records": lambda patch: patch.setattr(streams.Mark, "wait", wait_without_recording),
    "what goes back waits for the host": lambda patch: patch.setattr(tiered, "Mark", NeverWaited),
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
            SCHEDULES,
            lambda schedule: bool(play(schedule)),
            settings=options,
            random=random.Random(0),
        )
    except NoSuchExample:
        pytest.fail("it isn't needed, or no schedule shows it")
    assert play(found)
