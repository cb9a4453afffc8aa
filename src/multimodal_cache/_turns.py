"""How many may do something at once, threads and tasks alike."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future


class Turns:
    """Hands out so many turns at once, in the order in which they were asked for.

    Args:
        limit: None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._free: float = math.inf if limit is None else limit
        self._asked: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, *, nested: bool = False) -> Iterator[Future[None]]:
        """Yields a future that is done once it is the caller's turn; the turn ends with the block.

        The caller must wait for it.

        Args:
            nested: The caller is part of what has a turn, and needs none of its own.
        """
        turn: Future[None] = Future()
        if nested:
            turn.set_result(None)
            yield turn
            return
        self._ask(turn)
        try:
            yield turn
        finally:
            if not turn.cancel():  # it had its turn
                self._pass_on()

    def _ask(self, turn: Future[None]) -> None:
        with self._lock:
            if self._free < 1:
                self._asked.append(turn)
                return
            self._free -= 1
        turn.set_result(None)

    def _pass_on(self) -> None:
        while True:
            with self._lock:
                if not self._asked:
                    self._free += 1
                    return
                turn = self._asked.popleft()
            if turn.set_running_or_notify_cancel():  # else nobody waits for it any more
                turn.set_result(None)
                return
