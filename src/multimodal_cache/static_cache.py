"""A byte-accurate LRU cache of embeddings."""

from __future__ import annotations

import itertools
import logging
import operator
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch

from multimodal_cache._ownership import (
    Replacements,
    plan_ownership,
    replace_tensors,
    tensors_in,
)
from multimodal_cache._streams import use_here, written_here
from multimodal_cache.base import (
    CombinedHash,
    EmbeddingResult,
    MultimodalCache,
    as_int,
    as_size,
    item_keys,
    split_key,
)
from multimodal_cache.leases import Ended, Lease
from multimodal_cache.stats import CacheStats

if TYPE_CHECKING:
    from multimodal_cache.trace import Trace

logger = logging.getLogger(__name__)

_Items = tuple[int, ...] | None  # what a key says that it stands for; a plain int says nothing
# The result, its key, the bytes that it is charged, its items; and, None for most, what else a
# hit of it does: a call, which may raise KeyError. (In host memory: how to bring it back.)
_Entry = tuple[EmbeddingResult, int, int, _Items, Any]
# What on_evict is to hear, if there is one, and what makes it readable on the current stream.
_Evicted = list[tuple[int, EmbeddingResult, Any]] | None

_Plan = Replacements | None  # of the copies to be made; None if there is nothing to do

_NO_KEY = -1j  # no int is equal to it

_HITS_TAKE_THE_LOCK = not getattr(sys, "_is_gil_enabled", lambda: True)()


def _get_tensor_size(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements: element size times number of elements."""
    return tensor.element_size() * tensor.numel()


class _OutOfMemoryError(Exception):
    """There was no memory for the copy that an entry needs; says why to ``set`` alone."""


class MultiModalStaticCache(MultimodalCache):
    """Keeps encoder outputs under integer keys, within a budget of bytes, least recent out first.

    A drop-in for SGLang's class of the same name, with the differences that the README lists.
    An empty cache is falsy, as there: test a cache with ``is not None``.

    The life of an entry:

    1. ``set`` measures what storing the value will keep alive. A value larger than the budget
       is refused here, and nothing else happens.
    2. The least recent entries are evicted, no more of them than needed.
    3. The entry is made to own its memory: slices, expanded tensors and memory that torch did
       not allocate are copied, autograd graphs are detached. Anything else is stored as it is.
    4. It is inserted as the most recent entry, and charged the bytes it keeps alive.
    5. ``get``, ``get_single`` and a repeated ``set`` make it most recent again.
    6. It leaves by eviction, ``free``, ``clear``, ``resize``, or because ``set`` met another
       list of items under the same combined hash. The bytes of step 4 are given back.

    What holds after every public call on every thread:

    1. ``current_size`` is the sum of the bytes recorded for the entries, at most ``max_size``.
    2. The bytes recorded for an entry are those that it keeps alive at admission, each
       storage once. (A storage that two entries share is charged to both.) ``stats()`` tells
       how many of them are leased.
    3. The order of ``mm_cache`` is the order of last use.
    4. What ``mm_cache`` holds is what is charged, and a list stands under the hash of its items.

    Keys: an int of any width, NumPy integers included. A ``CombinedHash`` also says which
    items it stands for; where both the key of the entry and the key asked for say so and they
    differ, it is a collision, not a hit. A plain int is trusted: two images to which somebody gave
    one int share an entry. None means "no key": such an item is never stored and never found.
    Anything else, such as a digest as str or bytes, is a ``TypeError``, in every method. The keys
    of single items and of lists are in one table, and are entries of their own: to free an item
    doesn't free the lists that it is in.

    Ownership: what ``get`` returns is the stored object itself. Treat it, and what you have
    passed to ``set``, as read-only. It stays valid when the entry is evicted later. If the
    encoder reuses its output buffer, pass ``copy=True`` and go on with what ``get`` returns.

    Threads: every method is atomic. All but hits are so by one re-entrant lock. A hit of ``get``
    and ``get_single`` takes none where Python has a GIL, and isn't held up by it: it happens at
    its look into the table, and what it returns was there when the call began. Then it makes most
    recent what is under its key by then. So others mustn't walk ``mm_cache`` step by step, but
    take ``list(mm_cache)``, which is one step. What a dropped entry runs
    (finalizers, weak-reference callbacks) may call back; what ``set`` and ``resize`` evict is
    dropped under the lock, unless there is an ``on_evict``. The copy of step 3 happens under
    the lock too: on a GPU it is a launch, on a CPU it holds up what needs the lock for as long as
    it takes to allocate and copy the bytes, a millisecond or so for each MiB. An instance
    can be neither pickled nor copied. A forked child must not use it, which is not checked:
    another thread may hold the lock at the fork.

    Signals: a handler may raise (Ctrl-C) in the middle of any call. The lock is free then, the
    entry that was on its way in or out is out, and the counters may miss one. A handler must not
    call the cache.

    CUDA: copies run on the current stream of the calling thread, on which the tensors given to
    ``set`` must be ready; the CPU waits for nothing. ``get`` and ``get_single`` may be called on
    any stream: the caller's current stream waits for the writer's, and what it reads of the result
    is safe from eviction if it was launched while the caller had the result. Only for another
    stream than that of the call the caller must see to it itself, as with any tensor: so for what
    it takes from ``mm_cache``. Not while a CUDA graph is captured: look up before. It is the same
    for other accelerators of torch that have streams; one that has none (MPS) needs nothing.

    Attributes:
        mm_cache: The results by key, the least recent first. For reading only.

    Args:
        max_size: The budget in bytes. 0 switches the cache off: it refuses every value of
            one byte or more. (An embedding without elements has no bytes, and is stored.) The
            first value that is refused since it is larger is told in a logged warning, with both
            sizes, but for a budget of 0.
        copy: Copy every tensor at admission, for encoders that reuse their output buffer.
        on_evict: Called as ``on_evict(mm_hash, result)`` for each entry evicted to make room,
            by ``set`` or ``resize``, after the lock is released, on the thread that evicted.
            (If a finalizer that runs under the lock makes room, it is held for that call too.)
            ``mm_hash`` is the ``CombinedHash`` where the entry had one. The result is as that of a
            hit for the current stream. The evicted results
            live until it has run, so memory can pass the budget for that moment. An exception
            in it is logged and swallowed. It may run after a ``clear`` that came meanwhile: a
            second cache that it fills must not take what is older than the weights.
        trace: A ``multimodal_cache.trace.Trace`` of its own that records what is requested.

    Raises:
        TypeError: ``max_size`` isn't an int, ``on_evict`` isn't callable, or ``trace`` no trace.
        ValueError: ``max_size`` is negative.
    """

    _BUDGET = "max_size"  # what a warning calls it

    def __init__(
        self,
        max_size: int,
        *,
        copy: bool = False,
        on_evict: Callable[[int, EmbeddingResult], object] | None = None,
        trace: Trace | None = None,
    ) -> None:
        if trace is not None and not hasattr(trace, "hit_of"):
            raise TypeError(f"trace must be a Trace, got {type(trace).__name__}")
        if on_evict is not None and not callable(on_evict):
            raise TypeError(f"on_evict must be callable, got {type(on_evict).__name__}")
        self.mm_cache: OrderedDict[int, EmbeddingResult] = OrderedDict()
        self._entries: dict[int, _Entry] = {}
        self._by_items: dict[tuple[int, ...], _Entry] = {}  # those of lists: a get needs no hash
        # Where a hit may look without the lock: nowhere, if there is no GIL.
        self._hits_in_entries = {} if _HITS_TAKE_THE_LOCK else self._entries
        self._hits_by_items = {} if _HITS_TAKE_THE_LOCK else self._by_items
        self._current_size = 0
        self._changing: complex | None = None  # a key that isn't in all the tables, for a moment
        self._max_size = as_size("max_size", max_size)
        # By key, what stands for its leases. A set asks first if there are any: that is cheaper.
        self._leased: dict[int, set[object]] = {}
        self._ended: deque[Ended] = deque()  # leases whose end is still to be heeded
        self._room = self._max_size  # what isn't leased
        self._copy = copy
        self._on_evict = on_evict
        self._trace = trace
        self._generation = 0
        self._warned_of_size = False
        self._hits_to_come = itertools.repeat(None, sys.maxsize)  # next() is exact in all threads
        self._misses = self._insertions = self._inserted_bytes = self._collisions = 0
        self._evictions = self._evicted_bytes = self._rejections = self._rejected_bytes = 0
        self._lock = threading.RLock()

    @property
    def current_size(self) -> int:
        """The bytes charged for the entries held."""
        if self._changing is not None:
            self._settle()
        return self._current_size

    @property
    def max_size(self) -> int:
        """The budget in bytes. Assigning to it is ``resize``."""
        return self._max_size

    @max_size.setter
    def max_size(self, max_size: int) -> None:
        self.resize(max_size)

    @property
    def generation(self) -> int:
        """The number of ``clear`` calls. Read it before an encode, and pass it to ``set``."""
        return self._generation

    # A hit takes no lock: its lookup, the count and `move_to_end` are one call into C each, which
    # no other thread interrupts while there is a GIL. Between them the entry may leave, or
    # another one come under its key: that one is made most recent then. A miss takes the lock.

    def get(
        self,
        mm_hashes: Iterable[SupportsIndex | None] | None,
        combined_hash: int | None = None,
    ) -> EmbeddingResult | None:
        """Looks up a list of items as a whole and makes its entry most recent.

        It never falls back to the single items, like the reference.

        Args:
            mm_hashes: The keys of the items, in order.
            combined_hash: Ignored, as in the reference.

        Returns:
            The stored result, or None: nothing is stored for these items, or there are none,
            or one of them has no key, or another list of items is stored under their hash.

        Raises:
            TypeError: As ``combine_hashes``.
        """
        # This is item_keys, without a call for a list of plain ints, the usual argument.
        items = tuple(mm_hashes) if type(mm_hashes) is list else item_keys(mm_hashes)
        for item in items or ():
            if type(item) is not int:
                items = item_keys(items)
                break
        entry = self._hits_by_items.get(items)  # type: ignore[arg-type]  # None is in no dict of tuples
        if entry is None:
            return self._look_up(hash(items) if items else None, items)
        next(self._hits_to_come)
        try:
            if entry[4] is not None:
                entry[4]()
            self.mm_cache.move_to_end(entry[1])
        except KeyError:
            pass
        return entry[0]

    def get_single(self, mm_hash: SupportsIndex | None) -> EmbeddingResult | None:
        """Looks up one key and makes its entry most recent.

        Returns:
            The stored result, or None.

        Raises:
            TypeError: ``mm_hash`` is neither an int nor None.
        """
        if type(mm_hash) is not int:
            key, items = split_key(mm_hash)
            if key is None or items is not None:
                return self._look_up(key, items)
            mm_hash = key
        entry = self._hits_in_entries.get(mm_hash)
        if entry is None:
            return self._look_up(mm_hash, None)
        next(self._hits_to_come)
        try:
            if entry[4] is not None:
                entry[4]()
            self.mm_cache.move_to_end(mm_hash)
        except KeyError:
            pass
        return entry[0]

    def set(
        self,
        mm_hash: SupportsIndex | None,
        embedding: EmbeddingResult,
        loc: object = None,
        *,
        generation: int | None = None,
    ) -> bool:
        """Stores a result as the most recent entry, or makes the entry that is there so.

        A key that is present keeps its old value. If that value belongs to another list of
        items (a collision), the new one replaces it.

        Args:
            mm_hash: The key; None is refused.
            embedding: The result, usually with a tensor ``[num_tokens, hidden]``, of any dtype
                and on any device; or any object with a tensor in its own attribute
                ``embedding``, such as SGLang's results. All of the tensors in its attributes
                are charged and owned, also inside lists, tuples, dicts and dataclasses there;
                those in other containers, and arrays that aren't tensors, are not looked for.
                If a tensor must be copied or detached, a shallow copy of the object is stored
                and the object itself is left as it was; otherwise the object itself is stored.
                The copy is of the same shape: where an object contains itself, so does its copy.
                Python attributes and hooks of a tensor don't count as part of it.
            loc: Ignored, as in the reference.
            generation: The cache's ``generation`` when the encode began (by keyword only). If
                ``clear`` was called since, the result is stale.

        Returns:
            True if the key is in the cache now. False if there is no key, if ``generation``
            isn't current (even if the key is present), if the result is larger than
            ``max_size`` (nothing is evicted or copied then), or if memory ran out while it was
            copied (a warning is logged).

        Raises:
            EmbeddingTypeError: ``embedding`` isn't such an object; or holds a tensor whose
                memory can't be counted (sparse, quantised, nested, meta, or of a subclass with
                ``__torch_dispatch__``) or was freed; or must be copied and can't be, because
                its class or that of a container or a tensor in it forbids it. Nothing has changed.
            TypeError: ``mm_hash`` or ``generation`` is neither an int nor None.
            RuntimeError: Torch could not copy a tensor, for another reason than memory.
                Entries may have been evicted; the cache is consistent.
        """
        key: int | None
        if type(mm_hash) is int:  # split_key, without a call
            key, items = mm_hash, None
        else:
            key, items = split_key(mm_hash)
        nbytes, replacements = plan_ownership(embedding, self._copy)
        if generation is not None:
            generation = as_int("generation", generation)
        if key is None:
            return False
        evicted: _Evicted = None if self._on_evict is None else []
        stored, trace = None, self._trace
        hit = None if trace is None else trace.hit_of(key, nbytes, is_list=items is not None)
        try:
            entry = (embedding, key, nbytes, items, hit)
            stored = self._admit(entry, replacements, generation, evicted)
        except _OutOfMemoryError as error:
            logger.warning("an embedding of %d bytes was not cached: %s", nbytes, error)
            return False
        finally:
            if trace is not None:
                trace.after_set(key, bool(stored), is_list=items is not None)
            if evicted:
                self._report(evicted)
        if stored is None:
            self._warn_of_size(nbytes)
        return stored or False

    def has(self, mm_hash: SupportsIndex | None) -> bool:
        """Returns whether the key is in the cache; doesn't make its entry most recent.

        Raises:
            TypeError: ``mm_hash`` is neither an int nor None.
        """
        key, items = split_key(mm_hash)
        if key is None:
            return False
        with self._lock:
            self._mend()
            return key in self._entries and not self._collides(key, items)

    def __contains__(self, mm_hash: SupportsIndex | None) -> bool:
        return self.has(mm_hash)

    def free(self, mm_hash: SupportsIndex | None, mm_embedding_allocator: object = None) -> bool:
        """Drops one entry.

        Args:
            mm_hash: The key.
            mm_embedding_allocator: Ignored, as in the reference.

        Returns:
            Whether there was such an entry; not if it stands for other items.

        Raises:
            TypeError: ``mm_hash`` is neither an int nor None.
        """
        key, items = split_key(mm_hash)
        if key is None:
            return False
        trace = self._trace
        with self._lock:
            self._mend()
            if trace is not None:
                trace.forget(key)
            freed = None if self._collides(key, items) else self._remove(key)
        if trace is not None:
            trace.tend()
        return freed is not None

    def clear(self) -> None:
        """Drops every entry and begins a new ``generation``.

        For a weight update, after the weights have changed: a ``set`` with the generation of an
        encode that began before it is refused from now on. An encode that begins between a
        ``clear`` and the change would be cached with the old weights.
        """
        with self._lock:
            self._mend()
            self._generation += 1
            if self._trace is not None:
                self._trace.forget(None)
            dropped = list(map(self._remove, list(self.mm_cache)))
        del dropped  # after the lock is released, since it can run finalizers

    def resize(self, max_size: int) -> None:
        """Sets a new budget and evicts the least recent entries until the rest fits it.

        Raises:
            TypeError: ``max_size`` isn't an int.
            ValueError: ``max_size`` is negative, or less than the bytes of what is leased. Nothing
                has changed.
        """
        max_size = as_size("max_size", max_size)
        evicted: _Evicted = None if self._on_evict is None else []
        try:
            with self._lock:
                self._shrink(max_size, evicted)
                self._changing = _NO_KEY
                self._room += max_size - self._max_size
                self._max_size = max_size
                self._changing = None
        finally:
            if evicted:
                self._report(evicted)

    def lease(self, mm_hashes: Iterable[SupportsIndex | None]) -> Lease:
        """Keeps what is under some keys, and what is set under them later, from being evicted.

        For a request that is prefilled in several chunks, which needs its images until the last.
        ``set`` then evicts others, and returns False where a value can't fit beside what is leased,
        or would replace a leased entry of other items. ``free`` and ``clear`` drop leased entries
        nevertheless: whoever says that an entry is wrong is right. The lease goes on holding its
        keys. An entry whose last lease ends becomes the most recent.

        Args:
            mm_hashes: The keys, of single items or of lists; they needn't be there. A lease is of
                the int. None is ignored.

        Returns:
            The lease. ``release()`` it, or use it in a ``with`` block.

        Raises:
            TypeError: A key is neither an int nor None. Nothing is held then.
        """
        keys = [split_key(mm_hash)[0] for mm_hash in mm_hashes]
        lease = Lease(tuple(key for key in keys if key is not None), self._tiers())
        with self._lock:
            self._mend()
            lease._hold()
        return lease

    def _tiers(self) -> tuple[MultiModalStaticCache, ...]:
        return (self,)

    def __len__(self) -> int:
        if self._changing is not None:
            self._settle()
        return len(self.mm_cache)

    def available_size(self) -> int:
        """Returns the number of entries, despite its name, as in the reference."""
        return len(self)

    def stats(self) -> CacheStats:
        """Returns the counters and what is held, all of one moment."""
        with self._lock:
            self._mend()
            return CacheStats(
                hits=sys.maxsize - operator.length_hint(self._hits_to_come),
                misses=self._misses,
                insertions=self._insertions,
                inserted_bytes=self._inserted_bytes,
                evictions=self._evictions,
                evicted_bytes=self._evicted_bytes,
                rejections=self._rejections,
                rejected_bytes=self._rejected_bytes,
                collisions=self._collisions,
                entries=len(self.mm_cache),
                current_size=self._current_size,
                max_size=self._max_size,
                leased_bytes=self._max_size - self._room,
            )

    def check(self) -> None:
        """Verifies the class's promises, as far as they can be seen later, in linear time.

        Charges are not measured again: tensors may have been resized or replaced since.

        Raises:
            AssertionError: A promise of the class docstring is broken; the message says which.
        """
        with self._lock:
            self._mend()
            broken = self._broken_promises()
        if broken:
            raise AssertionError(f"{self!r} breaks invariant {', and '.join(broken)}")

    def __repr__(self) -> str:
        with self._lock:
            self._mend()
            return (
                f"{type(self).__name__}(entries={len(self.mm_cache)}, "
                f"current_size={self._current_size}, max_size={self._max_size})"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds a lock: it can't be pickled or copied")

    def _broken_promises(self) -> list[str]:
        entries = self._entries
        charged = [nbytes for _, _, nbytes, _, _ in entries.values()]
        combined = {entry[3]: entry for entry in entries.values() if entry[3] is not None}
        order = list(self.mm_cache)
        promises = {
            "1: current_size is the sum of what the entries are charged": (
                self._current_size == sum(charged)
            ),
            "1: current_size is from 0 to max_size": 0 <= self._current_size <= self._max_size,
            "2: leased_bytes is the sum of what leased entries are charged": (
                self._max_size - self._room
                == sum(entry[2] for key, entry in entries.items() if key in self._leased)
            ),
            "3: mm_cache lists each key once": (
                len(order) == len(set(order)) == len(self.mm_cache)
            ),
            "4: what is held is what is charged": self.mm_cache.keys() == entries.keys()
            and all(self.mm_cache[key] is entry[0] for key, entry in entries.items())
            and all(key == entry[1] for key, entry in entries.items()),
            "4: items stand under their hash": self._by_items.keys() == combined.keys()
            and all(self._by_items[items] is entry for items, entry in combined.items())
            and all(hash(items) == entry[1] for items, entry in combined.items()),
        }
        return [promise for promise, kept in promises.items() if not kept]

    # A `with` that takes the lock has no loop in it but `while True`: CPython 3.12, and 3.13.0,
    # leave the jump back of others out of the `with`, and a signal handler may raise right there.

    def _admit(  # noqa: C901  # a step a turn, and each is one question
        self, entry: _Entry, replacements: _Plan, generation: int | None, evicted: _Evicted
    ) -> bool | None:
        """Takes an entry through steps 1 to 4 of its life, under the lock, one step a turn.

        Returns what ``set`` does; but None if it is larger than the budget, which is to be said
        when the lock is released.

        To drop an entry or to copy a tensor can run finalizers that call back in here, and the
        garbage collector can run some wherever something is allocated. So each turn looks at
        everything anew, and the last one neither calls nor allocates between its look and its
        insertion.
        """
        _, key, nbytes, items, _ = entry
        with self._lock:
            while True:
                collides = items is not None and key in self._entries and self._collides(key, items)
                if self._changing is not None or self._ended:
                    self._mend()
                elif generation is not None and generation != self._generation:
                    return False
                elif key in self._entries and not collides:
                    self.mm_cache.move_to_end(key)
                    return True
                elif nbytes > self._room or (collides and key in self._leased):
                    self._collisions += collides
                    return self._reject(entry)
                elif collides:
                    self._collisions += 1
                    self._remove(key)
                elif self._current_size + nbytes > self._max_size:
                    self._evict_oldest(evicted)
                elif replacements is not None:
                    entry, replacements = self._own(entry, replacements), None
                else:
                    self._changing = key
                    self._entries[key] = entry
                    if items is not None:
                        self._by_items[items] = entry
                    self._current_size += nbytes
                    if self._leased and key in self._leased:
                        self._room -= nbytes
                    self.mm_cache[key] = entry[0]
                    self._changing = None
                    return self._count_insertion(key, nbytes)

    def _count_insertion(self, key: int, nbytes: int) -> bool:
        self._insertions += 1
        self._inserted_bytes += nbytes
        if self._trace is not None:
            self._trace.request(key, nbytes)
        return True

    def _reject(self, entry: _Entry) -> bool | None:
        self._rejections += 1
        self._rejected_bytes += entry[2]
        if self._trace is not None:
            self._trace.request(entry[1], entry[2])
        return None

    def _own(self, entry: _Entry, replacements: Replacements) -> _Entry:
        """Replaces tensors, and marks what a hit on another stream must wait for.

        Counts a rejection if there is no memory for them.
        """
        result, key, nbytes, items, use = entry
        use_here(tensors_in(result))  # it may have been allocated on another stream
        try:
            owned = replace_tensors(result, replacements)
        except RuntimeError as error:
            # Only CUDA's error has a type of its own; the CPU allocator says it in words.
            words = ("you tried to allocate", "out of memory")
            if isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words):
                self._reject(entry)
                raise _OutOfMemoryError(error) from error
            raise
        return owned, key, nbytes, items, written_here(tensors_in(owned), use)

    def _look_up(self, key: int | None, items: _Items) -> EmbeddingResult | None:
        """Looks up under the lock: all that isn't a hit without it."""
        with self._lock:
            if self._changing is not None or self._ended:
                self._mend()
            entry = self._entries.get(key)  # type: ignore[arg-type]  # None is in no dict of ints
            if entry is None or _are_known_to_differ(entry[3], items):
                self._misses += 1
                self._collisions += entry is not None
                return None
            next(self._hits_to_come)
            try:
                if entry[4] is not None:
                    entry[4]()
                self.mm_cache.move_to_end(entry[1])
            except KeyError:
                pass  # a finalizer has freed the entry since: the garbage collector runs anywhere
            return entry[0]

    def _collides(self, key: int, items: _Items) -> bool:
        """Whether the entry under this key is known to stand for other items."""
        entry = self._entries.get(key)
        return entry is not None and _are_known_to_differ(entry[3], items)

    # An insertion and a removal neither call nor drop nor allocate anything in the middle, so
    # nothing calls back while the tables disagree. But a signal handler may raise there (Ctrl-C,
    # on Python 3.10): `_changing` says so to whoever comes next under the lock.

    def _remove(self, key: int) -> tuple[Any, ...] | None:
        """Takes an entry out of the books and returns it, or more, for the caller to drop."""
        if self._changing is not None:
            self._mend()
        if key not in self._entries:
            return None
        entry = self._entries[key]
        self._changing = key
        del self.mm_cache[key]
        if entry[3] is not None:
            del self._by_items[entry[3]]
        del self._entries[key]
        self._current_size -= entry[2]
        if self._leased and key in self._leased:
            self._room += entry[2]
        self._changing = None
        return entry

    def _mend(self) -> None:
        """Ends what was broken off, and the leases whose end wasn't heeded yet."""
        if self._changing is not None:
            self._undo()
        if self._ended:
            self._end_leases()

    def _undo(self) -> None:
        """Drops the entry whose insertion or removal was broken off, and counts all others."""
        key = self._changing
        charged = [entry[1:3] for entry in list(self._entries.values()) if entry[1] != key]
        size = sum([nbytes for _, nbytes in charged])
        leased = sum([nbytes for k, nbytes in charged if k in self._leased])
        if self._changing is None:
            return  # a finalizer was faster
        if key in self.mm_cache:
            del self.mm_cache[key]  # type: ignore[arg-type]  # it is an int then
        if key in self._entries:
            entry = self._entries[key]  # type: ignore[index]
            if entry[3] in self._by_items:
                del self._by_items[entry[3]]
            del self._entries[key]  # type: ignore[arg-type]
        self._current_size = size
        self._room = self._max_size - leased
        self._changing = None

    def _hold(self, key: int, lease: object) -> None:
        """Takes what is under a key out of what may be evicted, until this lease ends."""
        leases = {lease}
        if self._changing is not None:
            self._undo()
        if key in self._leased:
            self._leased[key].add(lease)
            return
        self._changing = _NO_KEY
        self._leased[key] = leases
        if key in self._entries:
            self._room -= self._entries[key][2]
        self._changing = None

    def _end_leases(self) -> None:
        """Heeds the leases that are over. If it is broken off, the next one begins it again."""
        while self._ended:
            ended = self._ended[0]
            for key in ended[1]:
                self._let_go(key, ended[0])
            if self._ended and self._ended[0] is ended:  # else a finalizer was faster
                self._ended.popleft()

    def _let_go(self, key: int, lease: object) -> None:
        """Ends one lease of a key; what nobody leases any more becomes the most recent."""
        leases = self._leased.get(key, set())
        leases.discard(lease)
        if self._changing is not None:
            self._undo()
        if leases or key not in self._leased or self._leased[key] is not leases:
            return
        self._changing = _NO_KEY
        del self._leased[key]
        if key in self._entries:
            self._room += self._entries[key][2]
        self._changing = None
        try:
            self.mm_cache.move_to_end(key)
        except KeyError:
            pass  # there is none, or a finalizer has freed it

    def _settle(self) -> None:
        """Returns when no thread is in the middle of a change, and no lease's end is unheeded."""
        with self._lock:
            self._mend()

    def _shrink(self, size: int, evicted: _Evicted) -> None:
        """Evicts until the rest fits into a size; what is leased must, in every turn."""
        while True:
            if self._changing is not None or self._ended:
                self._mend()
                continue
            leased = self._max_size - self._room
            if leased > size:
                raise ValueError(f"max_size must be {leased} or more, the bytes leased, got {size}")
            if self._current_size <= size:
                return
            self._evict_oldest(evicted)

    def _evict_oldest(self, evicted: _Evicted) -> None:
        """Evicts one entry, and adds it to ``evicted``, if there is that.

        One that is leased becomes the most recent instead: it is in use.
        """
        try:
            for key in self.mm_cache:  # noqa: B007  # next(iter()) would let others in between
                break
            else:
                key = None
        except RuntimeError:  # they came in through a finalizer
            return
        if key is None:
            if self._current_size:
                raise RuntimeError("mm_cache was changed from outside; it is to be read only")
            return
        if self._leased and key in self._leased:
            self.mm_cache.move_to_end(key)
            return
        entry = self._remove(key)
        if entry is None:
            return  # a finalizer was faster
        self._evictions += 1
        self._evicted_bytes += entry[2]
        if evicted is not None:
            result, _, _, items, use = entry[:5]
            evicted.append((key if items is None else CombinedHash(items), result, use))

    def _warn_of_size(self, nbytes: int) -> None:
        """Says once that the budget is below one embedding; one of 0 is meant to be."""
        max_size = self._max_size
        if nbytes > max_size > 0 and not self._warned_of_size:
            self._warned_of_size = True
            logger.warning(
                "an embedding of %d bytes was not cached, since it is larger than %s, %d bytes: no "
                "such embedding will be; this is said once",
                nbytes,
                self._BUDGET,
                max_size,
            )

    def _report(self, evicted: list[tuple[int, EmbeddingResult, Any]]) -> None:
        for mm_hash, result, use in evicted:
            try:
                if use is not None:
                    use()
                self._on_evict(mm_hash, result)  # type: ignore[misc]  # else nothing is in the list
            except Exception:
                logger.exception("on_evict failed for the key %#x", mm_hash)


def _are_known_to_differ(some: _Items, others: _Items) -> bool:
    return some != others and some is not None and others is not None
