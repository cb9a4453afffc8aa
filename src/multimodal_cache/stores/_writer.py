"""The thread of a store that writes.

It is a daemon, since a call of a back end may never end, and it doesn't hold the store while it has
nothing to do: so a store that nobody holds is collected, which ends it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from multimodal_cache.stores._side import Ask, Counts, Side, describe, join


@dataclass(eq=False, slots=True)
class Write:
    """What is to be written.

    Attributes:
        name: Its name.
        nbytes: What it holds of memory until it is written.
        pack: Makes its value; what it raises is not the back end's fault.
        send: The back end's method.
    """

    name: str
    nbytes: int
    pack: Callable[[], bytes]
    send: Callable[[Mapping[str, bytes]], None]


class Writer:
    """One thread that writes, in order, what it is given, and drops it where the side rests.

    Args:
        side: The writes.
        counts: Of the store.
        timeout: As for ``EmbeddingStore``.
        max_pending_bytes: As for ``EmbeddingStore``.
        clock: Seconds, such as ``time.monotonic``.
        name: Of the thread.
    """

    def __init__(
        self,
        side: Side,
        counts: Counts,
        timeout: float,
        max_pending_bytes: int,
        clock: Callable[[], float],
        name: str,
    ) -> None:
        self._side = side
        self._counts = counts
        self._timeout = timeout
        self._max_pending_bytes = max_pending_bytes
        self._clock = clock
        self._name = name
        self._changed = threading.Condition()  # reentrant, since a finalizer calls `stop`
        self._pending: deque[Write] = deque()
        self._bytes = 0  # of the pending, and of what is being written
        self._busy = False
        self._asked: tuple[Ask, float] | None = None  # the call that runs, and since when
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, write: Write) -> bool:
        """Takes something to write; False if it is dropped. Never waits for the back end."""
        self._notice_hang()
        with self._changed:
            reason = self._refusal(write)
            if reason is None:
                try:
                    self._begin_thread()
                except RuntimeError:  # there can't be more, or the interpreter is shutting down
                    reason = "dropped"
            if reason is not None:
                self._counts.add(**{reason: 1})
                return False
            self._bytes += write.nbytes
            self._pending.append(write)
            self._changed.notify_all()
        return True

    def _refusal(self, write: Write) -> str | None:
        """Returns what to count it as, if it can't be taken."""
        if self._stopped or self._bytes + write.nbytes > self._max_pending_bytes:
            return "dropped"
        return None if self._side.may_begin() else "skipped"

    def _begin_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def _notice_hang(self) -> None:
        """Gives up the call that runs, if it has run for too long."""
        with self._changed:
            if self._asked is None or self._clock() - self._asked[1] <= self._timeout:
                return
            ask = self._asked[0]
            self._asked = None
            self._drop_pending()
        self._counts.add(timeouts=1)
        self._side.give_up(ask, f"no answer in {self._timeout:g} s")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._stopped)
                if self._stopped:
                    return
                write = self._pending.popleft()
                self._busy = True
            self._write(write)
            with self._changed:
                self._busy = False
                self._bytes -= write.nbytes
                del write  # it holds the store
                self._changed.notify_all()

    def _write(self, write: Write) -> None:
        try:
            value = write.pack()
        except Exception:  # noqa: BLE001  # such as want of memory
            self._counts.add(dropped=1)
            return
        ask = self._side.begin()
        if ask is None:
            self._counts.add(dropped=1)
            return
        with self._changed:
            self._asked = ask, self._clock()
        trouble = None
        try:
            write.send({write.name: value})
        except BaseException as error:  # noqa: BLE001  # whatever it is, it ends no thread
            trouble = describe(error)
        with self._changed:
            self._asked = None
            if trouble is not None:
                self._drop_pending()
        if trouble is None:
            self._counts.add(written=1, written_bytes=len(value))
        else:
            self._counts.add(errors=1, dropped=1)
        self._side.end(ask, trouble)

    def _drop_pending(self) -> None:
        """Holds no memory for a back end that doesn't take it."""
        self._counts.add(dropped=len(self._pending))
        self._bytes -= sum(write.nbytes for write in self._pending)
        self._pending.clear()

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is pending or being written; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._pending or self._busy), timeout)

    def stop(self) -> None:
        """Drops what is pending, and ends the thread when it is back; doesn't wait."""
        with self._changed:
            self._stopped = True
            self._drop_pending()
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Waits for the thread until it has ended or ``time.monotonic`` is at the deadline."""
        join([self._thread] if self._thread else [], deadline)
