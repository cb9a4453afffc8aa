"""What is cached, and what is on its way there: the table of flights, and the counters.

It knows keys and the cache, but runs no ``encode``. The lock is held for the table and the
counters alone, and around no call of the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from multimodal_cache._errors import Failure
from multimodal_cache._outputs import as_rows
from multimodal_cache.base import EmbeddingResult, MultimodalCache
from multimodal_cache.stats import EncoderStats

if TYPE_CHECKING:
    from multimodal_cache.stores import EmbeddingStore

Landed: TypeAlias = torch.Tensor | Failure | None
"""The embedding; or how an ``encode`` failed that had nothing else to do; or None: try again."""


@dataclass(eq=False, slots=True)
class Want:
    """What a call wants: one key, of one length, for one of its features or several."""

    feature: Any  # None once it is encoded
    key: int | None
    length: int | None
    uses: int = 1  # the number of features
    embedding: torch.Tensor | None = None
    mismatched: bool = False  # the cache has it with another length
    # What makes the embedding readable on the caller's current stream, if another one wrote it.
    written: Callable[[], object] | None = None

    def fits(self, embedding: torch.Tensor) -> bool:
        """Returns whether an embedding has the length that is wanted."""
        return self.length is None or embedding.shape[0] == self.length


@dataclass(eq=False, slots=True)
class Flight:
    """One key that is being encoded, from its claim to its landing."""

    key: int
    length: int | None
    generation: Any
    landed: Future[Landed] = field(default_factory=Future)
    written: Callable[[], object] | None = None  # as of a want

    def __post_init__(self) -> None:
        self.landed.set_running_or_notify_cancel()  # a waiter that is cancelled can't cancel it


Claim: TypeAlias = tuple[Want, Flight | None]
"""A want to encode, and its flight; None where it has no key, or is of one key with another."""


class Flights:
    """The flights to one cache.

    Args:
        cache: As for ``CachedEncoder``.
        shared: The store that is asked for what isn't there, or None.

    Attributes:
        shared: The same.
        by_key: Those that haven't landed.
        landings: The number of landings so far: who has looked into the cache and then finds it
            changed must look again.
    """

    def __init__(self, cache: MultimodalCache, shared: EmbeddingStore | None = None) -> None:
        self._cache = cache
        self.shared = shared
        self._lock = threading.RLock()  # a finalizer may call back
        self.by_key: dict[int, Flight] = {}
        self.landings = 0
        self._calls = self._row_mismatches = self._encodes = self._failures = 0
        self._encode_seconds = 0.0
        self._hits = self._fetched = self._encoded = self._coalesced = self._disagreements = 0
        self._hit_tokens = self._fetched_tokens = 0
        self._encoded_tokens = self._coalesced_tokens = 0

    def look_up(self, wants: Iterable[Want]) -> tuple[list[Want], list[Want]]:
        """Looks up what has no embedding yet; returns what was found, and what is missing."""
        get_single = self._cache.get_single
        found_now, missing = [], []
        for want in wants:
            if want.embedding is not None:
                continue
            found = None if want.key is None else get_single(want.key)
            embedding = None if found is None else as_rows(found.embedding)
            if embedding is not None and want.fits(embedding):
                want.embedding = embedding
                found_now.append(want)
            else:
                want.mismatched = found is not None
                missing.append(want)
        return found_now, missing

    def count_look_up(self, found: Iterable[Want], *, calls: int) -> None:
        """Counts hits; what has no embedding any more was given up, as another rank has it not.

        Args:
            found: What ``look_up`` found.
            calls: How many calls to count: 1 for the first time, 0 for another round.
        """
        hits = tokens = given_up = 0
        for want in found:
            if want.embedding is None:
                given_up += want.uses
            else:
                hits += want.uses
                tokens += want.uses * want.embedding.shape[0]
        with self._lock:
            self._calls += calls
            self._hits += hits
            self._hit_tokens += tokens
            self._disagreements += given_up

    def claim(
        self,
        missing: Iterable[Want],
        landings: int,
        *,
        claimed: list[Claim],
        awaited: list[tuple[Want, Flight]],
    ) -> bool:
        """Claims what nobody has claimed.

        Args:
            missing: What wasn't in the cache.
            landings: Their number before it was looked up.
            claimed: Gets what is claimed, each before its flight is in the table: so who is
                interrupted can land it.
            awaited: Gets the rest, with the flights of others.

        Returns:
            False if it did nothing, since what has landed meanwhile may be what is missing.
        """
        with self._lock:
            if landings != self.landings:
                return False
            self._claim(missing, claimed, awaited)
        return True

    # A `with` that takes the lock has no loop in it: CPython 3.12, and 3.13.0, leave the jump back
    # of some out of the `with`, and a signal handler may raise right there.

    def _claim(
        self, missing: Iterable[Want], claimed: list[Claim], awaited: list[tuple[Want, Flight]]
    ) -> None:
        ours = set()
        generation = getattr(self._cache, "generation", None)
        for want in missing:
            key = want.key
            if key is None or key in ours:
                claimed.append((want, None))
                continue
            flight = self.by_key.get(key)
            if flight is not None and flight.generation == generation:
                awaited.append((want, flight))
                continue
            flight = Flight(key, want.length, generation)
            claimed.append((want, flight))
            ours.add(key)
            self.by_key[key] = flight

    def _forget(self, claimed: Sequence[Claim]) -> None:
        for _, flight in claimed:
            # Not one of a later generation.
            if flight is not None and self.by_key.get(flight.key) is flight:
                del self.by_key[flight.key]

    def drop_mismatched(self, claimed: Iterable[Claim]) -> None:
        """Drops entries of the wrong length: nobody can have replaced those with a claim."""
        for want, _ in claimed:
            if want.key is not None and want.mismatched:
                dropped = self._cache.free(want.key, None)
                with self._lock:
                    self._row_mismatches += dropped

    def store(self, claimed: Iterable[Claim], embeddings: Sequence[torch.Tensor]) -> None:
        """Puts embeddings into the cache, if it is of the generation of their claim."""
        for (_, flight), embedding in zip(claimed, embeddings, strict=True):
            if flight is not None:
                result = EmbeddingResult(embedding=embedding)
                generation = flight.generation
                options = {} if generation is None else {"generation": generation}
                self._cache.set(flight.key, result, None, **options)

    def offer(self, claimed: Iterable[Claim], embeddings: Iterable[torch.Tensor]) -> None:
        """Offers embeddings to the store, but none that ``clear()`` has made an old one."""
        assert self.shared is not None
        generation = getattr(self._cache, "generation", None)
        for (_, flight), embedding in zip(claimed, embeddings, strict=True):
            if flight is not None and flight.generation == generation:
                self.shared.offer(flight.key, embedding)

    def land(self, claimed: Sequence[Claim], outcomes: Sequence[Landed]) -> None:
        """Ends flights, and gives those who wait their outcome.

        If it is interrupted, another call with the same flights goes on with it.
        """
        with self._lock:
            self.landings += 1
            self._forget(claimed)
        for (_, flight), outcome in zip(claimed, outcomes, strict=True):
            if flight is not None and not flight.landed.done():
                flight.landed.set_result(outcome)

    def count_encode(self, encoded: Sequence[Want], seconds: float) -> None:
        """Counts a call of ``encode`` that has ended; of a failed one nothing is ``encoded``."""
        embeddings = [want.embedding for want in encoded if want.embedding is not None]
        tokens, coalesced, coalesced_tokens = _shared_out(encoded, embeddings)
        with self._lock:
            self._encodes += 1
            self._encode_seconds += seconds
            self._failures += not encoded
            self._encoded += len(encoded)
            self._encoded_tokens += tokens
            self._coalesced += coalesced
            self._coalesced_tokens += coalesced_tokens

    def count_fetched(self, fetched: Sequence[Want], embeddings: Sequence[torch.Tensor]) -> None:
        """Counts what the store had."""
        tokens, coalesced, coalesced_tokens = _shared_out(fetched, embeddings)
        with self._lock:
            self._fetched += len(fetched)
            self._fetched_tokens += tokens
            self._coalesced += coalesced
            self._coalesced_tokens += coalesced_tokens

    def count_disagreements(self, features: int) -> None:
        """Counts what the store had, and is given up, as that of another rank had it not."""
        with self._lock:
            self._disagreements += features

    def count_coalesced(self, features: int, tokens: int) -> None:
        """Counts what other calls have encoded."""
        with self._lock:
            self._coalesced += features
            self._coalesced_tokens += tokens

    def stats(self) -> EncoderStats:
        """Returns a consistent snapshot of the counters."""
        with self._lock:
            return EncoderStats(
                calls=self._calls,
                hits=self._hits,
                hit_tokens=self._hit_tokens,
                fetched=self._fetched,
                fetched_tokens=self._fetched_tokens,
                encoded=self._encoded,
                encoded_tokens=self._encoded_tokens,
                coalesced=self._coalesced,
                coalesced_tokens=self._coalesced_tokens,
                encodes=self._encodes,
                encode_seconds=self._encode_seconds,
                row_mismatches=self._row_mismatches,
                failures=self._failures,
                disagreements=self._disagreements,
            )


def _shared_out(wants: Sequence[Want], embeddings: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Returns the tokens, the features that share the embedding of another, and their tokens."""
    tokens = coalesced = coalesced_tokens = 0
    for want, embedding in zip(wants, embeddings, strict=True):
        rows = embedding.shape[0]
        tokens += rows
        coalesced += want.uses - 1
        coalesced_tokens += (want.uses - 1) * rows
    return tokens, coalesced, coalesced_tokens
