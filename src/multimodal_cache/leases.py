"""Keys under which nothing is evicted for as long as somebody needs them."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Protocol

Ended = tuple[object, tuple[int, ...]]
"""A lease that is over, for the cache to heed: what stands for it, and its keys."""


class _Tier(Protocol):
    """A cache that heeds the leases that are over."""

    _ended: deque[Ended]

    def _settle(self) -> None: ...
    def _hold(self, key: int, lease: object) -> None: ...


class Lease:
    """Keys under which a cache evicts nothing; made by ``MultiModalStaticCache.lease``.

    It lasts until ``release()``, the end of its ``with`` block, or its finalizer, which warns with
    a ``ResourceWarning``: a lease that is forgotten holds memory until the garbage collector comes.

    Threads: any may release it.

    Attributes:
        mm_hashes: The keys, without the Nones among those asked for.
    """

    def __init__(self, mm_hashes: tuple[int, ...], tiers: tuple[_Tier, ...]) -> None:
        self.mm_hashes = mm_hashes
        self._end = (object(), mm_hashes)  # not itself: the cache must not keep it alive
        self._tiers = tiers

    def _hold(self) -> None:
        """Begins it; under the lock of the cache."""
        for tier in self._tiers:
            for key in self.mm_hashes:
                tier._hold(key, self._end[0])

    def release(self) -> None:
        """Makes the entries the most recent ones, and lets them go; a second time does nothing."""
        tiers = self._tiers
        for tier in tiers:  # first: if it is interrupted, the finalizer does it again
            tier._ended.append(self._end)
        self._tiers = ()
        if tiers:
            tiers[0]._settle()  # which heeds what is over in all of them, in one turn

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        # It may run anywhere, also inside the cache: it takes no lock and changes no table.
        tiers = getattr(self, "_tiers", ())  # none if __init__ was interrupted
        for tier in tiers:
            tier._ended.append(self._end)
        if tiers:
            warnings.warn(f"{self!r} was not released", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        state = "" if self._tiers else ", released"
        return f"Lease({len(self.mm_hashes)} keys{state})"
