"""The store that vLLM's servers share, as its scheduler and its workers use it. Needs no vLLM."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from back_ends import Clock, MemoryStore
from servers import LIMIT, find_mooncake, find_valkey, running, valkey

from multimodal_cache.integrations import _vllm_store
from multimodal_cache.integrations._vllm_index import PAGE, Fetch, Index, Plan
from multimodal_cache.integrations._vllm_pages import Pages
from multimodal_cache.integrations._vllm_store import Client, Fetches, Item, key_of, open_store

CPU = torch.device("cpu")
A, B = Item("A", "image", 1), Item("B", "image", 1)


# Keys.


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    assert key_of("torch.bfloat16 3584", A) == 0x27DBCEBB6BF6E2BFD167A949D71B0A03


@pytest.mark.parametrize(
    "other",
    [
        ("m", Item("B", "image", 1)),
        ("m", Item("A", "video", 1)),
        ("m", Item("A", "image", 2)),
        ("n", Item("A", "image", 1)),
        ("mi", Item("A", "mage", 1)),
        ("m", Item("1A", "image", 1)),
    ],
)
def test_another_item_has_another_key(other: tuple[str, Item]) -> None:
    assert key_of("m", A) != key_of(*other)


# In the scheduler.


class Scheduler:
    """An index in which a row takes a page, and what is fetched for it."""

    def __init__(self, pages: int = 4) -> None:
        self.clock = Clock()
        self.index = Index(pages * PAGE, {}, PAGE)
        self.fetches = Fetches(self.index, "model", 2.0, self.clock)

    def must_wait(self, request: str, *items: Item) -> bool:
        return self.fetches.must_wait(request, items)

    def plan(self) -> Plan:
        self.fetches.end_step()
        self.index.check()
        return self.index.plan()

    def hear(self, **found: int | None) -> None:
        """Settles what is being fetched, by name."""
        slots = self.index.slots()
        self.index.settle(0, {slots[name]: nbytes for name, nbytes in found.items()})


def test_a_request_waits_until_all_that_it_needs_is_found_or_not() -> None:
    scheduler = Scheduler()
    assert scheduler.must_wait("one", A, B)
    assert scheduler.plan().fetches == {
        0: Fetch(key_of("model", A), 1, PAGE),
        1: Fetch(key_of("model", B), 1, PAGE),
    }
    scheduler.hear(A=PAGE)
    assert scheduler.must_wait("one")
    scheduler.hear(B=None)
    assert not scheduler.must_wait("one")
    assert scheduler.index.promise("A", 1)
    assert not scheduler.index.promise("B", 1)


def test_a_request_asks_once_and_a_later_one_again() -> None:
    scheduler = Scheduler()
    scheduler.must_wait("one", A)
    scheduler.plan()
    scheduler.hear(A=None)
    assert not scheduler.must_wait("one", A, B)
    assert scheduler.plan().fetches == {}
    assert scheduler.must_wait("two", A)
    assert not scheduler.must_wait("one", A)  # nor does it wait for another's
    assert len(scheduler.plan().fetches) == 1


def test_two_requests_wait_for_one_fetch() -> None:
    scheduler = Scheduler()
    assert [scheduler.must_wait(name, A) for name in ("one", "two")] == [True, True]
    assert len(scheduler.plan().fetches) == 1
    scheduler.hear(A=PAGE)
    assert [scheduler.must_wait(name, A) for name in ("one", "two")] == [False, False]


def test_a_request_waits_no_longer_than_the_patience() -> None:
    scheduler = Scheduler()
    scheduler.must_wait("one", A)
    scheduler.plan()
    scheduler.clock.now += 1.9
    scheduler.plan()
    assert scheduler.must_wait("one")
    scheduler.clock.now += 0.2
    scheduler.plan()
    assert not scheduler.must_wait("one")


def test_what_is_on_the_gpu_or_kept_is_not_asked_for() -> None:
    scheduler = Scheduler()
    scheduler.fetches.on_gpu = {"A"}
    scheduler.index.allocate("B", "image", 1)
    scheduler.index.settle(scheduler.plan().step, {0: PAGE})
    assert not scheduler.must_wait("one", A, B)
    assert scheduler.plan().fetches == {}


def test_what_a_request_needs_makes_no_room_for_the_rest_of_it() -> None:
    scheduler = Scheduler(pages=2)
    for item in (A, B):
        scheduler.index.allocate(*item)
        scheduler.index.settle(
            scheduler.plan().step, {scheduler.index.slots()[item.identifier]: PAGE}
        )
    assert scheduler.must_wait("one", Item("C", "image", 1), A)
    assert scheduler.index.promise("A", 1)


def test_what_has_no_room_is_not_waited_for() -> None:
    scheduler = Scheduler(pages=1)
    assert not scheduler.must_wait("one", Item("large", "image", 2))


def test_finished_requests_are_forgotten() -> None:
    scheduler = Scheduler()
    for name in ("one", "two"):
        scheduler.must_wait(name, A)
        scheduler.fetches.forget(name)
        scheduler.fetches.forget(name)
    assert scheduler.fetches._waits == {}


def test_what_is_encoded_is_offered_once() -> None:
    scheduler = Scheduler()
    scheduler.fetches.offer(A)
    assert scheduler.fetches.end_step() == {"A": key_of("model", A)}
    assert scheduler.fetches.end_step() == {}


def test_after_a_reset_nothing_is_asked_or_offered_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler()
    assert scheduler.must_wait("one", A)
    scheduler.fetches.offer(B)
    for _ in range(2):
        scheduler.index.reset()
        scheduler.fetches.reset()
    assert not scheduler.must_wait("one", A)
    assert not scheduler.must_wait("two", B)
    assert scheduler.fetches.end_step() == {}
    scheduler.fetches.offer(B)
    assert scheduler.fetches.end_step() == {}
    assert scheduler.plan().fetches == {}
    assert caplog.messages == [
        "the weights may have changed, and the store's namespace has not: the store is used no "
        "more; restart the server with another namespace"
    ]


# In a worker.


def rows(count: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(count * 4.0, device=device).view(count, 4)


def plan(
    fetches: dict[int, Fetch] | None = None,
    evictions: tuple[int, ...] = (),
    heard: tuple[int, ...] = (),
) -> Plan:
    return Plan(0, evictions, {}, {}, fetches or {}, heard)


class Worker:
    """A client without threads: it fetches when it is told to."""

    def __init__(self, device: torch.device = CPU, *, offers: bool = True) -> None:
        self.store = MemoryStore()
        self.pages = Pages()
        self.client = Client(self.store, device, offers=offers, threads=0)

    def has(self, key: int, embedding: torch.Tensor) -> None:
        assert self.store.offer(key, embedding)
        self.store.written()

    def fetch(self) -> None:
        self.client._jobs.put(None)
        _vllm_store._fetch_all(
            self.store, self.client._jobs, self.client._wanted, self.client._found
        )

    def step(self, plan: Plan) -> dict[int, int | None]:
        self.pages.evict(plan.evictions)
        self.client.begin_step(plan)
        self.fetch()
        self.client.end_step(self.pages)
        return dict(self.client.sizes)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.client.close()


def test_what_is_found_is_kept_and_reported_until_it_is_heard(worker: Worker) -> None:
    worker.has(7, rows(2))
    assert worker.step(plan({0: Fetch(7, 2, PAGE), 1: Fetch(8, 1, PAGE)})) == {0: 32, 1: None}
    assert torch.equal(worker.pages.load(0), rows(2))
    assert worker.step(plan()) == {0: 32, 1: None}
    assert worker.step(plan(heard=(0,), evictions=(1,))) == {}
    assert torch.equal(worker.pages.load(0), rows(2))


@pytest.mark.parametrize("wrong", [rows(3), rows(2)[0, 0]], ids=["another number", "no rows"])
def test_what_has_not_the_right_rows_is_as_not_found(wrong: torch.Tensor, worker: Worker) -> None:
    worker.has(7, wrong)
    assert worker.step(plan({0: Fetch(7, 2, PAGE)})) == {0: None}
    assert worker.pages.size == 0


def test_what_takes_more_than_its_limit_is_reported_and_not_kept(worker: Worker) -> None:
    worker.has(7, rows(PAGE // 8))
    assert worker.step(plan({0: Fetch(7, PAGE // 8, PAGE)})) == {0: 2 * PAGE}
    assert worker.pages.size == 0


def test_what_comes_after_its_slot_was_dropped_goes_nowhere(worker: Worker) -> None:
    worker.has(7, rows(2))
    worker.client.begin_step(plan({0: Fetch(7, 2, PAGE)}))
    worker.fetch()
    assert worker.step(plan(evictions=(0,))) == {}
    assert worker.pages.size == 0


def test_what_was_dropped_before_its_turn_is_not_asked_for(worker: Worker) -> None:
    worker.client.begin_step(plan({0: Fetch(7, 2, PAGE)}))
    assert worker.step(plan(evictions=(0,))) == {}
    assert worker.store.reads == []


def test_what_is_fetched_is_loaded_to_the_device_where_it_is_used(device: str) -> None:
    worker = Worker(torch.device(device))
    worker.has(7, rows(2))
    worker.step(plan({0: Fetch(7, 2, PAGE)}))
    assert torch.equal(worker.pages.load(0), rows(2, device))
    worker.client.close()


def test_what_is_offered_is_a_copy_of_that_item_alone(worker: Worker, device: str) -> None:
    with torch.inference_mode():  # as in vLLM
        batch = rows(100, device)
        worker.client.offer(7, batch[:2])
        assert worker.store._writer._bytes <= 32  # of what waits
        batch.zero_()
    worker.store.written()
    assert torch.equal(worker.store.fetch([7])[7], rows(2))


def test_only_one_rank_offers() -> None:
    worker = Worker(offers=False)
    worker.client.offer(7, rows(2))
    worker.client.close()
    assert worker.store.writes == []


def test_without_memory_nothing_is_offered(
    worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    worker.client.offer(7, rows(2))
    assert caplog.messages == ["no memory to offer an item of 32 bytes: out of memory"]


def test_threads_fetch_several_at_once_and_end_when_it_is_closed() -> None:
    store, pages = MemoryStore(), Pages()
    for key in range(3):
        store.offer(key, rows(2))
    store.written()
    client = Client(store, CPU, offers=True)
    store.on_get = store.hang
    client.begin_step(plan({slot: Fetch(slot, 2, PAGE) for slot in range(3)}))
    for _ in range(3):
        assert store.hanging.acquire(timeout=LIMIT)
    client.end_step(pages)
    assert client.sizes == {}
    store.gate.set()
    found = [client._found.get(timeout=LIMIT) for _ in range(3)]
    assert sorted(slot for slot, _ in found) == [0, 1, 2]
    client.close()
    client.close()
    assert store.fetch([1]) == {}


def test_without_its_client_a_store_is_closed() -> None:
    store = MemoryStore()
    assert store.offer(7, rows(2))
    store.written()
    client = Client(store, CPU, offers=True)
    assert list(store.fetch([7])) == [7]
    del client
    gc.collect()
    assert store.fetch([7]) == {}


def test_a_process_that_closes_nothing_ends_with_its_own_status() -> None:
    code = """
        import sys
        sys.path[:0] = {folders}
        import torch
        from back_ends import MemoryStore
        from multimodal_cache.integrations._vllm_index import Fetch, Plan
        from multimodal_cache.integrations._vllm_store import Client
        store = MemoryStore(timeout=0.2)
        client = Client(store, torch.device("cpu"), offers=True)
        store.on_get = store.hang
        client.begin_step(Plan(0, (), {{}}, {{}}, {{n: Fetch(n, 1, 99) for n in range(9)}}, ()))
        assert store.hanging.acquire(timeout=60)
        sys.exit(7)
    """
    folders = [str(Path(each).parent) for each in (__file__, servers.__file__)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).format(folders=folders)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert done.returncode == 7, done.stderr


# Which store.


@pytest.mark.skipif(find_valkey() is None, reason="there is no valkey-server")
def test_a_url_is_a_store_in_redis(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="of the extra redis")
    with running(valkey(tmp_path)) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with open_store(url, "model", {"timeout": LIMIT}) as store:
            client = store._client  # type: ignore[attr-defined]
            assert store.offer(7, rows(2))
            assert store.flush(LIMIT)
        options = client.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == (120, 120)
        assert options["retry"].get_retries() == 0
        with open_store(url, "model", {"timeout": LIMIT}) as store:
            (found,) = store.fetch([7]).values()
            assert torch.equal(found, rows(2))
            assert found.device == CPU
        with open_store(url, "another", {"timeout": LIMIT}) as store:
            assert store.fetch([7]) == {}


@pytest.mark.skipif(find_mooncake() is None, reason="there is no Mooncake")
def test_an_object_is_a_store_in_mooncake() -> None:
    code = """
        import os, sys, traceback
        sys.path[:0] = {folders}
        import torch
        from servers import LIMIT, mooncake_master
        from multimodal_cache.integrations._vllm_store import open_store
        master = mooncake_master()
        status = 1
        try:
            settings = {{
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 64 * 2**20,
                "local_buffer_size": 64 * 2**20,
                "protocol": "tcp",
                "master_server_addr": f"127.0.0.1:{{master.port}}",
            }}
            store = open_store(settings, "model", {{"timeout": LIMIT}})
            assert store.offer(7, torch.ones(2, 3))
            assert store.flush(LIMIT)
            assert torch.equal(store.fetch([7])[7], torch.ones(2, 3))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            master.kill()
            sys.stdout.flush()
            os._exit(status)
    """
    folders = [str(Path(each).parent) for each in (__file__, servers.__file__)]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).format(folders=folders)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Engine:
    """In the place of ``MooncakeDistributedStore``."""

    code = 0
    get = is_exist = upsert = None

    def setup(self, settings: dict[str, Any]) -> int:
        assert settings == {"protocol": "tcp"}
        return self.code

    def __getattribute__(self, name: str) -> Any:
        return print if name in ("get", "is_exist", "upsert") else super().__getattribute__(name)


@pytest.mark.parametrize("code", [0, -1])
def test_mooncake_is_set_up_as_told(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("mooncake.store")
    module.MooncakeDistributedStore = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(Engine, "code", code)
    if code:
        with pytest.raises(RuntimeError, match="Mooncake's setup failed with code -1"):
            open_store({"protocol": "tcp"}, "model", {})
    else:
        open_store({"protocol": "tcp"}, "model", {}).close()


@pytest.mark.parametrize(
    ("missing", "settings", "message"),
    [
        ("redis", "redis://localhost", r'needs "multimodal-cache\[redis\]"'),
        ("mooncake.store", {"protocol": "tcp"}, "needs mooncake-transfer-engine"),
    ],
)
def test_without_its_client_a_store_is_one_clear_error(
    missing: str, settings: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=message):
        open_store(settings, "model", {})
