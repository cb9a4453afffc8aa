"""What one call of the cache costs, beside other caches, under threads, and as the cache grows.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    pip install --no-deps sglang==0.5.23 ai-dynamo==1.6.1
    python benchmarks/lookup.py

The peers are optional: one that isn't installed is left out, and a line says so. The defaults take
about two minutes. The report is Markdown, on standard output, and with ``--output`` also in a file.

How to read it: a cell such as ``237 (231-245)`` is nanoseconds per call, the median of the rounds
and their quartiles. In a round each cache makes ``--calls`` calls in a row, in an order of caches
that is drawn anew, so that a machine that slows down slows all of them. Where the quartiles are far
apart the machine was busy: run it again. "p99" is the 99th percentile of a tenth as many calls that
are timed one by one, clock included (some 50 ns), the median over the rounds. "Time / SGLang's"
is the median over the rounds of the time divided by the reference's in the same round, so it
suffers less from drift than the times do. All times include the loop that makes the calls, of a few
ns a call, and for ``set`` the drop of the result that leaves the cache or doesn't get in.

The results are of 40 bytes: to free or to copy a larger one takes longer, in all caches alike. Of
a row of a batch, ours and SGLang's store a copy; the others keep the batch, and have less to do.
Where a key is present, ours and SGLang's keep the old result, the others take the new one.

Several threads look keys up in one cache for ``--milliseconds``, which are many turns of Python's
global lock. The time of a call is that time divided by the calls of all the threads. A thread that
waits for its turn waits beyond the 99th percentile. SGLang's and Dynamo's caches have no lock: they
aren't correct under threads, and stand there for scale.

The keys are 64-bit ints; Dynamo's are 64 hexadecimal digits, and to hash them is part of the call.
They are visited in shuffled order, over the whole cache up to 1,000 entries and over 1,000 of them
in a larger one: how long it takes to fetch memory that the CPU has not seen for a while is a
property of the access pattern and the machine. Those looked up equal the stored ones but are other
objects, as in a server. The garbage collector runs before each timed region and is off inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from peers import OURS, REFERENCE, Implementation, installed, left_out
from reporting import QUARTILES, Parser, conditions, ratio, run, spread, table

FLOATS = 10
RESULT_BYTES = FLOATS * torch.float32.itemsize
VISITED = 1_000
SIZES = (10, 100, 1_000, 10_000, 100_000)
THREADS = (4, 8)


@dataclass
class Calls:
    """Calls that are ready to be made: of ``function(key)``, or ``function(key, result)``."""

    function: Callable[..., object]
    keys: Sequence[Any]
    results: list[Any] | None = None

    def time_all(self) -> float:
        """Makes the calls and returns the seconds that they took; gives the results away."""
        function = self.function
        if self.results is None:
            start = time.perf_counter()
            for key in self.keys:
                function(key)
            return time.perf_counter() - start
        take = self.results.pop
        start = time.perf_counter()
        for key in self.keys:
            function(key, take())
        return time.perf_counter() - start

    def time_each(self) -> list[int]:
        """Makes the calls and returns the nanoseconds that each took, clock included."""
        function, clock = self.function, time.perf_counter_ns
        taken = []
        if self.results is None:
            for key in self.keys:
                start = clock()
                function(key)
                taken.append(clock() - start)
            return taken
        take = self.results.pop
        for key in self.keys:
            start = clock()
            function(key, take())
            taken.append(clock() - start)
        return taken

    def repeat_until(self, end: float) -> tuple[int, list[int]]:
        """Makes the calls over and over until some time; returns how many, and ns of some."""
        some = Calls(self.function, self.keys[:10])
        made, taken = 0, []
        while made == 0 or time.perf_counter() < end:
            self.time_all()
            taken += some.time_each()
            made += len(self.keys) + len(some.keys)
        return made, taken


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
        self.p99s: list[float] = []
        self.cache = implementation.new_cache(entries * RESULT_BYTES)
        self._rng = random.Random(seed)
        keys = [self._rng.getrandbits(64) for _ in range(entries)]
        for key in keys:
            stored = self.cache.combine_hashes([key]) if by_list else implementation.key(key)
            self.cache.set(stored, self.new_results(1)[0])
        self._rng.shuffle(keys)
        self._visits = itertools.cycle(keys[:VISITED])

    def assert_it_works(self) -> None:
        """The cache holds as many entries as it has room for, and what comes is stored."""
        assert len(self.cache) == self.entries
        (key,) = self.new_keys(1)
        self.cache.set(key, self.new_results(1)[0])
        assert self.cache.get_single(key) is not None
        assert len(self.cache) == self.entries

    def present_keys(self, calls: int) -> list[Any]:
        """Returns keys that are present, as new objects; goes on where the last call stopped."""
        key = self.implementation.key
        return [key(int(str(each))) for each in itertools.islice(self._visits, calls)]

    def new_keys(self, calls: int) -> list[Any]:
        """Returns keys that are not present."""
        return [self.implementation.key(self._rng.getrandbits(64)) for _ in range(calls)]

    def new_results(self, calls: int) -> list[Any]:
        """Returns small results that own their memory."""
        return [self.implementation.new_result(torch.zeros(FLOATS)) for _ in range(calls)]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collects the garbage, then keeps the collector off.

    What survives is frozen for that time, or each collection would scan all the entries again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def get(subject: Subject, calls: int) -> Calls:
    """Hits of lists."""
    lists = [[key] for key in subject.present_keys(calls)]
    assert subject.cache.get(lists[-1]) is not None
    return Calls(subject.cache.get, lists)


def get_missing(subject: Subject, calls: int) -> Calls:
    """Misses of lists."""
    return Calls(subject.cache.get, [[key] for key in subject.new_keys(calls)])


def get_single(subject: Subject, calls: int) -> Calls:
    """Hits of single keys."""
    keys = subject.present_keys(calls)
    assert subject.cache.get_single(keys[-1]) is not None
    return Calls(subject.cache.get_single, keys)


def get_single_missing(subject: Subject, calls: int) -> Calls:
    """Misses of single keys."""
    return Calls(subject.cache.get_single, subject.new_keys(calls))


def combine(subject: Subject, calls: int) -> Calls:
    """``combine_hashes``, which a server calls once for each ``set`` by list."""
    return Calls(subject.cache.combine_hashes, [[key] for key in subject.new_keys(calls)])


def set_new(subject: Subject, calls: int) -> Calls:
    """Calls of ``set`` on an empty cache with room for all."""
    cache = subject.implementation.new_cache(calls * RESULT_BYTES)
    return Calls(cache.set, subject.new_keys(calls), subject.new_results(calls))


def set_present(subject: Subject, calls: int) -> Calls:
    """Calls of ``set`` with keys that are present."""
    return Calls(subject.cache.set, subject.present_keys(calls), subject.new_results(calls))


def set_evicting(subject: Subject, calls: int) -> Calls:
    """Calls of ``set`` that evict, and thereby free, one entry each."""
    assert len(subject.cache) == subject.entries
    return Calls(subject.cache.set, subject.new_keys(calls), subject.new_results(calls))


def set_combined(subject: Subject, calls: int) -> Calls:
    """The same with the keys of lists."""
    assert len(subject.cache) == subject.entries
    keys = [subject.cache.combine_hashes([key]) for key in subject.new_keys(calls)]
    return Calls(subject.cache.set, keys, subject.new_results(calls))


def set_row(subject: Subject, calls: int) -> Calls:
    """The same with rows of a batch, which ours and SGLang's copy out of it."""
    assert len(subject.cache) == subject.entries
    batch = torch.zeros(64, FLOATS)
    rows = (batch[number % len(batch)] for number in range(calls))
    results = [subject.implementation.new_result(row) for row in rows]
    return Calls(subject.cache.set, subject.new_keys(calls), results)


@dataclass(frozen=True)
class Operation:
    """A kind of call, and how to prepare a number of them."""

    name: str
    prepare: Callable[[Subject, int], Calls]
    by_list: bool = False
    threads: int = 1

    def measure(self, subject: Subject, options: argparse.Namespace) -> None:
        """Makes some calls, and a tenth as many one by one; notes what they took."""
        if self.threads == 1:
            calls = self.prepare(subject, options.calls)
            with collector_off():
                nanoseconds = calls.time_all() / options.calls * 1e9
            calls = self.prepare(subject, options.calls // 10)
            with collector_off():
                taken = calls.time_each()
        else:
            nanoseconds, taken = self._measure_threads(subject, options.milliseconds / 1e3)
        subject.samples.append(nanoseconds)
        subject.p99s.append(statistics.quantiles(taken, n=100, method="inclusive")[-1])

    def _measure_threads(self, subject: Subject, seconds: float) -> tuple[float, list[int]]:
        ready = [self.prepare(subject, VISITED) for _ in range(self.threads)]
        starts: list[float] = []
        barrier = threading.Barrier(self.threads, lambda: starts.append(time.perf_counter()))

        def call(calls: Calls) -> tuple[int, list[int]]:
            barrier.wait()
            return calls.repeat_until(starts[0] + seconds)

        with collector_off(), ThreadPoolExecutor(self.threads) as pool:
            done = list(pool.map(call, ready))
            passed = time.perf_counter() - starts[0]
        made = sum(number for number, _ in done)
        return passed / made * 1e9, [each for _, taken in done for each in taken]


SIZED_OPERATIONS = (
    Operation("`get([key])`, hit", get, by_list=True),
    Operation("`get_single(key)`, hit", get_single),
    Operation("`get_single(key)`, miss", get_single_missing),
    Operation("`set(key, result)`, evicts one", set_evicting),
)
OPERATIONS = (
    *SIZED_OPERATIONS,
    Operation("`set(combined key, result)`, evicts one", set_combined, by_list=True),
    Operation("`set(key, row of a batch)`, evicts one", set_row),
    Operation("`set(key, result)`, new, with room", set_new),
    Operation("`set(key, result)`, present", set_present),
    Operation("`get([key])`, miss", get_missing, by_list=True),
    Operation("`combine_hashes([key])`", combine, by_list=True),
    *(Operation(f"`get_single(key)`, hit, {n} threads", get_single, threads=n) for n in THREADS),
)


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
        if each.by_list or not operation.by_list
    ]
    for _ in range(rounds):
        for subject in rng.sample(subjects, len(subjects)):
            operation.measure(subject, options)
    for subject in subjects:
        subject.assert_it_works()
    return subjects


def compare(found: Sequence[Implementation], options: argparse.Namespace) -> str:
    """Returns the table of all implementations at one number of entries."""
    rows = []
    for operation in OPERATIONS:
        rounds = options.rounds if operation.threads == 1 else options.thread_rounds
        subjects = measure(operation, found, options.entries, rounds, options)
        by_name = {subject.implementation.name: subject for subject in subjects}
        reference = by_name.get(REFERENCE)
        for name, subject in by_name.items():
            relative = ratio(subject.samples, reference.samples) if reference else "-"
            p99 = f"{statistics.median(subject.p99s):.0f}"
            rows.append((operation.name, name, spread(subject.samples), p99, relative))
    return table(("Operation", "Cache", "ns per call", "p99", "Time / SGLang's"), rows)


def compare_sizes(found: Sequence[Implementation], options: argparse.Namespace) -> str:
    """Returns the table of ours, and the reference if it is there, at each of ``SIZES``."""
    shown = [each for each in found if each.name in (OURS, REFERENCE)]
    sizes = [size for size in SIZES if size <= options.max_entries]
    rows = []
    for operation in SIZED_OPERATIONS:
        cells: dict[str, list[str]] = {each.name: [] for each in shown}
        for size in sizes:
            for subject in measure(operation, shown, size, options.size_rounds, options):
                cells[subject.implementation.name].append(spread(subject.samples))
        rows += [(operation.name, name, *spreads) for name, spreads in cells.items()]
    return table(("Operation", "Cache", *[f"{size:,}" for size in sizes]), rows)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    found = installed()
    yield conditions(options.seed, ["torch", *(each.package for each in found)])
    yield from left_out(found)
    calls = f"rounds of {options.calls:,} calls, {QUARTILES}"
    yield (
        f"Caches of {options.entries:,} entries; {options.rounds} {calls}; with several threads "
        f"{options.thread_rounds} rounds of {options.milliseconds} ms:"
    )
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
    parser.add_number("--max-entries", 100_000, 10, "entries in the largest cache of the second")
    parser.add_number("--size-rounds", 11, 2, "rounds behind each cell of the second table")
    parser.add_number("--calls", 20_000, 20, "calls of each cache in one round")
    parser.add_number("--thread-rounds", 11, 2, "rounds behind each cell for several threads")
    parser.add_number("--milliseconds", 300, 1, "the time of such a round")
    run(parser, report)


if __name__ == "__main__":
    main()
