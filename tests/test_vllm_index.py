"""The index that vLLM's scheduler keeps of its workers' host memory. Needs no vLLM."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from multimodal_cache.integrations._vllm_index import PAGE, Fetch, Index, Plan, taken

IDENTIFIERS = st.sampled_from("ABCDEF")
ROWS = st.integers(0, 3)


def make(pages: int = 4) -> Index:
    """An index in which a row of an image takes a page."""
    return Index(pages * PAGE, {"image": PAGE}, 2 * PAGE)


def keep(index: Index, identifier: str, rows: int = 1) -> None:
    """One step that encodes an item, and its report."""
    index.allocate(identifier, "image", rows)
    plan = index.plan()
    index.settle(plan.step, {slot: rows * PAGE for slot, _ in plan.saves.values()})
    index.check()


def kept(index: Index, *identifiers: str, rows: int = 1) -> list[bool]:
    found = [index.promise(each, rows) for each in identifiers]
    index.plan()
    return found


def test_memory_is_taken_in_whole_pages() -> None:
    assert [taken(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]


def test_an_item_is_promised_once_it_is_reported_and_then_loaded() -> None:
    index = make()
    index.allocate("A", "image", 1)
    assert not index.promise("A", 1)
    plan = index.plan()
    assert (plan.loads, plan.saves) == ({}, {"A": (0, PAGE)})
    assert not index.promise("A", 1)
    index.settle(plan.step, {0: PAGE})
    assert index.promise("A", 1)
    index.allocate("A", "image", 1)
    plan = index.plan()
    assert (plan.loads, plan.saves, plan.evictions) == ({"A": 0}, {}, ())
    index.check()


def test_an_item_that_some_worker_does_not_keep_is_dropped_by_all() -> None:
    index = make()
    index.allocate("A", "image", 1)
    index.settle(index.plan().step, {})
    assert (len(index), index.size) == (0, 0)
    assert index.plan().evictions == (0,)


def test_an_item_that_is_encoded_again_before_its_report_waits_for_the_later_one() -> None:
    index = make()
    plans = []
    for _ in range(2):
        index.allocate("A", "image", 1)
        plans.append(index.plan())
    assert plans[0].saves == plans[1].saves
    index.settle(plans[0].step, {})
    assert len(index) == 1
    index.settle(plans[1].step, {0: PAGE})
    assert kept(index, "A") == [True]


def test_what_was_promised_is_not_evicted_in_the_same_step() -> None:
    index = make(2)
    keep(index, "A")
    keep(index, "B")
    assert index.promise("A", 1)
    index.allocate("C", "image", 1)  # to encode first, as vLLM does
    index.allocate("A", "image", 1)
    plan = index.plan()
    assert plan.loads == {"A": 0}
    assert plan.evictions == (1,)
    index.allocate("D", "image", 1)
    assert index.plan().evictions == (0,)


def test_what_cannot_fit_is_refused_before_anything_is_evicted() -> None:
    index = make(3)
    keep(index, "A")
    keep(index, "B")
    index.allocate("too large", "image", 4)
    assert index.promise("A", 1)
    index.allocate("too large beside A", "image", 3)
    index.allocate("fits", "image", 1)
    plan = index.plan()
    assert (plan.evictions, list(plan.saves)) == ((), ["fits"])
    index.allocate("too large beside what is not settled", "image", 3)
    plan = index.plan()
    assert (plan.evictions, plan.saves) == ((), {})
    assert kept(index, "A", "B") == [True, True]


def test_no_more_is_evicted_than_needed_and_the_least_recent_first() -> None:
    index = make(3)
    for each in "ABC":
        keep(index, each)
    keep(index, "A")  # a load
    index.refresh(["B", "unknown"])  # on the GPU until now
    index.allocate("D", "image", 1)
    assert index.plan().evictions == (2,)
    assert kept(index, "A", "B", "C") == [True, True, False]


def test_a_reset_forgets_all_and_late_reports_change_nothing() -> None:
    index = make()
    keep(index, "A")
    index.allocate("B", "image", 1)
    plan = index.plan()
    assert index.promise("A", 1)
    index.reset()
    index.check()
    assert (len(index), index.size) == (0, 0)
    index.allocate("B", "image", 1)
    later = index.plan()
    assert later.evictions == (0, 1)
    index.settle(plan.step, {1: PAGE})
    assert kept(index, "A", "B") == [False, False]
    index.settle(later.step, {2: PAGE})
    assert kept(index, "B") == [True]


def test_an_item_with_other_rows_under_the_same_identifier_takes_its_place() -> None:
    index = make()
    keep(index, "uuid", rows=1)
    assert not index.promise("uuid", 2)
    keep(index, "uuid", rows=2)
    assert kept(index, "uuid", rows=1) == [False]
    assert kept(index, "uuid", rows=2) == [True]


def test_but_not_while_the_other_one_is_promised_or_awaited() -> None:
    index = make()
    keep(index, "uuid", rows=1)
    assert index.promise("uuid", 1)
    keep(index, "uuid", rows=2)
    assert kept(index, "uuid", rows=1) == [True]
    index.allocate("new", "image", 1)
    index.allocate("new", "image", 2)
    assert index.plan().saves == {"new": (1, PAGE)}


def test_bytes_follow_what_the_workers_report() -> None:
    index = make(8)
    index.allocate("narrower", "image", 3)
    index.allocate("wider", "video", 1)
    plan = index.plan()
    assert plan.saves == {"narrower": (0, 3 * PAGE), "wider": (1, 2 * PAGE)}
    index.settle(plan.step, {0: PAGE + 1, 1: 2 * PAGE + 1})
    index.check()
    assert index.size == 2 * PAGE
    assert kept(index, "narrower", rows=3) == [True]
    index.allocate("wider", "video", 1)
    assert index.plan().saves == {"wider": (2, 3 * PAGE)}


# What is fetched from a store.


def fetch(index: Index, identifier: str, rows: int = 1, deadline: float = 1.0) -> int | None:
    slot = index.fetch(identifier, "image", rows, key=7, deadline=deadline)
    index.check()
    return slot


def test_what_all_workers_have_fetched_is_kept_and_heard_of_once() -> None:
    index = make()
    assert fetch(index, "A", rows=2) == 0
    plan = index.plan()
    assert plan.fetches == {0: Fetch(7, 2, 2 * PAGE)}
    for _ in range(2):  # it may take some steps
        index.settle(plan.step, {})
        assert index.awaits(0)
        assert not index.promise("A", 2)
        plan = index.plan()
        assert (plan.fetches, plan.heard) == ({}, ())
    index.settle(plan.step, {0: 2 * PAGE})
    assert not index.awaits(0)
    assert kept(index, "A", rows=2) == [True]
    index.settle(plan.step + 1, {0: 2 * PAGE})  # reported again, before they knew
    index.check()
    assert index.plan().heard == ()


def test_the_next_plan_says_what_was_heard_of() -> None:
    index = make()
    fetch(index, "A")
    index.settle(index.plan().step, {0: PAGE})
    plan = index.plan()
    assert (plan.heard, plan.evictions) == ((0,), ())


@pytest.mark.parametrize("nbytes", [None, PAGE + 1], ids=["not found", "too large"])
def test_what_workers_have_not_or_could_not_keep_is_dropped(nbytes: int | None) -> None:
    index = make()
    fetch(index, "A")
    index.settle(index.plan().step, {0: nbytes})
    assert not index.awaits(0)
    assert (len(index), index.size) == (0, 0)
    plan = index.plan()
    assert (plan.heard, plan.evictions) == ((), (0,))


def test_what_is_fetched_wider_than_expected_fits_the_next_time() -> None:
    index = make()
    fetch(index, "A")
    index.settle(index.plan().step, {0: 2 * PAGE})
    fetch(index, "A")
    assert index.plan().fetches == {1: Fetch(7, 1, 2 * PAGE)}


def test_an_item_is_fetched_once_for_all_who_want_it() -> None:
    index = make()
    assert fetch(index, "A") == 0
    index.plan()
    assert fetch(index, "A") == 0
    assert fetch(index, "A", rows=2) is None  # another item, which will be encoded
    assert index.plan().fetches == {}


def test_what_is_kept_or_being_encoded_is_not_fetched() -> None:
    index = make()
    keep(index, "A")
    index.allocate("B", "image", 1)
    assert [fetch(index, "A"), fetch(index, "A", rows=2), fetch(index, "B")] == [None, None, None]
    assert kept(index, "A") == [True]


def test_what_has_no_room_is_not_fetched() -> None:
    index = make(3)
    keep(index, "A")
    assert fetch(index, "too large", rows=4) is None
    assert fetch(index, "B", rows=2) == 1
    assert fetch(index, "C", rows=2) is None  # what is being fetched isn't evicted for it
    assert fetch(index, "D") == 2  # but what is kept is
    assert index.plan().evictions == (0,)


def test_a_fetch_that_takes_too_long_is_given_up_and_its_answer_ignored() -> None:
    index = make()
    fetch(index, "A", deadline=1.0)
    fetch(index, "B", deadline=2.0)
    plan = index.plan()
    index.give_up(0.9)
    assert index.awaits(0)
    index.give_up(1.0)
    index.check()
    assert (index.awaits(0), index.awaits(1)) == (False, True)
    later = index.plan()
    assert later.evictions == (0,)
    index.settle(plan.step, {0: PAGE, 1: PAGE})
    assert kept(index, "A", "B") == [False, True]
    index.give_up(2.0)  # it isn't fetched any more
    assert kept(index, "B") == [True]


def test_what_was_given_up_before_its_plan_is_in_none() -> None:
    index = make()
    fetch(index, "A", deadline=1.0)
    index.give_up(1.0)
    assert index.plan().fetches == {}


def test_an_item_that_is_encoded_before_it_is_fetched_has_a_slot_of_its_own() -> None:
    index = make(1)
    fetch(index, "A")
    plan = index.plan()
    assert not index.allocate("A", "image", 1)
    index.check()
    later = index.plan()
    assert (later.evictions, later.saves) == ((0,), {"A": (1, PAGE)})
    index.settle(plan.step, {0: PAGE})
    assert kept(index, "A") == [False]
    index.settle(later.step, {1: PAGE})
    assert kept(index, "A") == [True]


def test_a_reset_drops_what_is_being_fetched() -> None:
    index = make()
    fetch(index, "A")
    plan = index.plan()
    fetch(index, "B")
    index.reset()
    index.check()
    assert not index.awaits(0)
    later = index.plan()
    assert (later.fetches, later.evictions) == ({}, (0, 1))
    index.settle(plan.step, {0: PAGE})
    assert kept(index, "A") == [False]


def test_an_allocation_says_whether_it_loads() -> None:
    index = make(1)
    assert not index.allocate("A", "image", 1)
    index.settle(index.plan().step, {0: PAGE})
    assert index.allocate("A", "image", 1)
    assert not index.allocate("A", "image", 2)
    assert not index.allocate("too large", "image", 2)


def test_check_finds_what_is_wrong() -> None:
    index = make()
    keep(index, "A")
    index.size += 1
    with pytest.raises(AssertionError):
        index.check()


def test_a_plan_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().plan().step = 1  # type: ignore[misc]


def test_without_vllm_the_connector_is_one_clear_error() -> None:
    code = "import sys; sys.modules['vllm'] = None; import multimodal_cache.integrations.vllm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *_, last = done.stderr.splitlines()
    assert last.startswith(
        "ImportError: multimodal_cache.integrations.vllm needs vLLM 0.30 or newer"
    )


Kept = tuple[str, int, int, int]  # identifier, rows, weights, width


class Worker:
    """Does what is planned, and reports it."""

    def __init__(self) -> None:
        self.memory: dict[int, Kept] = {}
        self.wanted: dict[int, tuple[Fetch, str]] = {}
        self.answers: dict[int, int | None] = {}

    def begin(self, plan: Plan, names: dict[int, str]) -> None:
        for slot in plan.evictions:
            self.memory.pop(slot, None)
        for slot in (*plan.evictions, *plan.heard):
            self.wanted.pop(slot, None)
            self.answers.pop(slot, None)
        self.wanted |= {slot: (fetch, names[slot]) for slot, fetch in plan.fetches.items()}

    def save(self, slot: int, item: Kept, limit: int) -> int:
        _, rows, _, width = self.memory.get(slot, item)
        if rows * width * PAGE <= limit:
            self.memory.setdefault(slot, item)
        return rows * width * PAGE

    def find(self, weights: int, width: int | None) -> None:
        """Answers the fetch that was begun first: with an item, or None."""
        if self.wanted:
            slot = min(self.wanted)
            fetch, identifier = self.wanted.pop(slot)
            item = None if width is None else (identifier, fetch.rows, weights, width)
            self.answers[slot] = None if item is None else self.save(slot, item, fetch.limit)

    @property
    def size(self) -> int:
        return sum(rows * width * PAGE for _, rows, _, width in self.memory.values())


class Traffic(RuleBasedStateMachine):
    """An index and two workers that do what it plans, and report it late."""

    def __init__(self) -> None:
        super().__init__()
        self.index = make(6)
        self.workers = [Worker(), Worker()]
        self.weights = 0
        self.now = 0.0
        self.names: dict[int, str] = {}
        self.reports: deque[tuple[int, dict[int, int | None]]] = deque()

    @rule(
        fetched=st.lists(st.tuples(IDENTIFIERS, ROWS), max_size=3),
        asked=st.lists(st.tuples(IDENTIFIERS, ROWS), max_size=4, unique_by=lambda item: item[0]),
        scheduled=st.integers(0, 4),
        freed=st.lists(IDENTIFIERS, max_size=2),
        broken=st.sets(st.tuples(st.integers(0, 1), IDENTIFIERS), max_size=2),
        rows_are_wider=st.booleans(),
    )
    def step(
        self,
        fetched: list[tuple[str, int]],
        asked: list[tuple[str, int]],
        scheduled: int,
        freed: list[str],
        broken: set[tuple[int, str]],
        rows_are_wider: bool,
    ) -> None:
        for identifier, rows in fetched:
            slot = self.index.fetch(identifier, "image", rows, 7, self.now + 2)
            if slot is not None:
                assert self.names.setdefault(slot, identifier) == identifier
                assert self.index.awaits(slot)
        answers = {each: self.index.promise(*each) for each in asked}
        here = sorted(asked[:scheduled], key=answers.__getitem__)  # those to encode first
        for identifier, rows in here:
            assert self.index.allocate(identifier, "image", rows) == answers[identifier, rows]
        self.index.refresh(freed)
        self.index.give_up(self.now)
        self.index.check()
        plan = self.index.plan()
        assert all(plan.loads.get(i) is not None for i, rows in here if answers[i, rows])
        self.execute(plan, dict(here), broken, 2 if rows_are_wider else 1)

    def execute(
        self, plan: Plan, here: dict[str, int], broken: set[tuple[int, str]], width: int
    ) -> None:
        reports = []
        for rank, worker in enumerate(self.workers):
            worker.begin(plan, self.names)
            for identifier, slot in plan.loads.items():
                assert worker.memory[slot][:3] == (identifier, here[identifier], self.weights)
            seen = {}
            for identifier, (slot, limit) in plan.saves.items():
                if slot in worker.memory or (rank, identifier) not in broken:
                    item = identifier, here[identifier], self.weights, width
                    seen[slot] = worker.save(slot, item, limit)
            assert worker.size <= self.index.max_size
            reports.append(seen | worker.answers)
        one, other = reports
        agreed = {
            slot: one[slot] if one[slot] == other[slot] else None
            for slot in one.keys() & other.keys()
        }
        self.reports.append((plan.step, agreed))

    @rule(rank=st.integers(0, 1), width=st.sampled_from([None, 1, 1, 2]))
    def find(self, rank: int, width: int | None) -> None:
        self.workers[rank].find(self.weights, width)

    @rule()
    def wait(self) -> None:
        self.now += 1

    @precondition(lambda self: self.reports)
    @rule()
    def hear(self) -> None:
        self.index.settle(*self.reports.popleft())

    @rule()
    def update_weights(self) -> None:
        self.weights += 1
        self.index.reset()

    @invariant()
    def is_consistent(self) -> None:
        self.index.check()

    def teardown(self) -> None:
        self.index.give_up(self.now + 2)
        while self.reports:
            self.hear()
        self.execute(self.index.plan(), {}, set(), 1)
        self.hear()
        self.execute(self.index.plan(), {}, set(), 1)
        for worker in self.workers:
            kept = {identifier: slot for slot, (identifier, *_) in worker.memory.items()}
            assert kept == self.index.slots()
            assert (worker.wanted, worker.answers) == ({}, {})


TestTraffic = Traffic.TestCase
