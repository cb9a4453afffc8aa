"""Stores of embeddings that many servers share, and that outlive them.

A back end is a subclass of ``EmbeddingStore``, such as ``multimodal_cache.stores.redis.RedisStore``
and ``multimodal_cache.stores.mooncake.MooncakeStore``. README.md, beside this file, is for those
who run one.
"""

from __future__ import annotations

import abc
import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from multimodal_cache._streams import module_of
from multimodal_cache._tensors import dense_storage, is_dense
from multimodal_cache.base import as_int, single_key
from multimodal_cache.stores._format import (
    NAMES,
    OVERHEAD_BYTES,
    SECRET_BYTES,
    name_of,
    name_prefix,
    pack,
    unpack,
)
from multimodal_cache.stores._reader import Reader
from multimodal_cache.stores._side import Counts, Side
from multimodal_cache.stores._writer import Write, Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store has done since it was made.

    A consistent snapshot. Each key of a fetch was a hit, a miss or skipped; each offer was, or
    will be, written, dropped or skipped.

    Attributes:
        hits: Keys whose embedding a fetch returned.
        misses: Keys that the back end was asked for, in vain; those that hadn't come in time
            included, and those of a fetch after ``close``.
        skipped: Keys of fetches that didn't ask, and offers that were refused, because that
            side of the back end rested or hung.
        fetched_bytes: The bytes of the embeddings that fetches returned.
        fetch_seconds: The seconds that fetches took, together.
        written: Offers that the back end has taken.
        written_bytes: The bytes of their values.
        dropped: Offers that were refused for another reason, or not written later.
        timeouts: Calls of the back end that weren't back in time.
        errors: Calls of the back end that raised, and embeddings that had no room in memory.
        corrupt: Values that weren't what was written under their name. They are misses.
    """

    hits: int = 0
    misses: int = 0
    skipped: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    written: int = 0
    written_bytes: int = 0
    dropped: int = 0
    timeouts: int = 0
    errors: int = 0
    corrupt: int = 0


class EmbeddingStore(abc.ABC):
    """A store of embeddings behind a cache, that never fails or delays a request for long.

    Whatever the back end does, ``fetch`` returns in time, and ``offer`` at once. When a call of
    the back end raises, or nothing has come of it within ``timeout``, that side of it, reads or
    writes, rests for ``retry_after`` seconds, in which it isn't asked; then one call sees whether
    it works again. While a call hangs, no other is begun on its side. An outage is logged as one
    WARNING when it begins and one INFO when it is over, by ``multimodal_cache.stores``.

    A back end defines ``_get_many`` and ``_set_many``. They run on threads of the store's own,
    several ``_get_many`` at once, and may raise and may hang; they must not use torch.

    Any thread may use a store. It must be made in the process that uses it, not before a fork.
    Who doesn't close it has its threads ended when it is collected; at exit it is closed.

    Args:
        namespace: What tells these embeddings from all others in the store: the model, its
            weights, the preprocessing, the dtype, and the rank where ranks hold different
            shards. After a change of weights it must be another one, and with it the store.
        device: Where fetched embeddings go. By default the current CUDA device of the thread
            that makes the store, or the CPU where there is none.
        timeout: Seconds a fetch may take, and a write before it counts as hung.
        retry_after: Seconds of a rest.
        secret: 32 bytes. With them only who knows them can write values that are read.
        max_pending_bytes: What may wait to be written, in bytes of memory, which is held beside
            the cache's budget. One value more, packed, is held while it is written.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: ``namespace`` is empty, ``secret`` hasn't 32 bytes, a number is negative or
            too large, or ``timeout`` is 0.
    """

    _max_value_bytes: int | None = None
    """Larger ones aren't written; None for no limit."""

    _clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        *,
        namespace: str | bytes,
        device: torch.device | str | int | None = None,
        timeout: float = 1.0,
        retry_after: float = 5.0,
        secret: bytes | None = None,
        max_pending_bytes: int = 256 * 2**20,
    ) -> None:
        _require(namespace, secret)
        self._prefix = name_prefix(namespace)
        self._namespace = namespace
        self._secret = secret
        self._timeout = _seconds("timeout", timeout)
        if not self._timeout:
            raise ValueError("timeout must be more than 0 seconds")
        retry_after = _seconds("retry_after", retry_after)
        max_pending_bytes = as_int("max_pending_bytes", max_pending_bytes)
        if max_pending_bytes < 0:
            raise ValueError(f"max_pending_bytes must not be negative, got {max_pending_bytes}")
        self._device = _device(device)
        self._closed = False
        self._counts = Counts()
        name = type(self).__name__
        reads, writes = (
            Side(f"{what} {self!r}", self._timeout, retry_after, self._clock)
            for what in ("reads from", "writes to")
        )
        self._reader = Reader(reads, self._counts, self._timeout, self._clock, f"{name} reader")
        self._writer = Writer(
            writes, self._counts, self._timeout, max_pending_bytes, self._clock, f"{name} writer"
        )
        weakref.finalize(self, _stop, self._reader, self._writer).atexit = False
        _open_stores.add(self)

    # What a back end defines

    @abc.abstractmethod
    def _get_many(self, names: Sequence[str]) -> Iterable[bytes | None]:
        """Returns the value of each name, in order; None for one that isn't there.

        It should be a generator: what has been yielded is of use if the rest is late or fails.
        """

    @abc.abstractmethod
    def _set_many(self, values: Mapping[str, bytes]) -> None:
        """Writes values, over what is there; raises if it can't. Not called twice at once."""

    # What users call

    def fetch(self, keys: Iterable[SupportsIndex]) -> dict[int, torch.Tensor]:
        """Returns what the store has, within ``timeout`` seconds.

        Args:
            keys: As for a cache. Those that come first are asked for first.

        Returns:
            The embedding of each key that was found, in memory of its own, as it was offered, on
            the store's device; on a GPU its copy, for which this thread waits, is on the
            current stream. It is the caller's, to change and keep.

        Raises:
            TypeError: A key isn't an int, or is one of several items. Nothing else is raised.
        """
        began = self._clock()
        names = {name_of(self._prefix, key): key for key in map(single_key, keys)}
        if not names:
            return {}
        if self._closed:
            self._counts.add(misses=len(names))
            return {}
        values = self._reader.read(self._get_many, list(names))
        if values is None:
            self._counts.add(skipped=len(names))
            return {}
        found: dict[int, torch.Tensor] = {}
        for (name, key), value in zip(names.items(), values, strict=False):
            embedding = None if value is None else self._unpack(name, value)
            if embedding is not None:
                found[key] = embedding
        self._counts.add(
            hits=len(found),
            misses=len(names) - len(found),
            fetched_bytes=sum(embedding.nbytes for embedding in found.values()),
            fetch_seconds=self._clock() - began,
        )
        return found

    def offer(self, key: SupportsIndex, embedding: torch.Tensor) -> bool:
        """Has an embedding written, soon, over what the store has; returns at once.

        Args:
            key: As for a cache.
            embedding: It must not change until it is written. On a GPU it is what the
                current stream makes of it.

        Returns:
            False if it won't be written: writes rest, too much is pending, the store is closed,
            or the embedding is none that safetensors can hold (it must be dense, of no more
            than 8 bytes an element, and neither quantised nor of a sub-byte dtype) or larger
            than the back end takes. True if it is pending; it may still be dropped.

        Raises:
            TypeError: The key isn't an int, or ``embedding`` no tensor. Nothing else is raised.
        """
        key = single_key(key)
        if not isinstance(embedding, torch.Tensor):
            raise TypeError(f"embedding must be a tensor, got {type(embedding).__name__}")
        nbytes = self._held_bytes(embedding)
        if nbytes is None or self._closed:
            self._counts.add(dropped=1)
            return False
        name = name_of(self._prefix, key)
        try:
            event = _event_after(embedding)
        except RuntimeError:  # such as a device that has failed
            self._counts.add(dropped=1)
            return False
        make = functools.partial(self._pack, name, embedding, event)
        return self._writer.offer(Write(name, nbytes, make, self._set_many))

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until nothing is pending: all is written or dropped.

        Args:
            timeout: Seconds to wait at most; by default the store's own ``timeout``.

        Returns:
            False if something still is.
        """
        return self._writer.flush(self._timeout if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> None:
        """Refuses to fetch and offer from now on, and ends the threads.

        What is pending is written, as long as that takes no longer than told, and dropped
        then. Of a call that hangs the thread ends when that is back. A second call does no
        more. The client is its owner's, to close afterwards: some crash if they are used then.

        Args:
            timeout: Seconds to wait at most; by default the store's own ``timeout``.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        self._closed = True
        self._writer.flush(max(0.0, deadline - time.monotonic()))
        _stop(self._reader, self._writer)
        self._writer.join(deadline)
        self._reader.join(deadline)
        _open_stores.discard(self)

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(namespace={self._namespace!r})"

    def stats(self) -> StoreStats:
        """Returns a consistent snapshot of the counters."""
        return StoreStats(**self._counts.get())

    # What is kept, and how

    def _unpack(self, name: str, value: Any) -> torch.Tensor | None:
        try:
            with torch.inference_mode(False):
                return unpack(name, value, self._secret).to(self._device)
        except ValueError:
            self._counts.add(corrupt=1)
        except Exception:  # noqa: BLE001  # want of memory: the image can still be encoded
            self._counts.add(errors=1)
        return None

    def _held_bytes(self, embedding: torch.Tensor) -> int | None:
        """Returns what a tensor holds of memory until it is written; None if it can't be."""
        if not is_dense(embedding) or embedding.dtype not in NAMES:
            return None
        try:
            storage = dense_storage(embedding)
        except TypeError:
            return None
        limit = self._max_value_bytes
        if limit is not None and embedding.nbytes + OVERHEAD_BYTES > limit:
            return None
        return max(embedding.nbytes, storage.nbytes())

    def _pack(self, name: str, embedding: torch.Tensor, event: Any) -> bytes:
        if event is not None:
            event.synchronize()
        return pack(name, embedding, self._secret)


_open_stores: weakref.WeakSet[EmbeddingStore] = weakref.WeakSet()


@atexit.register
def _close_open_stores() -> None:
    """Ends the writers: a thread inside torch when the interpreter ends would abort it."""
    for store in list(_open_stores):
        store.close()


def _stop(reader: Reader, writer: Writer) -> None:
    writer.stop()
    reader.stop()


def _require(namespace: Any, secret: Any) -> None:
    if not isinstance(namespace, (str, bytes)):
        raise TypeError(f"namespace must be str or bytes, got {type(namespace).__name__}")
    if not namespace:
        raise ValueError("namespace must not be empty: name the model, its weights and the rest")
    if secret is not None:
        if not isinstance(secret, bytes):
            raise TypeError(f"secret must be bytes, got {type(secret).__name__}")
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"secret must have {SECRET_BYTES} bytes, got {len(secret)}")


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}")
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be from 0 to {threading.TIMEOUT_MAX:.0f}, got {value}")
    return float(value)


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _event_after(embedding: torch.Tensor) -> Any:
    """Returns an event after what the current stream has to do; None where there are none."""
    module = module_of(embedding)
    if module is None:
        return None
    event = module.Event()
    event.record(module.current_stream(embedding.device))
    return event
