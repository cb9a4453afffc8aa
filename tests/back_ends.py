"""A back end for tests of the stores.

The time limits only end a test that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from servers import LIMIT

from multimodal_cache.stores import EmbeddingStore


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class MemoryStore(EmbeddingStore):
    """Keeps values in a dict, and does what tests tell it.

    Attributes:
        values: By name.
        reads: The names that each call of ``_get_many`` asked for.
        writes: The names that each call of ``_set_many`` was given.
        on_get: Called before each value with its name; what it returns replaces the value.
        on_set: Called before each write.
        hanging: Released when a call has come to ``hang``.
        gate: Until it is set, ``hang`` hangs.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None, **options: Any) -> None:
        if clock is not None:
            self._clock = clock  # type: ignore[method-assign]
        self.values: dict[str, Any] = {}
        self.reads: list[list[str]] = []
        self.writes: list[list[str]] = []
        self.on_get: Callable[[str], Any] | None = None
        self.on_set: Callable[[], None] | None = None
        self.hanging = threading.Semaphore(0)
        self.gate = threading.Event()
        super().__init__(**{"namespace": "test", "device": "cpu", "timeout": LIMIT} | options)

    def _get_many(self, names: Sequence[str]) -> Iterable[Any]:
        self.reads.append(list(names))
        for name in names:
            value = self.values.get(name)
            yield value if self.on_get is None else self.on_get(name)

    def _set_many(self, values: Mapping[str, bytes]) -> None:
        self.writes.append(list(values))
        if self.on_set is not None:
            self.on_set()
        self.values.update(values)

    def hang(self, _: object = None) -> None:
        self.hanging.release()
        assert self.gate.wait(LIMIT)

    def written(self) -> None:
        """Waits until all that was offered is written or dropped."""
        assert self.flush(LIMIT)
