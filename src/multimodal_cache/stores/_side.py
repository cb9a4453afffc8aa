"""When a back end may be asked: neither while it rests, nor beside a call that hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("multimodal_cache.stores")


class Ask:
    """One call of the back end, until it is back.

    Attributes:
        probe: It was begun after a rest, to see whether that is over.
        given_up: Nobody waits for it any more.
        back: It has ended.
    """

    __slots__ = ("back", "given_up", "probe")

    def __init__(self, probe: bool) -> None:
        self.probe = probe
        self.given_up = self.back = False


class Side:
    """The reads, or the writes, of one back end.

    It is in order until a call fails; then it rests, and nothing may be asked. When the rest is
    over one call may, the probe: if that succeeds, the side is in order again, else it rests anew.
    A probe that is never heard of again counts as failed after a while. Any thread may call it.

    Args:
        what: Such as "reads from ...", for the log.
        timeout: Seconds after which a call has failed.
        retry_after: Seconds of a rest.
        clock: Seconds, such as ``time.monotonic``.
    """

    def __init__(
        self, what: str, timeout: float, retry_after: float, clock: Callable[[], float]
    ) -> None:
        self._what = what
        self._timeout = timeout
        self._retry_after = retry_after
        self._clock = clock
        self._lock = threading.RLock()  # a finalizer may call back
        self._rest_until: float | None = None
        self._hung = 0  # calls that were given up and aren't back

    def may_begin(self) -> bool:
        """Returns whether ``begin`` would succeed just now."""
        with self._lock:
            resting = self._rest_until is not None and self._clock() < self._rest_until
            return not (resting or self._hung)

    def begin(self) -> Ask | None:
        """Begins a call; None if the back end mustn't be asked."""
        with self._lock:
            if not self.may_begin():
                return None
            probe = self._rest_until is not None
            if probe:  # the others go on resting meanwhile
                self._rest_until = self._clock() + max(self._retry_after, self._timeout)
            return Ask(probe)

    def end(self, ask: Ask, trouble: str | None = None) -> None:
        """Says that a call is back, and why it failed if it did."""
        with self._lock:
            ask.back = True
            if ask.given_up:
                self._hung -= 1
                if trouble is None:  # too late to be a success
                    return
            changed = self._judge(ask, trouble)
        self._log(changed, trouble)

    def give_up(self, ask: Ask, trouble: str | None = None) -> None:
        """Says that nobody waits for a call any more; does nothing if it is back.

        Args:
            ask: The call.
            trouble: Why it has failed; None if it has been of use.
        """
        with self._lock:
            if ask.back or ask.given_up:
                return
            ask.given_up = True
            self._hung += 1
            changed = self._judge(ask, trouble)
        self._log(changed, trouble)

    def _judge(self, ask: Ask, trouble: str | None) -> bool:
        """Draws the consequence; returns whether an outage has begun or ended."""
        rested = self._rest_until is not None
        if trouble is not None:
            self._rest_until = self._clock() + self._retry_after
            return not rested
        if ask.probe:
            self._rest_until = None
            return rested
        return False

    def _log(self, changed: bool, trouble: str | None) -> None:
        if not changed:
            return
        if trouble is None:
            logger.info("%s work again", self._what)
        else:
            rest = f"resting for {self._retry_after:g} s at a time"
            logger.warning("%s fail, %s: %s", self._what, rest, trouble)


def describe(error: BaseException) -> str:
    """Says in one short line what was raised."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  # whatever its class does
        text = "it can't be shown"
    return f"{type(error).__name__}: {text[:300]}"


class Counts:
    """Counters, by name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may call back
        self._counts: Counter[str] = Counter()

    def add(self, **numbers: float) -> None:
        """Adds to some of them, at once."""
        with self._lock:
            self._counts.update(numbers)

    def get(self) -> dict[str, Any]:
        """Returns those that aren't 0."""
        with self._lock:
            return dict(self._counts)


def join(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Waits for threads, but not for this one, until ``time.monotonic`` is at the deadline."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
