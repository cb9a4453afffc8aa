"""Around a vision encoder: what is cached isn't encoded, and nothing is encoded twice at once."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch

from multimodal_cache._calls import Batch, Call
from multimodal_cache._flights import Flights
from multimodal_cache._gate import Gate, require_no_running_loop
from multimodal_cache._modes import Modes
from multimodal_cache.base import MultimodalCache, as_int, ordered_items, single_key
from multimodal_cache.keys import hash_feature
from multimodal_cache.stats import EncoderStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from multimodal_cache.parallel import Ranks
    from multimodal_cache.stores import EmbeddingStore

T = TypeVar("T")
EncoderOutput: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
EncodeFunction: TypeAlias = (
    Callable[[list[Any]], EncoderOutput] | Callable[[list[Any]], Awaitable[EncoderOutput]]
)


class CachedEncoder:
    """Calls a vision encoder for what isn't in a cache, and for no image twice at once.

    Any number of threads, and of asyncio tasks on any number of event loops, may call one
    encoder. A key that one of them is encoding is waited for by the others; two encoders around
    one cache don't know of each other's. If that encode fails, its error goes to those who wait
    too, where it had no other key to encode; else they encode what they want themselves.

    Args:
        cache: Keeps the embeddings: any ``MultimodalCache`` with ``get_single``, ``set`` and
            ``free``. Where it has a ``generation``, as ``MultimodalCache`` describes it,
            ``clear()`` works during an encode: a call that comes after it doesn't wait for what
            was begun before, and that isn't cached.
        encode: The vision encoder. It gets a list of features, those that are missing, each
            distinct key once, in first-seen order: around a model that takes a batch, pass
            ``lambda images: model(torch.stack(images))``. It returns their embeddings:

            - a list or tuple with one tensor for each feature, all of one rank and hidden size,
              and all of floats or none. The first dimensions are flattened to
              ``[tokens, hidden]``; ``[hidden]`` is one row;
            - one tensor ``[features, tokens, hidden]``;
            - one tensor ``[features, hidden]``, of one row each, where ``num_tokens`` isn't given;
            - or one tensor ``[tokens of all features, hidden]``, which is cut by ``num_tokens``;
              for one feature that isn't needed. There ``num_tokens`` is trusted: only its sum
              can be checked.

            Return the embeddings alone. A named tuple or a mapping, such as the output of
            ``torch.max`` or of a model of ``transformers``, is refused; a plain tuple of as many
            things of one shape as there are features can't be told from their embeddings.

            It runs under ``torch.no_grad()``, on several threads at once for different images: it
            must allow that, or ``max_concurrency`` be 1. Autocast and the like have no part in a
            key: what changes them belongs in ``namespace``. It may reuse an output buffer, since
            each embedding is copied out of what it returns, if its own calls don't overlap. It may
            be a coroutine function (``async def``), for ``encode_async``. On a GPU its output must
            be ready on its own thread's current stream; the current streams of those who get the
            embeddings wait for that one, and the CPU waits for nothing.
        namespace: As for ``hash_feature``: whatever changes the embedding and isn't in the
            feature. It has no part in keys that are given, or made by ``key``: those must tell
            models and options apart themselves.
        key: Makes the key of a feature, an int, or None for one that must not be cached or
            shared; for example from the compressed file, or from an id that the server
            trusts. By default ``hash_feature(feature, namespace=namespace)``.
        max_concurrency: How many calls of ``encode`` may run at once, from threads and tasks
            together; the others wait for their turn, in order. By default there is no limit but
            that of the threads that ``encode_async`` has for a plain ``encode``, which is
            ``min(32, os.cpu_count() + 4)``. An ``encode`` inside another one is a part of that,
            and has a thread beyond those if it needs one.
        group: The process group of the tensor-parallel ranks on which each call is made, where
            ``encode`` has collectives in it: these hang if the ranks don't encode the same list.
            Each call then agrees with the other ranks, so that what one of them misses is missing
            on all: it is encoded anew, while the caches that have it keep what they have. All ranks
            make the same calls in the same order, one at a time, and not by ``encode_async``; they
            get a RuntimeError if they were called with different keys or lengths, or if a call
            fails on one of them before ``encode``. A rank that doesn't call at all is the group's
            own timeout. An ``encode`` that fails on one rank raises there. A CPU group (gloo) costs
            least; on NCCL the message goes through the current device. None, and a group of one
            rank, send nothing.

    An encoder can be neither pickled nor copied. ``close()``, or the end of its ``with`` block,
    ends its threads.

    Raises:
        TypeError: ``cache`` has no ``get_single`` or is a class, ``encode`` or ``key`` can't be
            called, ``namespace`` is neither str nor bytes, ``max_concurrency`` is no int, or
            ``store`` is no ``EmbeddingStore``.
        ValueError: ``max_concurrency`` is below 1.
    """

    def __init__(
        self,
        cache: MultimodalCache,
        encode: EncodeFunction,
        *,
        namespace: str | bytes = "",
        key: Callable[[Any], SupportsIndex | None] | None = None,
        max_concurrency: int | None = None,
        group: ProcessGroup | None = None,
        store: EmbeddingStore | None = None,
    ) -> None:
        _require_cache(cache, encode)
        if not callable(encode):
            raise TypeError(f"encode must be callable, got {type(encode).__name__}")
        if key is not None and not callable(key):
            raise TypeError(f"key must be callable or None, got {type(key).__name__}")
        hash_feature(None, namespace=namespace)  # refuses a bad one now
        if max_concurrency is not None:
            max_concurrency = as_int("max_concurrency", max_concurrency)
            if max_concurrency < 1:
                raise ValueError(f"max_concurrency must be 1 or more, got {max_concurrency}")
        self._ranks = None if group is None else _ranks_of(group)
        if store is not None:
            _require_store(store)
        self._cache = cache
        self._encode = encode
        self._is_async = _is_coroutine_function(encode)
        if self._is_async and group is not None:
            raise TypeError("with a group, encode must be a plain function, got an async one")
        self._namespace = namespace
        self._key = key
        self._flights = Flights(cache, store)
        self._gate = Gate(max_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        # Not that of the loop, which may be full of synchronous calls that wait for a flight.
        self._executor = ThreadPoolExecutor(thread_name_prefix="CachedEncoder")
        # For encodes inside of others, which may have all of those threads and wait for these.
        self._nested_executor = ThreadPoolExecutor(sys.maxsize, "CachedEncoder")

    def __call__(
        self,
        features: Iterable[Any],
        mm_hashes: Iterable[SupportsIndex | None] | None = None,
        num_tokens: Iterable[SupportsIndex] | None = None,
    ) -> list[torch.Tensor]:
        """Returns the embedding of each feature.

        Args:
            features: What ``encode`` takes, one for each image.
            mm_hashes: The key of each feature, where the server has them already. A feature
                with the key None is encoded, but neither cached nor shared.
            num_tokens: The number of rows that each embedding must have, such as the number of
                placeholders in the prompt. A cached embedding of another length is dropped
                and encoded again. Features with one key and different lengths are encoded
                separately.

        Returns:
            A tensor ``[num_tokens, hidden]`` for each feature, in order, without a graph. The
            cache may hold the same tensor, and others get it: treat it as read-only. It stays
            valid when it is evicted, and keeps no batch alive.

        Raises:
            TypeError: An argument is of the wrong type, or ``encode`` is a coroutine function.
            ValueError: The arguments differ in length, or what ``encode`` returned has the
                wrong type, number or shape. Nothing of it is cached.
            RuntimeError: The call would have to wait, for what another one encodes or for its
                turn, where that might never end: inside ``encode`` of this encoder, or on a
                thread whose event loop is running. Inside is what runs on its thread or in its
                task, or in a task that it awaits directly. (It must not wait in another way, as
                by ``asyncio.gather``, for a call that wants what it encodes, or needs a turn:
                that isn't noticed, and hangs.) Or the encoder is closed.
            Exception: What ``encode`` raised, here or, if it encoded nothing but a key that
                this call waited for, elsewhere: then in an error of this call's own, also where
                the first caller's feature was at fault. Failures aren't remembered.
        """
        if self._is_async:
            raise TypeError("encode is a coroutine function: await encode_async(...) instead")
        if self._ranks is not None:
            with self._ranks.call():
                return self._embed(features, mm_hashes, num_tokens)
        return self._embed(features, mm_hashes, num_tokens)

    def _embed(
        self,
        features: Iterable[Any],
        mm_hashes: Iterable[SupportsIndex | None] | None,
        num_tokens: Iterable[SupportsIndex] | None,
    ) -> list[torch.Tensor]:
        self._gate.require_open()
        items = _features(features)
        lengths = _lengths(items, num_tokens)
        keys = self._keys(items, mm_hashes)
        call = Call(self._flights, self._gate, items, keys, lengths, self._ranks)
        try:
            while (batch := call.next_batch()) is not None:
                batch.encode(self._encode)
                batch.raise_error()
                for want, flight in call.awaited:
                    if not flight.landed.done():
                        self._gate.require_outside()
                        require_no_running_loop()
                    call.take(want, flight, flight.landed.result())
        finally:
            call.abandon()
        return call.embeddings()

    async def encode_async(
        self,
        features: Iterable[Any],
        mm_hashes: Iterable[SupportsIndex | None] | None = None,
        num_tokens: Iterable[SupportsIndex] | None = None,
    ) -> list[torch.Tensor]:
        """Returns the embedding of each feature, as a call does, for asyncio.

        Keys are made in a worker thread of the event loop. A plain ``encode`` runs in a thread of
        the encoder's own, under the autocast, inference mode and default device that the caller
        had when the call began, and with its context variables; but with that thread's current
        CUDA device and stream, and without whatever else torch keeps by thread: the caller's
        ``TorchFunctionMode`` and ``TorchDispatchMode``, hooks of saved tensors, whether forward
        AD is enabled. A coroutine function runs on the loop, under what is set there.
        Waiting takes no thread. Cancelling the task doesn't cancel an ``encode`` that was begun:
        it finishes, and its embeddings are cached. A loop that is closed with such a task in it,
        uncancelled, leaves its keys claimed for ever.

        Args:
            features: As for a call.
            mm_hashes: As for a call.
            num_tokens: As for a call.

        Returns:
            As a call.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: As for a call.
            RuntimeError: The call would have to wait inside ``encode`` of this encoder. Or the
                encoder is closed, or the interpreter is shutting down.
            Exception: As for a call.
        """
        self._gate.require_open()
        if self._ranks is not None:
            raise RuntimeError("with a group, calls come one at a time: not by encode_async")
        modes = None if self._is_async else Modes()  # before anything is awaited
        items = _features(features)
        lengths = _lengths(items, num_tokens)
        if mm_hashes is None and items:
            keys = await asyncio.to_thread(self._keys, items, None)
        else:
            keys = self._keys(items, mm_hashes)
        call = Call(self._flights, self._gate, items, keys, lengths)
        while (batch := call.next_batch()) is not None:
            await self._encode_elsewhere(batch, modes)
            batch.raise_error()
            for want, flight in call.awaited:
                if not flight.landed.done():
                    self._gate.require_outside()
                call.take(want, flight, await asyncio.wrap_future(flight.landed))
        return call.embeddings()

    def close(self, *, wait: bool = True) -> None:
        """Refuses calls from now on, and ends the threads of ``encode_async``.

        Calls that run get what is cached or being encoded; where they would have to begin an
        ``encode``, a RuntimeError. A second call does nothing more. Who doesn't close an encoder
        has its threads ended when it is collected, and at exit waits for an ``encode`` that runs.

        Args:
            wait: Return when the last plain ``encode`` of ``encode_async`` has ended; not from
                inside it. One that is a coroutine function is left to its loop.
        """
        self._gate.closed = True
        for executor in (self._executor, self._nested_executor):
            executor.shutdown(wait=wait and not self._gate.is_inside())

    def __enter__(self) -> CachedEncoder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = getattr(self._encode, "__qualname__", type(self._encode).__name__)
        return f"{type(self).__name__}({self._cache!r}, {name}, {self.stats()!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds a lock: it can't be pickled or copied")

    def stats(self) -> EncoderStats:
        """Returns a consistent snapshot of the counters."""
        return self._flights.stats()

    def _keys(
        self, features: Sequence[Any], mm_hashes: Iterable[SupportsIndex | None] | None
    ) -> list[int | None]:
        if mm_hashes is not None:
            given = _one_for_each("mm_hashes", mm_hashes, features)
            # Without a call for plain ints, the usual keys.
            return [
                item if type(item) is int or item is None else single_key(item) for item in given
            ]
        if self._key is None:
            return [hash_feature(feature, namespace=self._namespace) for feature in features]
        keys: list[int | None] = []
        for feature in features:
            try:
                made = self._key(feature)
            except StopIteration as error:  # which can't leave a worker thread
                raise RuntimeError("key(feature) raised StopIteration") from error
            name = "what key(feature) returns"
            keys.append(None if made is None else single_key(made, name))
        return keys

    async def _encode_elsewhere(self, batch: Batch, modes: Modes | None) -> None:
        """Encodes a batch in a way that outlives its call."""
        if not batch.claimed:
            return
        try:
            encoding = self._begin_elsewhere(batch, modes)
        except RuntimeError:  # the interpreter or the executor is shutting down
            batch.land_without(None)
            raise
        try:
            await asyncio.shield(encoding)
        except BaseException:
            batch.leave()
            raise
        finally:
            del encoding  # it may hold an error, whose traceback holds this frame

    def _begin_elsewhere(self, batch: Batch, modes: Modes | None) -> asyncio.Future[None]:
        executor = self._nested_executor if batch.nested else self._executor
        if not self._is_async:
            run = contextvars.copy_context().run
            loop = asyncio.get_running_loop()
            return loop.run_in_executor(executor, run, batch.encode, self._encode, modes)
        task = asyncio.ensure_future(batch.encode_async(self._encode, executor))
        self._tasks.add(task)  # the loop itself would let go of it
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: batch.land_without(None))  # if it never began
        return task


# Arguments


def _ranks_of(group: object) -> Ranks | None:
    from multimodal_cache.parallel import ranks_of  # torch.distributed is imported by who uses it

    return ranks_of(group)


def _require_cache(cache: Any, encode: Any) -> None:
    if isinstance(cache, type):
        raise TypeError(
            f"cache must be a MultimodalCache, got the class {cache.__name__}: give an instance"
        )
    if not callable(getattr(cache, "get_single", None)):
        swapped = callable(getattr(encode, "get_single", None))
        advice = ": the order is CachedEncoder(cache, encode)" if swapped else ""
        raise TypeError(f"cache must be a MultimodalCache, got {type(cache).__name__}{advice}")


def _require_store(store: Any) -> None:
    from multimodal_cache.stores import EmbeddingStore

    if not isinstance(store, EmbeddingStore):
        kind = f"the class {store.__name__}" if isinstance(store, type) else type(store).__name__
        raise TypeError(f"store must be an EmbeddingStore or None, got {kind}")


def _one_for_each(name: str, items: Iterable[T], features: Sequence[Any]) -> tuple[T, ...]:
    found = ordered_items(name, items)
    if len(found) != len(features):
        raise ValueError(
            f"{name} must have one item for each of {len(features)} features, got {len(found)}"
        )
    return found


def _features(features: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the features; refuses a batch in one, whose rows may be anything."""
    if isinstance(features, (list, tuple)):
        return tuple(features)
    advice = "[image] for one image, a list for several"
    if isinstance(features, (torch.Tensor, np.ndarray)):
        advice = "[image] for one image, list(batch) for a batch of them"
    elif isinstance(features, Mapping):
        advice = "list(inputs['pixel_values']) for what a processor returns"
    else:
        return ordered_items("features", features, advice=f": give {advice}")
    raise TypeError(f"features must be a list, got {type(features).__name__}: give {advice}")


def _lengths(
    features: Sequence[Any], num_tokens: Iterable[SupportsIndex] | None
) -> Sequence[int | None]:
    if num_tokens is None:
        return [None] * len(features)
    lengths = [
        as_int("an item of num_tokens", item)
        for item in _one_for_each("num_tokens", num_tokens, features)
    ]
    if any(length < 0 for length in lengths):
        raise ValueError(f"num_tokens must not be negative, got {min(lengths)}")
    return lengths


def _is_coroutine_function(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # of an object, maybe
    )
