"""The threads of a store that read.

They are daemons, since a call of a back end may never end, and none of them holds the store while
it has nothing to do: so a store that nobody holds is collected, which ends them.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from multimodal_cache.stores._side import Ask, Counts, Side, describe, join

GetMany: TypeAlias = Callable[[Sequence[str]], Iterable[Any]]

MAX_THREADS = 8


class Reader:
    """Reads, many times at once, and waits no longer than it may.

    Args:
        side: The reads.
        counts: Of the store.
        timeout: As for ``EmbeddingStore``.
        clock: Seconds, such as ``time.monotonic``.
        name: Of the threads.
    """

    def __init__(
        self,
        side: Side,
        counts: Counts,
        timeout: float,
        clock: Callable[[], float],
        name: str,
    ) -> None:
        self._side = side
        self._counts = counts
        self._timeout = timeout
        self._clock = clock
        self._threads = Threads(MAX_THREADS, name)

    def read(self, get_many: GetMany, names: Sequence[str]) -> Iterator[Any] | None:
        """Reads some values.

        Args:
            get_many: The back end's method.
            names: What it is to get.

        Returns:
            What comes of each name, in order, until the time is over; None if the back end
            mustn't be asked.
        """
        deadline = self._clock() + self._timeout
        ask = self._side.begin()
        if ask is None:
            return None
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self._threads.submit(functools.partial(self._run, ask, get_many, names, arrived))
        except RuntimeError as error:  # there can't be more, or the interpreter is shutting down
            self._counts.add(errors=1)
            self._side.end(ask, describe(error))
            return None
        return self._arrivals(ask, arrived, deadline)

    # An interrupt of who waits here needs no care: the call judges itself when it is back.

    def _arrivals(
        self, ask: Ask, arrived: queue.SimpleQueue[Any], deadline: float
    ) -> Iterator[Any]:
        came = False
        while True:
            left = 0.0 if ask.given_up else max(0.0, deadline - self._clock())
            try:
                value = arrived.get(left > 0, left)
            except queue.Empty:
                if ask.given_up:
                    return
                self._counts.add(timeouts=1)
                self._side.give_up(ask, None if came else f"no answer in {self._timeout:g} s")
                continue  # with what has come just now
            if value is _END:
                return
            came = True
            yield value

    def _run(
        self, ask: Ask, get_many: GetMany, names: Sequence[str], arrived: queue.SimpleQueue[Any]
    ) -> None:
        """Reads, on a thread; touches no torch."""
        trouble = None
        try:
            if not ask.given_up:
                for _, value in zip(names, get_many(names), strict=False):
                    arrived.put(value)
                    if ask.given_up:
                        break
        except BaseException as error:  # noqa: BLE001  # whatever it is, it ends no thread
            trouble = describe(error)
            self._counts.add(errors=1)
        self._side.end(ask, trouble)
        arrived.put(_END)

    def stop(self) -> None:
        """Ends the threads when they have done what they were given; doesn't wait."""
        self._threads.stop()

    def join(self, deadline: float) -> None:
        """Waits for the threads until they have ended or ``time.monotonic`` is at the deadline."""
        self._threads.join(deadline)


_END = object()
"""Says that a read is over."""


class Threads:
    """Up to ``limit`` threads, begun as they are needed, that do what they are given, in order."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # `stop` is called by a finalizer too, which may be anywhere
        self._threads: list[threading.Thread] = []
        self._load = 0  # jobs that wait or run
        self._stopped = False

    def submit(self, job: Callable[[], None]) -> None:
        """Has a job done, which must not raise.

        Raises:
            RuntimeError: They are stopped, or no thread can be begun.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("this store is closed")
            if self._load >= len(self._threads) < self._limit:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._load += 1
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds the store
            with self._lock:
                self._load -= 1

    def stop(self) -> None:
        """Ends the threads when they have done what they were given; doesn't wait."""
        with self._lock:
            threads = 0 if self._stopped else len(self._threads)
            self._stopped = True
        for _ in range(threads):
            self._jobs.put(None)

    def join(self, deadline: float) -> None:
        """Waits for the threads until they have ended or ``time.monotonic`` is at the deadline."""
        join(self._threads, deadline)
