"""The curve of hit rate over size, held to replays with the real cache."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.planner import LARGEST_SIZE, hit_curve

Requests = list[tuple[Any, int]]


def replay(requests: Requests, size: int, skip: int = 0) -> tuple[int, int, int]:
    """Serves the requests with a real cache: the hits, their bytes, and the entries at the end."""
    cache = MultiModalStaticCache(size)
    numbers: dict[tuple[Any, int], int] = {}
    hits = hit_bytes = 0
    for position, request in enumerate(requests):
        key = numbers.setdefault(request, len(numbers))
        if cache.get_single(key) is None:
            cache.set(key, EmbeddingResult(embedding=torch.empty(request[1], dtype=torch.uint8)))
        elif position >= skip:
            hits += 1
            hit_bytes += request[1]
    return hits, hit_bytes, len(cache)


def curve(requests: Requests, **options: Any) -> Any:
    return hit_curve([key for key, _ in requests], [size for _, size in requests], **options)


traces = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 5, 9, 40])), max_size=60)


@given(requests=traces, skip=st.integers(0, 70))
@example(requests=[(0, 0), (1, 5), (2, 5), (3, 5), (0, 0), (1, 5)], skip=0)  # an empty one leaves
@example(requests=[(0, 5), (1, 40), (0, 5), (1, 40)], skip=0)  # a refused one takes no room
def test_at_each_size_it_equals_a_replay_with_the_real_cache(requests: Requests, skip: int) -> None:
    computed = curve(requests, skip=skip)
    assert computed.requests == len(requests[skip:])
    assert computed.requested_bytes == sum(size for _, size in requests[skip:])
    assert computed.items == len(set(requests))
    assert computed.footprint == sum(size for _, size in set(requests))
    assert computed.largest == max((size for _, size in requests), default=0)
    for size in range(computed.footprint + 2):
        point = computed.at(size)
        replayed = replay(requests, size, skip)
        assert (point.size, point.hits, point.hit_bytes, point.entries) == (size, *replayed)
        assert point.hit_rate == (point.hits / computed.requests if computed.requests else 0.0)
        if computed.requested_bytes:
            assert point.byte_hit_rate == point.hit_bytes / computed.requested_bytes
    assert computed.at(10**30).hit_rate == point.hit_rate == computed.ceiling


@given(requests=traces, percent=st.integers(0, 100))
def test_a_size_that_reaches_a_share_of_the_ceiling_does_so_as_does_any_larger(
    requests: Requests, percent: int
) -> None:
    computed = curve(requests)
    wanted = computed.ceiling * computed.requests * percent / 100
    reaching = computed.size_reaching(percent)
    for size in range(reaching, computed.footprint + 2):
        assert computed.at(size).hits >= wanted - 1e-9
    if reaching > computed.largest:
        assert computed.at(reaching - 1).hits < wanted


def test_ten_thousand_requests_equal_a_replay() -> None:
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.3, 10_000) % 500
    sizes = rng.integers(0, 3000, 500)[keys]
    requests = list(zip(keys.tolist(), sizes.tolist(), strict=True))
    computed = hit_curve(keys, sizes)  # type: ignore[arg-type]  # arrays will do
    for size in (1000, 2500, 10_000, 100_000, 400_000):
        point = computed.at(size)
        assert (point.hits, point.hit_bytes, point.entries) == replay(requests, size)


def test_keys_are_compared_exactly_whatever_they_are() -> None:
    different: list[Any] = [2**63, 2**63 + 1, -1, -2, "1", 1, 2**200, (1, 2)]
    sizes = [1] * len(different)
    assert hit_curve(different, sizes).ceiling == 0.0
    assert hit_curve(different * 2, sizes * 2).at(8).hits == len(different)
    unsigned = np.array([2**63, 2**63 + 1], np.uint64)
    assert hit_curve(unsigned, [1, 1]).ceiling == 0.0  # type: ignore[arg-type]
    words = np.array(["a", "b", "a"])
    assert hit_curve(words, [1, 1, 1]).at(2).hits == 1  # type: ignore[arg-type]


def test_the_largest_size_is_taken_and_the_sum_is_not_passed_over() -> None:
    assert hit_curve([1], [LARGEST_SIZE]).at(2**62).entries == 1
    for shape in ([LARGEST_SIZE] * 2, [LARGEST_SIZE, LARGEST_SIZE - 1, 1], [LARGEST_SIZE] * 9):
        with pytest.raises(ValueError, match="sizes must add up to less than 2\\*\\*63"):
            hit_curve([1] * len(shape), shape)
    most = hit_curve([1, 1, 2], [LARGEST_SIZE, LARGEST_SIZE - 2, 1])
    assert (most.requested_bytes, most.footprint) == (2**63 - 1, 2**63 - 1)


def test_what_is_wrong_with_the_arguments_is_said() -> None:
    for sizes, error, message in [
        ([1.5], TypeError, "sizes must be integers, of 64 bits at most, got float64"),
        ([True], TypeError, "got bool"),
        ([-1], ValueError, "sizes must be from 0 to 2**62, got -1 to -1"),
        ([2**62 + 1], ValueError, "sizes must be from 0 to 2**62"),
        ([1, 2], ValueError, "there must be a size for each key, got 1 and 2"),
    ]:
        with pytest.raises(error) as caught:
            hit_curve([7], sizes)  # type: ignore[arg-type]  # on purpose
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="skip must be 0 or more, got -1"):
        hit_curve([], [], skip=-1)
    computed = hit_curve([7, 7], [1, 1])
    with pytest.raises(ValueError, match="size must be 0 or more, got -1"):
        computed.at(-1)
    for percent in (-1, 101):
        with pytest.raises(ValueError, match=f"percent must be from 0 to 100, got {percent}"):
            computed.size_reaching(percent)


def test_the_weights_of_greater_ones_before_are_those_of_the_definition() -> None:
    from multimodal_cache.planner import _weight_of_greater_before

    for length in range(6):
        weights = np.array([2**k for k in range(length)], np.int64)
        for ranks in itertools.permutations(range(length)):
            expected = [sum(2**q for q in range(k) if ranks[q] > ranks[k]) for k in range(length)]
            found = _weight_of_greater_before(np.array(ranks, np.int64), weights)
            assert found.tolist() == expected
