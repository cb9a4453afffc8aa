"""SGLang's own code runs on this cache as on its own. ``test_sglang.py`` runs this file.

Each trace of chunked prefills goes through SGLang's scheduling twice, once around each class, and
must give the same tensors, the same calls of the encoder, and the same entries in the cache.
"""

from __future__ import annotations

import ast
import gc
import logging
import os
import weakref
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_server import OUTPUTS, ROW, Chunk, Medium, Request, Server, image, video, waves
from sglang_stand_ins import (
    EVSEmbeddingResult,
    MultimodalDataItem,
    mm_schedule,
    multimodal_cache,
    plugins,
)
from support import WRAP, kept_bytes, recount

from multimodal_cache import MultiModalStaticCache
from multimodal_cache.integrations.sglang import (
    HOST_SIZE,
    SchedulerCache,
    TieredSchedulerCache,
    register,
)

# Kept in an object, since SGLang replaces the class in every module that has it.
sglangs = SimpleNamespace(Cache=multimodal_cache.MultiModalStaticCache)

RECORDS: list[logging.LogRecord] = []
handler = logging.Handler()
handler.emit = RECORDS.append  # type: ignore[method-assign]
logger = logging.getLogger(register.__module__)
logger.setLevel(logging.INFO)
logger.addHandler(handler)
plugins.load_plugins()
LOADING = [(record.levelname, record.getMessage()) for record in RECORDS]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Two tensors, or two Nones."""
    if theirs is None:
        assert ours is None
    else:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def assert_same_run(
    trace: list[list[Chunk]],
    max_size: int,
    output: str = "list",
    per_request: bool = False,
    device: str = "cpu",
    server: type[Server] = Server,
) -> Server:
    """A trace of prefills goes through ours as through SGLang's own class; returns ours."""
    ours = server(SchedulerCache, max_size, output, per_request)
    theirs = server(sglangs.Cache, max_size, output, per_request)
    for batch in trace:
        pairs = zip(
            ours.prefill(*batch, device=device),
            theirs.prefill(*batch, device=device),
            strict=True,
        )
        for our_tensor, their_tensor in pairs:
            assert_equal(our_tensor, their_tensor)
        assert ours.calls == theirs.calls
        assert list(ours.cache.mm_cache) == list(theirs.cache.mm_cache)
        assert ours.cache.current_size == theirs.cache.current_size
        ours.cache.check()
    return ours


def test_the_plugin_puts_it_in_wherever_sglang_has_its_own() -> None:
    assert sglangs.Cache is not SchedulerCache
    assert multimodal_cache.MultiModalStaticCache is SchedulerCache
    assert mm_schedule.MultiModalStaticCache is SchedulerCache
    assert issubclass(SchedulerCache, MultiModalStaticCache)


def test_the_plugin_says_so_in_one_line() -> None:
    assert LOADING == [
        (
            "INFO",
            "replacing sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache with "
            "multimodal_cache.integrations.sglang.SchedulerCache",
        )
    ]


def test_the_scheduler_s_cache_says_so_in_one_line() -> None:
    RECORDS.clear()
    mm_schedule.init_mm_embedding_cache(100 * 2**20)
    assert type(mm_schedule.embedding_cache) is SchedulerCache
    assert mm_schedule.embedding_cache.max_size == 100 * 2**20
    assert [(record.levelname, record.getMessage()) for record in RECORDS] == [
        (
            "INFO",
            "multimodal_cache.integrations.sglang.SchedulerCache is in place of SGLang's cache, "
            "with a budget of 104857600 bytes (100.0 MiB)",
        )
    ]


def test_a_budget_below_zero_refuses_everything_as_sglang_s_own_does() -> None:
    for cls in (SchedulerCache, sglangs.Cache):
        cache = cls(-(2**20))
        assert not cache.set(1, multimodal_cache.EmbeddingResult(embedding=torch.zeros(1, 4)))
        assert len(cache) == 0


@pytest.mark.parametrize(
    ("allowed", "chosen"), [("", True), ("another, multimodal_cache", True), ("none", False)]
)
def test_sglang_plugins_selects_it(
    monkeypatch: pytest.MonkeyPatch, allowed: str, chosen: bool
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    assert found.get("multimodal_cache") == ((register, "multimodal-cache") if chosen else None)


IMAGES = [
    Request(image(1, 3), image(2, 5)),
    Request(image(2, 5), image(3, 2), image(2, 5)),
    Request(),
    Request(image(4, 4), image(1, 3)),
]
VIDEOS = [
    Request(video(5, 2, 3)),
    Request(image(1, 3), video(6, 1, 2, 1)),
    Request(video(5, 2, 3), video(6, 1, 2, 1)),
    Request(video(5, 2, 3)),
]
PATHS = {
    "per item across requests": (IMAGES, False),
    "per item of a request": (IMAGES, True),
    "combined": (VIDEOS, False),
    "all of them": (IMAGES + VIDEOS, False),
}


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_size", [0, 4 * ROW, 9 * ROW, 100 * ROW])
@pytest.mark.parametrize("length", [1, 4, 7, 100])
def test_chunked_prefill(path: str, output: str, max_size: int, length: int, device: str) -> None:
    requests, per_request = PATHS[path]
    trace = 2 * waves(requests, length)
    ours = assert_same_run(trace, max_size, output, per_request, device)
    for batch in trace:
        embedding, mask, _ = ours.prefill(*batch, device=device)
        expected = torch.cat([chunk.rows for chunk in batch]).to(device)
        assert int(mask.sum() if mask is not None else 0) == len(expected)
        if embedding is None:
            assert len(expected) == 0
        else:
            assert torch.equal(embedding, expected)


@pytest.mark.parametrize(
    ("path", "once"),
    [
        ("per item across requests", [[1, 2, 4], [3]]),
        ("per item of a request", [[1, 2], [4], [3]]),
        ("combined", [[5], [1, 6], [5, 6]]),
    ],
)
def test_each_is_encoded_once_or_without_room_each_time(path: str, once: list[list[int]]) -> None:
    requests, per_request = PATHS[path]
    trace = 3 * waves(requests, 8)
    large = assert_same_run(trace, 1000 * ROW, per_request=per_request)
    assert large.calls == once
    none = assert_same_run(trace, 0, per_request=per_request)
    assert len(none.cache) == 0
    first_run = none.calls[: len(none.calls) // 3]
    assert len(first_run) > len(once)
    assert none.calls == 3 * first_run


# Images 2 and 5 share a key and a length; 3 and 6 a key, but not a length.
POOL = [image(1, 1), image(2, 2), image(3, 3), image(4, 5), image(5, 2, 1002), image(6, 4, 1003)]
media_lists = st.lists(st.sampled_from(POOL), max_size=3) | st.lists(
    st.sampled_from([*POOL[:2], video(7, 1, 1), video(8, 2, 3)]), min_size=1, max_size=3
)


@given(
    media=st.lists(media_lists, min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    rows=st.integers(0, 12),
    output=st.sampled_from(list(OUTPUTS)),
    per_request=st.booleans(),
)
def test_any_trace(
    media: list[list[Medium]], lengths: list[int], rows: int, output: str, per_request: bool
) -> None:
    requests = [Request(*each) for each in media]
    trace = [batch for length in lengths for batch in waves(requests, length)]
    assert_same_run(trace, rows * ROW, output, per_request)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_size", [0, 4 * ROW, 9 * ROW])
@pytest.mark.parametrize("length", [1, 4, 7, 100])
def test_what_left_the_device_is_not_encoded_again(
    path: str, max_size: int, length: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With host memory for all, the calls of the encoder are those of a device that holds all.

    Two tensor-parallel ranks encode together, so they must make the same calls, too.
    """
    monkeypatch.setenv(HOST_SIZE, "1")
    requests, per_request = PATHS[path]
    large = Server(SchedulerCache, 2**20, per_request=per_request)
    small = [Server(TieredSchedulerCache, max_size, per_request=per_request) for _ in range(2)]
    for batch in 2 * waves(requests, length):
        expected = large.prefill(*batch, device=device)
        for rank in small:
            for ours, theirs in zip(rank.prefill(*batch, device=device), expected, strict=True):
                assert_equal(ours, theirs)
            assert rank.calls == large.calls
            rank.cache.check()
            assert rank.cache.current_size <= max_size
    assert small[0].cache.stats() == small[1].cache.stats()
    assert small[0].cache.stats().host_hits > 0


@given(
    media=st.lists(media_lists, min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    rows=st.integers(0, 12),
    more_rows=st.integers(0, 12),
    per_request=st.booleans(),
)
def test_any_trace_with_little_host_memory(
    media: list[list[Medium]], lengths: list[int], rows: int, more_rows: int, per_request: bool
) -> None:
    """Then the calls of the encoder are those of a device with as much memory as the host."""
    requests = [Request(*each) for each in media]
    host_size = (rows + more_rows) * ROW
    large = Server(SchedulerCache, host_size, per_request=per_request)
    with mock.patch.dict(os.environ, {HOST_SIZE: str(host_size / 2**20)}):
        small = Server(TieredSchedulerCache, rows * ROW, per_request=per_request)
    for length in lengths:
        for batch in waves(requests, length):
            expected = large.prefill(*batch)
            for ours, theirs in zip(small.prefill(*batch), expected, strict=True):
                assert_equal(ours, theirs)
            assert small.calls == large.calls
            small.cache.check()


KEYS = range(4)
keys = st.sampled_from(KEYS)
operations = st.one_of(
    st.tuples(st.just("set"), keys, st.integers(0, 6)),
    st.tuples(st.just("set"), st.lists(keys, max_size=2), st.integers(0, 6)),
    st.tuples(st.just("get_single"), keys | st.lists(keys, min_size=1, max_size=2)),
    st.tuples(st.just("get"), st.lists(keys, max_size=2)),
    st.tuples(st.just("free"), keys | st.lists(keys, min_size=1, max_size=2)),
    st.tuples(st.just("clear")),
)


def operate(cache: Any, value: float, name: str, key: Any = None, rows: int = 0) -> Any:
    """Calls one method as SGLang does; returns its answer in a form that can be compared."""
    if name == "clear":
        return cache.clear()
    if isinstance(key, list) and name != "get":
        key = cache.combine_hashes(key)
        if key is None:
            return None
    if name == "set":
        embedding = torch.full((rows, 4), value / 3)
        return cache.set(key, multimodal_cache.EmbeddingResult(embedding=embedding))
    answer = cache.free(key, None) if name == "free" else getattr(cache, name)(key)
    return answer if answer is None or isinstance(answer, bool) else answer.embedding.tolist()


@given(st.integers(0, 15 * ROW), st.lists(operations, min_size=10, max_size=40))
def test_every_method_answers_as_sglang_s_own(max_size: int, trace: list[tuple[Any, ...]]) -> None:
    ours, theirs = SchedulerCache(max_size), sglangs.Cache(max_size)
    for step, operation in enumerate(trace):
        assert operate(ours, step, *operation) == operate(theirs, step, *operation)
        assert [ours.has(key) for key in KEYS] == [theirs.has(key) for key in KEYS]
        assert all(ours.has(key) for key in theirs.mm_cache)
        assert list(ours.mm_cache) == list(theirs.mm_cache)
        assert ours.current_size == theirs.current_size
        assert len(ours) == len(theirs)
        assert ours.available_size() == theirs.available_size()


def test_it_has_the_attributes_that_sglang_s_encode_server_uses() -> None:
    files = metadata.distribution("sglang")
    path = Path(files.locate_file("sglang/srt/disaggregation/encoder/server.py"))
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("self.mm_cache", "MultiModalStaticCache")
    }
    assert {"get", "set", "has", "free", "combine_hashes", "current_size"} <= used
    cache = SchedulerCache(max_size=0)
    assert [name for name in used if not hasattr(cache, name)] == []


@pytest.mark.parametrize("wrong", [1, 4])
@pytest.mark.parametrize(
    ("medium", "per_request"), [(image(5, 3), False), (image(5, 3), True), (video(5, 2, 1), False)]
)
def test_an_entry_with_a_wrong_number_of_rows_is_replaced(
    medium: Medium, per_request: bool, wrong: int
) -> None:
    request = Request(medium)
    server = Server(SchedulerCache, 100 * ROW, per_request=per_request)
    key = 1005 if medium.modality == "image" else server.cache.combine_hashes([1005])
    stale = multimodal_cache.EmbeddingResult(embedding=torch.zeros(wrong, 4))
    assert server.cache.set(key, stale)
    for _ in range(3):
        embedding, _, _ = server.prefill(request.whole())
        assert torch.equal(embedding, request.rows)
    assert server.calls == [[5]]
    assert list(server.cache.mm_cache) == [key]
    assert server.cache.current_size == 3 * ROW


class PruningServer(Server):
    """A server whose encoder says how many tokens of each frame it has kept."""

    def encode(self, items: list[MultimodalDataItem]) -> Any:
        (item,) = items
        self.calls.append([int(item.feature)])
        batch = torch.arange(40.0).reshape(10, 4)
        return EVSEmbeddingResult(embedding=batch[2:8], num_tokens_per_frame=[3, 1, 2])


@pytest.mark.parametrize("max_size", [0, 6 * ROW])
@pytest.mark.parametrize("length", [3, 100])
def test_results_of_a_subclass_survive(max_size: int, length: int) -> None:
    request = Request(video(5, 2, 2, 2))
    (item,) = request.items
    item.model_specific_data["pre_chunked_input_ids"] = request.input_ids
    ours = assert_same_run(2 * waves([request], length), max_size, server=PruningServer)
    touched = [chunk for chunk in request.chunks(length) if len(chunk.rows)]
    assert len(ours.calls) == (1 if max_size else 2 * len(touched))
    if max_size:
        (entry,) = ours.cache.mm_cache.values()
        assert type(entry) is EVSEmbeddingResult
        assert entry.num_tokens_per_frame == [3, 1, 2]
        assert kept_bytes(entry) == ours.cache.current_size == 6 * ROW


@pytest.mark.parametrize("output", ["concatenated", "part of a buffer"])
@pytest.mark.parametrize("path", ["per item across requests", "per item of a request", "combined"])
def test_entries_do_not_keep_the_batch(path: str, output: str) -> None:
    requests, per_request = PATHS[path]
    batches = []

    class Watching(Server):
        def encode(self, items: list[MultimodalDataItem]) -> Any:
            batch = super().encode(items)
            batches.append(weakref.ref(batch.untyped_storage()))
            return batch

    server = Watching(SchedulerCache, 7 * ROW, output, per_request)
    embedding, _, _ = server.prefill(*(request.whole() for request in requests))
    assert 0 < recount(server.cache) == server.cache.current_size <= 7 * ROW
    del embedding
    gc.collect()
    kept = [storage for storage in (batch() for batch in batches) if storage is not None]
    assert sum(storage.nbytes() for storage in kept) <= server.cache.current_size


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Medium(5, (4,), None), Medium(6, (4,), None)),
        (Medium(5, (2, 2), None, "video"), Medium(6, (2, 2), None, "video")),
        # Two 64-bit keys, whose tuples have one hash.
        (Medium(5, (2, 2), 7, "video"), Medium(6, (2, 2), 7 + WRAP, "video")),
    ],
    ids=["image without a key", "video without a key", "hashes of tuples that collide"],
)
def test_what_shares_an_entry_in_sglang_s_own_does_not_here(first: Medium, second: Medium) -> None:
    one, other = Request(first), Request(second)
    theirs = Server(sglangs.Cache, 100 * ROW)
    theirs.prefill(one.whole())
    assert torch.equal(theirs.prefill(other.whole())[0], one.rows)
    ours = Server(SchedulerCache, 100 * ROW)
    for request in (one, other, one):
        assert torch.equal(ours.prefill(request.whole())[0], request.rows)
    assert ours.calls == [[5], [6], [5]]


def test_hits_include_sglang_s_reads_after_its_own_sets() -> None:
    server = Server(SchedulerCache, 100 * ROW)
    request = Request(image(1, 3), image(2, 5))
    server.prefill(request.whole())
    stats = server.cache.stats()
    assert (stats.misses, stats.insertions, stats.hits) == (2, 2, 2)
    server.prefill(request.whole())
    stats = server.cache.stats()
    assert (stats.misses, stats.insertions, stats.hits) == (2, 2, 4)
