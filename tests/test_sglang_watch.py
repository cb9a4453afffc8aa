"""What operators of an SGLang server see: the trace, the metrics and the line in the log."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from support import result, run_python

from multimodal_cache.integrations import _sglang_watch as module
from multimodal_cache.integrations.sglang import SchedulerCache, TieredSchedulerCache

CLASSES = pytest.mark.parametrize("cls", [SchedulerCache, TieredSchedulerCache])


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIMODAL_CACHE_HOST_SIZE_MB", "2")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.delenv(module.TRACE, raising=False)


def ranks(monkeypatch: pytest.MonkeyPatch, **known: Any) -> None:
    """SGLang's context, with what it knows; for the rest it raises an error of its own."""

    class Parallel:
        def __getattr__(self, name: str) -> Any:
            if name not in known:
                raise ValueError(f"{name} isn't published")
            return known[name]

    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = Parallel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)


def serve(cache: Any, key: int) -> None:
    """As SGLang does."""
    if cache.get_single(key) is None and cache.set(key, result(10)):
        cache.get_single(key)


@CLASSES
def test_the_line_takes_off_what_sglang_looks_up_again(cls: Any) -> None:
    cache = cls(2**20)
    assert cache._log.line() is None
    for key in (1, 2, 1, 1):
        serve(cache, key)
    assert cache._log.line() == (
        "multimodal cache: hit rate 50.0% of 4 look-ups (50.0% of 4 since the start), 2 entries, "
        "0.0 of 1.0 MiB, 0 evictions"
    )
    assert cache._log.line() is None
    cache.set(cache.combine_hashes([1, 2]), result(2**18 - 20))  # which isn't looked up again
    cache.get([1, 2])
    assert cache._log.line() == (
        "multimodal cache: hit rate 100.0% of 1 look-ups (60.0% of 5 since the start), 3 entries, "
        "1.0 of 1.0 MiB, 0 evictions"
    )
    serve(cache, 3)
    assert cache._log.line().endswith(" 1.0 of 1.0 MiB, 1 evictions")


def test_a_cache_that_refuses_everything_has_a_line_too() -> None:
    cache = SchedulerCache(0)
    for key in (1, 1):
        serve(cache, key)
    assert "hit rate 0.0% of 2 look-ups" in str(cache._log.line())


def test_the_line_comes_by_itself_and_ends_with_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    came = threading.Event()
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 1e-3)
    monkeypatch.setattr(module.logger, "info", lambda *_: came.set())
    waits = iter([False, False])  # the first line is None, as there was no traffic
    quiet = module.Report(SchedulerCache(1000))
    quiet._gone = types.SimpleNamespace(  # type: ignore[assignment]
        wait=lambda seconds: next(waits, True)
    )
    quiet.run()
    assert not came.is_set()
    before = set(threading.enumerate())
    cache = SchedulerCache(1000)
    (thread,) = set(threading.enumerate()) - before
    serve(cache, 1)
    assert came.wait(60)
    report = cache._log
    del cache
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert report.line() is None


@pytest.mark.parametrize(
    ("given", "made"),
    [("t.csv", "t.{}.csv"), ("t.csv.gz", "t.{}.csv.gz"), ("t", "t.{}"), ("a.b.gz", "a.{}.b.gz")],
)
@CLASSES
def test_a_trace_is_recorded_where_the_environment_says_so(
    cls: Any, given: str, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.TRACE, str(tmp_path / given))
    cache = cls(1000)
    for key in (1, 2, 1):
        serve(cache, key)
    trace = cache._trace or cache.host._trace
    trace.close()
    (path,) = tmp_path.iterdir()
    assert path.name == made.format(os.getpid())
    if not given.endswith(".gz"):
        assert path.read_text() == "key,nbytes\n1,40\n2,40\n1,40\n"


@pytest.mark.parametrize(
    ("known", "recorded"),
    [
        ({}, True),
        ({"tp_rank": 0, "attn_tp_rank": 0, "pp_rank": 0}, True),
        ({"tp_rank": 4, "attn_tp_rank": 0, "attn_cp_rank": 0}, True),  # another group's first
        ({"tp_rank": 1, "attn_tp_rank": 1}, False),
        ({"attn_tp_rank": 0, "attn_cp_rank": 1}, False),
        ({"attn_tp_rank": 0, "pp_rank": 1}, False),
    ],
)
def test_of_ranks_that_see_the_same_the_first_records(
    known: dict[str, int], recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(module.TRACE, str(tmp_path / "t.csv"))
    ranks(monkeypatch, **known)
    cache = SchedulerCache(1000)
    assert (cache._trace is not None) == recorded == bool(list(tmp_path.iterdir()))
    if cache._trace is not None:
        cache._trace.close()


def test_a_trace_that_cannot_be_made_stops_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.TRACE, "/dev/null/t.csv")
    with pytest.raises(NotADirectoryError):
        SchedulerCache(1000)


def test_metrics_are_merged_from_the_schedulers_with_their_ranks(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="of the extra metrics")
    scheduler = (
        "import sys, torch, types\n"
        "context = types.ModuleType('sglang.srt.runtime_context')\n"
        "rank = types.SimpleNamespace(tp_rank=int(sys.argv[1]), pp_rank=0, dp_rank=None)\n"
        "context.get_parallel = lambda: rank\n"
        "sys.modules[context.__name__] = context\n"
        "from multimodal_cache import EmbeddingResult\n"
        "from multimodal_cache.integrations.sglang import SchedulerCache\n"
        "cache = SchedulerCache(1000)\n"
        "cache.set(1, EmbeddingResult(embedding=torch.zeros(10)))\n"
    )
    for rank in "01":
        run_python(scheduler, rank, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    merge = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    lines = run_python(merge, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).splitlines()
    for rank in "01":
        labels = f'{{cache="sglang",pp_rank="0",tp_rank="{rank}"}}'
        assert f"multimodal_cache_insertions_total{labels} 1.0" in lines
        assert f"multimodal_cache_entries{labels} 1.0" in lines


def test_the_bridge_is_started_with_the_ranks_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    metrics = types.ModuleType("multimodal_cache.metrics")
    metrics.start_bridge = lambda *arguments: started.append(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, metrics.__name__, metrics)
    SchedulerCache(1000)
    assert started == []
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    ranks(monkeypatch, tp_rank=1, dp_rank=None)
    cache = SchedulerCache(1000)
    assert started == [(cache, "sglang", {"tp_rank": 1})]


def test_metrics_that_cannot_be_are_said_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "multimodal_cache.metrics", None)
    cache = SchedulerCache(1000)
    serve(cache, 1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("there are no metrics of the cache: ")


def test_a_rank_is_what_sglang_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    assert module.rank_of("tp_rank") is None
    ranks(monkeypatch, tp_rank=3, dp_rank=None)
    found = [module.rank_of(name) for name in ("tp_rank", "dp_rank", "pp_rank")]
    assert found == [3, None, None]
