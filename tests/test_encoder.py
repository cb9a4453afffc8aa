"""``CachedEncoder``: what a call returns, encodes, caches and refuses."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import EncoderOfNumbers, numbers, result

from multimodal_cache import (
    CachedEncoder,
    EmbeddingResult,
    EncoderStats,
    MultimodalCache,
    MultiModalStaticCache,
    _calls,
    hash_feature,
)
from multimodal_cache._modes import outside_graphs


def test_only_what_is_missing_is_encoded_in_one_call() -> None:
    encode = EncoderOfNumbers()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    assert numbers(encoder([5, 1, 5, 2])) == [5, 1, 5, 2]
    assert numbers(encoder([2, 9, 1, 8, 5])) == [2, 9, 1, 8, 5]
    assert encode.calls == [[5, 1, 2], [9, 8]]
    stats = encoder.stats()
    assert stats == EncoderStats(
        calls=2, hits=3, hit_tokens=6, fetched=0, fetched_tokens=0, encoded=5, encoded_tokens=10,
        coalesced=1, coalesced_tokens=2, encodes=2, encode_seconds=stats.encode_seconds,
        row_mismatches=0, failures=0,
    )  # fmt: skip
    assert encoder([]) == []
    assert len(encode.calls) == 2


def test_a_hit_is_the_tensor_that_the_cache_holds() -> None:
    cache = MultiModalStaticCache(10_000)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    (first,) = encoder([1], [77])
    (again,) = encoder([1], [77])
    stored = cache.get_single(77)
    assert stored is not None
    assert first is again is stored.embedding


@pytest.mark.parametrize("device_features", [[torch.zeros(2)], [torch.zeros(2)] * 3])
def test_features_are_hashed_with_the_namespace(device_features: list[torch.Tensor]) -> None:
    cache = MultiModalStaticCache(10_000)
    CachedEncoder(cache, lambda f: [torch.zeros(2, 3)] * len(f), namespace="v1")(device_features)
    assert list(cache.mm_cache) == [hash_feature(torch.zeros(2), namespace="v1")]


def test_a_key_function_makes_the_keys() -> None:
    cache = MultiModalStaticCache(10_000)
    encode = EncoderOfNumbers()
    encoder = CachedEncoder(cache, encode, key=lambda n: None if n < 0 else np.int64(n % 10))
    assert numbers(encoder([3, 13, -1, -1])) == [3, 3, -1, -1]
    assert list(cache.mm_cache) == [3]
    assert encode.calls == [[3, -1, -1]]
    assert numbers(encoder([-1, 23])) == [-1, 3]
    assert encode.calls[1:] == [[-1]]


def test_given_keys_come_first() -> None:
    def no_key(feature: Any) -> int:
        pytest.fail("it was asked")

    encode = EncoderOfNumbers()
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode, key=no_key)
    assert numbers(encoder([1, 2], [7, None])) == [1, 2]
    assert numbers(encoder([1, 2], (np.int64(7), None))) == [1, 2]
    assert encode.calls == [[1, 2], [2]]


# What encode may return


class Output(NamedTuple):
    """As an encoder returns that has more than one thing to say."""

    hidden: torch.Tensor
    pooled: torch.Tensor


class Empty(NamedTuple):
    """It has no field to return instead."""


class ModelOutput(collections.OrderedDict[str, Any]):
    """As those of transformers."""


ROWS = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("output", "num_tokens"),
    [
        ([ROWS[0], ROWS[1]], None),
        ((ROWS[0], ROWS[1]), [3, 3]),
        ([ROWS[0].reshape(1, 3, 4), ROWS[1].reshape(3, 1, 4)], None),
        (ROWS, None),
        (ROWS, [3, 3]),
        (ROWS.reshape(6, 4), [3, 3]),
        (ROWS.clone().requires_grad_(), None),
        ([ROWS.permute(2, 1, 0).contiguous().permute(2, 1, 0)[0], ROWS[1]], None),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_forms_of_output(output: Any, num_tokens: list[int] | None, asynchronous: bool) -> None:
    cache = MultiModalStaticCache(10_000)
    encoder = CachedEncoder(cache, lambda features: output)
    if asynchronous:
        rows = asyncio.run(encoder.encode_async([1, 2], [1, 2], num_tokens))
    else:
        rows = encoder([1, 2], [1, 2], num_tokens)
    for row, expected in zip(rows, ROWS, strict=True):
        assert torch.equal(row, expected)
        assert row.is_contiguous()
        assert not row.requires_grad
        assert row.untyped_storage().nbytes() == 48
    assert cache.current_size == 96


def test_unequal_lengths_are_cut_by_num_tokens() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), lambda features: ROWS.reshape(6, 4))
    rows = encoder([1, 2, 3], [1, 2, 3], [1, 5, 0])
    assert [row.shape for row in rows] == [(1, 4), (5, 4), (0, 4)]
    assert torch.equal(torch.cat(rows), ROWS.reshape(6, 4))


def test_one_feature_needs_no_num_tokens() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), lambda features: ROWS[0])
    assert torch.equal(encoder([1], [1])[0], ROWS[0])


@pytest.mark.parametrize("form", [torch.stack, list, tuple])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_vector_for_each_feature_however_many_are_missing(form: Any, count: int) -> None:
    def pooled(features: list[Any]) -> Any:
        return form([torch.full((4,), float(number)) for number in features])

    encoder = CachedEncoder(MultiModalStaticCache(10_000), pooled)
    rows = encoder([*range(count)])
    assert [row.shape for row in rows] == [(1, 4)] * count
    assert numbers(rows) == [*range(count)]
    assert numbers(encoder([0], num_tokens=[1])) == [0]


def test_num_tokens_decides_where_there_are_as_many_rows_as_features() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), lambda features: ROWS[0, :2])
    assert [row.shape[0] for row in encoder([1, 2], num_tokens=[2, 0])] == [2, 0]


@pytest.mark.parametrize(
    ("output", "num_tokens", "message"),
    [
        (None, None, "a dense tensor, or a list or tuple of them, got NoneType"),
        (np.zeros((2, 3, 4)), None, "them, got ndarray: return torch.from_numpy(...) of it"),
        ([np.zeros((3, 4))] * 2, None, "got ndarray for feature 0: return torch.from_numpy(...)"),
        (result(2, 3, 4), None, "tuple of them, got EmbeddingResult: return its .embedding"),
        ([result(3, 4)] * 2, None, "got EmbeddingResult for feature 0: return its .embedding"),
        (Empty(), None, "a dense tensor, or a list or tuple of them, got Empty"),
        ({"x": ROWS}, None, "got dict: return one of its values, such as output['x']"),
        ({}, None, "a dense tensor, or a list or tuple of them, got dict"),
        (ModelOutput(h=ROWS, p=ROWS[:, 0]), None, "got ModelOutput: return one of its values, "),
        (Output(ROWS, ROWS[:, 0]), None, "got Output: return one field, such as output.hidden"),
        (ROWS.max(dim=1), None, "got max: return one field, such as output.values"),
        (ROWS.topk(1), None, "got topk: return one field, such as output.values"),
        (torch.linalg.qr(ROWS), None, "return one field, such as output.Q"),
        ([ROWS.max(dim=1)] * 2, None, "for feature 0: return one field, such as output.values"),
        ((*ROWS.max(dim=1),), None, "got torch.float32 for feature 0 and torch.int64 for feature"),
        ([ROWS[0] > 0, ROWS[1]], None, "torch.bool for feature 0 and torch.float32 for feature 1"),
        ((ROWS, ROWS[:, 0]), None, "a tensor [2, 3, 4] for feature 0 and a tensor [2, 4] for"),
        ((ROWS[:, 0], ROWS), None, "one for each feature, not several things about all of them"),
        ([ROWS[0], ROWS[0, :, :3]], None, "one rank and hidden size, got a tensor [3, 4] for"),
        ([ROWS[0]], None, "must return 2 embeddings, got 1"),
        ([ROWS[0]] * 3, None, "must return 2 embeddings, got 3"),
        ([ROWS[0], torch.tensor(1.0)], None, "rank 1 or more, got a tensor [] for feature 1"),
        (ROWS.to_sparse(), None, "tuple of them, got a tensor with layout=torch.sparse_coo"),
        ([ROWS[0], ROWS[0].to("meta")], None, "got a tensor with layout=torch.strided, is_nested"),
        ([ROWS[0], None], None, "rank 1 or more, got NoneType for feature 1"),
        (torch.zeros(3, 3, 4), None, "[2, tokens, hidden] or [all tokens, hidden] or a list, got"),
        (torch.zeros(2, 3, 4, 5), None, "or a list, got a tensor [2, 3, 4, 5]"),
        (torch.zeros(4), None, "or a list, got a tensor [4]"),
        (ROWS.reshape(6, 4), None, "num_tokens is needed to cut a tensor [6, 4] into the"),
        (ROWS.reshape(6, 4), [3, 4], "7 tokens in all, as num_tokens says, got a tensor [6, 4]"),
        (ROWS, [3, 2], "2 tokens for feature 1, as num_tokens says, got 3"),
        ([ROWS[0], ROWS[1]], [4, 3], "4 tokens for feature 0, as num_tokens says, got 3"),
    ],
)
def test_other_output_is_refused_and_nothing_is_cached(
    output: Any, num_tokens: list[int] | None, message: str
) -> None:
    cache = MultiModalStaticCache(10_000)
    encoder = CachedEncoder(cache, lambda features: output)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is compared below
        encoder([1, 2], [1, 2], num_tokens)
    assert message in str(caught.value)
    assert len(cache) == 0
    assert encoder.stats().failures == 1
    assert encoder._flights.by_key == {}


# num_tokens


def test_an_entry_of_another_length_is_dropped_and_encoded_again() -> None:
    cache = MultiModalStaticCache(10_000)
    encode = EncoderOfNumbers(tokens=275)
    encoder = CachedEncoder(cache, encode)
    cache.set(1, result(256, 1))
    cache.set(2, EmbeddingResult(embedding=torch.zeros(4)))  # no [tokens, hidden] at all
    rows = encoder([7, 8], [1, 2], [275, 275])
    assert numbers(rows) == [7, 8]
    assert encoder.stats().row_mismatches == 2
    encoder([7, 8], [1, 2], [275, 275])
    assert encode.calls == [[7, 8]]


def test_an_entry_of_more_dimensions_is_flattened() -> None:
    cache = MultiModalStaticCache(10_000)
    cache.set(1, EmbeddingResult(embedding=ROWS.clone()))
    (rows,) = CachedEncoder(cache, EncoderOfNumbers())([0], [1], [6])
    assert torch.equal(rows, ROWS.reshape(6, 4))


def test_one_key_with_two_lengths_is_two_things_to_encode() -> None:
    lengths = iter([[2, 3, 2], [3]])

    def encode(features: list[Any]) -> list[torch.Tensor]:
        return [torch.ones(n, 4) for n in next(lengths)]

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    rows = encoder(["a", "b", "c", "a"], [1, 1, 2, 1], [2, 3, 2, 2])
    assert [row.shape[0] for row in rows] == [2, 3, 2, 2]
    assert encoder.stats().encoded == 3
    assert encoder(["b"], [1], [3])[0].shape == (3, 4)  # the first is cached, and makes way
    assert encoder.stats().row_mismatches == 1


# What is returned


def test_no_graph_and_no_gradients_inside() -> None:
    layer = torch.nn.Linear(3, 4)
    seen = []

    def encode(features: list[Any]) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        with torch.enable_grad():
            output: torch.Tensor = layer(torch.ones(len(features), 2, 3))
        assert output.requires_grad
        return output

    rows = CachedEncoder(MultiModalStaticCache(10_000), encode)([1, 2])
    assert seen == [False]
    assert torch.is_grad_enabled()
    assert not any(row.requires_grad for row in rows)


@pytest.mark.parametrize("max_size", [0, 100, 10_000])
def test_results_outlive_the_cache_and_keep_no_batch(max_size: int) -> None:
    batches = []

    def encode(features: list[Any]) -> torch.Tensor:
        batch = torch.ones(len(features), 5, 4)
        batches.append(weakref.ref(batch.untyped_storage()))
        alive.append(weakref.ref(batch))
        return batch

    alive: list[weakref.ref[torch.Tensor]] = []
    cache = MultiModalStaticCache(max_size)
    rows = CachedEncoder(cache, encode)([1, 2, 3])
    gc.collect()
    assert [ref() for ref in alive] == [None]
    cache.clear()
    assert [row.sum().item() for row in rows] == [20, 20, 20]
    assert {row.untyped_storage().nbytes() for row in rows} == {80}


def test_the_mode_of_the_caller_does_not_count() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers())
    with torch.inference_mode():
        (rows,) = encoder([1])
    assert not rows.is_inference()
    assert not rows.requires_grad


async def later(features: list[Any]) -> list[torch.Tensor]:
    return []


async def later_still(features: list[Any]) -> Any:
    return later(features)


async def as_task(features: list[Any]) -> Any:
    return asyncio.ensure_future(later(features))


class Module(torch.nn.Module):
    async def forward(self, features: list[Any]) -> list[torch.Tensor]:
        return []


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda features: later(features), "or a list or tuple of them, got coroutine: await it"),
        (Module(), "got coroutine: await it in encode, as in: async def encode(images): return aw"),
        (lambda features: [later([feature]) for feature in features], "for feature 0: await it in"),
        (lambda features: (later(features),), "encode must return 2 embeddings, got 1"),
        (later_still, "got coroutine: await it in encode, as in: async def encode(images): return"),
        (as_task, "got Task: await it in encode, as in: async def encode(images): return await m"),
    ],
)
def test_what_nobody_has_awaited_is_refused(encode: Any, message: str) -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is compared below
        asyncio.run(encoder.encode_async([1, 2]))
    assert message in str(caught.value)
    del caught
    gc.collect()  # a coroutine that was never awaited would warn of it


def test_embeddings_of_two_floating_dtypes_may_be_mixed() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), lambda _: [ROWS[0], ROWS[1].half()])
    assert [rows.dtype for rows in encoder([1, 2])] == [torch.float32, torch.float16]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_waits_for_the_collector(fails: bool) -> None:
    """What it holds is memory that the collector doesn't see."""
    features = [torch.zeros(3)]
    outputs: list[weakref.ref[torch.Tensor]] = []

    def encode(features: list[Any]) -> torch.Tensor:
        output = torch.ones(1, 2, 4)
        outputs.append(weakref.ref(output))
        if fails:
            raise OSError("no such image")
        return output

    cache = MultiModalStaticCache(10_000)
    encoder = CachedEncoder(cache, encode)
    feature = weakref.ref(features[0])
    gc.collect()
    gc.disable()
    try:
        rows: Any = None
        with contextlib.suppress(OSError):
            rows = encoder(features)
        row = weakref.ref(rows[0]) if rows else lambda: None
        del rows
        cache.clear()
        features.clear()
        assert (feature(), outputs[0](), row()) == (None, None, None)
    finally:
        gc.enable()


@pytest.mark.parametrize("copy", [False, True])
def test_an_encoder_may_reuse_its_buffer(copy: bool) -> None:
    buffer = torch.zeros(1, 2, 4)
    encoder = CachedEncoder(
        MultiModalStaticCache(10_000, copy=copy), lambda features: buffer.fill_(features[0])
    )
    one, two = encoder([1])[0], encoder([2])[0]
    assert numbers([one, two, *encoder([1]), *encoder([2])]) == [1, 2, 1, 2]


# Generations


def test_clear_during_an_encode() -> None:
    cache = MultiModalStaticCache(10_000)
    outside: list[Any] = []

    def encode(features: list[Any]) -> torch.Tensor:
        if features == [1]:
            cache.clear()
            outside.append(encoder([2]))
        return torch.full((len(features), 2, 4), float(features[0]))

    encoder = CachedEncoder(cache, encode, key=int)
    assert numbers(encoder([1])) == [1]
    assert list(cache.mm_cache) == [2]
    assert encoder._flights.by_key == {}


# Other caches


class OwnCache(MultimodalCache):
    """The least that an encoder needs: no generation."""

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}

    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> None:
        raise NotImplementedError

    def get_single(self, mm_hash: int) -> Any:
        return self.entries.get(mm_hash)

    def set(self, mm_hash: int, embedding: Any, mm_embedding_allocator: Any) -> bool:
        self.entries[mm_hash] = embedding
        return True

    def has(self, mm_hash: int) -> bool:
        raise NotImplementedError

    def free(self, mm_hash: int, mm_embedding_allocator: Any) -> bool:
        return self.entries.pop(mm_hash, None) is not None

    def clear(self) -> None:
        self.entries.clear()

    def available_size(self) -> int:
        return len(self.entries)


def test_it_works_with_the_least_of_caches() -> None:
    encode = EncoderOfNumbers()
    encoder = CachedEncoder(OwnCache(), encode)
    assert numbers(encoder([1, 2], num_tokens=[2, 2])) == [1, 2]
    assert numbers(encoder([1, 2, 3], num_tokens=[2, 2, 2])) == [1, 2, 3]
    encode.tokens = 3
    assert numbers(encoder([1], num_tokens=[3])) == [1]
    assert encode.calls == [[1, 2], [3], [1]]


def test_a_cache_without_get_single_says_so() -> None:
    class Incomplete(OwnCache):
        get_single = MultimodalCache.get_single

    encoder = CachedEncoder(Incomplete(), EncoderOfNumbers())
    with pytest.raises(NotImplementedError, match=r"Incomplete doesn't define get_single\(mm_hash"):
        encoder([1])


def test_a_cache_that_refuses_fails_the_call_and_lands_its_flights() -> None:
    class Refusing(OwnCache):
        def set(self, mm_hash: int, embedding: Any, mm_embedding_allocator: Any) -> bool:
            raise MemoryError("full")

    encoder = CachedEncoder(Refusing(), EncoderOfNumbers())
    for _ in range(2):
        with pytest.raises(MemoryError, match="full"):
            encoder([1, 2])
    assert (encoder._flights.by_key, encoder.stats().failures) == ({}, 2)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ab",), "a list, got str: give [image] for one image, a list for several"),
        ((b"ab",), "a list, got bytes: give [image] for one image, a list for several"),
        ((5,), "a list, got int: give [image] for one image, a list for several"),
        (({"a": 1},), "features must be a list, got dict"),
        ((torch.zeros(2, 3),), "got Tensor: give [image] for one image, list(batch) for a batch"),
        ((np.zeros((2, 3)),), "got ndarray: give [image] for one image, list(batch) for a batch"),
        ((collections.UserDict(a=1),), "got UserDict: give list(inputs['pixel_values']) for what"),
        (([1], 5), "mm_hashes must be a list, got int"),
        (([1], ["a"]), "an item of mm_hashes must be an int, got str"),
        (([1], [True]), "an item of mm_hashes must be an int, got bool"),
        (([1], [MultimodalCache.combine_hashes([1])]), "got the CombinedHash of 1 items"),
        (([1], None, 5), "num_tokens must be a list, got int"),
        (([1], None, [2.0]), "an item of num_tokens must be an int, got float"),
        (([1], None, [None]), "an item of num_tokens must be an int, got NoneType"),
        (([object()],), "got object"),
    ],
)
def test_an_argument_of_another_type_is_refused(arguments: Sequence[Any], message: str) -> None:
    refuse(TypeError, arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1]), "mm_hashes must have one item for each of 2 features, got 1"),
        (([1], None, [1, 2]), "num_tokens must have one item for each of 1 features, got 2"),
        (([1], None, [-1]), "num_tokens must not be negative, got -1"),
    ],
)
def test_an_argument_of_another_size_is_refused(arguments: Sequence[Any], message: str) -> None:
    refuse(ValueError, arguments, message)


def refuse(error: type[Exception], arguments: Sequence[Any], message: str) -> None:
    encode = EncoderOfNumbers()
    encoder = CachedEncoder(MultiModalStaticCache(100), encode)
    with pytest.raises(error) as caught:
        encoder(*arguments)
    assert message in str(caught.value)
    with pytest.raises(error) as caught:
        asyncio.run(encoder.encode_async(*arguments))
    assert message in str(caught.value)
    assert encode.calls == []
    assert encoder.stats().calls == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: CachedEncoder(None, len), "cache must be a MultimodalCache, got NoneType"),  # type: ignore
        (lambda c: CachedEncoder(len, c), "got builtin_function_or_method: the order is Cached"),  # type: ignore
        (lambda c: CachedEncoder(type(c), len), "got the class MultiModalStaticCache: give an in"),  # type: ignore
        (lambda c: CachedEncoder(c, None), "encode must be callable, got NoneType"),  # type: ignore
        (lambda c: CachedEncoder(c, len, key=5), "key must be callable or None, got int"),  # type: ignore
        (lambda c: CachedEncoder(c, len, namespace=5), "namespace must be str or bytes, got int"),  # type: ignore
    ],
)
def test_a_bad_encoder_is_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(MultiModalStaticCache(100))


def test_tokens_are_those_of_the_features_that_use_them() -> None:
    def encode(features: list[int]) -> list[torch.Tensor]:
        return [torch.zeros(tokens, 1) for tokens in features]

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    encoder([3, 5, 3, 3])
    encoder([3, 3, 7])
    stats = encoder.stats()
    assert (stats.hits, stats.hit_tokens) == (2, 6)
    assert (stats.encoded, stats.encoded_tokens) == (3, 15)
    assert (stats.coalesced, stats.coalesced_tokens) == (2, 6)


def test_the_time_of_each_encode_is_counted_that_of_failed_ones_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    monkeypatch.setattr(_calls, "perf_counter", lambda: clock)

    def encode(features: list[int]) -> torch.Tensor:
        nonlocal clock
        clock += features[0]
        if features[0] == 4:
            raise ValueError
        return torch.zeros(1, 2, 3)

    async def encode_async(features: list[int]) -> torch.Tensor:
        return encode(features)

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)
    encoder([1])
    encoder([1])
    with pytest.raises(ValueError, match="^$"):
        encoder([4])
    encoder([16], num_tokens=[2])
    with pytest.raises(ValueError, match="num_tokens"):
        encoder([32], num_tokens=[3])
    stats = encoder.stats()
    assert (stats.encodes, stats.failures, stats.encode_seconds) == (4, 2, 1 + 4 + 16 + 32)
    with CachedEncoder(MultiModalStaticCache(10_000), encode) as plain:
        asyncio.run(plain.encode_async([64]))
    coroutines = CachedEncoder(MultiModalStaticCache(10_000), encode_async)
    asyncio.run(coroutines.encode_async([128]))
    for encoder, seconds in ((plain, 64), (coroutines, 128)):
        stats = encoder.stats()
        assert (stats.encodes, stats.failures, stats.encode_seconds) == (1, 0, seconds)


def test_an_error_while_the_features_are_made_is_not_hidden() -> None:
    def features() -> Any:
        yield 1
        raise TypeError("the true reason")

    with pytest.raises(TypeError, match="the true reason"):
        CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers())(features())


def test_a_key_function_that_returns_nonsense_is_named() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers(), key=lambda n: "k")  # type: ignore
    with pytest.raises(TypeError, match=r"what key\(feature\) returns must be an int, got str"):
        encoder([1])


def test_a_key_function_that_forgets_what_it_stands_for_is_refused() -> None:
    """``hash((-1,))`` is ``hash((-2,))``, and the key would be a plain int from here on."""
    encoder = CachedEncoder(
        MultiModalStaticCache(100), EncoderOfNumbers(), key=MultiModalStaticCache.combine_hashes
    )
    with pytest.raises(TypeError, match=r"what key\(feature\) returns must be the key of a single"):
        encoder([[-1]])


def test_the_share_that_was_served_without_an_encode() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(10_000), EncoderOfNumbers())
    assert encoder.stats().hit_rate == 0.0
    encoder([1, 1, 2, 3])
    assert encoder.stats().hit_rate == 1 / 4
    encoder([1, 2, 3, 4])
    assert encoder.stats().hit_rate == 4 / 8


def test_it_says_what_it_is() -> None:
    encoder = CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers())
    encoder([1])
    shown = repr(encoder)
    assert shown.startswith("CachedEncoder(MultiModalStaticCache(entries=1, current_size=8, ")
    assert "EncoderOfNumbers, EncoderStats(calls=1, hits=0, hit_tokens=0, fetched=0, " in shown


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_can_not_be_copied(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="CachedEncoder holds a lock: it can't be pickled or copi"):
        function(CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers()))


@pytest.mark.parametrize(
    ("bad", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_a_bad_limit_is_refused(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_concurrency must be"):
        CachedEncoder(MultiModalStaticCache(100), len, max_concurrency=bad)  # type: ignore


def test_a_partial_of_a_coroutine_function_is_one() -> None:
    class Encode:
        async def __call__(self, scale: float, features: list[Any]) -> torch.Tensor:
            return scale * EncoderOfNumbers()(features)

    partial = functools.partial(functools.partial(Encode()), 2.0)
    encoder = CachedEncoder(MultiModalStaticCache(10_000), partial)
    assert numbers(asyncio.run(encoder.encode_async([1, 2]))) == [2, 4]
    with pytest.raises(TypeError, match="await encode_async"):
        encoder([1])


# torch


def test_what_can_not_be_traced_runs_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.compiler, "_is_compiling_flag", True
    )  # not the function: dynamo knows it
    assert outside_graphs(divmod)(7, 2) == (3, 1)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_inside_torch_compile(backend: str) -> None:
    fails = True

    def encode(features: list[Any]) -> torch.Tensor:
        if fails:
            raise OSError("no such image")
        return torch.stack([feature * 2 for feature in features])

    encoder = CachedEncoder(MultiModalStaticCache(10_000), encode)

    @torch.compile(backend=backend)
    def double(x: torch.Tensor) -> torch.Tensor:
        (rows,) = encoder([x + 1])
        return rows * 1

    try:
        with pytest.raises(OSError, match="no such image"):
            double(torch.ones(2, 3))
        fails = False
        for _ in range(2):
            assert double(torch.ones(2, 3)).tolist() == [[4.0] * 3] * 2
    finally:
        torch.compiler.reset()  # type: ignore[no-untyped-call]
    assert (encoder.stats().encoded, encoder.stats().hits) == (1, 1)


def test_the_statistics_are_frozen() -> None:
    stats = CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers()).stats()
    with pytest.raises(AttributeError):
        stats.calls = 1  # type: ignore[misc]
