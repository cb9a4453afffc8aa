"""The gate of ``encode``: who may go in, and who is inside.

It knows threads and tasks, but nothing of keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import Awaitable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from multimodal_cache._turns import Turns


class Gate:
    """Lets so many into ``encode`` at once, none when it is closed, and knows who is inside.

    Args:
        max_concurrency: None for no limit.
    """

    def __init__(self, max_concurrency: int | None) -> None:
        self._turns = Turns(max_concurrency)
        self._inside: set[Any] = set()  # threads by their ids, tasks, and the tasks they await
        self.closed = False

    def turn(self, *, nested: bool) -> contextlib.AbstractContextManager[Future[None]]:
        """Takes a turn, as ``Turns.taken`` does; what comes from inside needs none."""
        return self._turns.taken(nested=nested)

    @contextlib.contextmanager
    def inside(self, owner: Any) -> Iterator[None]:
        """Marks a thread (by its id) or a task as inside, until the block ends.

        Raises:
            RuntimeError: The gate is closed.
        """
        self.require_open()
        outermost = owner not in self._inside
        self._inside.add(owner)
        try:
            yield
        finally:
            if outermost:
                self._inside.discard(owner)

    @types.coroutine
    def without_grad(self, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Awaits without gradients, and with them for other tasks while it is suspended.

        A task that it waits for is inside meanwhile.

        It is ``yield from``, step by step. (``torch.no_grad`` decorates generators too, but throws
        into them in a way that Python 3.12 has deprecated.)
        """
        steps: Any = awaitable.__await__()
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                with torch.no_grad():
                    if error is not None:
                        request = steps.throw(error)
                    elif answer is None:
                        request = next(steps)
                    else:
                        request = steps.send(answer)
            except StopIteration as stop:
                return stop.value
            finally:
                error = None  # its traceback holds this frame
            waits_for_task = isinstance(request, asyncio.Task)  # it may be None, or anything
            if waits_for_task:
                self._inside.add(request)
            try:
                answer = yield request
            except BaseException as thrown:
                if not hasattr(steps, "throw"):
                    raise
                error = thrown
            finally:
                if waits_for_task:
                    self._inside.discard(request)

    def is_inside(self) -> bool:
        """Returns whether this thread or task is inside."""
        return threading.get_ident() in self._inside or current_task() in self._inside

    def require_open(self) -> None:
        """Refuses to begin anything when the gate is closed."""
        if self.closed:
            raise RuntimeError("this CachedEncoder is closed")

    def require_outside(self) -> None:
        """Refuses to wait for an encode from inside one, which may be the same."""
        if self.is_inside():
            raise RuntimeError(
                "a call from inside encode would have to wait for an image that is being encoded"
            )


def require_no_running_loop() -> None:
    """Refuses to wait on a thread whose event loop would stand still meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "a synchronous call on the thread of a running event loop would have to wait for "
        "another encode: await encode_async(...) instead"
    )


def current_task() -> asyncio.Task[Any] | None:
    """Returns the task that runs on this thread; None where there is none."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop is running
        return None
