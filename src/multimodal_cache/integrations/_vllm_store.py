"""A store that vLLM's servers share, behind what their workers keep. Needs no vLLM.

The workers ask it, on threads of their own, for what the scheduler lists in its plans, and report
in some later step what they have found (see ``_vllm_index``). Requests wait for that, for a while.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from multimodal_cache.integrations._vllm_index import Fetch, Index, Plan
from multimodal_cache.integrations._vllm_pages import Pages
from multimodal_cache.stores import EmbeddingStore

logger = logging.getLogger(__name__)

TIMEOUT = 1.0
"""Seconds of a fetch, if nothing else is configured."""

SCHEMES = ("redis://", "rediss://", "unix://")

_THREADS = 4


class Item(NamedTuple):
    """What is encoded: its name, the kind of it, and how many rows come of it."""

    identifier: str
    kind: str
    rows: int


def key_of(model: str, item: Item) -> int:
    """Returns an item's key in the store.

    Args:
        model: What is known of the model. The namespace must say the rest.
        item: Under one identifier, other rows have another key.
    """
    parts = [part.encode() for part in (model, item.kind, str(item.rows), item.identifier)]
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(hasher.digest(16), "little")


def open_store(
    settings: str | Mapping[str, Any], namespace: str, options: Mapping[str, Any]
) -> EmbeddingStore:
    """Returns a store whose embeddings come to the CPU. Its client ends with the process.

    Args:
        settings: A URL of Redis or Valkey, or what ``MooncakeDistributedStore.setup`` takes.
        namespace: As for ``EmbeddingStore``.
        options: Of the store's class.

    Raises:
        ImportError: Its client isn't installed.
        RuntimeError: Mooncake refused the settings.
        TypeError, ValueError: They make no sense.
    """
    options = {"timeout": TIMEOUT, **options, "namespace": namespace, "device": "cpu"}
    if isinstance(settings, str):
        return _open_redis(settings, options)
    return _open_mooncake(dict(settings), options)


def _open_redis(url: str, options: dict[str, Any]) -> EmbeddingStore:
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ImportError('a store in Redis needs "multimodal-cache[redis]"') from error
    from multimodal_cache.stores.redis import RedisStore

    wait = 2 * options["timeout"]  # longer than the store does, which knows what to do then
    retry = Retry(NoBackoff(), 0)
    client = Redis.from_url(url, socket_timeout=wait, socket_connect_timeout=wait, retry=retry)
    return RedisStore(client, **options)


def _open_mooncake(settings: dict[str, Any], options: dict[str, Any]) -> EmbeddingStore:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ImportError(
            "a store in Mooncake needs mooncake-transfer-engine, or "
            "mooncake-transfer-engine-non-cuda"
        ) from error
    from multimodal_cache.stores.mooncake import MooncakeStore

    client = MooncakeDistributedStore()
    code = client.setup(settings)
    if code != 0:
        raise RuntimeError(f"Mooncake's setup failed with code {code}")
    return MooncakeStore(client, **options)


class Fetches:
    """What is fetched and offered, as the scheduler sees it. Not thread-safe.

    A request asks once, when it is first looked at, for all that it needs then, and waits until
    that is settled. So nothing that others ask for later can make it wait again.

    Args:
        index: Of what the workers keep.
        model: As for ``key_of``.
        patience: Seconds that a request waits at most.
        clock: Seconds, such as ``time.monotonic``.

    Attributes:
        on_gpu: The identifiers of what is there, or will be.
    """

    def __init__(
        self,
        index: Index,
        model: str,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_gpu: Container[str] = ()
        self._index = index
        self._model = model
        self._patience = patience
        self._clock = clock
        self._waits: dict[str, list[int]] = {}
        self._offers: dict[str, int] = {}
        self._over = False

    def must_wait(self, request: str, items: Iterable[Item]) -> bool:
        """Says whether a request must wait.

        Args:
            request: By name; ``forget`` must be told when it is finished.
            items: What it needs. Looked at when it is asked for the first time.
        """
        slots = self._waits.get(request)
        if slots is None:
            slots = self._waits[request] = [] if self._over else self._ask(list(items))
        return any(self._index.awaits(slot) for slot in slots)

    def _ask(self, items: list[Item]) -> list[int]:
        self._index.refresh(item.identifier for item in items)  # they mustn't evict one another
        deadline = self._clock() + self._patience
        slots = [
            self._index.fetch(*item, key_of(self._model, item), deadline)
            for item in items
            if item.identifier not in self.on_gpu
        ]
        return [slot for slot in slots if slot is not None]

    def forget(self, request: str) -> None:
        """Takes note that a request is finished."""
        self._waits.pop(request, None)

    def offer(self, item: Item) -> None:
        """Has the workers offer an item that is encoded in this step.

        Also one that the index has no room for: another server may have it.
        """
        if not self._over:
            self._offers[item.identifier] = key_of(self._model, item)

    def end_step(self) -> dict[str, int]:
        """Gives up what has taken too long, and returns the keys of what is offered, by name."""
        self._index.give_up(self._clock())
        offers, self._offers = self._offers, {}
        return offers

    def reset(self) -> None:
        """Has nothing fetched or offered any more, since the weights have changed.

        (Two servers can't tell whether they have the same weights by how often each was reset.)
        """
        if not self._over:
            logger.warning(
                "the weights may have changed, and the store's namespace has not: the store is "
                "used no more; restart the server with another namespace"
            )
        self._over = True
        self._offers.clear()


class Client:
    """The store, as a worker uses it. All but its threads is for the worker's thread.

    Args:
        store: With embeddings on the CPU.
        device: Where embeddings are used.
        offers: Whether this worker offers what it encodes; one of a server's should.
        threads: How many fetch at once.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        device: torch.device,
        *,
        offers: bool,
        threads: int = _THREADS,
    ) -> None:
        self.sizes: dict[int, int | None] = {}  # what is reported until it is heard
        self._store = store
        self._device = device
        self._offers = offers
        self._wanted: dict[int, Fetch] = {}
        self._jobs: _Jobs = queue.SimpleQueue()
        self._found: _Found = queue.SimpleQueue()
        work = (store, self._jobs, self._wanted, self._found)
        pool = [
            threading.Thread(target=_fetch_all, args=work, name="vllm-fetch", daemon=True)
            for _ in range(threads)
        ]
        for thread in pool:
            thread.start()
        self._end = weakref.finalize(self, _end, store, self._jobs, pool)  # at exit, at the latest

    def begin_step(self, plan: Plan) -> None:
        """Begins to fetch what the plan lists, and forgets what is dropped or heard of."""
        for slot in (*plan.evictions, *plan.heard):
            self._wanted.pop(slot, None)
            self.sizes.pop(slot, None)
        for slot, fetch in plan.fetches.items():
            self._wanted[slot] = fetch
            self._jobs.put(slot)

    def end_step(self, pages: Pages) -> None:
        """Keeps what has been fetched by now."""
        while not self._found.empty():
            slot, tensor = self._found.get()
            fetch = self._wanted.pop(slot, None)
            if fetch is None:  # it was late
                continue
            self.sizes[slot] = None
            if tensor is not None and tensor.shape[:1] == (fetch.rows,):
                self.sizes[slot] = pages.save(slot, tensor, fetch.limit, self._device)

    def offer(self, key: int, tensor: torch.Tensor) -> None:
        """Offers what this worker has just encoded, if it is the one that does."""
        if not self._offers:
            return
        try:
            copy = tensor.clone()  # of a batch, all of which would be held, and counted
        except RuntimeError as error:
            logger.warning("no memory to offer an item of %d bytes: %s", tensor.nbytes, error)
        else:
            self._store.offer(key, copy)

    def close(self) -> None:
        """Closes the store, and ends the threads."""
        self._end()


_Jobs = queue.SimpleQueue[int | None]
_Found = queue.SimpleQueue[tuple[int, torch.Tensor | None]]


def _fetch_all(
    store: EmbeddingStore, jobs: _Jobs, wanted: Mapping[int, Fetch], found: _Found
) -> None:
    """Fetches what is wanted, on a thread, until a None."""
    while (slot := jobs.get()) is not None:
        fetch = wanted.get(slot)
        if fetch is not None:
            found.put((slot, store.fetch([fetch.key]).get(fetch.key)))


def _end(store: EmbeddingStore, jobs: _Jobs, threads: list[threading.Thread]) -> None:
    store.close()
    for _ in threads:
        jobs.put(None)
    for thread in threads:  # a fetch is over in time
        thread.join()
