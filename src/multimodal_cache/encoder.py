"""Around a vision encoder: what is cached isn't encoded, and nothing is encoded twice at once."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import types
from collections.abc import (
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import torch

from multimodal_cache._errors import SharedError
from multimodal_cache._modes import Modes, outside_graphs
from multimodal_cache._outputs import as_rows, split_output
from multimodal_cache._ownership import copy_out
from multimodal_cache._turns import Turns
from multimodal_cache.base import (
    EmbeddingResult,
    MultimodalCache,
    as_int,
    ordered_items,
    single_key,
)
from multimodal_cache.keys import hash_feature
from multimodal_cache.stats import EncoderStats

T = TypeVar("T")
EncoderOutput: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
EncodeFunction: TypeAlias = (
    Callable[[list[Any]], EncoderOutput] | Callable[[list[Any]], Awaitable[EncoderOutput]]
)


class CachedEncoder:
    """Calls a vision encoder for what isn't in a cache, and for no image twice at once.

    Any number of threads, and of asyncio tasks on any number of event loops, may call one
    encoder. A key that one of them is encoding is waited for by the others; two encoders around
    one cache don't know of each other's. The life of a key that isn't cached:

    1. A call looks up all its keys in the cache.
    2. Under the lock it *claims* the missing keys that nobody has claimed: each gets a flight,
       in a table by key. A key with a flight is somebody else's, and will be waited for.
    3. It encodes all that it claimed, in one call of ``encode``, without the lock.
    4. The flights *land*: the embeddings go into the cache, the flights leave the table, and
       then those who wait get them. If ``encode`` failed they get its error, where it had
       nothing but their key to encode: an error of their own, of the same type, whose
       ``__cause__`` leads to what ``encode`` raised. Else, or where it was interrupted or its
       error can't be copied, they get nothing.
    5. Only now the call waits for the flights of others; so calls that overlap never wait for
       each other in a circle. What it got nothing for goes back to 1.

    The encoder's lock is held for the table and the counters alone.

    A flight belongs to the ``generation`` of the cache in which it was claimed: a call that
    comes after ``clear()`` doesn't wait for one from before, and what that returns late isn't
    cached.

    Args:
        cache: Keeps the embeddings: any ``MultimodalCache`` with ``get_single``, ``set`` and
            ``free``. Where it has a ``generation``, ``clear()`` works during an encode.
        encode: The vision encoder. It gets a list of features, those that are missing, each
            distinct key once, in first-seen order, and returns their embeddings:

            - a list or tuple with one tensor for each feature, all of one rank and hidden size.
              The first dimensions are flattened to ``[tokens, hidden]``; ``[hidden]`` is one row;
            - one tensor ``[features, tokens, hidden]``;
            - one tensor ``[features, hidden]``, of one row each, where ``num_tokens`` isn't given;
            - or one tensor ``[tokens of all features, hidden]``, which is cut by ``num_tokens``;
              for one feature that isn't needed. There ``num_tokens`` is trusted: only its sum
              can be checked.

            Return the embeddings alone. A named tuple or a mapping, such as the output of a
            model of ``transformers``, is refused; a plain tuple of as many things of one shape as
            there are features can't be told from their embeddings.

            It runs under ``torch.no_grad()``, on several threads at once for different images: it
            must allow that, or ``max_concurrency`` be 1. Autocast and the like have no part in a
            key: what changes them belongs in ``namespace``. It may reuse an output buffer, since
            each embedding is copied out of what it returns, if its own calls don't overlap. It may
            be a coroutine function (``async def``), for ``encode_async``. On a GPU it must leave
            its output to the current stream; nothing is synchronised for those who wait.
        namespace: As for ``hash_feature``: whatever changes the embedding and isn't in the
            feature. It has no part in keys that are given, or made by ``key``: those must tell
            models and options apart themselves.
        key: Makes the key of a feature, an int, or None for one that must not be cached or
            shared; for example from the compressed file, or from an id that the server
            trusts. By default ``hash_feature(feature, namespace=namespace)``.
        max_concurrency: How many calls of ``encode`` may run at once, from threads and tasks
            together; the others wait for their turn, in order. By default there is no limit but
            that of the threads that ``encode_async`` has for a plain ``encode``, which is
            ``min(32, os.cpu_count() + 4)``. An ``encode`` inside another one is a part of that.

    An encoder can be neither pickled nor copied. ``close()``, or the end of its ``with`` block,
    ends its threads.

    Raises:
        TypeError: ``cache`` has no ``get_single``, ``encode`` or ``key`` can't be called,
            ``namespace`` is neither str nor bytes, or ``max_concurrency`` is no int.
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
    ) -> None:
        if not callable(getattr(cache, "get_single", None)):
            raise TypeError(f"cache must be a MultimodalCache, got {type(cache).__name__}")
        if not callable(encode):
            raise TypeError(f"encode must be callable, got {type(encode).__name__}")
        if key is not None and not callable(key):
            raise TypeError(f"key must be callable or None, got {type(key).__name__}")
        hash_feature(None, namespace=namespace)  # refuses a bad one now
        if max_concurrency is not None:
            max_concurrency = as_int("max_concurrency", max_concurrency)
            if max_concurrency < 1:
                raise ValueError(f"max_concurrency must be 1 or more, got {max_concurrency}")
        self._cache = cache
        self._encode = encode
        self._is_coroutine_function = _is_coroutine_function(encode)
        self._namespace = namespace
        self._key = key
        self._lock = threading.RLock()  # a finalizer may call back
        self._flights: dict[int, _Flight] = {}
        self._landings = 0
        self._inside: set[Any] = set()  # the threads, tasks and awaited tasks that are in encode
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = Turns(max_concurrency)
        self._closed = False
        # Not that of the loop, which may be full of synchronous calls that wait for a flight.
        self._executor = ThreadPoolExecutor(thread_name_prefix="CachedEncoder")
        self._calls = self._hits = self._encoded = self._coalesced = 0
        self._row_mismatches = self._failures = 0

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
            RuntimeError: The call would have to wait where that might never end: inside
                ``encode`` of this encoder, or on a thread whose event loop is running. Inside is
                what runs on its thread or in its task, or in a task that it awaits directly. (It
                must not wait in another way, as by ``asyncio.gather``, for a call that wants what
                it encodes: that isn't noticed, and hangs.) Or the encoder is closed.
            Exception: What ``encode`` raised, here or, if it encoded nothing but a key that
                this call waited for, elsewhere: then in an error of this call's own, also where
                the first caller's feature was at fault. Failures aren't remembered.
        """
        self._require_open()
        if self._is_coroutine_function:
            raise TypeError("encode is a coroutine function: await encode_async(...) instead")
        items = _features(features)
        lengths = _lengths(items, num_tokens)
        call = _Call(self, items, self._keys(items, mm_hashes), lengths)
        try:
            while call.look_up_and_claim():
                call.encode_claimed()
                call.raise_error()
                for want, flight in call.awaited():
                    if not flight.landed.done():
                        self._require_may_wait(loop_is_running=_loop_is_running())
                    want.take(flight, flight.landed.result())
        finally:
            call.land_without(None)  # if it was interrupted between the claim and the encode
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
        CUDA device and stream, and without the caller's ``TorchFunctionMode`` and
        ``TorchDispatchMode``. A coroutine function runs on the loop, under what is set there.
        Waiting takes no thread. Cancelling the task doesn't cancel an ``encode`` that was begun:
        it finishes, and its embeddings are cached. A loop that is closed with such a task in it,
        uncancelled, leaves its keys claimed for ever.

        Args:
            features: As above.
            mm_hashes: As above.
            num_tokens: As above.

        Returns:
            As above.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: As above.
            RuntimeError: The call would have to wait inside ``encode`` of this encoder.
            Exception: As above.
        """
        self._require_open()
        modes = None if self._is_coroutine_function else Modes()  # before anything is awaited
        items = _features(features)
        lengths = _lengths(items, num_tokens)
        if mm_hashes is None and items:
            keys = await asyncio.to_thread(self._keys, items, None)
        else:
            keys = self._keys(items, mm_hashes)
        call = _Call(self, items, keys, lengths)
        while call.look_up_and_claim():
            await self._encode_elsewhere(call, modes)
            call.raise_error()
            for want, flight in call.awaited():
                if not flight.landed.done():
                    self._require_may_wait(loop_is_running=False)
                want.take(flight, await asyncio.wrap_future(flight.landed))
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
        self._closed = True
        self._executor.shutdown(wait=wait and not self._is_inside_encode())

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
        with self._lock:
            return EncoderStats(
                calls=self._calls,
                hits=self._hits,
                encoded=self._encoded,
                coalesced=self._coalesced,
                row_mismatches=self._row_mismatches,
                failures=self._failures,
            )

    def _keys(
        self, features: Sequence[Any], mm_hashes: Iterable[SupportsIndex | None] | None
    ) -> list[int | None]:
        if mm_hashes is not None:
            given = _one_for_each("mm_hashes", mm_hashes, features)
            return [None if item is None else single_key(item) for item in given]
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

    async def _encode_elsewhere(self, call: _Call, modes: Modes | None) -> None:
        """Encodes what a call claimed, in a way that outlives the call."""
        if not call.claimed:
            return
        try:
            encoding = self._begin_elsewhere(call, modes)
        except RuntimeError:  # the interpreter or the executor is shutting down
            call.land_without(None)
            raise
        try:
            await asyncio.shield(encoding)
        except BaseException:
            call.leave()
            raise

    def _begin_elsewhere(self, call: _Call, modes: Modes | None) -> asyncio.Future[None]:
        if not self._is_coroutine_function:
            run = contextvars.copy_context().run
            loop = asyncio.get_running_loop()
            return loop.run_in_executor(self._executor, run, call.encode_claimed, modes)
        task = asyncio.ensure_future(call.encode_claimed_async())
        self._tasks.add(task)  # the loop itself would let go of it
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: call.land_without(None))  # if it never began
        return task

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this CachedEncoder is closed")

    def _is_inside_encode(self) -> bool:
        return threading.get_ident() in self._inside or _current_task() in self._inside

    def _require_may_wait(self, *, loop_is_running: bool) -> None:
        if self._is_inside_encode():
            raise RuntimeError(
                "a call from inside encode would have to wait for an image that is being encoded"
            )
        if loop_is_running:
            raise RuntimeError(
                "a synchronous call on the thread of a running event loop would have to wait for "
                "an image that is being encoded: await encode_async(...) instead"
            )


Landed: TypeAlias = torch.Tensor | SharedError | None
"""The embedding; or the error of an ``encode`` that had nothing else to do; or None: try again."""


@dataclass(eq=False, slots=True)
class _Flight:
    """One key that is being encoded, from its claim to its landing."""

    key: int
    length: int | None
    generation: Any
    landed: Future[Landed] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.landed.set_running_or_notify_cancel()  # a waiter that is cancelled can't cancel it


@dataclass(eq=False, slots=True)
class _Want:
    """What a call wants: one key, of one length, for one of its features or several."""

    feature: Any
    key: int | None
    length: int | None
    places: list[int]
    embedding: torch.Tensor | None = None
    coalesced: bool = False
    mismatched: bool = False  # the cache has it with another length
    flight: _Flight | None = None  # ours while it is claimed, another call's while it is awaited

    def fits(self, embedding: torch.Tensor) -> bool:
        return self.length is None or embedding.shape[0] == self.length

    def take(self, flight: _Flight, landed: Landed) -> None:
        """Takes what another call's flight brought, if it is of use here."""
        self.flight = None
        if isinstance(landed, SharedError):
            if flight.length == self.length:  # else the error may be about the length
                raise landed.new()
        elif landed is not None and self.fits(landed):
            self.embedding, self.coalesced = landed, True


class _Call:
    """One call of an encoder, on its way to an embedding for each feature."""

    def __init__(
        self,
        encoder: CachedEncoder,
        features: Sequence[Any],
        keys: list[int | None],
        lengths: Sequence[int | None],
    ) -> None:
        self._encoder = encoder
        self._size = len(features)
        self._wants: list[_Want] = []
        self._counted = self._landing = self._left = False
        self._error: Exception | None = None
        self.claimed: list[_Want] = []
        known: dict[tuple[int, int | None], _Want] = {}
        for place, (feature, key, length) in enumerate(zip(features, keys, lengths, strict=True)):
            want = None if key is None else known.get((key, length))
            if want is not None:
                want.places.append(place)
                continue
            want = _Want(feature, key, length, [place])
            self._wants.append(want)
            if key is not None:
                known[key, length] = want

    def embeddings(self) -> list[torch.Tensor]:
        """Returns the embeddings in the order of the features."""
        placed: list[Any] = [None] * self._size
        coalesced = 0
        for want in self._wants:
            for place in want.places:
                placed[place] = want.embedding
            coalesced += len(want.places) if want.coalesced else 0
        if coalesced:
            with self._encoder._lock:
                self._encoder._coalesced += coalesced
        return placed

    def awaited(self) -> list[tuple[_Want, _Flight]]:
        """Returns what other calls are encoding for this one."""
        return [
            (want, want.flight)
            for want in self._wants
            if want.embedding is None and want.flight is not None
        ]

    def look_up_and_claim(self) -> bool:
        """Looks up what is missing, and claims what nobody encodes; False if all is there."""
        encoder = self._encoder
        while True:
            landings = encoder._landings
            missing, hits = self._look_up()
            with encoder._lock:
                # Else what has landed meanwhile may be what is missing.
                settled = not missing or landings == encoder._landings
                if settled:
                    self._claim(missing)
                encoder._calls += not self._counted
                encoder._hits += hits
                self._counted = True
            if settled:
                return bool(missing)

    def _look_up(self) -> tuple[list[_Want], int]:
        """Returns what is missing, and the number of features that aren't since now."""
        cache = self._encoder._cache
        missing = []
        hits = 0
        for want in self._wants:
            if want.embedding is not None:
                continue
            found = None if want.key is None else cache.get_single(want.key)
            embedding = None if found is None else as_rows(found.embedding)
            if embedding is not None and want.fits(embedding):
                want.embedding = embedding
                hits += len(want.places)
            else:
                want.mismatched = found is not None
                missing.append(want)
        return missing, hits

    def _claim(self, missing: list[_Want]) -> None:
        encoder = self._encoder
        generation = getattr(encoder._cache, "generation", None)
        ours = set()
        for want in missing:
            flight = None if want.key is None else encoder._flights.get(want.key)
            if flight is not None and flight.generation == generation and want.key not in ours:
                want.flight = flight
                continue
            want.flight = None  # without a key, or the same key as one of ours of another length
            if want.key is not None and want.key not in ours:
                want.flight = _Flight(want.key, want.length, generation)
                ours.add(want.key)
            self.claimed.append(want)
            if want.flight is not None:
                encoder._flights[want.flight.key] = want.flight

    # Encoding what was claimed

    # An error isn't returned, and isn't kept by a frame of these: its traceback holds them, and
    # those that called them, such as that of a worker thread, which keeps what it was returned.
    # Such a circle would keep all that encode has allocated until the garbage collector runs.

    @outside_graphs
    def encode_claimed(self, modes: Modes | None = None) -> None:
        """Encodes, and lands; leaves an error to ``raise_error``.

        Args:
            modes: In which ``encode`` runs, if not in those of this thread.
        """
        if not self.claimed:
            return
        encoder = self._encoder
        try:
            with encoder._turns.taken(free=encoder._is_inside_encode()) as turn:
                turn.result()
                with self._inside_encode(threading.get_ident()):
                    with modes.entered() if modes else contextlib.nullcontext(), torch.no_grad():
                        output = encoder._encode(self._claimed_features())
                    self._store_and_land(self._copy_out(output))
        except Exception as error:  # noqa: BLE001  # raised to the caller, by whoever drives this
            self._fail(error)
        except BaseException:
            self.land_without(None)
            raise

    async def encode_claimed_async(self) -> None:
        """The same for an ``encode`` that is a coroutine function."""
        encoder = self._encoder
        try:
            with encoder._turns.taken(free=encoder._is_inside_encode()) as turn:
                if not turn.done():
                    await asyncio.wrap_future(turn)
                with self._inside_encode(_current_task()):
                    awaitable: Any = encoder._encode(self._claimed_features())
                    output = await _without_grad(awaitable, encoder._inside)
                    self._store_and_land(self._copy_out(output))
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(error)
        except BaseException:
            self.land_without(None)
            raise

    @contextlib.contextmanager
    def _inside_encode(self, owner: Any) -> Iterator[None]:
        """Marks the thread or task that encodes, and makes room for what it encodes."""
        encoder = self._encoder
        encoder._require_open()
        outermost = owner not in encoder._inside
        encoder._inside.add(owner)
        try:
            self._drop_mismatched()
            yield
        finally:
            if outermost:
                encoder._inside.discard(owner)

    def _fail(self, error: Exception) -> None:
        """Lands, and keeps the error for the caller, if there still is one."""
        self.land_without(error)
        self._error = error
        if self._left:
            self._error = None

    def leave(self) -> None:
        """Says that nobody will ask for the error, which may come at any time."""
        self._left = True
        self._error = None

    def raise_error(self) -> None:
        """Raises the error of the encode, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _claimed_features(self) -> list[Any]:
        return [want.feature for want in self.claimed]

    def _drop_mismatched(self) -> None:
        """Drops entries of the wrong length: now, since nobody else can have replaced them."""
        for want in self.claimed:
            if want.key is not None and want.mismatched:
                dropped = self._encoder._cache.free(want.key, None)
                with self._encoder._lock:
                    self._encoder._row_mismatches += dropped

    def _copy_out(self, output: Any) -> list[torch.Tensor]:
        """Copies each embedding, so that none keeps a batch, a graph or a reused buffer."""
        lengths = [want.length for want in self.claimed]
        with torch.inference_mode(False), torch.no_grad():  # others may not be in that mode
            return [copy_out(rows) for rows in split_output(output, lengths)]

    def _store_and_land(self, embeddings: list[torch.Tensor]) -> None:
        for want, embedding in zip(self.claimed, embeddings, strict=True):
            if want.flight is not None:
                result = EmbeddingResult(embedding=embedding)
                generation = want.flight.generation
                options = {} if generation is None else {"generation": generation}
                self._encoder._cache.set(want.flight.key, result, None, **options)
        for want, embedding in zip(self.claimed, embeddings, strict=True):
            want.embedding, want.feature = embedding, None
        self._land(embeddings)

    def land_without(self, error: Exception | None) -> None:
        """Ends the flights that haven't ended, without embeddings.

        Those who wait get the error, if the encode had nothing else to do; else they try again
        themselves, and so they do where it was interrupted or its error can't be copied.
        """
        shared = None
        if error is not None and len(self.claimed) == 1:
            with contextlib.suppress(Exception):
                shared = SharedError(error)
        self._land([shared] * len(self.claimed))

    def _land(self, outcomes: Sequence[Landed]) -> None:
        """Ends the flights, or goes on with that where it was interrupted."""
        encoder, claimed = self._encoder, self.claimed
        if not claimed:
            return
        encoded = [want for want in claimed if want.embedding is not None]
        flights = [want.flight for want in claimed]
        with encoder._lock:
            if not self._landing:
                self._landing = True
                encoder._landings += 1
                encoder._failures += not encoded
                encoder._encoded += len(encoded)
                encoder._coalesced += sum(len(want.places) - 1 for want in encoded)
            for flight in flights:
                # Not one of a later generation.
                if flight is not None and encoder._flights.get(flight.key) is flight:
                    del encoder._flights[flight.key]
        for flight, outcome in zip(flights, outcomes, strict=True):
            if flight is not None and not flight.landed.done():
                flight.landed.set_result(outcome)
        for want in claimed:
            want.flight = None
        self.claimed, self._landing = [], False


# Arguments, and coroutines


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
    advice = ""
    if isinstance(features, (torch.Tensor, np.ndarray)):
        advice = "[image] for one image, list(batch) for a batch of them"
    elif isinstance(features, Mapping):
        advice = "list(inputs['pixel_values']) for what a processor returns"
    if advice:
        raise TypeError(f"features must be a list, got {type(features).__name__}: give {advice}")
    return ordered_items("features", features)


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


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop is running
        return None


@types.coroutine
def _without_grad(awaitable: Awaitable[Any], awaited: set[Any]) -> Generator[Any, Any, Any]:
    """Awaits without gradients, and with them for other tasks while it is suspended.

    While it waits for a task, that is in ``awaited``.

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
            awaited.add(request)
        try:
            answer = yield request
        except BaseException as thrown:
            if not hasattr(steps, "throw"):
                raise
            error = thrown
        finally:
            if waits_for_task:
                awaited.discard(request)
