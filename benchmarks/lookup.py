"""What one call of the cache costs, beside other caches and as the cache grows.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    pip install --no-deps sglang==0.5.23
    python benchmarks/lookup.py

Both peers are optional: the rows of one that isn't installed are left out, and a line says so.
The defaults take about half a minute. The report is Markdown, on standard output, and with
``--output`` also in a file.

How to read it: a cell such as ``237 (231-245)`` is nanoseconds per call, the median of the
rounds and their quartiles. In a round each cache makes ``--calls`` calls in a row, in an order
of caches that is drawn anew, so that a machine that slows down slows all of them. Where the
quartiles are far apart the machine was busy: run it again. "Times the reference" is the median
over the rounds of the time divided by the reference's in the same round, so it suffers less
from drift than the times do. All times include the loop that makes the calls, of a few ns a
call, and for ``set`` the drop of the evicted entry.

The keys are 64-bit ints, visited in shuffled order, over the whole cache up to 1,000 entries
and over 1,000 of them in a larger one: how long it takes to fetch memory that the CPU has not
seen for a while is a property of the access pattern and the machine. Those looked up equal the
stored ones but are other objects, as in a server. The garbage collector runs before each
timed region and is off inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peers import load_reference
from reporting import QUARTILES, Parser, conditions, ratio, run, spread, table

from multimodal_cache import EmbeddingResult, MultiModalStaticCache

FLOATS = 10
RESULT_BYTES = FLOATS * torch.float32.itemsize
VISITED = 1_000
SIZES = (10, 100, 1_000, 10_000, 100_000)
OURS = "multimodal-cache"
REFERENCE = "SGLang's, no lock"
CACHETOOLS = "cachetools + RLock"
INSTALL = {
    REFERENCE: "pip install --no-deps sglang==0.5.23",
    CACHETOOLS: "pip install cachetools",
}


class Cache(Protocol):
    """What the operations need of a cache."""

    @staticmethod
    def combine_hashes(mm_hashes: list[int]) -> int | None: ...  # noqa: D102
    def get(self, mm_hashes: list[int]) -> object: ...  # noqa: D102
    def get_single(self, mm_hash: int) -> object: ...  # noqa: D102
    def set(self, mm_hash: int, embedding: Any) -> bool: ...  # noqa: D102
    def __len__(self) -> int: ...


class LockedLRUCache:
    """The cache that one would write by hand around ``cachetools.LRUCache``."""

    def __init__(self, max_size: int) -> None:
        from cachetools import LRUCache

        self._cache: Any = LRUCache(max_size, getsizeof=lambda result: result.embedding.nbytes)
        self._lock = threading.RLock()

    @staticmethod
    def combine_hashes(mm_hashes: list[int]) -> int:
        """Returns the key of a list of items."""
        return hash(tuple(mm_hashes))

    def get(self, mm_hashes: list[int]) -> object:
        """Looks a list of items up."""
        with self._lock:
            return self._cache.get(hash(tuple(mm_hashes)))

    def get_single(self, mm_hash: int) -> object:
        """Looks one key up."""
        with self._lock:
            return self._cache.get(mm_hash)

    def set(self, mm_hash: int, embedding: EmbeddingResult) -> bool:
        """Stores a result."""
        with self._lock:
            self._cache[mm_hash] = embedding
        return True

    def __len__(self) -> int:
        return len(self._cache)


@dataclass(frozen=True)
class Implementation:
    """A cache class, made from a budget in bytes, and the class of the results it takes."""

    name: str
    package: str
    cache_class: Callable[[int], Cache]
    result_class: Callable[..., Any]

    def new_result(self) -> Any:
        """Returns a small result that owns its memory."""
        return self.result_class(embedding=torch.zeros(FLOATS))


class Subject:
    """One full cache, what was measured on it, and the source of arguments for its calls.

    Args:
        implementation: What the cache is made of.
        entries: How many entries fill it, to the byte.
        by_list: The entries are stored under the keys of lists of one item each.
        seed: For the keys and the order in which they are visited.
    """

    def __init__(
        self, implementation: Implementation, entries: int, *, by_list: bool, seed: int
    ) -> None:
        self.implementation = implementation
        self.entries = entries
        self.samples: list[float] = []
        self.cache = implementation.cache_class(entries * RESULT_BYTES)
        self._rng = random.Random(seed)
        keys = self.new_keys(entries)
        for key in keys:
            stored_key = self.cache.combine_hashes([key]) if by_list else key
            assert stored_key is not None
            self.cache.set(stored_key, implementation.new_result())
        self._rng.shuffle(keys)
        self._visits = itertools.cycle(keys[:VISITED])

    def next_keys(self, calls: int) -> list[int]:
        """Returns keys that are present, as new objects; goes on where the last call stopped."""
        return [int(str(key)) for key in itertools.islice(self._visits, calls)]

    def new_keys(self, calls: int) -> list[int]:
        """Returns keys that are not present."""
        return [self._rng.getrandbits(64) for _ in range(calls)]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collects the garbage, then keeps the collector off.

    What survives is never looked at again; each collection would otherwise scan all entries.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_lookups(lookup: Callable[[Any], object], keys: Iterable[object]) -> float:
    """Returns the seconds that it takes to look the keys up."""
    with collector_off():
        start = time.perf_counter()
        for key in keys:
            lookup(key)
        return time.perf_counter() - start


def time_get(subject: Subject, calls: int) -> float:
    """Times hits of ``get``."""
    lists = [[key] for key in subject.next_keys(calls)]
    seconds = time_lookups(subject.cache.get, lists)
    assert subject.cache.get(lists[-1]) is not None
    return seconds


def time_get_single(subject: Subject, calls: int) -> float:
    """Times hits of ``get_single``."""
    keys = subject.next_keys(calls)
    seconds = time_lookups(subject.cache.get_single, keys)
    assert subject.cache.get_single(keys[-1]) is not None
    return seconds


def time_miss(subject: Subject, calls: int) -> float:
    """Times misses of ``get_single``."""
    keys = subject.new_keys(calls)
    seconds = time_lookups(subject.cache.get_single, keys)
    assert subject.cache.get_single(keys[-1]) is None
    return seconds


def time_combine(subject: Subject, calls: int) -> float:
    """Times ``combine_hashes``, which a server calls once for each ``set`` by list."""
    return time_lookups(subject.cache.combine_hashes, [[key] for key in subject.new_keys(calls)])


def time_set(subject: Subject, calls: int) -> float:
    """Times calls of ``set`` that evict, and thereby free, one entry each."""
    return time_sets(subject, [subject.implementation.new_result() for _ in range(calls)])


def time_set_row(subject: Subject, calls: int) -> float:
    """Times the same with rows of a batch, which ours and SGLang's copy out of it."""
    batch = torch.zeros(64, FLOATS)
    rows = itertools.islice(itertools.cycle(batch), calls)
    return time_sets(subject, [subject.implementation.result_class(embedding=row) for row in rows])


def time_sets(subject: Subject, results: list[Any]) -> float:
    """Times a call of ``set`` for each result, with a new key; empties the list."""
    keys = subject.new_keys(len(results))
    set_, take = subject.cache.set, results.pop
    with collector_off():
        start = time.perf_counter()
        for key in keys:
            set_(key, take())
        seconds = time.perf_counter() - start
    assert len(subject.cache) == subject.entries
    assert subject.cache.get_single(keys[-1]) is not None
    return seconds


@dataclass(frozen=True)
class Operation:
    """A kind of call, and how to time it: ``time(subject, calls)`` returns seconds."""

    name: str
    time: Callable[[Subject, int], float]
    by_list: bool = False


SIZED_OPERATIONS = (
    Operation("`get([key])`, hit", time_get, by_list=True),
    Operation("`get_single(key)`, hit", time_get_single),
    Operation("`get_single(key)`, miss", time_miss),
    Operation("`set(key, result)`, evicts one", time_set),
)
OPERATIONS = (
    *SIZED_OPERATIONS,
    Operation("`set(key, row of a batch)`, evicts one", time_set_row),
    Operation("`combine_hashes([key])`", time_combine),
)


def installed() -> list[Implementation]:
    """Returns ours and those peers that are installed."""
    found = [Implementation(OURS, "multimodal-cache", MultiModalStaticCache, EmbeddingResult)]
    reference = load_reference()
    if reference is not None:
        found.append(
            Implementation(
                REFERENCE, "sglang", reference.MultiModalStaticCache, reference.EmbeddingResult
            )
        )
    if importlib.util.find_spec("cachetools"):
        found.append(Implementation(CACHETOOLS, "cachetools", LockedLRUCache, EmbeddingResult))
    return found


def measure(
    operation: Operation,
    implementations: Sequence[Implementation],
    entries: int,
    rounds: int,
    options: argparse.Namespace,
) -> list[Subject]:
    """Times an operation on a cache of each implementation, round by round."""
    rng = random.Random(options.seed)
    subjects = [
        Subject(each, entries, by_list=operation.by_list, seed=options.seed)
        for each in implementations
    ]
    for _ in range(rounds):
        for subject in rng.sample(subjects, len(subjects)):
            seconds = operation.time(subject, options.calls)
            subject.samples.append(seconds / options.calls * 1e9)
    return subjects


def compare(found: Sequence[Implementation], options: argparse.Namespace) -> str:
    """Returns the table of all implementations at one number of entries."""
    rows = []
    for operation in OPERATIONS:
        subjects = measure(operation, found, options.entries, options.rounds, options)
        by_name = {subject.implementation.name: subject for subject in subjects}
        for name, subject in by_name.items():
            reference = by_name.get(REFERENCE)
            relative = ratio(subject.samples, reference.samples) if reference else "-"
            rows.append((operation.name, name, spread(subject.samples), relative))
    return table(("Operation", "Cache", "ns per call", "Times the reference"), rows)


def compare_sizes(found: Sequence[Implementation], options: argparse.Namespace) -> str:
    """Returns the table of ours, and the reference if it is there, at each of ``SIZES``."""
    shown = [each for each in found if each.name in (OURS, REFERENCE)]
    rows = []
    for operation in SIZED_OPERATIONS:
        cells: dict[str, list[str]] = {each.name: [] for each in shown}
        for size in SIZES:
            for subject in measure(operation, shown, size, options.size_rounds, options):
                cells[subject.implementation.name].append(spread(subject.samples))
        rows += [(operation.name, name, *spreads) for name, spreads in cells.items()]
    return table(("Operation", "Cache", *[f"{size:,}" for size in SIZES]), rows)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    found = installed()
    yield conditions(options.seed, ["torch", *(each.package for each in found)])
    for name, command in INSTALL.items():
        if name not in {each.name for each in found}:
            yield f"Left out, not installed: {name} (`{command}`)."
    calls = f"rounds of {options.calls:,} calls, {QUARTILES}"
    yield f"Caches of {options.entries:,} entries; {options.rounds} {calls}:"
    yield compare(found, options)
    yield (
        f"Nanoseconds per call by number of entries; {options.size_rounds} {calls}. A lookup "
        f"visits {VISITED:,} entries at most. A `set` evicts the entry that was longest unused, "
        "which the CPU's caches have lost in a large cache, and the reference's too:"
    )
    yield compare_sizes(found, options)


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Times one call of the cache, beside other caches and as the cache grows.")
    parser.add_number("--entries", 1_000, 1, "entries in the caches of the first table")
    parser.add_number("--rounds", 31, 2, "rounds behind each cell of the first table")
    parser.add_number("--size-rounds", 11, 2, "rounds behind each cell of the second table")
    parser.add_number("--calls", 20_000, 1, "calls of each cache in one round")
    run(parser, report)


if __name__ == "__main__":
    main()
