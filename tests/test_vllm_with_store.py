"""The connector with a store behind it, in vLLM's own scheduler and workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from back_ends import Clock, MemoryStore
from servers import LIMIT, find_valkey, running, valkey

pytest.importorskip("vllm", reason="vLLM is not installed")

import functools

from vllm_checks import (  # needs vLLM
    ROWS,
    answer,
    check,
    check_end,
    index_of,
    pages_of,
    random_traffic,
)
from vllm_engine import HIDDEN, Engine, VllmConfig, configuration, encoded

from multimodal_cache.integrations import _vllm_store, vllm
from multimodal_cache.integrations._vllm_index import PAGE
from multimodal_cache.integrations._vllm_store import Client, Item, key_of
from multimodal_cache.integrations.vllm import (
    ECConnectorRole,
    MultimodalCacheConnector,
)

STORE = {"store": "redis://localhost", "namespace": "model v1"}
TICK = 0.001  # seconds that a step takes
PATIENCE = 2.0  # seconds: the time-out, and one for the report
MakeEngine = Callable[..., "StoreEngine"]


class StoreEngine(Engine):
    """An engine whose workers fetch when the test lets them.

    Attributes:
        clock: The scheduler's.
        lets: Says of a rank whether it fetches, before a step, all that it was told to.
    """

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.clock = Clock()
        self.fetches._clock = self.clock
        self.lets: Callable[[int], bool] = lambda rank: True

    @property
    def fetches(self) -> Any:
        return self.scheduler.ec_connector._fetches

    @property
    def clients(self) -> list[Any]:
        return [worker.connector.ec_connector._client for worker in self.workers]

    @property
    def stores(self) -> list[MemoryStore]:
        return [client._store for client in self.clients]

    def step(self) -> Any:
        self.clock.now += TICK
        for rank, client in enumerate(self.clients):
            if self.lets(rank):
                client._jobs.put(None)
                _vllm_store._fetch_all(client._store, client._jobs, client._wanted, client._found)
        metadata = super().step()
        self.seen.update(fetches=len(metadata.plan.fetches), offers=len(metadata.offers))
        return metadata

    def run(self, steps: int = 10_000) -> None:
        super().run(steps)
        lets, self.lets = self.lets, lambda rank: True
        for _ in range(4):  # what requests that are gone have asked for
            self.step()
            while self.unheard:
                self.hear()
        self.lets = lets

    def written(self) -> None:
        for store in self.stores:
            store.written()


@pytest.fixture
def values() -> dict[str, Any]:
    """What is in the store."""
    return {}


@pytest.fixture
def make(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Makes servers that share a store; checks them at the end."""
    engines = []

    def memory(settings: str, namespace: str, options: dict[str, Any]) -> MemoryStore:
        store = MemoryStore(namespace=namespace, **options)
        store.values = values
        return store

    monkeypatch.setattr(vllm, "open_store", memory)
    monkeypatch.setattr(vllm, "Client", functools.partial(Client, threads=0))

    def new(
        *, pages: int = 4, cache_size: int = 16, settings: Any = STORE, **options: Any
    ) -> StoreEngine:
        config = configuration(tmp_path, settings={"max_size": pages * PAGE, **settings}, **options)
        with monkeypatch.context() as context:  # 0.30 has none on the CPU
            context.setattr(VllmConfig, "use_v2_model_runner", True, raising=False)
            engine = StoreEngine(
                config, asynchronous=options.get("asynchronous", False), cache_size=cache_size
            )
        engines.append(engine)
        return engine

    yield new
    for engine in engines:
        check_end(engine)
        assert engine.fetches._waits == {}
        for client in engine.clients:
            assert (client._wanted, client.sizes) == ({}, {})
        for worker in engine.workers:
            worker.connector.ec_connector.shutdown()


def put(engine: StoreEngine, content: int, rows: int, tensor: torch.Tensor) -> None:
    """Has the store have a tensor for an image."""
    key = key_of(f"torch.float32 {HIDDEN}", Item(f"{content}x{rows}", "image", rows))
    assert engine.stores[0].offer(key, tensor)
    engine.written()


both_ways = pytest.mark.parametrize(
    "asynchronous", [False, True], ids=["synchronous", "asynchronous"]
)
IMAGES = [(content, ROWS) for content in range(4)]


# What it is for.


@pytest.mark.parametrize("ranks", [1, 2])
@both_ways
def test_a_server_that_has_just_started_encodes_nothing_that_another_has_encoded(
    asynchronous: bool, ranks: int, make: MakeEngine
) -> None:
    one = make(asynchronous=asynchronous, ranks=ranks)
    for image in IMAGES:
        answer(one, image)
    one.written()
    assert [len(store.writes) for store in one.stores] == [4, 0][:ranks]
    other = make(asynchronous=asynchronous, ranks=ranks)
    for image in IMAGES * 2:
        answer(other, image)
    assert [worker.model.encoded for worker in other.workers] == [[]] * ranks
    assert other.seen["offers"] == 0
    other.written()
    assert [store.writes for store in other.stores] == [[]] * ranks  # nor offers what it fetched


def test_requests_that_wait_keep_the_engine_going_and_no_other_request_waiting(
    make: MakeEngine,
) -> None:
    engine = make()
    engine.lets = lambda rank: False
    name = engine.ask(*IMAGES[:2])
    engine.step()
    assert engine.scheduler.has_requests()
    text = engine.ask(text=5, tokens=3)
    for _ in range(5):
        engine.step()
    assert text in engine.finished
    assert name not in engine.finished
    assert engine.encoded == []
    engine.run()
    assert name in engine.finished


def test_two_requests_ask_once_for_an_image(make: MakeEngine) -> None:
    engine = make()
    for _ in range(2):
        engine.ask(IMAGES[0])
    engine.run()
    assert (engine.seen["fetches"], engine.encoded) == (1, [0])


def test_what_is_on_the_gpu_is_not_asked_for(make: MakeEngine) -> None:
    engine = make()
    answer(engine, IMAGES[0])
    index_of(engine).reset()
    assert answer(engine, IMAGES[0]) == []
    assert engine.seen["fetches"] == 1


def test_what_is_computed_is_not_asked_for(make: MakeEngine) -> None:
    engine = make()
    request = engine.requests[engine.ask(IMAGES[0], text=2)]
    connector = engine.scheduler.ec_connector
    assert connector.ensure_cache_available(request, 2 + ROWS)
    connector.request_finished(request)
    assert not connector.ensure_cache_available(request, 2 + ROWS - 1)


def test_what_the_index_has_no_room_for_is_encoded_and_offered(make: MakeEngine) -> None:
    one = make(pages=1)
    assert answer(one, (0, 2 * ROWS)) == [0]
    assert one.seen["offers"] == 1
    one.written()
    other = make(pages=2)
    assert answer(other, (1, 1)) == [1]  # which tells vLLM 0.30 how wide the rows are
    assert answer(other, (0, 2 * ROWS)) == []


def test_what_is_preempted_or_needs_several_steps_is_answered(make: MakeEngine) -> None:
    for engine in (make(tokens=16, asynchronous=True), make(tokens=16, asynchronous=True)):
        for _ in range(2):
            answer(engine, *((content, ROWS + 4) for content in range(3)), tokens=3)
        engine.written()


# (1) Yes only for what every rank has reported.


@both_ways
def test_ranks_may_find_it_in_different_steps(asynchronous: bool, make: MakeEngine) -> None:
    answer(make(), IMAGES[0])
    engine = make(ranks=2, asynchronous=asynchronous)
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    name = engine.ask(IMAGES[0])
    engine.lets = lambda rank: rank == 0
    for _ in range(5):
        engine.step()
        check(engine)
    assert engine.clients[0].sizes
    assert name not in engine.finished
    engine.lets = lambda rank: True
    engine.run()
    assert engine.encoded == []


@pytest.mark.parametrize("loser", [0, 1])
def test_what_one_rank_does_not_find_all_encode(loser: int, make: MakeEngine) -> None:
    engine = make(ranks=2)
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    engine.stores[loser].on_get = lambda name: None
    answer(engine, IMAGES[0])
    assert [worker.model.encoded for worker in engine.workers] == [[0], [0]]


def test_what_one_rank_has_no_memory_for_all_encode(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(ranks=2)
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    with monkeypatch.context() as context:
        context.setattr(pages_of(engine.workers[1]), "save", lambda *_: None)
        answer(engine, IMAGES[0])
    assert [worker.model.encoded for worker in engine.workers] == [[0], [0]]


def test_what_has_other_rows_is_as_not_found(make: MakeEngine) -> None:
    engine = make()
    put(engine, 0, ROWS, encoded(0, ROWS - 1, 0))
    assert answer(engine, IMAGES[0]) == [0]


def test_another_image_under_a_known_identifier_is_another_key(make: MakeEngine) -> None:
    one = make()
    answer(one, (0, ROWS, "uuid"))
    one.written()
    assert answer(make(), (2, ROWS // 2, "uuid")) == [2]
    assert answer(make(), (0, ROWS, "uuid")) == []


# What takes too long.


@both_ways
def test_no_request_waits_longer_than_told_and_late_answers_go_nowhere(
    asynchronous: bool, make: MakeEngine
) -> None:
    engine = make(asynchronous=asynchronous)
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    engine.lets = lambda rank: False
    before = engine.clock.now
    name = engine.ask(IMAGES[0])
    while name not in engine.finished:
        engine.step()
    assert PATIENCE <= engine.clock.now - before <= PATIENCE + 10 * TICK
    assert engine.encoded == [0]
    check_end(engine)
    assert engine.stores[0].reads == []  # it wasn't wanted any more


def test_an_answer_that_comes_after_its_deadline_is_dropped(make: MakeEngine) -> None:
    engine = make()
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    engine.ask(IMAGES[0])
    engine.step()
    client = engine.clients[0]
    (slot,) = client._wanted
    found = engine.stores[0].fetch([client._wanted[slot].key]).popitem()[1]
    engine.clock.now += PATIENCE
    engine.step()
    engine.step()  # the one that evicts the slot, and encodes
    client._found.put((slot, found))
    engine.step()
    assert client.sizes == {}
    assert engine.encoded == [0]


@both_ways
def test_with_a_dead_store_all_is_answered_at_once(asynchronous: bool, make: MakeEngine) -> None:
    engine = make(asynchronous=asynchronous)

    def fail(*_: object) -> None:
        raise ConnectionError

    for store in engine.stores:
        store.on_get = store.on_set = fail
    before = engine.clock.now
    for image in IMAGES * 2:
        answer(engine, image)
    assert engine.clock.now - before < PATIENCE / 2
    assert engine.encoded == [0, 1, 2, 3]


# What is gone meanwhile.


@both_ways
def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind(
    asynchronous: bool, make: MakeEngine
) -> None:
    engine = make(asynchronous=asynchronous)
    put(engine, 0, ROWS, encoded(0, ROWS, 0))
    engine.lets = lambda rank: False
    name = engine.ask(IMAGES[0])
    engine.step()
    engine.abort([name])
    check_end(engine)
    assert answer(engine, IMAGES[0]) == []  # kept all the same


@both_ways
def test_a_reset_ends_what_is_fetched_and_the_use_of_the_store(
    asynchronous: bool, make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(asynchronous=asynchronous)
    for content, rows in IMAGES:
        put(engine, content, rows, encoded(content, rows, weights=0))
    engine.ask(*IMAGES[:2])
    engine.step()
    engine.update_weights(1)
    engine.step()  # a worker may ask before it hears of the reset
    store = engine.stores[0]
    reads, writes = len(store.reads), len(store.writes)
    for image in IMAGES:
        answer(engine, image)
    engine.written()
    assert sorted(engine.encoded) == [0, 1, 2, 3]
    assert (len(store.reads) - reads, len(store.writes) - writes) == (0, 0)
    assert sum("restart the server with another namespace" in each for each in caplog.messages) == 1


def test_what_old_weights_have_encoded_is_not_offered_after_a_reset(make: MakeEngine) -> None:
    engine = make()
    engine.fetches.offer(Item("old", "image", 1))
    engine.update_weights(1)
    assert engine.step().offers == {}


# All at once.


@pytest.mark.parametrize("ranks", [1, 2])
@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_every_tensor_is_the_right_one(
    seed: int, asynchronous: bool, ranks: int, make: MakeEngine, values: dict[str, Any]
) -> None:
    preemptions = 0
    for turn in range(2):
        engine = make(
            pages=6, cache_size=3 * ROWS, asynchronous=asynchronous, ranks=ranks, blocks=10
        )
        chance = random.Random(seed)

        def lets(rank: int, engine: StoreEngine = engine, chance: Any = chance) -> bool:
            if chance.random() < 0.02:
                engine.clock.now += PATIENCE
            if values and chance.random() < 0.1:
                values.pop(chance.choice(sorted(values)), None)
            return chance.random() < 0.4

        engine.lets = lets
        random_traffic(engine, seed + 10 * turn, steps=120, resets=0)
        engine.run()
        engine.written()
        assert engine.seen["fetches"] > 10
        random_traffic(engine, seed + 10 * turn, steps=40)
        engine.run()
        preemptions += sum(request.num_preemptions for request in engine.requests.values())
    assert preemptions


# With a server of its own, and threads.


@pytest.mark.skipif(find_valkey() is None, reason="there is no valkey-server")
def test_servers_share_what_they_encode_through_valkey_and_go_on_without(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="of the extra redis")

    def start() -> Engine:
        config = configuration(tmp_path, settings=settings, ranks=2)
        if hasattr(config, "use_v2_model_runner"):  # 0.30 has none on the CPU
            with pytest.MonkeyPatch.context() as context:
                context.setattr(VllmConfig, "use_v2_model_runner", True)
                return Engine(config)
        return Engine(config)

    def stop(engine: Engine) -> None:
        check_end(engine)
        for worker in engine.workers:
            worker.connector.ec_connector.shutdown()

    def ask(engine: Engine) -> list[int]:
        for image in IMAGES:
            engine.ask(image)
            engine.run(steps=10**7)
        return engine.encoded

    with running(valkey(tmp_path)) as server:
        settings = {
            "max_size": 8 * PAGE,
            "store": f"redis://127.0.0.1:{server.port}",
            "namespace": "model v1",
            "store_options": {"timeout": LIMIT},
        }
        for expected in ([0, 1, 2, 3], []):
            engine = start()
            assert ask(engine) == expected
            stop(engine)
        engine = start()
        server.kill()
        assert ask(engine) == [0, 1, 2, 3]
        stop(engine)


# The configuration.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": "localhost"}, "store must be a URL with redis://, rediss://, unix://, or an"),
        ({"store": {}}, "store must be a URL"),
        ({"store": "redis://x"}, "with store, namespace must be a text that says the model"),
        ({"store": "redis://x", "namespace": ""}, "namespace must be a text .* got ''"),
        ({"store": {"a": 1}, "namespace": 1}, "namespace must be a text .* got 1"),
        ({"namespace": "n"}, "namespace and store_options are of use only with store"),
        ({"store_options": {}}, "namespace and store_options are of use only with store"),
        (STORE | {"store_options": 1}, "store_options must be an object, got 1"),
        (STORE | {"store_options": {"timeout": 0}}, "timeout must be a number of seconds above 0"),
        (STORE | {"store_options": {"timeout": True}}, "timeout must be a number .* got True"),
        (STORE | {"store_options": {"timeout": "1"}}, "timeout must be a number .* got '1'"),
    ],
)
@pytest.mark.parametrize("role", ECConnectorRole)
def test_settings_that_make_no_sense_are_refused(
    role: ECConnectorRole, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = configuration(tmp_path, settings={"max_size": 1, **settings})
    with pytest.raises(ValueError, match=message):
        MultimodalCacheConnector(config, role)


def test_identifiers_that_are_counters_are_refused(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, settings={"max_size": 1, **STORE})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True, raising=False)
    counted = SimpleNamespace(mm_processor_cache_gb=0)
    monkeypatch.setitem(vars(config.model_config), "multimodal_config", counted)
    with pytest.raises(ValueError, match="enable prefix caching, or set --mm-processor-cache-gb"):
        MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)
    config.cache_config.enable_prefix_caching = True
    MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)
    config.cache_config.enable_prefix_caching = False
    counted.mm_processor_cache_gb = 1
    MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)


def test_a_model_runner_that_skips_the_connector_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, settings={"max_size": 1, **STORE})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False, raising=False)
    with pytest.raises(ValueError, match="set VLLM_USE_V2_MODEL_RUNNER=1"):
        MultimodalCacheConnector(config, ECConnectorRole.WORKER)


def test_the_time_out_of_the_store_is_part_of_how_long_requests_wait(make: MakeEngine) -> None:
    engine = make(settings=STORE | {"store_options": {"timeout": 3}})
    assert engine.fetches._patience == 4
    assert engine.stores[0]._timeout == 3
