"""What vLLM's workers keep in host memory, as its scheduler knows it. Needs neither vLLM nor torch.

The scheduler decides in step N what the workers do in step N, and hears what came of it later:
after it has decided step N + 1, where it schedules asynchronously. The workers do all steps, in
order. So what the index says holds for the workers when they get there:

1. An item is promised only once every rank has reported that it keeps it.
2. A promise pins the item until the step's plan is made: the plan that loads it evicts it not.
3. Evictions stand in a plan and are done first; space is reserved before an item is encoded, or
   fetched from a store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PAGE = 256 * 1024
"""Bytes. Host memory is taken in pages of one size, so that what is freed fits what comes next."""


def taken(nbytes: int) -> int:
    """Returns how many bytes of host memory a tensor takes."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True)
class Fetch:
    """What a worker looks for in the store.

    Attributes:
        key: The store's.
        rows: How many the tensor must have.
        limit: The bytes of host memory that it may take.
    """

    key: int
    rows: int
    limit: int


@dataclass(frozen=True)
class Plan:
    """What each worker does in one step, in this order.

    Attributes:
        step: Counts up.
        evictions: The slots whose items are dropped. A worker may have nothing in one of them.
        loads: By identifier, the slot whose item is brought back.
        saves: By identifier, the slot for an item that is encoded in this step, and the bytes of
            host memory that it may take.
        fetches: By slot, what is begun to be fetched. A worker reports what came of it in this
            step's report, or in any later one, and again in each until the slot is evicted or
            heard of.
        heard: The slots whose items all workers have reported fetched.
    """

    step: int
    evictions: tuple[int, ...]
    loads: Mapping[str, int]
    saves: Mapping[str, tuple[int, int]]
    fetches: Mapping[int, Fetch]
    heard: tuple[int, ...]


@dataclass
class _Entry:
    slot: int  # never used again, so that a late report can't be about another item
    kind: str
    rows: int
    size: int  # bytes of host memory: reserved, or taken
    step: int  # the last one that saves it
    deadline: float | None = None  # while it's fetched
    kept: bool = False


class Index:
    """The items that all workers keep, least recently used first.

    One step: ``fetch``, ``promise`` and ``allocate`` for each item, ``refresh``, ``plan``. Then, or
    after the next step's, ``settle`` with what the workers reported of it. Not thread-safe.

    Args:
        max_size: Bytes of host memory in each worker.
        row_bytes: By kind of item, the bytes of one row. A first guess: corrected by reports.
        default_row_bytes: That of other kinds.
    """

    def __init__(self, max_size: int, row_bytes: Mapping[str, int], default_row_bytes: int) -> None:
        self.max_size = max_size
        self.size = 0
        self._row_bytes = dict(row_bytes)
        self._default_row_bytes = default_row_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unsettled: dict[int, str] = {}
        self._pinned: set[str] = set()
        self._evictions: list[int] = []
        self._loads: dict[str, int] = {}
        self._saves: dict[str, tuple[int, int]] = {}
        self._fetches: dict[int, Fetch] = {}
        self._heard: list[int] = []
        self._step = 0
        self._slots = 0

    def __len__(self) -> int:
        return len(self._entries)

    def slots(self) -> dict[str, int]:
        """Returns the slot of each item, also of those whose report is still to come."""
        return {identifier: entry.slot for identifier, entry in self._entries.items()}

    def promise(self, identifier: str, rows: int) -> bool:
        """Says whether ``allocate`` would load the item, which then stays until the step ends.

        Args:
            identifier: What is in the item, by name.
            rows: How many rows it must have. Under an identifier that a client chose, another
                request may have brought another item.
        """
        entry = self._entries.get(identifier)
        if entry is None or not entry.kept or entry.rows != rows:
            return False
        self._pinned.add(identifier)
        return True

    def fetch(self, identifier: str, kind: str, rows: int, key: int, deadline: float) -> int | None:
        """Has the workers fetch an item, if it's neither kept nor being encoded, and fits.

        Args:
            identifier: What is in the item, by name.
            kind: Of the item.
            rows: How many it must have.
            key: The store's.
            deadline: When ``give_up`` gives it up, in seconds.

        Returns:
            The slot that it will be in, also if it's being fetched already; None: it won't be.
        """
        entry = self._entries.get(identifier)
        if entry is None:
            entry = self._reserve(identifier, kind, rows)
            if entry is None:
                return None
            entry.deadline = deadline
            self._fetches[entry.slot] = Fetch(key, rows, entry.size)
        return entry.slot if entry.deadline is not None and entry.rows == rows else None

    def awaits(self, slot: int) -> bool:
        """Says whether an item is still being fetched into this slot."""
        identifier = self._unsettled.get(slot)
        return identifier is not None and self._entries[identifier].deadline is not None

    def give_up(self, now: float) -> None:
        """Drops the fetches whose deadline has come."""
        for identifier in list(self._unsettled.values()):
            deadline = self._entries[identifier].deadline
            if deadline is not None and deadline <= now:
                self._drop(identifier)

    def allocate(self, identifier: str, kind: str, rows: int) -> bool:
        """Takes note that the workers will have the item: loaded if it's kept, else encoded.

        An item to encode is kept afterwards if it fits beside those that can't be evicted.

        Returns:
            Whether it's loaded.
        """
        entry = self._entries.get(identifier)
        if entry is not None and entry.deadline is not None:  # it's encoded before it's fetched
            self._drop(identifier)
            entry = None
        if entry is not None and entry.rows != rows:
            if not entry.kept or identifier in self._pinned:
                return False
            self._drop(identifier)
            entry = None
        if entry is None:
            entry = self._reserve(identifier, kind, rows)
            if entry is None:
                return False
        self._entries.move_to_end(identifier)
        if entry.kept:
            self._pinned.add(identifier)
            self._loads[identifier] = entry.slot
        else:
            entry.step = self._step
            self._saves[identifier] = entry.slot, entry.size
        return entry.kept

    def refresh(self, identifiers: Iterable[str]) -> None:
        """Makes items the most recent ones: they were in use on the GPU until now."""
        for identifier in identifiers:
            if identifier in self._entries:
                self._entries.move_to_end(identifier)

    def plan(self) -> Plan:
        """Ends the step and returns what the workers do in it."""
        plan = Plan(
            self._step,
            tuple(self._evictions),
            self._loads,
            self._saves,
            self._fetches,
            tuple(self._heard),
        )
        self._pinned, self._loads, self._saves, self._fetches = set(), {}, {}, {}
        self._evictions, self._heard = [], []
        self._step += 1
        return plan

    def settle(self, step: int, sizes: Mapping[int, int | None]) -> None:
        """Takes note of what the workers did in a step.

        Args:
            step: The plan's. Steps come in order.
            sizes: The bytes of the tensor for each slot, where all workers had the same for it.
                They keep it if it fits in the slot. None: all have looked for it, and they
                disagree, or have none.
        """
        for slot, identifier in list(self._unsettled.items()):
            entry = self._entries[identifier]
            nbytes = sizes.get(slot)
            if nbytes is not None:
                self._learn(entry, nbytes)
            if nbytes is not None and taken(nbytes) <= entry.size:
                self.size += taken(nbytes) - entry.size
                entry.size, entry.kept = taken(nbytes), True
                del self._unsettled[slot]
                if entry.deadline is not None:
                    entry.deadline = None
                    self._heard.append(slot)
            elif entry.deadline is not None:
                if slot in sizes:
                    self._drop(identifier)
            elif entry.step <= step:  # no later step may still save it
                self._drop(identifier)

    def reset(self) -> None:
        """Forgets all items, since the weights have changed. The next plan evicts them."""
        for identifier in list(self._entries):
            self._drop(identifier)
        self._pinned, self._loads, self._saves = set(), {}, {}

    def check(self) -> None:
        """Checks that the index is consistent.

        Raises:
            AssertionError: It isn't.
        """
        entries = self._entries
        assert self.size == sum(each.size for each in entries.values()) <= self.max_size
        assert {e.slot: i for i, e in entries.items() if not e.kept} == self._unsettled
        assert len({e.slot for e in entries.values()}) == len(entries)
        assert all(entries[i].kept for i in self._pinned)
        assert self._loads.items() <= {i: entries[i].slot for i in self._pinned}.items()
        assert self._saves.items() <= {i: (e.slot, e.size) for i, e in entries.items()}.items()
        fetched = {e.slot for e in entries.values() if e.deadline is not None}
        assert self._fetches.keys() <= fetched <= self._unsettled.keys()
        assert not {e.slot for e in entries.values()} & set(self._evictions)

    def _reserve(self, identifier: str, kind: str, rows: int) -> _Entry | None:
        size = taken(rows * self._row_bytes.get(kind, self._default_row_bytes))
        if not self._make_room(size):
            return None
        entry = _Entry(self._slots, kind, rows, size, self._step)
        self._slots += 1
        self._entries[identifier] = entry
        self._unsettled[entry.slot] = identifier
        self.size += size
        return entry

    def _make_room(self, size: int) -> bool:
        """Evicts the least recent items, no more than needed; none if that isn't enough."""
        room = self.max_size - self.size
        if size <= room:
            return True
        if size > self.max_size:
            return False
        victims = []
        for identifier, entry in self._entries.items():
            if entry.kept and identifier not in self._pinned:
                victims.append(identifier)
                room += entry.size
                if size <= room:
                    break
        else:
            return False
        for identifier in victims:
            self._drop(identifier)
        return True

    def _drop(self, identifier: str) -> None:
        entry = self._entries.pop(identifier)
        self.size -= entry.size
        self._unsettled.pop(entry.slot, None)
        self._fetches.pop(entry.slot, None)
        self._evictions.append(entry.slot)

    def _learn(self, entry: _Entry, nbytes: int) -> None:
        """Corrects the guess upwards: encoders may be wider than the language model."""
        known = self._row_bytes.get(entry.kind, self._default_row_bytes)
        self._row_bytes[entry.kind] = max(known, -(-nbytes // max(entry.rows, 1)))
