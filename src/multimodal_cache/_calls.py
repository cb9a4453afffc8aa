"""One call of a ``CachedEncoder``, and what it encodes.

The life of a key that isn't cached:

1. A call looks up all its keys in the cache.
2. Under the lock of the flights it *claims* the missing keys that nobody has claimed: each gets
   a flight, in a table by key. What it claims in one round is a batch. A key with a flight is
   somebody else's, and will be waited for.
3. It asks the store, where there is one, for what has a flight; what that has lands at once.
   It encodes the rest, in one call of ``encode``, without the lock, and offers it to the store.
4. The flights *land*: the embeddings go into the cache, the flights leave the table, and then
   those who wait get them. If ``encode`` failed they get its error, where it had nothing but
   their key to encode: an error of their own, of the same type, whose ``__cause__`` leads to
   what ``encode`` raised. Else, or where it was interrupted or its error can't be copied, they
   get nothing.
5. Only now the call waits for the flights of others; so calls that overlap never wait for each
   other in a circle. What it got nothing for goes back to 1.

A flight belongs to the ``generation`` of the cache in which it was claimed: a call that comes
after ``clear()`` doesn't wait for one from before, and what that returns late isn't cached.

A call lives for all its rounds and no longer than its caller. A batch may outlive a caller that
is cancelled, and lands on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from multimodal_cache._errors import Failure
from multimodal_cache._flights import Claim, Flight, Flights, Landed, Want
from multimodal_cache._gate import Gate, current_task, require_no_running_loop
from multimodal_cache._modes import Modes, outside_graphs
from multimodal_cache._outputs import as_rows, split_output
from multimodal_cache._ownership import copy_out
from multimodal_cache._streams import use_here, written_here

if TYPE_CHECKING:
    from multimodal_cache.parallel import Ranks
    from multimodal_cache.stores import EmbeddingStore

Fetched: TypeAlias = dict[int, torch.Tensor]
"""What a store has, by key."""

Agree: TypeAlias = Callable[[list[bool]], list[bool]]


class Call:
    """One call, on its way to an embedding for each feature.

    Args:
        flights: To the cache.
        gate: Of ``encode``.
        features: What to encode.
        keys: The key of each, or None.
        lengths: The number of rows that each must have, or None.
        ranks: With which it must agree about what is missing, if there are others.

    Attributes:
        awaited: What others are encoding for it in this round.
    """

    def __init__(
        self,
        flights: Flights,
        gate: Gate,
        features: Iterable[Any],
        keys: Iterable[int | None],
        lengths: Iterable[int | None],
        ranks: Ranks | None = None,
    ) -> None:
        self._flights = flights
        self._ranks = ranks
        self._gate = gate
        self._batch: Batch | None = None
        self._agree_again: Agree | None = None
        self.awaited: list[tuple[Want, Flight]] = []
        self._counted = False
        self._coalesced = self._coalesced_tokens = 0
        self._wants: list[Want] = []
        self._by_feature: list[Want] = []
        known: dict[tuple[int, int | None], Want] = {}
        for feature, key, length in zip(features, keys, lengths, strict=True):
            want = None if key is None else known.get((key, length))
            if want is not None:
                want.uses += 1
            else:
                want = Want(feature, key, length)
                self._wants.append(want)
                if key is not None:
                    known[key, length] = want
            self._by_feature.append(want)

    def next_batch(self) -> Batch | None:
        """Looks up what is missing, and claims what nobody encodes; None if all is there."""
        flights = self._flights
        self.awaited = []
        while True:
            landings = flights.landings
            found, missing = flights.look_up(self._wants)
            is_first, self._counted = not self._counted, True
            try:
                if self._ranks is not None and is_first:
                    missing = self._agree(self._ranks)
            finally:
                flights.count_look_up(found, calls=is_first)
            if not missing:
                return None
            # It is kept before it claims anything: so `abandon` finds all that is claimed.
            self._batch = batch = Batch(flights, self._gate, self._agree_again)
            if flights.claim(missing, landings, claimed=batch.claimed, awaited=self.awaited):
                return batch

    def _agree(self, ranks: Ranks) -> list[Want]:
        """Gives up what another rank misses; returns what is missing then."""
        asked = [(want.key, want.length) for want in self._by_feature]
        more = self._flights.shared is not None
        flags = ranks.agree(
            asked, [want.embedding is None for want in self._wants], more_to_come=more
        )
        self._agree_again = functools.partial(ranks.agree, asked)
        missing = [want for want, flag in zip(self._wants, flags, strict=True) if flag]
        for want in missing:
            want.embedding = None
        return missing

    def take(self, want: Want, flight: Flight, landed: Landed) -> None:
        """Takes what the flight of another call brought, if it is of use here."""
        if isinstance(landed, Failure):
            if flight.length == want.length:  # else the error may be about the length
                raise landed.new_error()
        elif landed is not None and want.fits(landed):
            want.embedding, want.written = landed, flight.written
            self._coalesced += want.uses
            self._coalesced_tokens += want.uses * landed.shape[0]

    def embeddings(self) -> list[Any]:
        """Returns the embedding of each feature, when all are there, for the current stream."""
        for want in self._wants:
            if want.written is not None:
                want.written()
        if self._coalesced:
            self._flights.count_coalesced(self._coalesced, self._coalesced_tokens)
        return [want.embedding for want in self._by_feature]

    def abandon(self) -> None:
        """Lands what it has claimed, where it was interrupted between claim and encode."""
        if self._batch is not None:
            self._batch.land_without(None)


class Batch:
    """What one round of a call has claimed, until it has landed.

    Args:
        flights: To the cache.
        gate: Of ``encode``.
        agree: Says what is missing on any rank of a group, of what is missing here.

    Attributes:
        claimed: What hasn't landed.
        nested: Its call is inside ``encode``.
    """

    def __init__(self, flights: Flights, gate: Gate, agree: Agree | None = None) -> None:
        self.nested = gate.is_inside()  # asked here: another thread or task may encode
        self._flights = flights
        self._gate = gate
        self._agree = agree
        self.claimed: list[Claim] = []
        self._entered = self._counted = self._left = False
        self._seconds = 0.0
        self._error: Exception | None = None

    # An error isn't returned, and isn't kept by a frame of these: its traceback holds them, and
    # those that called them, such as that of a worker thread, which keeps what it was returned.
    # Such a circle would keep all that encode has allocated until the garbage collector runs.

    @outside_graphs
    def encode(self, encode: Callable[[list[Any]], Any], modes: Modes | None = None) -> None:
        """Encodes, and lands; leaves an error to ``raise_error``.

        Args:
            encode: A plain function.
            modes: In which it runs, if not in those of this thread.
        """
        if not self.claimed:
            return
        with self._landed_whatever_happens():
            store = self._flights.shared
            if store is not None and self._land_fetched(store.fetch(self._keys())):
                return
            with self._gate.turn(nested=self.nested) as turn:
                if not turn.done():
                    self._require_no_running_loop()
                turn.result()
                with self._gate.inside(threading.get_ident()):
                    self._flights.drop_mismatched(self.claimed)
                    entered = modes.entered() if modes else contextlib.nullcontext()
                    with entered, torch.no_grad(), self._timed():
                        output = encode(self._features())
                    self._store_and_land(output)

    def _require_no_running_loop(self) -> None:
        try:
            require_no_running_loop()
        except RuntimeError:
            self.land_without(None)  # it is no error of those who wait for what it has claimed
            raise

    async def encode_async(self, encode: Callable[[list[Any]], Any], executor: Executor) -> None:
        """The same for an ``encode`` that is a coroutine function.

        Args:
            encode: The function.
            executor: Has threads for the store.
        """
        with self._landed_whatever_happens():
            store = self._flights.shared
            if store is not None and self._land_fetched(await self._fetch_in(executor, store)):
                return
            with self._gate.turn(nested=self.nested) as turn:
                if not turn.done():
                    await asyncio.wrap_future(turn)
                with self._gate.inside(current_task()):
                    self._flights.drop_mismatched(self.claimed)
                    with self._timed():
                        output = await self._gate.without_grad(encode(self._features()))
                    self._store_and_land(output)

    async def _fetch_in(self, executor: Executor, store: EmbeddingStore) -> Fetched:
        """Fetches in a thread, which lands nothing: this task may be cancelled meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            fetching = loop.run_in_executor(executor, store.fetch, self._keys())
        except RuntimeError:  # the interpreter or the executor is shutting down
            return {}
        return await fetching

    def _keys(self) -> list[int]:
        return [flight.key for _, flight in self.claimed if flight is not None]

    def _land_fetched(self, fetched: Fetched) -> bool:
        """Lands what the store had, on all ranks; returns whether that was all."""
        hits, embeddings, rest = [], [], []
        for claim, rows in zip(self.claimed, self._of_use(fetched), strict=True):
            if rows is None:
                rest.append(claim)
            else:
                hits.append(claim)
                embeddings.append(rows)
        if not hits:
            return False
        self._flights.drop_mismatched(hits)
        self._flights.store(hits, embeddings)
        self._flights.count_fetched([want for want, _ in hits], embeddings)
        _hand_over(hits, embeddings)
        self._flights.land(hits, embeddings)
        self.claimed = rest
        return not rest

    def _of_use(self, fetched: Fetched) -> list[torch.Tensor | None]:
        """Returns what was fetched for each claim, or None."""
        found = []
        for want, flight in self.claimed:
            rows = as_rows(fetched.get(flight.key)) if flight is not None else None
            found.append(rows if rows is not None and want.fits(rows) else None)
        if self._agree is None:
            return found
        missing = self._agree([rows is None for rows in found])
        given_up = sum(
            want.uses
            for (want, _), rows, flag in zip(self.claimed, found, missing, strict=True)
            if flag and rows is not None
        )
        self._flights.count_disagreements(given_up)
        return [None if flag else rows for rows, flag in zip(found, missing, strict=True)]

    @contextlib.contextmanager
    def _landed_whatever_happens(self) -> Iterator[None]:
        """Keeps an error for the caller, if there still is one; but not an interrupt."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the caller raises it
            self.land_without(error)
            self._error = error
            if self._left:
                self._error = None
        except BaseException:
            self.land_without(None)
            raise

    def _features(self) -> list[Any]:
        return [want.feature for want, _ in self.claimed]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._entered = True
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds = perf_counter() - began

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

    def _store_and_land(self, output: Any) -> None:
        claimed = self.claimed
        embeddings = self._copy_out(output)
        self._flights.store(claimed, embeddings)
        _hand_over(claimed, embeddings)
        self._land(embeddings)
        if self._flights.shared is not None:
            self._flights.offer(claimed, embeddings)

    def _copy_out(self, output: Any) -> list[torch.Tensor]:
        """Copies each embedding, so that none keeps a batch, a graph or a reused buffer."""
        lengths = [want.length for want, _ in self.claimed]
        with torch.inference_mode(False), torch.no_grad():  # others may not be in that mode
            parts = split_output(output, lengths)
            use_here(parts)
            return [copy_out(rows) for rows in parts]

    def land_without(self, error: Exception | None) -> None:
        """Ends the flights that haven't ended, without embeddings.

        Those who wait get the error, if the encode had nothing else to do; else they try again
        themselves, and so they do where it was interrupted or its error can't be copied.
        """
        failure = None
        if error is not None and len(self.claimed) == 1:
            with contextlib.suppress(Exception):
                failure = Failure(error)
        self._land([failure] * len(self.claimed))

    def _land(self, outcomes: Sequence[Landed]) -> None:
        """Ends the flights, or goes on with that where it was interrupted."""
        claimed = self.claimed
        if not claimed:
            return
        if not self._counted:
            self._counted = True
            if self._entered:
                encoded = [want for want, _ in claimed if want.embedding is not None]
                self._flights.count_encode(encoded, self._seconds)
        self._flights.land(claimed, outcomes)
        self.claimed = []


def _hand_over(claimed: Iterable[Claim], embeddings: Iterable[torch.Tensor]) -> None:
    """Gives the call its embeddings, and all who get them what to wait for on other streams."""
    for (want, flight), embedding in zip(claimed, embeddings, strict=True):
        want.embedding, want.feature = embedding, None
        want.written = written_here([embedding])
        if flight is not None:
            flight.written = want.written
