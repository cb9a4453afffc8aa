"""What ``Trace`` writes of the requests to a cache."""

from __future__ import annotations

import gzip
import logging
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import result, run_python

from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache import static_cache as module
from multimodal_cache._plan import read_trace
from multimodal_cache.planner import hit_curve
from multimodal_cache.tiered import TieredCache
from multimodal_cache.trace import LONG, Trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def rows(path: Path) -> list[str]:
    header, *found = path.read_text().splitlines()
    assert header == "key,nbytes"
    return found


def request(cache: MultiModalStaticCache, key: int, nbytes: int) -> bool:
    """Asks for an item as a server does; returns whether it was a hit."""
    if cache.get_single(key) is not None:
        return True
    cache.set(key, EmbeddingResult(embedding=torch.empty(nbytes, dtype=torch.uint8)))
    return False


def made(kind: str, size: int, **options: Any) -> MultiModalStaticCache:
    return (
        MultiModalStaticCache(size, **options)
        if kind == "plain"
        else TieredCache(size // 2, size, **options)
    )


KINDS = pytest.mark.parametrize("kind", ["plain", "tiered"])


@KINDS
def test_each_request_is_a_row_and_no_hash_is_written(kind: str, path: Path) -> None:
    with Trace(path) as trace:
        cache = made(kind, 100, trace=trace)
        for key, nbytes in [(10**9, 30), (-7, 40), (10**9, 30), (5, 60), (-7, 40), (8, 101)]:
            request(cache, key, nbytes)
        cache.get_single(99)  # a miss alone is not a request: what it would have stored is unknown
        cache.get_single(None)
        cache.set(None, result(1))
        assert rows(path) == []  # they wait
    assert rows(path) == ["1,30", "2,40", "1,30", "3,60", "2,40", "4,101"]


@KINDS
def test_a_list_is_a_request_of_its_own(kind: str, path: Path) -> None:
    with Trace(path) as trace:
        cache = made(kind, 1000, trace=trace)
        for _ in range(2):
            if cache.get([1, 2]) is None:
                cache.set(cache.combine_hashes([1, 2]), result(10))
            request(cache, 1, 20)
    assert rows(path) == ["1,40", "2,20", "1,40", "2,20"]


@KINDS
def test_a_set_that_finds_its_key_present_is_no_request(kind: str, path: Path) -> None:
    with Trace(path) as trace:
        cache = made(kind, 1000, trace=trace)
        assert cache.set(1, result(10))
        assert cache.set(1, result(20))
    assert rows(path) == ["1,40"]


@KINDS
def test_what_is_freed_or_cleared_is_a_new_item(kind: str, path: Path) -> None:
    with Trace(path) as trace:
        cache = made(kind, 100, trace=trace)
        for key in (1, 2):
            request(cache, key, 40)
        cache.free(1, None)
        assert not cache.free(3, None)
        for key in (1, 2, 3):
            request(cache, key, 20)
        cache.free(None)
        assert not cache.free(4, None)
        cache.clear()
        for key in (1, 2):
            request(cache, key, 20)
    assert rows(path) == ["1,40", "2,40", "3,20", "2,40", "4,20", "5,20", "6,20"]


calls = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.integers(0, 9)),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=60,
)
BYTES = [1, 2, 4, 8, 3, 16, 0, 16, 32, 100]


@KINDS
@given(calls=calls, sizes=st.lists(st.integers(0, 260), min_size=2, max_size=3))
def test_the_rows_are_the_same_whatever_the_size_and_predict_any_other(
    kind: str, calls: list[tuple[str, int]], sizes: list[int], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    recorded, hits = [], []
    for size in sizes:
        with Trace(path) as trace:
            cache = made(kind, size, trace=trace)
            hits.append(0)
            for name, key in calls:
                if name == "request":
                    hits[-1] += request(cache, key, BYTES[key])
                elif name == "free":
                    cache.free(key, None)
                else:
                    cache.clear()
        recorded.append(rows(path))
    assert recorded == [recorded[0]] * len(sizes)
    if recorded[0] and {name for name, _ in calls} == {"request"}:
        curve = hit_curve(*read_trace(path))  # type: ignore[arg-type]  # arrays will do
        assert [curve.at(size).hits for size in sizes] == hits


@KINDS
def test_the_hit_right_after_a_set_can_be_left_out(kind: str, path: Path) -> None:
    recorded = []
    for size in (0, 1000):
        with Trace(path, skip_first_hit=True) as trace:
            cache = made(kind, size, trace=trace)
            for _ in range(2):  # as SGLang does
                if cache.get_single(1) is None and cache.set(1, result(10)):
                    cache.get_single(1)
                if cache.get([1, 2]) is None:
                    cache.set(cache.combine_hashes([1, 2]), result(20))
            cache.free(1, None)
            cache.set(1, result(10))
            cache.clear()
            request(cache, 1, 40)
        recorded.append(rows(path))
    assert recorded == [["1,40", "2,80", "1,40", "2,80", "3,40", "4,40"]] * 2


@KINDS
def test_a_hit_is_left_out_once_also_when_others_are_written_meanwhile(
    kind: str, path: Path
) -> None:
    with Trace(path, skip_first_hit=True) as trace:
        cache = made(kind, 1000, trace=trace)
        for key in (1, 2):
            cache.set(key, result(10))
            cache.get_single(key)
            cache.get_single(key)
        trace.flush()
        cache.set(1, result(10))  # it is there, and is looked up again
        trace.flush()
        for key in (2, 1, 1, 2):
            cache.get_single(key)
    assert rows(path) == ["1,40", "1,40", "2,40", "2,40", "2,40", "1,40", "2,40"]


def test_hits_that_have_a_row_already_end_at_the_last_row_too(path: Path) -> None:
    with Trace(path, max_rows=5) as trace:
        cache = MultiModalStaticCache(1000, trace=trace)
        cache.set(1, result(10))
        for hits in (1, 10):
            for _ in range(hits):
                cache.get_single(1)
            trace.flush()
    assert rows(path) == ["1,40"] * 5


@KINDS
def test_a_list_in_the_place_of_an_item_has_all_its_hits(kind: str, path: Path) -> None:
    with Trace(path, skip_first_hit=True) as trace:
        cache = made(kind, 90, trace=trace)
        cache.set(hash((1, 2)), result(10))
        cache.set(3, result(20))
        assert hash((1, 2)) not in cache
        cache.set(cache.combine_hashes([1, 2]), result(20))
        for _ in range(2):
            assert cache.get([1, 2]) is not None
            trace.flush()
    assert rows(path) == ["1,40", "2,80", "1,80", "1,80", "1,80"]


def test_a_set_whose_entry_is_gone_leaves_out_no_other_hit(path: Path) -> None:
    with Trace(path, skip_first_hit=True) as trace:
        cache = MultiModalStaticCache(1000, trace=trace)
        after_set = trace.after_set

        def free_first(key: int, is_there: bool, **how: bool) -> None:
            cache.free(key, None)
            after_set(key, is_there, **how)

        trace.after_set = free_first  # type: ignore[method-assign]
        cache.set(1, result(10))
        trace.after_set = after_set  # type: ignore[method-assign]
        cache.set(2, result(10))
        for key in (2, 2, 2):
            cache.get_single(key)
        trace.flush()
        assert not trace._looked_up_next  # else every row is looked at from now on
    assert rows(path) == ["1,40", "2,40", "2,40", "2,40"]


def test_memory_that_ran_out_is_a_request_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with Trace(path) as trace:
        cache = MultiModalStaticCache(1000, copy=True, trace=trace)
        monkeypatch.setattr(module, "replace_tensors", fail)
        assert not cache.set(1, result(10))
    assert rows(path) == ["1,40"]


def test_a_stale_set_is_no_request(path: Path) -> None:
    with Trace(path) as trace:
        cache = MultiModalStaticCache(1000, trace=trace)
        generation = cache.generation
        cache.clear()
        assert not cache.set(1, result(10), generation=generation)
    assert rows(path) == []


def test_hits_and_sets_write_when_many_wait(path: Path) -> None:
    trace = Trace(path)
    cache = MultiModalStaticCache(10**6, trace=trace)
    cache.set(1, result(1))
    for _ in range(LONG):
        cache.get_single(1)
    assert len(rows(path)) == LONG + 1
    for key in range(2, LONG + 3):
        cache.set(key, result(1))
    assert len(rows(path)) == 2 * LONG + 2
    cache.get_single(1)
    trace.flush()
    assert len(rows(path)) == 2 * LONG + 3
    trace.close()
    trace.close()
    cache.get_single(1)
    trace.flush()
    assert len(rows(path)) == 2 * LONG + 3


def test_frees_alone_do_not_wait_for_ever(path: Path) -> None:
    with Trace(path) as trace:
        cache = MultiModalStaticCache(0, trace=trace)
        for key in range(3 * LONG):
            cache.free(key, None)
        assert len(trace._events) <= LONG + 1


def test_the_last_row_ends_it_with_one_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multimodal_cache.trace")
    with Trace(path, max_rows=3) as trace:
        cache = MultiModalStaticCache(100, trace=trace)
        for _ in range(5):
            request(cache, 1, 10)
        trace.flush()
        for _ in range(2 * LONG):
            request(cache, 1, 10)
        assert len(trace._events) <= LONG + 1
    assert rows(path) == ["1,10"] * 3
    assert caplog.messages == [f"{path} has all the rows it may have: no more is recorded"]
    with pytest.raises(ValueError, match="max_rows must be 0 or more, got -1"):
        Trace(path, max_rows=-1)


def test_a_file_that_is_there_is_replaced_and_one_that_cannot_be_made_is_an_error(
    path: Path,
) -> None:
    path.write_text("something longer than the header")
    Trace(str(path)).close()
    assert rows(path) == []
    with pytest.raises(NotADirectoryError):
        Trace(path / "none" / "trace.csv")
    with Trace(path) as trace:
        assert repr(trace) == f"Trace({str(path)!r})"


def test_a_compressed_trace_can_be_read_while_it_is_written(path: Path) -> None:
    path = path.with_suffix(".csv.gz")
    with Trace(path) as trace:
        cache = MultiModalStaticCache(100, trace=trace)
        request(cache, 1, 10)
        trace.flush()
        with gzip.open(path, "rt") as file:
            assert next(file) + next(file) == "key,nbytes\n1,10\n"
        request(cache, 1, 10)
    with gzip.open(path, "rt") as file:
        assert file.read() == "key,nbytes\n1,10\n1,10\n"


def test_a_full_disk_ends_it_with_a_warning_and_fails_no_request(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.symlink_to("/dev/full")
    trace = Trace(path)
    cache = MultiModalStaticCache(100, trace=trace)
    for _ in range(2 * LONG):
        request(cache, 1, 10)
    trace.close()
    (message,) = caplog.messages
    assert message.startswith(f"{path} can't be written, no more is recorded: ")
    assert "No space left on device" in message


class FullAfter:
    """A file that takes so many bytes, and a few of those that don't fit."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def truncate(self, size: int) -> None:
        self.file.truncate(size)

    def __enter__(self) -> FullAfter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_disk_that_fills_up_leaves_whole_rows(
    suffix: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path.with_suffix(suffix)
    trace = Trace(path)
    cache = MultiModalStaticCache(100, trace=trace)
    request(cache, 1, 10)
    trace.flush()
    whole = path.stat().st_size
    trace._file = FullAfter(trace._file, 3)  # type: ignore[assignment]
    request(cache, 1, 10)
    trace.close()
    assert path.stat().st_size == whole
    assert len(read_trace(path)[0]) == 1
    assert len(caplog.messages) == 1


def test_what_is_no_trace_is_refused() -> None:
    for kind in ("plain", "tiered"):
        with pytest.raises(TypeError, match="trace must be a Trace, got str"):
            made(kind, 100, trace="trace.csv")


def test_each_request_of_each_thread_is_recorded_once(path: Path) -> None:
    threads, each = 4, 3 * LONG
    with Trace(path) as trace:
        cache = MultiModalStaticCache(100, trace=trace)
        start = threading.Barrier(threads)

        def serve(seed: int) -> None:
            rng = random.Random(seed)
            start.wait()
            for _ in range(each):
                request(cache, rng.randrange(8), 20)

        running = [threading.Thread(target=serve, args=(seed,)) for seed in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        stats = cache.stats()
    assert len(rows(path)) == stats.hits + stats.insertions
    assert {row.split(",")[1] for row in rows(path)} == {"20"}
    assert {int(row.split(",")[0]) for row in rows(path)} == set(range(1, 9))


def test_a_finalizer_that_comes_in_while_rows_are_written_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(path)
    cache = MultiModalStaticCache(100, trace=trace)
    request(cache, 1, 10)
    numbered = trace._number

    def number(key: int | None) -> int:
        monkeypatch.undo()
        request(cache, 1, 10)
        trace.flush()
        return numbered(key)

    monkeypatch.setattr(trace, "_number", number)
    trace.flush()
    assert rows(path) == ["1,10"]
    trace.close()
    assert rows(path) == ["1,10"] * 2


def test_a_finalizer_may_even_close_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(path)
    cache = MultiModalStaticCache(100, trace=trace)
    request(cache, 1, 10)
    monkeypatch.setattr(trace, "_number", lambda _: trace.close() or 1)
    trace.flush()
    trace.close()
    assert rows(path) == []


def test_another_thread_does_not_wait_for_who_writes(path: Path) -> None:
    with Trace(path) as trace:
        cache = MultiModalStaticCache(100, trace=trace)
        with trace._lock:
            other = threading.Thread(
                target=lambda: [request(cache, 1, 10) for _ in range(2 * LONG)]
            )
            other.start()
            other.join()
            assert rows(path) == []
    assert len(rows(path)) == 2 * LONG


SCRIPT = """
import os, sys, torch
from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.trace import LONG, Trace
trace = Trace(sys.argv[1])
cache = MultiModalStaticCache(100, trace=trace)
cache.set(1, EmbeddingResult(embedding=torch.zeros(10)))
"""


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_the_end_of_the_process_writes_what_waits(suffix: str, path: Path) -> None:
    path = path.with_suffix(suffix)
    run_python(SCRIPT, str(path))
    assert [list(column) for column in read_trace(path)] == [[0], [40]]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_a_forked_child_writes_nothing(suffix: str, path: Path) -> None:
    path = path.with_suffix(suffix)
    child = """
with trace._lock:
    child = os.fork()
if not child:
    for _ in range(3 * LONG):
        cache.get_single(1)
    trace.flush()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
cache.get_single(1)
"""
    run_python(SCRIPT + child, str(path))
    assert [list(column) for column in read_trace(path)] == [[0, 0], [40, 40]]


def test_in_the_process_of_another_nothing_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(path)
    cache = MultiModalStaticCache(100, trace=trace)
    request(cache, 1, 10)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    for _ in range(2 * LONG):
        request(cache, 1, 10)
    trace.flush()
    trace.close()
    assert rows(path) == []
    monkeypatch.undo()
    trace.close()
