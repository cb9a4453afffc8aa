"""The counters of a cache or of an encoder, as one consistent snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a cache has done since it was made, and what it holds.

    A consistent snapshot. ``has``, ``in``, ``free`` and ``clear`` move none of
    the counters.

    Attributes:
        hits: Calls of ``get`` and ``get_single`` that returned an entry.
        host_hits: Those of the hits that the host memory of a ``TieredCache`` answered.
        misses: Calls of ``get`` and ``get_single`` that returned None, those without a key
            and those that met a collision included.
        insertions: Calls of ``set`` that stored their value. One that found its key present
            is not among them.
        inserted_bytes: The bytes that those values were charged.
        evictions: Entries that ``set`` or ``resize`` removed to make room. Those removed by
            ``free``, ``clear`` or a collision are not among them.
        evicted_bytes: The bytes that those entries were charged.
        rejections: Calls of ``set`` that returned False for want of room: the value was
            larger than ``max_size``, or memory ran out while it was copied. A missing key
            or an old ``generation`` doesn't count.
        rejected_bytes: The bytes that those values would have been charged.
        collisions: Calls of ``get``, ``get_single`` and ``set`` that met another list of
            items under the same combined hash.
        entries: Entries held.
        current_size: Bytes held.
        max_size: The budget, in bytes.
        leased_bytes: Bytes of entries that are leased, and can't be evicted.
    """

    hits: int
    host_hits: int = 0
    misses: int
    insertions: int
    inserted_bytes: int
    evictions: int
    evicted_bytes: int
    rejections: int
    rejected_bytes: int
    collisions: int
    entries: int
    current_size: int
    max_size: int
    leased_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, from 0.0 to 1.0; 0.0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStats:
    """What a ``CachedEncoder`` has done since it was made.

    A consistent snapshot. Each feature of a call that returned was a hit, fetched, encoded or
    coalesced. The tokens of a feature are the rows of its embedding.

    Attributes:
        calls: Calls that looked their keys up: all with valid arguments.
        hits: Features whose embedding was in the cache.
        hit_tokens: Their tokens.
        fetched: Features whose embedding was in the store.
        fetched_tokens: Their tokens.
        encoded: Features that ``encode`` was given and returned an embedding for.
        encoded_tokens: Their tokens.
        coalesced: Features that were served by somebody else's encode or fetch: that of another
            call, or of a feature with the same key in the same call.
        coalesced_tokens: Their tokens.
        encodes: Calls of ``encode`` that have ended, those that failed included.
        encode_seconds: How long those took, all together: calls that overlap, or are inside of
            others, count each for itself. On CUDA a call takes until it has launched its work,
            unless it waits for that.
        row_mismatches: Entries that were dropped from the cache because their number of rows
            was not that of ``num_tokens``.
        failures: Calls of ``encode`` that raised, were interrupted, or returned what can't be
            split into embeddings or cached. A call of the encoder that fails before ``encode``
            is called is not among them.
        disagreements: Features that were in the cache or the store and encoded nevertheless, since
            another rank of the ``group`` missed them; they count as encoded.
    """

    calls: int
    hits: int
    hit_tokens: int
    fetched: int
    fetched_tokens: int
    encoded: int
    encoded_tokens: int
    coalesced: int
    coalesced_tokens: int
    encodes: int
    encode_seconds: float
    row_mismatches: int
    failures: int
    disagreements: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of features served without an encode of their own, from 0.0 to 1.0.

        Those are the hits, the fetched and the coalesced ones. 0.0 before the first feature.
        """
        served = self.hits + self.fetched + self.coalesced
        features = served + self.encoded
        return served / features if features else 0.0
