"""Statistics for Prometheus: from one process, or from many under PROMETHEUS_MULTIPROC_DIR.

Names begin with ``multimodal_cache_`` and have the label ``cache``. There are no rates among them:
those are PromQL's. What isn't there (an encoder, a store, host memory) has no samples.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        "multimodal_cache.metrics needs prometheus_client: pip install 'multimodal-cache[metrics]'"
    ) from error

logger = logging.getLogger(__name__)

PREFIX = "multimodal_cache_"


class _Row(NamedTuple):
    """A sample: which attribute of whose statistics it is. A counter's name gets ``_total``."""

    owner: Literal["cache", "host", "encoder", "store"]
    name: str
    type: Literal["counter", "gauge"]
    attribute: str
    help: str
    source: str = ""  # a label, of rows with the same name

    @property
    def label_names(self) -> tuple[str, ...]:
        return ("source",) if self.source else ()

    @property
    def label_values(self) -> tuple[str, ...]:
        return (self.source,) if self.source else ()


_FEATURES = "Features served, by where their embedding came from."
_TOKENS = "Tokens (rows) of the features served, by where their embedding came from."

_ROWS = tuple(
    _Row(*row)  # type: ignore[arg-type]
    for row in [
        ("cache", "hits", "counter", "hits", "Look-ups that found an entry."),
        ("cache", "host_hits", "counter", "host_hits", "Those that host memory answered."),
        ("cache", "misses", "counter", "misses", "Look-ups that found none."),
        ("cache", "insertions", "counter", "insertions", "Embeddings stored."),
        ("cache", "inserted_bytes", "counter", "inserted_bytes", "Their bytes."),
        ("cache", "rejections", "counter", "rejections", "Embeddings refused for want of room."),
        ("cache", "rejected_bytes", "counter", "rejected_bytes", "Their bytes."),
        ("cache", "evictions", "counter", "evictions", "Entries removed to make room."),
        ("cache", "evicted_bytes", "counter", "evicted_bytes", "Their bytes."),
        ("cache", "collisions", "counter", "collisions", "Other items met under one hash."),
        ("cache", "entries", "gauge", "entries", "Entries held."),
        ("cache", "size_bytes", "gauge", "current_size", "Bytes held."),
        ("cache", "max_size_bytes", "gauge", "max_size", "The budget."),
        ("cache", "leased_bytes", "gauge", "leased_bytes", "Bytes that can't be evicted now."),
        ("host", "host_entries", "gauge", "entries", "Entries held in host memory."),
        ("host", "host_size_bytes", "gauge", "current_size", "Bytes held in host memory."),
        ("host", "host_max_size_bytes", "gauge", "max_size", "The budget of host memory."),
        ("encoder", "encoder_calls", "counter", "calls", "Calls of the cached encoder."),
        ("encoder", "encoder_features", "counter", "hits", _FEATURES, "cache"),
        ("encoder", "encoder_features", "counter", "fetched", _FEATURES, "store"),
        ("encoder", "encoder_features", "counter", "encoded", _FEATURES, "encoder"),
        ("encoder", "encoder_features", "counter", "coalesced", _FEATURES, "other_call"),
        ("encoder", "encoder_tokens", "counter", "hit_tokens", _TOKENS, "cache"),
        ("encoder", "encoder_tokens", "counter", "fetched_tokens", _TOKENS, "store"),
        ("encoder", "encoder_tokens", "counter", "encoded_tokens", _TOKENS, "encoder"),
        ("encoder", "encoder_tokens", "counter", "coalesced_tokens", _TOKENS, "other_call"),
        ("encoder", "encoder_encodes", "counter", "encodes", "Calls of encode, failed ones too."),
        ("encoder", "encoder_encode_seconds", "counter", "encode_seconds", "How long those took."),
        ("encoder", "encoder_failures", "counter", "failures", "Calls of encode that failed."),
        (
            "encoder",
            "encoder_row_mismatches",
            "counter",
            "row_mismatches",
            "Entries dropped, as they had another number of rows than was asked for.",
        ),
        (
            "encoder",
            "encoder_disagreements",
            "counter",
            "disagreements",
            "Hits given up, as another rank had none.",
        ),
        ("store", "store_hits", "counter", "hits", "Embeddings that the store had."),
        ("store", "store_misses", "counter", "misses", "Embeddings that it didn't have."),
        ("store", "store_fetched_bytes", "counter", "fetched_bytes", "Bytes fetched."),
        ("store", "store_fetch_seconds", "counter", "fetch_seconds", "How long fetches took."),
        ("store", "store_written", "counter", "written", "Embeddings written to the store."),
        ("store", "store_written_bytes", "counter", "written_bytes", "Their bytes."),
        ("store", "store_dropped", "counter", "dropped", "Embeddings not written."),
        ("store", "store_timeouts", "counter", "timeouts", "Calls of it that took too long."),
        ("store", "store_errors", "counter", "errors", "Calls of it that failed."),
        ("store", "store_corrupt", "counter", "corrupt", "Values that aren't what was written."),
        ("store", "store_skipped", "counter", "skipped", "Calls not made while it rests."),
    ]
)


class _Watched:
    """A cache and what is around it, held weakly."""

    def __init__(self, cache: Any, encoder: Any, store: Any) -> None:
        owners = {"cache": cache, "encoder": encoder, "store": store}
        present = {name: owner for name, owner in owners.items() if owner is not None}
        for name, owner in [("cache", cache), *present.items()]:
            if not callable(getattr(owner, "stats", None)):
                raise TypeError(f"{name} must have stats(), got {type(owner).__name__}")
        self._owners = {name: weakref.ref(owner) for name, owner in present.items()}

    def is_gone(self) -> bool:
        """Returns whether the cache is."""
        return self._owners["cache"]() is None

    def values(self) -> dict[_Row, float]:
        """Returns what the statistics say now, of what isn't gone."""
        owners = {name: owner() for name, owner in self._owners.items()}
        owners["host"] = getattr(owners["cache"], "host", None)
        stats = {name: owner.stats() for name, owner in owners.items() if owner is not None}
        return {
            row: getattr(stats[row.owner], row.attribute)
            for row in _ROWS
            if row.owner in stats and hasattr(stats[row.owner], row.attribute)
        }


class CacheCollector(Collector):
    """Serves statistics to the scrapes of one process; costs nothing between them.

    It reads ``stats()`` at each scrape. It doesn't work in multi-process mode: see
    ``start_bridge``. Threads may use it.

    Args:
        registry: Where it registers itself; it can be the only one there.

    Raises:
        ValueError: The registry has one already.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: dict[str, _Watched] = {}
        registry.register(self)

    def add(self, name: str, cache: Any, encoder: Any = None, store: Any = None) -> None:
        """Adds a cache, and what is around it; all three are held weakly.

        Args:
            name: The label ``cache``.
            cache: A ``MultiModalStaticCache`` or ``TieredCache``.
            encoder: A ``CachedEncoder``.
            store: An ``EmbeddingStore``.

        Raises:
            TypeError: One of them has no ``stats()``.
            ValueError: The name is that of another cache that still exists.
        """
        watched = _Watched(cache, encoder, store)
        known = self._watched.get(name)
        if known is not None and not known.is_gone():
            raise ValueError(f"there is a cache of the name {name!r} already")
        self._watched[name] = watched

    def describe(self) -> Iterable[Metric]:
        """Returns the metrics without samples. Prometheus calls it."""
        return _families().values()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics that have samples. Prometheus calls it."""
        families = _families()
        for name, watched in list(self._watched.items()):
            if watched.is_gone():
                self._watched.pop(name, None)
                continue
            for row, value in watched.values().items():
                families[row.name].add_metric([name, *row.label_values], value)
        yield from (family for family in families.values() if family.samples)


def _families() -> dict[str, Any]:
    types = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {
        row.name: types[row.type](PREFIX + row.name, row.help, labels=["cache", *row.label_names])
        for row in _ROWS
    }


# Locks are taken in this order: that of the bridges, that of a bridge, that of the natives.
_bridges: dict[tuple[tuple[str, str], ...], Bridge] = {}
_bridges_lock = threading.RLock()
_natives: dict[tuple[str, tuple[str, ...]], Any] = {}
_natives_lock = threading.RLock()


def start_bridge(
    cache: Any,
    name: str,
    labels: Mapping[str, object] | None = None,
    interval: float = 5.0,
    *,
    encoder: Any = None,
    store: Any = None,
) -> Bridge:
    """Feeds statistics to the files of Prometheus's multi-process mode, until ``stop()``.

    For processes with PROMETHEUS_MULTIPROC_DIR set, whose files another one merges, as SGLang's
    schedulers: custom collectors don't work there. A thread reads ``stats()`` every ``interval``
    seconds, and the last time at exit; the cache itself gets no slower.

    Counters of processes with the same labels are added up; of gauges the latest is shown, so
    ``labels`` should tell the processes apart, by their ranks.

    Args:
        cache: As for ``CacheCollector.add``, held weakly like the two below.
        name: The label ``cache``.
        labels: More labels, by name.
        interval: In seconds.
        encoder: As for ``CacheCollector.add``.
        store: As for ``CacheCollector.add``.

    Raises:
        TypeError: One of them has no ``stats()``.
        ValueError: There is a bridge with this name and these labels, for a cache that still
            exists; a label's name is none, or is ``cache`` or ``source``; or ``interval`` isn't
            above 0.
    """
    if not interval > 0:
        raise ValueError(f"interval must be above 0, got {interval}")
    watched = _Watched(cache, encoder, store)
    more = {label: str(value) for label, value in (labels or {}).items()}
    if taken := more.keys() & {"cache", "source"}:
        raise ValueError(f"the label {min(taken)!r} has a meaning of its own")
    key = tuple(sorted({"cache": name, **more}.items()))
    with _bridges_lock:
        known = _bridges.get(key)
        if known is not None and not known._watched.is_gone():
            raise ValueError(f"there is a bridge for {dict(key)} already")
        if known is not None:
            known.stop()
        bridge = _bridges[key] = Bridge(watched, key, interval)
    return bridge


class Bridge:
    """What ``start_bridge`` has started."""

    def __init__(
        self, watched: _Watched, labels: tuple[tuple[str, str], ...], interval: float
    ) -> None:
        self._watched = watched
        self._labels = labels
        self._fed: dict[_Row, float] = {}
        self._process = os.getpid()
        self._feeding = threading.RLock()
        self._stopped = threading.Event()
        self.feed()
        self._thread = threading.Thread(
            target=self._run, args=(interval,), name="multimodal_cache.metrics", daemon=True
        )
        self._thread.start()
        atexit.register(self.stop)

    def feed(self) -> None:
        """Adds what has been counted since the last time, and sets the gauges."""
        with self._feeding:
            if self._stopped.is_set():
                return
            values = self._watched.values()
            for row in self._fed.keys() - values.keys():
                values[row] = 0 if row.type == "gauge" else self._fed[row]  # its owner is gone
            for row, value in values.items():
                self._feed_row(row, value)
            self._fed = values

    def stop(self) -> None:
        """Feeds for the last time, and ends the thread; again, or in a forked child, nothing."""
        atexit.unregister(self.stop)
        if os.getpid() != self._process:
            return
        with _bridges_lock, self._feeding:
            self.feed()
            self._stopped.set()
            if _bridges.get(self._labels) is self:
                del _bridges[self._labels]

    def _run(self, interval: float) -> None:
        while not self._stopped.wait(interval):
            try:
                self.feed()
                if self._watched.is_gone():
                    self.stop()
            except Exception:
                logger.exception("statistics of a cache can't be passed on, for %s", self._labels)
                self._stopped.set()

    def _feed_row(self, row: _Row, value: float) -> None:
        names, labels = zip(*self._labels, strict=True)
        native = _native(row, names).labels(*labels, *row.label_values)
        if row.type == "gauge":
            native.set(value)
        else:
            native.inc(value - self._fed.get(row, 0))


def _native(row: _Row, label_names: tuple[str, ...]) -> Any:
    """Returns the metric of a row, which is made once for each set of label names."""
    with _natives_lock:
        native = _natives.get((row.name, label_names))
        if native is None:
            labels = [*label_names, *row.label_names]
            if row.type == "counter":
                native = Counter(PREFIX + row.name, row.help, labels, registry=None)
            else:
                native = Gauge(
                    PREFIX + row.name,
                    row.help,
                    labels,
                    registry=None,
                    multiprocess_mode="mostrecent",
                )
            _natives[row.name, label_names] = native
    return native
