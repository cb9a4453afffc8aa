"""What an SGLang server's operators see of its caches: a trace, metrics, and a line in the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from multimodal_cache.base import CombinedHash
from multimodal_cache.static_cache import MultiModalStaticCache
from multimodal_cache.stats import CacheStats

if TYPE_CHECKING:
    from multimodal_cache.trace import Trace

logger = logging.getLogger(__name__)

TRACE = "MULTIMODAL_CACHE_TRACE"
SECONDS_BETWEEN_LINES = 300.0
MIB = 2**20

_RANKS = ("tp_rank", "pp_rank", "dp_rank")


def new_trace() -> Trace | None:
    """Returns the trace of this process, if the environment names one and it is to have one.

    Ranks that encode the same images together record them once.

    Raises:
        OSError: The file can't be created.
    """
    text = os.environ.get(TRACE)
    if not text or any(rank_of(name) for name in ("attn_tp_rank", "attn_cp_rank", "pp_rank")):
        return None
    from multimodal_cache.trace import Trace

    path = Path(text)
    suffix = path.suffix
    if suffix == ".gz":
        suffix = path.with_suffix("").suffix + suffix
    name = f"{path.name.removesuffix(suffix)}.{os.getpid()}{suffix}"
    trace = Trace(path.with_name(name), skip_first_hit=True)
    logger.info("recording what is requested in %s", trace.path)
    return trace


def rank_of(name: str) -> int | None:
    """Returns a rank of this process, where SGLang knows it."""
    context = sys.modules.get("sglang.srt.runtime_context")
    try:
        rank = getattr(context.get_parallel(), name)  # type: ignore[union-attr]  # then not either
    except Exception:  # noqa: BLE001  # SGLang has several for what isn't known yet
        return None
    return rank if isinstance(rank, int) else None


def watch(cache: MultiModalStaticCache, report: Report) -> None:
    """Starts the lines in the log, and metrics where SGLang collects them."""
    threading.Thread(target=report.run, name="multimodal_cache.report", daemon=True).start()
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        ranks = {name: rank_of(name) for name in _RANKS}
        known = {name: rank for name, rank in ranks.items() if rank is not None}
        try:
            from multimodal_cache.metrics import start_bridge

            start_bridge(cache, "sglang", known)
        except (ImportError, OSError, ValueError) as error:
            logger.warning("there are no metrics of the cache: %s", error)


class Report:
    """Says in the log how a cache does, if anything was looked up since it last did.

    Args:
        cache: Held weakly.

    Attributes:
        looked_up_again: Hits of SGLang's own, right after a ``set``.
    """

    def __init__(self, cache: MultiModalStaticCache) -> None:
        self.looked_up_again = 0
        self._gone = threading.Event()
        self._cache = weakref.ref(cache, lambda _: self._gone.set())
        self._said = self._count(cache.stats())

    def after_set(self, mm_hash: object, stored: bool) -> bool:
        """Hears what ``set`` returns, and returns it: SGLang looks up what it says is stored."""
        self.looked_up_again += stored and not isinstance(mm_hash, CombinedHash)
        return stored

    def run(self) -> None:
        """Logs a line every five minutes, until the cache is gone."""
        while not self._gone.wait(SECONDS_BETWEEN_LINES):
            if line := self.line():
                logger.info("%s", line)

    def line(self) -> str | None:
        """Returns the line, or None where there was no traffic, or there is no cache."""
        cache = self._cache()
        if cache is None:
            return None
        stats = cache.stats()
        count = self._count(stats)
        hits, lookups = (now - then for now, then in zip(count, self._said, strict=True))
        if not lookups:
            return None
        self._said = count
        return (
            f"multimodal cache: hit rate {hits / lookups:.1%} of {lookups:,} look-ups "
            f"({count[0] / count[1]:.1%} of {count[1]:,} since the start), "
            f"{stats.entries:,} entries, {stats.current_size / MIB:,.1f} of "
            f"{stats.max_size / MIB:,.1f} MiB, {stats.evictions:,} evictions"
        )

    def _count(self, stats: CacheStats) -> tuple[int, int]:
        hits = max(stats.hits - self.looked_up_again, 0)
        return hits, hits + stats.misses
