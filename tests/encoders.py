"""Encoders that wait until they are told to go on, and what else tests of concurrency share.

The time limits only end a test that hangs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from support import EncoderOfNumbers

from multimodal_cache import CachedEncoder, MultiModalStaticCache

LIMIT = 60


class GatedEncoder(EncoderOfNumbers):
    """Encodes when it is told to; ``fail`` holds what it is to raise once, by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.fail: dict[float, BaseException] = {}

    def __call__(self, features: list[Any]) -> torch.Tensor:
        output = super().__call__(features)
        self.begun.release()
        assert self.gate.wait(LIMIT)
        for feature in features:
            if feature in self.fail:
                raise self.fail.pop(feature)
        return output

    async def begins(self) -> None:
        """Waits, on an event loop, until an encode has begun."""
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0)


class WaitingFlights(dict[int, Any]):
    """A table of flights that says when somebody finds one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = threading.Semaphore(0)

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        if found is not None:
            self.joined.release()
        return found


@contextmanager
def gated(
    max_size: int = 10_000, max_concurrency: int | None = None
) -> Iterator[tuple[CachedEncoder, GatedEncoder, Any]]:
    """Yields an encoder whose encode waits, that encode, and a function that runs in a thread."""
    encode = GatedEncoder()
    cache = MultiModalStaticCache(max_size)
    encoder = CachedEncoder(cache, encode, key=int, max_concurrency=max_concurrency)
    encoder._flights.by_key = WaitingFlights()
    with ThreadPoolExecutor(32) as pool:
        try:
            yield encoder, encode, pool.submit
        finally:
            encode.gate.set()


def wait_for(semaphore: threading.Semaphore, count: int = 1) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=LIMIT)


def joined(encoder: CachedEncoder, count: int = 1) -> None:
    flights = encoder._flights.by_key
    assert isinstance(flights, WaitingFlights)
    wait_for(flights.joined, count)


def limited(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, LIMIT))


class AsyncEncoder(EncoderOfNumbers):
    """A coroutine function whose encodes end when their gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Future[None]] = []
        self.grad_modes: list[bool] = []

    async def __call__(self, features: list[Any]) -> torch.Tensor:  # type: ignore[override]
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        output = super().__call__(features)
        self.grad_modes.append(torch.is_grad_enabled())
        await gate
        self.grad_modes.append(torch.is_grad_enabled())
        return output


async def settle() -> None:
    """Lets all tasks go on until each waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)
