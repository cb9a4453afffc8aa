"""The index that vLLM's scheduler keeps of its workers' host memory. Needs no vLLM."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from multimodal_cache.integrations._vllm_index import PAGE, Index, Plan, taken

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


Kept = tuple[str, int, int]  # identifier, rows, weights


class Traffic(RuleBasedStateMachine):
    """An index and two workers that do what it plans, and report it late."""

    def __init__(self) -> None:
        super().__init__()
        self.index = make(6)
        self.workers: list[dict[int, Kept]] = [{}, {}]
        self.weights = 0
        self.reports: deque[tuple[int, dict[int, int]]] = deque()
        self.widths: dict[int, int] = {}

    @rule(
        asked=st.lists(st.tuples(IDENTIFIERS, ROWS), max_size=4, unique_by=lambda item: item[0]),
        scheduled=st.integers(0, 4),
        freed=st.lists(IDENTIFIERS, max_size=2),
        broken=st.sets(st.tuples(st.integers(0, 1), IDENTIFIERS), max_size=2),
        rows_are_wider=st.booleans(),
    )
    def step(
        self,
        asked: list[tuple[str, int]],
        scheduled: int,
        freed: list[str],
        broken: set[tuple[int, str]],
        rows_are_wider: bool,
    ) -> None:
        answers = {each: self.index.promise(*each) for each in asked}
        here = sorted(asked[:scheduled], key=answers.__getitem__)  # those to encode first
        for identifier, rows in here:
            self.index.allocate(identifier, "image", rows)
        self.index.refresh(freed)
        self.index.check()
        plan = self.index.plan()
        assert all(plan.loads.get(i) is not None for i, rows in here if answers[i, rows])
        self.execute(plan, dict(here), broken, 2 if rows_are_wider else 1)

    def execute(
        self, plan: Plan, here: dict[str, int], broken: set[tuple[int, str]], width: int
    ) -> None:
        sizes = []
        for rank, memory in enumerate(self.workers):
            for slot in plan.evictions:
                memory.pop(slot, None)
            for identifier, slot in plan.loads.items():
                assert memory[slot] == (identifier, here[identifier], self.weights)
            seen = {}
            for identifier, (slot, limit) in plan.saves.items():
                nbytes = here[identifier] * PAGE * width
                if slot in memory:
                    seen[slot] = memory[slot][1] * PAGE * self.widths[slot]
                elif (rank, identifier) not in broken:
                    seen[slot] = nbytes
                    if nbytes <= limit:
                        memory[slot] = identifier, here[identifier], self.weights
                        self.widths[slot] = width
            sizes.append(seen)
            bytes_kept = sum(
                rows * PAGE * self.widths[slot] for slot, (_, rows, _) in memory.items()
            )
            assert bytes_kept <= self.index.max_size
        self.reports.append((plan.step, dict(sizes[0].items() & sizes[1].items())))

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
        while self.reports:
            self.hear()
        self.execute(self.index.plan(), {}, set(), 1)
        for memory in self.workers:
            kept = {identifier: slot for slot, (identifier, _, _) in memory.items()}
            assert kept == self.index.slots()


TestTraffic = Traffic.TestCase
