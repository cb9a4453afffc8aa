"""``MooncakeStore`` on a real Mooncake master, over TCP, that is killed and stopped.

Mooncake's client takes its time without a master, even to be closed, and a process may hold few of
them: so each test is a process that is ended without asking it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from servers import LIMIT, find_mooncake, mooncake_master, running

from multimodal_cache.stores.mooncake import MooncakeStore

needs_mooncake = pytest.mark.skipif(
    find_mooncake() is None,
    reason="there is no Mooncake (pip install mooncake-transfer-engine-non-cuda, with Debian's "
    "libibverbs1, libnl-3-200 and libnl-route-3-200)",
)

FOLDERS = [str(Path(each).parent) for each in (__file__, servers.__file__)]

SETUP = """
import sys
sys.path[:0] = {FOLDERS}
import os, time, traceback
import torch
from back_ends import Clock
from servers import LIMIT, mooncake_master
from mooncake.store import MooncakeDistributedStore
from multimodal_cache.stores import StoreStats
from multimodal_cache.stores.mooncake import MooncakeStore

MIB = 2**20
master = mooncake_master()

def client(segment=64 * MIB, buffer=64 * MIB):
    made = MooncakeDistributedStore()
    address = f"127.0.0.1:{master.port}"
    code = made.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, "tcp", "", address)
    assert code == 0, code
    return made

def store_of(client, **options):
    options = {"namespace": "test", "device": "cpu", "timeout": LIMIT} | options
    return MooncakeStore(client, **options)

def rows(value, count=2):
    return torch.full((count, 3), float(value))

def offered(store, *keys):
    for key in keys:
        assert store.offer(key, rows(key))
    assert store.flush(LIMIT)

def found(fetched):
    return {key: embedding[0, 0].item() for key, embedding in fetched.items()}

def main():
""".replace("{FOLDERS}", repr(FOLDERS))
END = """
status = 1
try:
    main()
    status = 0
except BaseException:
    traceback.print_exc()
finally:
    master.go_on()
    master.kill()
    sys.stdout.flush()
    os._exit(status)
"""


def run(body: str) -> None:
    """Runs the body of a test in a process of its own."""
    code = SETUP + textwrap.indent(textwrap.dedent(body), "    ") + END
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr


@needs_mooncake
def test_what_one_client_offers_another_fetches() -> None:
    run("""
        with store_of(client()) as one, store_of(client()) as other:
            offered(one, 1, 2)
            assert found(other.fetch([1, 2, 3])) == {1: 1, 2: 2}
            assert other.offer(1, rows(9))  # written over
            assert other.flush(LIMIT)
            assert found(one.fetch([1])) == {1: 9}
            large = torch.randn(2560, 1024)
            assert one.offer(4, large)
            assert one.flush(LIMIT)
            assert torch.equal(other.fetch([4])[4], large)
            assert (one.stats().errors, other.stats().errors) == (0, 0)
    """)


@needs_mooncake
def test_what_was_damaged_in_the_store_is_a_miss_and_written_over() -> None:
    run("""
        engine = client()
        with store_of(engine) as store:
            offered(store, 1)
            from multimodal_cache.stores._format import name_of, name_prefix
            name = name_of(name_prefix("test"), 1)
            value = bytearray(engine.get(name))
            value[100] ^= 1
            assert engine.upsert(name, bytes(value)) == 0
            assert store.fetch([1]) == {}
            assert store.stats().corrupt == 1
            offered(store, 1)
            assert found(store.fetch([1])) == {1: 1}
    """)


@needs_mooncake
def test_a_killed_master_is_a_miss_and_one_that_is_back_is_used_again() -> None:
    run("""
        clock = Clock()
        store = store_of(client(), timeout=20.0)
        store._reader._side._clock = store._writer._side._clock = clock
        offered(store, 1)
        master.kill()
        began = time.monotonic()
        assert store.fetch([1]) == {}
        assert store.fetch([1]) == {}
        assert time.monotonic() - began < 30
        assert (store.stats().errors, store.stats().skipped) == (1, 1)
        assert store.offer(2, rows(2))
        assert store.flush(LIMIT)
        assert store.stats().dropped == 1
        master.start()
        deadline = time.monotonic() + LIMIT
        while store.stats().written < 2:  # the client connects anew in its own time
            assert time.monotonic() < deadline
            clock.now += 5
            store.offer(3, rows(3))
            assert store.flush(LIMIT)
        while found(store.fetch([3])) != {3: 3}:
            assert time.monotonic() < deadline
            clock.now += 5
    """)


@needs_mooncake
def test_a_stopped_master_delays_no_longer_than_told() -> None:
    run("""
        clock = Clock()
        store = store_of(client(), timeout=0.5)
        store._reader._side._clock = store._writer._side._clock = clock
        offered(store, 1)
        master.stop()
        began = time.monotonic()
        assert store.fetch([1]) == {}
        assert store.offer(2, rows(2))
        clock.now += 1000
        assert store.fetch([1]) == {}  # not while that hangs
        assert (store.stats().timeouts, store.stats().skipped) == (1, 1)
        store.close()
        assert time.monotonic() - began < 20
    """)


@needs_mooncake
def test_a_full_store_evicts_or_refuses_and_fails_nothing() -> None:
    run("""
        with store_of(client(segment=16 * MIB, buffer=64 * MIB), retry_after=0.0) as store:
            for key in range(12):
                store.offer(key, torch.full((1_000_000,), float(key)))
                assert store.flush(LIMIT)
            fetched = store.fetch(range(12))
            assert all(embedding[0].item() == key for key, embedding in fetched.items())
            assert 0 < len(fetched) < 12
    """)


@needs_mooncake
def test_a_value_larger_than_the_buffer_fails_nothing() -> None:
    run("""
        with store_of(client(segment=64 * MIB, buffer=16 * MIB), retry_after=0.0) as store:
            assert store.offer(1, torch.zeros(8_000_000))
            assert store.flush(LIMIT)
            assert (store.stats().errors, store.stats().dropped) == (1, 1)
            offered(store, 2)
            assert found(store.fetch([1, 2])) == {2: 2}
    """)


@needs_mooncake
def test_a_process_that_never_closes_its_store_exits_with_its_own_status() -> None:
    with running(mooncake_master()) as master:
        end = "store = store_of(client())\noffered(store, 1)\nstore.fetch([1])\nsys.exit(7)\n"
        reach = f"import types\nmaster = types.SimpleNamespace(port={master.port})\n"
        code = SETUP.replace("master = mooncake_master()\n", reach) + "    pass\n" + end
        shown = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            timeout=2 * LIMIT,
            check=False,
        )
    assert shown.returncode == 7


# What the engine answers


class Engine:
    """Answers as told, one answer a call."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def _next(self, *_: object) -> Any:
        return self.answers.pop(0)

    is_exist = get = upsert = _next


@pytest.mark.parametrize(
    ("answers", "misses", "errors"),
    [
        ([0], 1, 0),
        ([1, b"", 0], 1, 0),  # evicted in between
        ([1, b"", 1], 1, 1),
        ([1, b"", -900], 1, 1),
        ([-900], 1, 1),
        ([1, b"damaged"], 1, 0),
    ],
)
def test_a_failed_get_is_told_from_a_miss(answers: list[Any], misses: int, errors: int) -> None:
    engine = Engine(*answers)
    with MooncakeStore(engine, namespace="test", device="cpu", timeout=LIMIT) as store:
        assert store.fetch([1]) == {}
        assert (store.stats().misses, store.stats().errors) == (misses, errors)
    assert engine.answers == []


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(-200, "no space is left"), (-600, "larger than local_buffer_size"), (-7, "ErrorCode")],
)
def test_a_refused_write_is_logged_with_its_reason(
    code: int, meaning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with MooncakeStore(Engine(code), namespace="test", device="cpu") as store:
        assert store.offer(1, torch.zeros(2))
        assert store.flush(LIMIT)
    assert f"failed with code {code}: " in caplog.text
    assert meaning in caplog.text


def test_several_values_are_read_and_written_one_by_one() -> None:
    store = MooncakeStore(Engine(1, b"a", 0, 0, 0), namespace="test", device="cpu")
    assert list(store._get_many(["one", "two"])) == [b"a", None]
    store._set_many({"one": b"a", "two": b"b"})
    store.close()


@pytest.mark.parametrize("store", [None, Engine, {}, types.SimpleNamespace(get=print)], ids=str)
def test_what_is_no_store_of_mooncake_is_refused(store: Any) -> None:
    with pytest.raises(TypeError, match="store must be a MooncakeDistributedStore, got .*install"):
        MooncakeStore(store, namespace="test")
