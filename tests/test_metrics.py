"""Statistics for Prometheus, in real registries and in real multi-process directories."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from support import EncoderOfNumbers, filled, result, run_python

pytest.importorskip("prometheus_client", reason="of the extra metrics")

from prometheus_client import CollectorRegistry, generate_latest

from multimodal_cache import CachedEncoder, MultiModalStaticCache, metrics
from multimodal_cache.metrics import CacheCollector, start_bridge
from multimodal_cache.stores import StoreStats
from multimodal_cache.tiered import TieredCache


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """What a scrape shows, by name and labels, without the prefix."""
    return samples_in(generate_latest(registry).decode())


def samples_in(text: str) -> dict[str, float]:
    samples = re.findall(r"^multimodal_cache_(\S+) (\S+)$", text, flags=re.MULTILINE)
    return {name: float(value) for name, value in samples}


class Stats:
    """Statistics of something that isn't there yet, or whatever else has them."""

    def __init__(self, **stats: float) -> None:
        self.__dict__.update(stats)

    def stats(self) -> Stats:
        return self


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_scrape_shows_what_a_cache_counts_and_holds(registry: CollectorRegistry) -> None:
    cache = filled(100, 1, 2, 3)
    cache.get_single(3)
    cache.get_single(1)
    cache.set(4, result(26))
    collector = CacheCollector(registry)
    collector.add("vision", cache)
    assert exposed(registry) == {
        'hits_total{cache="vision"}': 1,
        'host_hits_total{cache="vision"}': 0,
        'misses_total{cache="vision"}': 1,
        'insertions_total{cache="vision"}': 3,
        'inserted_bytes_total{cache="vision"}': 120,
        'rejections_total{cache="vision"}': 1,
        'rejected_bytes_total{cache="vision"}': 104,
        'evictions_total{cache="vision"}': 1,
        'evicted_bytes_total{cache="vision"}': 40,
        'collisions_total{cache="vision"}': 0,
        'entries{cache="vision"}': 2,
        'size_bytes{cache="vision"}': 80,
        'max_size_bytes{cache="vision"}': 100,
        'leased_bytes{cache="vision"}': 0,
    }
    cache.get_single(3)
    assert exposed(registry)['hits_total{cache="vision"}'] == 2


def test_a_tiered_cache_has_gauges_of_host_memory_too(registry: CollectorRegistry) -> None:
    cache = TieredCache(40, 100)
    for key in (1, 2):
        cache.set(key, result(10))
    CacheCollector(registry).add("vision", cache)
    cache.get_single(1)
    shown = exposed(registry)
    names = ["entries", "host_entries", "size_bytes", "host_size_bytes", "host_max_size_bytes"]
    assert [shown[f'{name}{{cache="vision"}}'] for name in names] == [1, 2, 40, 80, 100]
    assert shown['host_hits_total{cache="vision"}'] == 1


def test_an_encoder_and_a_store_have_their_own(registry: CollectorRegistry) -> None:
    cache = MultiModalStaticCache(1000)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    encoder([1, 2, 1])
    encoder([1])
    store = Stats(hits=5, fetch_seconds=0.25)
    CacheCollector(registry).add("vision", cache, encoder=encoder, store=store)
    shown = exposed(registry)
    seconds = shown.pop('encoder_encode_seconds_total{cache="vision"}')
    assert seconds == encoder.stats().encode_seconds > 0
    assert {name: value for name, value in shown.items() if name.startswith("encoder_")} == {
        'encoder_calls_total{cache="vision"}': 2,
        'encoder_features_total{cache="vision",source="cache"}': 1,
        'encoder_features_total{cache="vision",source="store"}': 0,
        'encoder_features_total{cache="vision",source="encoder"}': 2,
        'encoder_features_total{cache="vision",source="other_call"}': 1,
        'encoder_tokens_total{cache="vision",source="cache"}': 2,
        'encoder_tokens_total{cache="vision",source="store"}': 0,
        'encoder_tokens_total{cache="vision",source="encoder"}': 4,
        'encoder_tokens_total{cache="vision",source="other_call"}': 2,
        'encoder_encodes_total{cache="vision"}': 1,
        'encoder_failures_total{cache="vision"}': 0,
        'encoder_row_mismatches_total{cache="vision"}': 0,
        'encoder_disagreements_total{cache="vision"}': 0,
    }
    assert {name: value for name, value in shown.items() if name.startswith("store_")} == {
        'store_hits_total{cache="vision"}': 5,
        'store_fetch_seconds_total{cache="vision"}': 0.25,
    }


def test_what_is_on_the_way_has_its_names(registry: CollectorRegistry) -> None:
    cache, encoder = Stats(leased_bytes=7), Stats(fetched=1, fetched_tokens=2, disagreements=3)
    CacheCollector(registry).add("a", cache, encoder)
    assert exposed(registry) == {
        'leased_bytes{cache="a"}': 7,
        'encoder_features_total{cache="a",source="store"}': 1,
        'encoder_tokens_total{cache="a",source="store"}': 2,
        'encoder_disagreements_total{cache="a"}': 3,
    }


def test_every_number_of_the_statistics_is_exposed() -> None:
    cache = TieredCache(10, 10)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    for owner, stats in (("cache", cache.stats()), ("encoder", encoder.stats())):
        read = {row.attribute for row in metrics._ROWS if row.owner == owner}
        assert set(stats.__slots__) <= read


def test_each_metric_has_a_type_and_a_help_and_is_named_once(registry: CollectorRegistry) -> None:
    cache = MultiModalStaticCache(10)
    collector = CacheCollector(registry)
    collector.add("a", cache)
    collector.add("b", encoder := Stats(hits=1, misses=2), encoder=encoder)
    lines = generate_latest(registry).decode().splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert (
        len(heads) == len(set(heads)) == 2 * len({line.split("{")[0] for line in lines} - {*heads})
    )
    assert "# TYPE multimodal_cache_hits_total counter" in heads
    assert "# TYPE multimodal_cache_size_bytes gauge" in heads


def test_a_collector_reads_nothing_until_it_is_scraped(registry: CollectorRegistry) -> None:
    collector = CacheCollector(registry)
    described = list(collector.describe())
    assert len(described) == len({row.name for row in metrics._ROWS})
    assert [family for family in described if family.samples] == []
    assert exposed(registry) == {}
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        CacheCollector(registry)


def test_what_is_collected_is_held_weakly(registry: CollectorRegistry) -> None:
    collector = CacheCollector(registry)
    cache = MultiModalStaticCache(10)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    collector.add("vision", cache, encoder=encoder)
    del encoder
    gc.collect()
    shown = exposed(registry)
    assert shown
    assert [name for name in shown if name.startswith("encoder_")] == []
    with pytest.raises(ValueError, match="there is a cache of the name 'vision' already"):
        collector.add("vision", MultiModalStaticCache(10))
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert exposed(registry) == {}
    second, third = MultiModalStaticCache(10), MultiModalStaticCache(20)
    collector.add("vision", second)
    del second
    gc.collect()
    collector.add("vision", third)
    assert exposed(registry)['max_size_bytes{cache="vision"}'] == 20


def test_what_has_no_statistics_is_refused(registry: CollectorRegistry) -> None:
    cache: Any = MultiModalStaticCache(10)
    for arguments, message in [
        ((None,), "cache must have stats(), got NoneType"),
        ((cache, 5), "encoder must have stats(), got int"),
        ((cache, None, "x"), "store must have stats(), got str"),
    ]:
        with pytest.raises(TypeError) as caught:
            CacheCollector(CollectorRegistry()).add("a", *arguments)
        assert str(caught.value) == message


def fed(**labels: str) -> dict[str, float]:
    """What a bridge of this process has fed to Prometheus's own metrics."""
    found = {}
    for (name, names), native in list(metrics._natives.items()):
        for sample in native.collect()[0].samples:
            if not sample.name.endswith("_created") and labels.items() <= sample.labels.items():
                assert sorted({*labels, *names}) == sorted(names)
                source = sample.labels.get("source", "")
                found[f"{name} {source}".strip()] = sample.value
    return found


def test_a_bridge_feeds_what_has_been_counted_since() -> None:
    cache = filled(100, 1, 2)
    bridge = start_bridge(cache, "fed", {"tp_rank": 3})
    try:
        shown = fed(cache="fed", tp_rank="3")
        assert [shown[name] for name in ("insertions", "hits", "entries")] == [2, 0, 2]
        cache.get_single(1)
        cache.set(3, result(10))
        assert fed(cache="fed", tp_rank="3") == shown
        bridge.feed()
        bridge.feed()
        shown = fed(cache="fed", tp_rank="3")
        assert [shown[name] for name in ("insertions", "hits", "entries")] == [3, 1, 2]
        cache.get_single(3)
    finally:
        bridge.stop()
    assert fed(cache="fed", tp_rank="3")["hits"] == 2
    cache.get_single(3)
    bridge.stop()
    bridge.feed()
    assert fed(cache="fed", tp_rank="3")["hits"] == 2
    bridge._thread.join(60)
    assert not bridge._thread.is_alive()


def test_its_thread_feeds_without_being_asked() -> None:
    cache = filled(100, 1)
    came = threading.Event()
    stats = cache.stats
    cache.stats = lambda: (came.set(), stats())[1]  # type: ignore[method-assign]
    bridge = start_bridge(cache, "alone", interval=1e-3)
    came.clear()
    assert came.wait(60)
    bridge.stop()


def test_the_same_name_and_labels_are_refused_while_the_cache_exists() -> None:
    cache = MultiModalStaticCache(10)
    bridge = start_bridge(cache, "same", {"b": 1, "a": 2})
    with pytest.raises(ValueError, match="there is a bridge for .'a': '2', 'b': '1', 'cache'"):
        start_bridge(cache, "same", {"a": "2", "b": "1"})
    other = start_bridge(cache, "same", {"a": "2"})
    bridge.stop()
    again = start_bridge(cache, "same", {"b": 1, "a": 2})
    for each in (other, again):
        each.stop()
    start_bridge(MultiModalStaticCache(10), "same")  # which is gone at once
    gc.collect()
    start_bridge(cache, "same").stop()


def test_a_bridge_ends_with_its_cache_and_the_gauges_say_so() -> None:
    cache = filled(100, 1)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    encoder([1])
    bridge = start_bridge(cache, "ends", interval=1e-3, encoder=encoder)
    del cache, encoder
    gc.collect()
    bridge._thread.join(60)
    assert not bridge._thread.is_alive()
    shown = fed(cache="ends")
    assert [shown[name] for name in ("insertions", "entries", "max_size_bytes")] == [2, 0, 0]
    assert shown["encoder_features encoder"] == 1
    assert not [key for key in metrics._bridges if ("cache", "ends") in key]


def test_a_bridge_that_cannot_feed_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(100, 1)
    bridge = start_bridge(cache, "broken", interval=1e-3)
    cache.stats = lambda: 1 / 0  # type: ignore[method-assign,assignment]
    bridge._thread.join(60)
    assert not bridge._thread.is_alive()
    (record,) = caplog.records
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    bridge.stop()


def test_in_a_forked_child_a_bridge_feeds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MultiModalStaticCache(100)
    bridge = start_bridge(cache, "child")
    cache.get_single(1)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    bridge.stop()
    assert fed(cache="child")["misses"] == 0
    monkeypatch.undo()
    bridge.stop()
    assert fed(cache="child")["misses"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be above 0, got 0"),
        ({"interval": float("nan")}, "interval must be above 0, got nan"),
        ({"labels": {"source": 1}}, "the label 'source' has a meaning of its own"),
        ({"labels": {"cache": 1}}, "the label 'cache' has a meaning of its own"),
        ({"labels": {"__a": 1}}, "eserved label"),
    ],
)
def test_bad_options_of_a_bridge_are_refused(options: dict[str, Any], message: str) -> None:
    cache = MultiModalStaticCache(10)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            start_bridge(cache, "bad", **options)


SCHEDULER = """
import sys, torch
from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.metrics import start_bridge
rank = int(sys.argv[1])
cache = MultiModalStaticCache(1000)
start_bridge(cache, "scheduler", {"tp_rank": rank} if len(sys.argv) == 2 else None)
for key in range(rank + 1):
    cache.set(key, EmbeddingResult(embedding=torch.zeros(10)))
    cache.get_single(key)
"""


def merged_text(directory: Path) -> str:
    """What SGLang's server exposes of its schedulers, in a process of its own as there."""
    code = (
        "import sys\n"
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "sys.stdout.write(generate_latest(registry).decode())\n"
    )
    return run_python(code, PROMETHEUS_MULTIPROC_DIR=str(directory))


def merged(directory: Path) -> dict[str, float]:
    return samples_in(merged_text(directory))


def test_processes_are_merged_as_sglang_merges_them(tmp_path: Path) -> None:
    for rank in "01":
        run_python(SCHEDULER, rank, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    shown = merged(tmp_path)
    for name, values in {
        "hits_total": (1, 2),
        "inserted_bytes_total": (40, 80),
        "entries": (1, 2),
        "max_size_bytes": (1000, 1000),
    }.items():
        for rank, value in enumerate(values):
            assert shown[f'{name}{{cache="scheduler",tp_rank="{rank}"}}'] == value


def test_counters_of_processes_without_ranks_are_added_up(tmp_path: Path) -> None:
    for rank in "01":
        run_python(SCHEDULER, rank, "no labels", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    shown = merged(tmp_path)
    assert shown['hits_total{cache="scheduler"}'] == 3
    assert shown['max_size_bytes{cache="scheduler"}'] == 1000


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's promtool isn't on PATH")
def test_promtool_finds_nothing_to_say(registry: CollectorRegistry, tmp_path: Path) -> None:
    cache = TieredCache(100, 400)
    encoder = CachedEncoder(cache, EncoderOfNumbers())
    encoder([1, 2, 1])
    stats = {field.name: 1 for field in dataclasses.fields(StoreStats)}
    CacheCollector(registry).add("vision", cache, encoder=encoder, store=Stats(**stats))
    run_python(SCHEDULER, "0", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    for text in (generate_latest(registry).decode(), merged_text(tmp_path)):
        assert samples_in(text)
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_without_prometheus_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = metrics.__spec__
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    expected = "multimodal_cache.metrics needs prometheus_client: pip install"
    assert str(caught.value) == f"{expected} 'multimodal-cache[metrics]'"


def test_the_package_imports_neither_this_nor_the_trace_or_the_planner() -> None:
    code = (
        "import sys, multimodal_cache\n"
        "names = ['metrics', 'trace', 'planner', '_plan']\n"
        "print([n for n in names if f'multimodal_cache.{n}' in sys.modules])\n"
    )
    assert run_python(code) == "[]\n"
