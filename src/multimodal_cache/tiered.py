"""A static cache with host memory behind it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from multimodal_cache._ownership import Replacements, copy_out, plan_ownership
from multimodal_cache._streams import Mark, module_of
from multimodal_cache.base import EmbeddingResult, as_size
from multimodal_cache.static_cache import (
    MultiModalStaticCache,
    _are_known_to_differ,
    _Entry,
    _Evicted,
    _Items,
    _OutOfMemoryError,
    _Plan,
)
from multimodal_cache.stats import CacheStats

if TYPE_CHECKING:
    from multimodal_cache.trace import Trace

logger = logging.getLogger(__name__)

_IN_HOST_ALONE = "an embedding of %d bytes is in host memory alone: %s"


class TieredCache(MultiModalStaticCache):
    """A ``MultiModalStaticCache`` on the device, with host memory behind it.

    What falls out of the device's spare memory stays in the host's, which is larger by far, and
    is copied back when it is asked for: so an image is encoded again only when it has left the
    host as well. It is used as the plain class is, and gives the same answers as a plain one of
    ``host_size`` bytes would.

    The life of an entry:

    1. ``set`` measures the value, and the copy of it that host memory will hold. A copy larger
       than ``host_size`` is refused here, and nothing else happens.
    2. The entries that were used least recently leave the host, no more of them than needed; an
       entry that leaves the host leaves the device.
    3. The copy is made, and is the most recent entry of the host.
    4. The value goes to the device as in the plain class: room first, which takes no copy as
       the host has all, then what must be copied. If it is larger than ``max_size``, or the device
       has no memory for a copy, it is in the host alone.
    5. ``get``, ``get_single`` and a repeated ``set`` make it most recent in both. If the host alone
       has it, a copy is made on the device that each of its tensors came from, room first. If it
       can't stay there, the copy is for this call alone; and without memory even for that the call
       is a miss, and a warning is logged.
    6. It leaves by eviction from the host, ``free``, ``clear``, or because ``set`` met another list
       of items under the same combined hash.

    What holds after every public call, beyond the promises of the plain class for either tier:

    5. What the device holds, the host holds.
    6. Hits and misses are those of a ``MultiModalStaticCache(host_size, copy=True)``. The device
       answers as one of ``max_size`` that is given what it missed, and loses what leaves the host.
       Nothing depends on time or on how far a copy has come: ranks that see the same calls stay
       alike.

    ``has``, ``in``, ``len``, ``available_size``, ``free``, ``clear``, ``generation`` and
    ``on_evict`` are about the whole; ``mm_cache``, ``current_size``, ``max_size`` and ``resize``
    about the device; ``stats`` says which of its counters are which, ``check`` verifies both.

    Bytes: each tensor is copied to host memory by itself, so a storage that several tensors of a
    result share is charged to the host once for each. On a CPU both tiers are ordinary memory,
    charged alike. The copies of CUDA tensors are pinned, and torch rounds such memory up to a power
    of two, which is what the host is charged: give it at least twice ``max_size``.

    CUDA: as in the plain class. Copies to the host are launched on the current stream, without a
    synchronisation, and what goes back waits for them on its own stream. So the values in ``host``,
    and what ``on_evict`` gets, may be read by the CPU only after a synchronisation.

    Threads, signals and ownership are as in the plain class; both tiers have one lock, and a hit on
    the device takes none. What leaves the device to make room, also for what ``get`` brings back,
    is dropped under the lock.

    Attributes:
        host: The host memory, a ``MultiModalStaticCache``; for reading only. The hits and misses of
            its ``stats()`` are of the lookups that the device didn't answer.

    Args:
        max_size: The device's budget in bytes.
        host_size: The host's budget in bytes, ``max_size`` at least, since it holds what the device
            holds and more.
        copy: Copy every tensor at admission to the device, for encoders that reuse their output
            buffer. (Host memory always holds copies.)
        on_evict: As in the plain class, for each entry that leaves the whole to make room, with its
            copy in host memory.
        trace: As in the plain class; the requests to the whole, once each.

    Raises:
        TypeError: ``max_size`` or ``host_size`` isn't an int, ``on_evict`` isn't callable, or
            ``trace`` no trace.
        ValueError: ``max_size`` is negative, or ``host_size`` is less than ``max_size``.

    The copies between a CUDA device and pinned memory have not been run on a device yet.
    """

    def __init__(
        self,
        max_size: int,
        host_size: int,
        *,
        copy: bool = False,
        on_evict: Callable[[int, EmbeddingResult], object] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(max_size, copy=copy)
        self.host: MultiModalStaticCache = _HostMemory(self, host_size, on_evict, trace)
        self._require_room_behind(self._max_size)

    @property
    def generation(self) -> int:
        """The number of ``clear`` calls. Read it before an encode, and pass it to ``set``."""
        return self.host.generation

    def has(self, mm_hash: SupportsIndex | None) -> bool:
        """Returns whether the key is in host memory; doesn't make its entry most recent.

        Raises:
            TypeError: ``mm_hash`` is neither an int nor None.
        """
        return self.host.has(mm_hash)

    def free(self, mm_hash: SupportsIndex | None, mm_embedding_allocator: object = None) -> bool:
        """Drops one entry from both tiers; as in the plain class."""
        return self.host.free(mm_hash)

    def clear(self) -> None:
        """Empties both tiers and begins a new ``generation``; as in the plain class."""
        self.host.clear()

    def resize(self, max_size: int) -> None:
        """Sets a new budget for the device; what doesn't fit any more stays in host memory.

        Raises:
            TypeError: ``max_size`` isn't an int.
            ValueError: ``max_size`` is negative, or more than ``host_size``.
        """
        self._require_room_behind(as_size("max_size", max_size))
        super().resize(max_size)

    def __len__(self) -> int:
        return len(self.host)

    def stats(self) -> CacheStats:
        """Returns the counters and what is held, all of one moment.

        Lookups, and the insertions, rejections and collisions of ``set``, are those of the whole,
        to which a copy back to the device doesn't count; evictions, entries and bytes are the
        device's. The host's are in ``host.stats()``: what leaves both is an eviction there alone.
        """
        with self._lock:
            device, host = super().stats(), self.host.stats()
        return dataclasses.replace(
            device,
            hits=device.hits + host.hits,
            host_hits=host.hits,
            misses=host.misses,
            insertions=host.insertions,
            inserted_bytes=host.inserted_bytes,
            rejections=host.rejections,
            rejected_bytes=host.rejected_bytes,
            collisions=host.collisions,
        )

    def __repr__(self) -> str:
        with self._lock:
            device, host = super().stats(), self.host.stats()
        return (
            f"{type(self).__name__}(entries={device.entries}, current_size={device.current_size}, "
            f"max_size={device.max_size}, host_entries={host.entries}, "
            f"host_current_size={host.current_size}, host_size={host.max_size})"
        )

    def _require_room_behind(self, max_size: int) -> None:
        if max_size > self.host.max_size:
            raise ValueError(
                "host_size must be max_size or more, since the host holds what the device holds, "
                f"got host_size={self.host.max_size} and max_size={max_size}"
            )

    def _tiers(self) -> tuple[MultiModalStaticCache, ...]:
        return (self, self.host)

    def _mend(self) -> None:
        super()._mend()
        self.host._mend()

    def _broken_promises(self) -> list[str]:
        broken = super()._broken_promises()
        broken += [f"{promise} (in host memory)" for promise in self.host._broken_promises()]
        behind = self.host._entries
        if not all(
            key in behind and behind[key][3] == entry[3] for key, entry in self._entries.items()
        ):
            broken.append("5: what the device holds, the host holds")
        return broken

    def _admit(
        self, entry: _Entry, replacements: _Plan, generation: int | None, evicted: _Evicted
    ) -> bool:
        result, key, _, items, _ = entry
        origin = _Origin()
        nbytes, copies = plan_ownership(result, True, origin.plan_host_copy)
        leaving: _Evicted = None if self.host._on_evict is None else []
        stored, here, why_not = None, False, ""
        try:
            with self._lock:
                self._mend()
                kept = (result, key, nbytes, items, origin)
                stored = self.host._admit(kept, copies, generation, leaving)
                left = self._generation
                held = self.host._entries.get(key)
                if stored and held is not None:  # else a finalizer has freed it
                    if held[4] is not origin:  # it was there before, and keeps its value
                        entry, replacements = _entry_to_bring_back(held)
                    try:
                        why_not = self._stay(entry, replacements, left, held)
                    except _OutOfMemoryError as error:
                        why_not = str(error)
                here = key in self.host._entries
        finally:
            if self.host._trace is not None:
                self.host._trace.after_set(key, bool(stored and here), is_list=items is not None)
            if leaving:
                self.host._report(leaving)
        if stored is None:
            self.host._warn_of_size(nbytes)
        if why_not:
            logger.warning(_IN_HOST_ALONE, entry[2], why_not)
        return bool(stored and here)

    def _look_up(self, key: int | None, items: _Items) -> EmbeddingResult | None:
        host = self.host
        with self._lock:
            self._mend()
            left = self._generation
            held = host._entries.get(key)  # type: ignore[arg-type]  # None is in no dict of ints
            differs = held is not None and _are_known_to_differ(held[3], items)
            found, why_not = None, ""
            if held is not None and not differs:
                if key in self._entries:
                    return super()._look_up(key, items)
                found, why_not = self._bring_back(held, left)
            if found is None:
                host._misses += 1
                host._collisions += differs
            else:
                next(host._hits_to_come)
                try:
                    self._hit_of(held)()  # type: ignore[arg-type]  # it was found
                except KeyError:
                    pass  # a finalizer has freed the entry since
        if why_not:
            nbytes = held[4].nbytes  # type: ignore[index]  # it was to be brought back
            logger.warning(_IN_HOST_ALONE, nbytes, why_not)
        return found

    # What leaves the host leaves the device, so what was taken from the host before something left
    # it may not be put on the device after: `_generation` counts what has left. It is read before
    # the host is, since the garbage collector can run finalizers in between.

    def _stay(self, entry: _Entry, replacements: _Plan, left: int, held: _Entry) -> str:
        """Puts on the device what the host has, if it fits; else says why not, at most once."""
        entry = (*entry[:4], self._hit_of(held))
        stored = super()._admit(entry, replacements, left, None)
        if stored is not None or self._warned_of_size or not entry[2] > self._max_size > 0:
            return ""
        self._warned_of_size = True
        return (
            f"it is larger than max_size, {self._max_size} bytes, so each hit of such an "
            "embedding copies it; this is said once"
        )

    def _hit_of(self, held: _Entry) -> Callable[[], object]:
        """Returns what else a hit does with what the host has; it may raise KeyError."""
        _, key, nbytes, items, _ = held
        use = functools.partial(self.host.mm_cache.move_to_end, key)
        trace = self.host._trace
        if trace is None:
            return use
        record = trace.hit_of(key, nbytes, is_list=items is not None)

        def record_and_use() -> None:
            record()
            use()

        return record_and_use

    def _bring_back(self, held: _Entry, left: int) -> tuple[EmbeddingResult | None, str]:
        """Returns the copy on the device of what the host has, if there is memory for one.

        And what is to be said when the lock is released.
        """
        entry, replacements = _entry_to_bring_back(held)
        why_not = ""
        try:
            why_not = self._stay(entry, replacements, left, held)
        except _OutOfMemoryError:
            pass  # there may be some yet, now that room was made
        on_device = self._entries.get(entry[1])
        if on_device is not None and left == self._generation:
            return on_device[0], why_not
        try:
            return self._own(entry, replacements)[0], why_not
        except _OutOfMemoryError as error:
            return None, f"it can't be copied back: {error}"


class _HostMemory(MultiModalStaticCache):
    """The tier behind the device: what leaves it leaves the device too."""

    _BUDGET = "host_size"

    def __init__(
        self,
        device: TieredCache,
        host_size: int,
        on_evict: Callable[[int, EmbeddingResult], object] | None,
        trace: Trace | None,
    ) -> None:
        host_size = as_size("host_size", host_size)
        super().__init__(host_size, copy=True, on_evict=on_evict, trace=trace)
        self._lock = device._lock
        self._device = weakref.ref(device)  # no cycle: a dropped cache frees its memory at once

    def _remove(self, key: int) -> tuple[Any, ...] | None:
        if self._changing is not None:
            self._mend()
        if key not in self._entries:
            return None
        entry = self._entries[key]
        self._changing = key
        on_device = self._leave_device(key)
        if self._changing is not None:  # else one has run nevertheless, and mended
            del self.mm_cache[key]
            if entry[3] is not None:
                del self._by_items[entry[3]]
            del self._entries[key]
            self._current_size -= entry[2]
            if key in self._leased:
                self._room += entry[2]
            self._changing = None
        return (*entry, on_device)

    def _undo(self) -> None:
        on_device = self._leave_device(self._changing)
        super()._undo()
        del on_device

    def _leave_device(self, key: Any) -> tuple[Any, ...] | None:
        device = self._device()
        if device is None:
            return None
        device._generation += 1
        return device._remove(key)


class _Origin:
    """Where the tensors of a host copy came from: plans how they go there, and how they go back.

    Attributes:
        nbytes: What they take on the way back.
        replacements: What makes the tensors that go back, by the ids of those in host memory.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.replacements: Replacements = {}

    def __call__(self) -> None:
        """Does what else a hit in host memory does: nothing."""

    def plan_host_copy(self, tensor: torch.Tensor) -> tuple[int, Callable[[], torch.Tensor]]:
        """Plans a copy in host memory: a ``Copier``."""
        nbytes = tensor.nbytes
        self.nbytes += nbytes
        if tensor.is_cuda and nbytes:
            nbytes = 1 << (nbytes - 1).bit_length()  # what torch takes for pinned memory
        return nbytes, functools.partial(self._copy, tensor)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = copy_out(tensor) if tensor.is_cpu else copy_out(tensor, _clone_to_host)
        written = Mark(module_of(tensor), tensor.device) if tensor.is_cuda else None
        self.replacements[id(copy)] = functools.partial(_copy_back, copy, tensor.device, written)
        return copy


def _clone_to_host(source: torch.Tensor) -> torch.Tensor:
    pinned = source.is_cuda
    copy = torch.empty_like(
        source, device="cpu", memory_format=torch.contiguous_format, pin_memory=pinned
    )
    return copy.copy_(source, non_blocking=pinned)


def _copy_back(copy: torch.Tensor, device: torch.device, written: Mark | None) -> torch.Tensor:
    """Copies a tensor from host memory to where it came from, after it was written there."""
    if copy.device == device:
        return copy_out(copy)
    if written is not None:
        written.wait()

    def clone(source: torch.Tensor) -> torch.Tensor:
        twin = torch.empty_like(source, device=device, pin_memory=False)
        return twin.copy_(source, non_blocking=written is not None)

    return copy_out(copy, clone)


def _entry_to_bring_back(held: _Entry) -> tuple[_Entry, Replacements]:
    result, key, _, items, origin = held
    return (result, key, origin.nbytes, items, None), origin.replacements
