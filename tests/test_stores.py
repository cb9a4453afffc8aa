"""A store never fails a request, never delays it for long, and never brings a wrong embedding."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch
from back_ends import Clock, MemoryStore
from blake3 import blake3
from servers import LIMIT
from support import Wrapper

from multimodal_cache import CombinedHash, EmbeddingResult, MultiModalStaticCache, stores
from multimodal_cache.stores import EmbeddingStore, StoreStats, _format

SOON = 0.05  # seconds, where nothing comes
WHILE = 0.5  # seconds, in which something has come


NAME_OF_1 = "9b40a7f16bbc32b8a118782e778d89b42ce70a8ee3f61e7523da2170567f6a06"


def embedding(value: float = 1.0, rows: int = 2) -> torch.Tensor:
    return torch.full((rows, 3), float(value))


def filled(*keys: int, **options: Any) -> MemoryStore:
    """Returns a store that holds an embedding of its key for each."""
    store = MemoryStore(**options)
    for key in keys:
        store.values[name(key)] = _format.pack(name(key), embedding(key), store._secret)
    return store


def name(key: int, namespace: str | bytes = "test") -> str:
    return _format.name_of(_format.name_prefix(namespace), key)


def found(fetched: dict[int, torch.Tensor]) -> dict[int, float]:
    return {key: rows[0, 0].item() for key, rows in fetched.items()}


# Names and values


def test_a_name_is_made_as_specified() -> None:
    for namespace, kind in (("my-encoder v1", b"s"), (b"\xff", b"b"), ("\ud800", b"s")):
        text = (
            namespace if isinstance(namespace, bytes) else namespace.encode(errors="surrogatepass")
        )
        for key, digits in ((255, b"ff"), (-2, b"-2"), (0, b"0"), (2**20000, b"1" + b"0" * 5000)):
            hashed = b"multimodal-cache store 1\n" + kind + len(text).to_bytes(8, "little") + text
            assert name(key, namespace) == blake3(hashed + digits).hexdigest()
    assert name(1) == NAME_OF_1  # as it always was


def test_a_value_is_a_digest_and_a_safetensors_file() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    for secret in (None, b"k" * 32):
        value = _format.pack("name", rows, secret)
        assert value[:32] == blake3(b"name" + value[32:], key=secret).digest()
        (tensor,) = safetensors.torch.load(value[32:]).values()
        assert torch.equal(tensor, rows)
        theirs = safetensors.torch.save({"embedding": rows})
        digest = blake3(b"name" + theirs, key=secret).digest()
        assert torch.equal(_format.unpack("name", digest + theirs, secret), rows)


def of_each_kind() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    noise = torch.randint(0, 256, (4, 6, 8), dtype=torch.uint8)  # NaNs too
    for dtype in _format.NAMES:
        bits = noise % 2 if dtype is torch.bool else noise
        yield bits.view(dtype)
        yield bits.view(dtype)[0, 0, 0]
        yield bits.view(dtype)[:0]
    yield noise.float().transpose(0, 2)
    yield noise.float()[::2, 1:, ::3]
    yield torch.ones(1, 3).expand(4, 3)
    yield torch.randn(3, 3, dtype=torch.complex64).conj()
    yield torch.randn(3, 3, dtype=torch.complex64).conj().imag  # lazily negative
    yield torch.randn(3, requires_grad=True)
    yield torch.nn.Parameter(torch.randn(3))
    yield torch.zeros(3, 0)


def test_every_kind_of_embedding_comes_back_bit_for_bit() -> None:
    with MemoryStore() as store:
        for key, rows in enumerate(of_each_kind()):
            assert store.offer(key, rows)
            store.written()
            back = store.fetch([key])[key]
            assert (back.dtype, back.shape) == (rows.dtype, rows.shape)
            plain = rows.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            assert torch.equal(back.reshape(-1).view(torch.uint8), plain.view(torch.uint8))
            assert {back.requires_grad, back.is_conj(), back.is_neg()} == {False}


UNFIT: dict[str, Callable[[], torch.Tensor]] = {
    "complex128": lambda: torch.zeros(2, dtype=torch.complex128),
    "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
    "float8_e8m0fnu": lambda: torch.zeros(2, dtype=torch.float8_e8m0fnu),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "uninitialised": torch.nn.parameter.UninitializedParameter,
    "of a subclass that wraps another": lambda: Wrapper(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNFIT)
def test_what_safetensors_cannot_hold_is_refused_at_once(kind: str) -> None:
    with MemoryStore() as store:
        assert not store.offer(1, UNFIT[kind]())
        assert store.stats() == StoreStats(dropped=1)


def test_what_is_fetched_owns_its_memory() -> None:
    store = filled(1)
    with torch.inference_mode():
        (rows,) = store.fetch([1]).values()
    assert rows.untyped_storage().nbytes() == rows.nbytes
    assert not rows.is_inference()
    rows += 1  # it is the caller's
    assert found(store.fetch([1])) == {1: 1}
    cache = MultiModalStaticCache(100)
    cache.set(1, EmbeddingResult(embedding=rows))
    kept = cache.get_single(1)
    assert kept is not None
    assert kept.embedding is rows  # without a copy


def test_an_offer_leaves_the_tensor_as_it_was() -> None:
    rows = embedding()
    with MemoryStore() as store:
        assert store.offer(1, rows)
        store.written()
    assert rows.untyped_storage().resizable()


@pytest.mark.parametrize("secret", [None, b"k" * 32])
def test_each_prefix_and_each_flipped_bit_of_a_value_is_a_miss(secret: bytes | None) -> None:
    store = filled(1, secret=secret)
    value = store.values[name(1)]
    prefixes = [value[:length] for length in range(len(value))]
    flipped = []
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(damaged))
    bad = [*prefixes, *flipped, value + b"\0", b"", value * 2]
    for each in bad:
        store.values[name(1)] = each
        assert store.fetch([1]) == {}
    assert store.stats().corrupt == store.stats().misses == len(bad)
    assert store.offer(1, embedding(1))  # and is written over
    store.written()
    assert store.values[name(1)] == value
    assert found(store.fetch([1])) == {1: 1}


@pytest.mark.parametrize("bad", ["text", 5, bytearray(b"x" * 99), [], object(), float("nan")])
def test_a_value_that_is_not_bytes_is_a_miss(bad: object) -> None:
    store = filled(1)
    store.on_get = lambda _: bad
    assert store.fetch([1]) == {}
    assert store.stats().corrupt == 1


def test_a_value_under_another_name_or_of_another_secret_is_a_miss() -> None:
    store, other = filled(1, 2), filled(1, namespace="other")
    store.values[name(1)] = store.values[name(2)]
    assert found(store.fetch([1, 2])) == {2: 2}
    other.values = {key: store.values[name(2)] for key in [name(2, "other")]}
    assert other.fetch([2]) == {}
    for secret, another in ((None, b"a" * 32), (b"b" * 32, None), (b"a" * 32, b"b" * 32)):
        written, read = filled(1, secret=secret), filled(secret=another)
        read.values = written.values
        assert read.fetch([1]) == {}
        assert read.stats().corrupt == 1


HEADER = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"embedding": 1}',
        {"other": HEADER},
        {"embedding": HEADER, "other": HEADER},
        {"embedding": HEADER, "__metadata__": {}},
        {"embedding": HEADER | {"more": 1}},
        *(
            {"embedding": HEADER | change}
            for change in (
                {"dtype": "F64"},
                {"dtype": "F128"},
                {"dtype": []},
                {"shape": [3]},
                {"shape": [-1, -2]},
                {"shape": [2.0]},
                {"shape": [True, 2]},
                {"shape": {}},
                {"shape": "2"},
                {"shape": 2},
                {"shape": None},
                {"data_offsets": [0, 9]},
                {"data_offsets": [8, 0]},
                {"data_offsets": 8},
            )
        ),
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_that_is_not_as_written_here_is_a_miss(header: Any) -> None:
    """Of who knows how to make the digest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    store = filled(1)
    for length in (len(text), 2**63, 0):
        file = length.to_bytes(8, "little") + text + bytes(8)
        store.values[name(1)] = blake3(name(1).encode() + file).digest() + file
        assert store.fetch([1]) == {}
    assert store.stats().corrupt == 3


def test_a_shape_that_torch_refuses_is_a_miss() -> None:
    text = json.dumps({"embedding": HEADER | {"shape": [0, 2**70], "data_offsets": [0, 0]}})
    file = len(text).to_bytes(8, "little") + text.encode()
    store = filled(1)
    store.values[name(1)] = blake3(name(1).encode() + file).digest() + file
    assert store.fetch([1]) == {}
    assert store.stats().misses == 1


# Back ends that fail


class UnshowableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


EVERY_KIND = [
    OSError("refused"),
    ConnectionResetError("reset"),
    TimeoutError("late"),
    MemoryError(),
    RecursionError("deep"),
    ValueError("bad"),
    StopIteration(),
    StopAsyncIteration(),
    asyncio.CancelledError(),
    GeneratorExit(),
    KeyboardInterrupt(),
    SystemExit(3),
    UnshowableError(),
    type("Own", (BaseException,), {})(),
]


@pytest.mark.parametrize("error", EVERY_KIND, ids=lambda error: type(error).__name__)
def test_what_a_back_end_raises_fails_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="multimodal_cache")
    clock = Clock()

    def fail(_: object = None) -> Any:
        raise error

    with filled(1, 2, clock=clock, retry_after=5.0) as store:
        store._get_many = lambda names: [fail()]  # type: ignore[method-assign]
        assert store.fetch([1]) == {}
        assert store.fetch([1, 2]) == {}  # it rests
        assert store.stats().errors == 1
        assert (store.stats().misses, store.stats().skipped) == (1, 2)
        store.on_set = fail
        assert store.offer(3, embedding(3))  # writes rest apart
        store.written()
        assert not store.offer(3, embedding(3))
        assert (store.stats().dropped, store.stats().skipped) == (1, 3)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert type(error).__name__ in caplog.text
        store.on_set = None
        del store._get_many
        clock.now += 5
        assert found(store.fetch([1, 2])) == {1: 1, 2: 2}
        assert store.offer(3, embedding(3))
        store.written()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 + ["INFO"] * 2
    assert (store.stats().errors, store.stats().written) == (2, 1)


def test_what_came_before_an_error_is_returned() -> None:
    store = filled(1, 2, 3, clock=Clock())

    def second_fails(asked: str) -> Any:
        if asked == name(2):
            raise OSError("reset in mid-value")
        return store.values[asked]

    store.on_get = second_fails
    assert found(store.fetch([1, 2, 3])) == {1: 1}
    assert store.fetch([1]) == {}
    assert store.stats() == StoreStats(
        hits=1,
        misses=2,
        skipped=1,
        errors=1,
        fetched_bytes=24,
        fetch_seconds=0,
    )


@pytest.mark.parametrize(
    "answers",
    [[], [None], iter([]), [None] * 9, (None for _ in iter(int, 1))],
    ids=["none", "one", "an end", "too many", "no end"],
)
def test_a_back_end_that_answers_too_little_or_too_much_is_one_that_has_nothing(
    answers: Any,
) -> None:
    store = filled(1, 2)
    store._get_many = lambda names: answers  # type: ignore[method-assign]
    assert store.fetch([1, 2]) == {}
    assert store.stats().misses == 2


@pytest.mark.parametrize("answers", [None, 5, object()])
def test_an_answer_that_cannot_be_walked_is_an_error(answers: Any) -> None:
    store = filled(1)
    store._get_many = lambda names: answers  # type: ignore[method-assign]
    assert store.fetch([1]) == {}
    assert (store.stats().errors, store.stats().misses) == (1, 1)


def test_a_read_that_hangs_is_waited_for_no_longer_than_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="multimodal_cache")
    clock = Clock()
    store = filled(1, timeout=SOON)
    store._reader._side._clock = clock  # rests end when the test says so
    store.on_get = store.hang
    began = time.monotonic()
    assert store.fetch([1]) == {}
    assert time.monotonic() - began < 30
    clock.now += 1000  # the rest is over, but the call isn't back
    for _ in range(3):
        assert store.fetch([1]) == {}
    assert (len(store.reads), store.stats().timeouts, store.stats().skipped) == (1, 1, 3)
    store.on_get = None
    store.gate.set()
    join_hung(store)
    assert found(store.fetch([1])) == {1: 1}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert store.stats().misses == 1


def join_hung(store: MemoryStore) -> None:
    """Waits until the call that hung is back."""
    deadline = time.monotonic() + LIMIT
    while store._reader._side._hung or store._writer._side._hung:
        assert time.monotonic() < deadline


def test_what_has_come_of_a_read_that_trickles_is_returned() -> None:
    store = filled(1, 2, 3, timeout=WHILE)
    asked_for = []

    def trickle(asked: str) -> Any:
        asked_for.append(asked)
        if asked == name(2):
            store.hang()
        return store.values[asked]

    store.on_get = trickle
    assert found(store.fetch([1, 2, 3])) == {1: 1}
    assert store.fetch([1]) == {}  # not beside one that hangs
    store.gate.set()
    join_hung(store)
    assert asked_for == [name(1), name(2)]  # nobody waits for the rest
    assert found(store.fetch([1, 2])) == {1: 1, 2: 2}  # it was of use: so there is no rest
    assert (store.stats().timeouts, store.stats().skipped) == (1, 1)


def test_an_error_after_the_time_was_over_counts_and_a_late_success_does_not() -> None:
    for error in (None, OSError("reset")):
        clock = Clock()
        store = filled(1, timeout=SOON)
        store._reader._side._clock = clock

        def late(asked: str, store: MemoryStore = store, error: Any = error) -> Any:
            store.hang()
            if error:
                raise error
            return store.values[asked]

        store.on_get = late
        assert store.fetch([1]) == {}
        store.gate.set()
        join_hung(store)
        assert store.fetch([1]) == {}  # in a rest
        assert store.stats().skipped == 1
        assert store.stats().errors == (error is not None)
        assert store.stats().hits == 0


def test_one_call_probes_and_the_others_skip_meanwhile() -> None:
    clock = Clock()
    store = filled(1, clock=clock, retry_after=0.0)

    def fail(_: str) -> Any:
        raise OSError("refused")

    store.on_get = fail
    assert store.fetch([1]) == {}
    store.on_get = lambda asked: (store.hang(), store.values[asked])[1]
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(store.fetch, [1])
        assert store.hanging.acquire(timeout=LIMIT)
        assert store.fetch([1]) == {}
        assert store.stats().skipped == 1
        store.gate.set()
        assert found(probe.result(LIMIT)) == {1: 1}
    assert found(store.fetch([1])) == {1: 1}


def test_a_probe_that_comes_back_too_late_ends_no_outage() -> None:
    clock = Clock()
    side = filled(clock=clock)._reader._side
    ask = side.begin()
    assert ask
    side.end(ask, "refused")
    clock.now += 5
    probe = side.begin()
    assert probe
    side.give_up(probe, "no answer")
    side.end(probe)
    assert not side.may_begin()
    clock.now += 5
    assert side.may_begin()


def test_a_probe_that_is_never_heard_of_again_is_followed_by_another() -> None:
    clock = Clock()
    store = filled(1, clock=clock, retry_after=5.0)
    side = store._reader._side
    ask = side.begin()
    assert ask
    side.end(ask, "refused")
    clock.now += 5
    assert side.begin()  # by a caller that was interrupted right then
    assert store.fetch([1]) == {}
    clock.now += LIMIT
    assert found(store.fetch([1])) == {1: 1}


def test_what_waits_for_a_reader_waits_no_longer_than_told_either() -> None:
    store = filled(1, timeout=WHILE)
    store.on_get = store.hang
    with ThreadPoolExecutor(12) as pool:
        began = time.monotonic()
        fetches = [pool.submit(store.fetch, [1]) for _ in range(12)]
        assert all(fetch.result(LIMIT) == {} for fetch in fetches)
        assert time.monotonic() - began < 30
    assert len(store.reads) <= 8
    store.gate.set()
    join_hung(store)
    assert len(store.reads) <= 8  # nobody has begun what was given up


def test_many_threads_fetch_and_offer_at_once() -> None:
    with MemoryStore(max_pending_bytes=2**30) as store, ThreadPoolExecutor(16) as pool:
        keys = range(200)
        assert all(pool.map(lambda key: store.offer(key, embedding(key)), keys))
        store.written()
        fetched = pool.map(lambda key: store.fetch([key, key + 1, 1000 + key]), keys[:-1])
        for key, rows in zip(keys, fetched, strict=False):
            assert found(rows) == {key: key, key + 1: key + 1}
    assert store.stats().hits == 398
    assert store.stats().misses == 199


def test_without_memory_for_it_a_hit_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    store = filled(1)
    monkeypatch.setattr(stores, "unpack", fail)
    assert store.fetch([1]) == {}
    assert (store.stats().errors, store.stats().misses) == (1, 1)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_threads")
def test_without_threads_nothing_is_read_or_written() -> None:
    store = filled(1, clock=Clock())
    assert store.fetch([1]) == {}
    assert store.fetch([1]) == {}
    assert not store.offer(1, embedding())
    assert store.stats() == StoreStats(skipped=2, errors=1, dropped=1)


def test_an_interrupted_fetch_leaves_the_store_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(1, 2)
    unpack = stores.unpack
    errors = [KeyboardInterrupt()]

    def interrupt(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return unpack(*arguments)

    monkeypatch.setattr(stores, "unpack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.fetch([1, 2])
    assert found(store.fetch([1, 2])) == {1: 1, 2: 2}


# Writes


def test_an_offer_does_not_wait_and_keeps_no_more_than_it_may() -> None:
    with MemoryStore(max_pending_bytes=100) as store:
        store.on_set = store.hang
        assert store.offer(1, torch.zeros(10))
        assert store.hanging.acquire(timeout=LIMIT)
        assert store.offer(2, torch.zeros(10))
        assert not store.offer(3, torch.zeros(10))  # 40 bytes are being written, 40 wait
        assert not store.offer(4, torch.zeros(100)[:1])  # it holds 400 bytes
        assert store.offer(5, torch.zeros(5))
        assert not store.flush(0)
        store.gate.set()
        store.written()
        assert store.offer(3, torch.zeros(25))
        store.written()
    assert store.writes == [[name(key)] for key in (1, 2, 5, 3)]
    assert (store.stats().written, store.stats().dropped) == (4, 2)
    assert store.stats().written_bytes == sum(map(len, store.values.values()))


def test_a_failed_write_drops_what_waits_and_is_no_affair_of_reads() -> None:
    clock = Clock()
    with filled(1, clock=clock) as store:

        def fail() -> None:
            store.hang()
            raise OSError("out of memory")

        store.on_set = fail
        assert store.offer(2, embedding())
        assert store.hanging.acquire(timeout=LIMIT)
        assert store.offer(3, embedding())
        store.gate.set()
        store.written()
        assert not store.offer(4, embedding())
        assert store.stats() == StoreStats(errors=1, dropped=2, skipped=1)
        assert found(store.fetch([1])) == {1: 1}
        store.on_set = None
        clock.now += 5
        assert store.offer(4, embedding(4))
        store.written()
        assert found(store.fetch([2, 3, 4])) == {4: 4}


def test_a_write_that_hangs_is_noticed_by_the_next_offer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="multimodal_cache")
    clock = Clock()
    with MemoryStore(clock=clock, timeout=1.0, retry_after=5.0) as store:
        store.on_set = store.hang
        assert store.offer(1, embedding())
        assert store.hanging.acquire(timeout=LIMIT)
        clock.now += 1
        assert store.offer(2, embedding())
        clock.now += 0.1
        assert not store.offer(3, embedding())
        assert store.stats() == StoreStats(timeouts=1, dropped=1, skipped=1)
        clock.now += 1000
        assert not store.offer(3, embedding())  # not beside one that hangs
        store.gate.set()
        store.written()
        assert store.offer(3, embedding())
        store.written()
        assert store.stats() == StoreStats(
            timeouts=1, dropped=1, skipped=2, written=2, written_bytes=2 * (32 + 8 + 80 + 24)
        )
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_what_cannot_be_packed_is_dropped_and_no_fault_of_the_back_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryStore() as store:
        with monkeypatch.context() as patch:
            patch.setattr(stores, "pack", lambda *_: torch.empty(2**60))
            assert store.offer(1, embedding())
            store.written()
        assert store.offer(2, embedding())
        store.written()
    assert (store.stats().dropped, store.stats().written) == (1, 1)


def test_what_is_packed_when_the_rest_begins_is_dropped() -> None:
    with MemoryStore(clock=Clock()) as store:
        side = store._writer._side
        store.on_set = store.hang
        ask = side.begin()
        assert ask
        packed = store._pack
        began = threading.Event()

        def pack(*arguments: Any) -> bytes:
            began.set()
            assert store.gate.wait(LIMIT)
            return packed(*arguments)

        store._pack = pack  # type: ignore[method-assign]
        assert store.offer(1, embedding())
        assert began.wait(LIMIT)
        side.end(ask, "refused")
        store.gate.set()
        store.written()
    assert store.stats().dropped == 1
    assert store.writes == []


def test_a_value_larger_than_the_back_end_takes_is_refused_at_once() -> None:
    class Small(MemoryStore):
        _max_value_bytes = 5000

    with Small() as store:
        assert not store.offer(1, torch.zeros(1000))
        assert store.offer(2, torch.zeros(200))
        store.written()
    assert store.stats().dropped == 1
    assert max(map(len, store.values.values())) <= 5000


# Streams


class Stream:
    """What torch's module of a device does, written down."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self) -> Any:  # noqa: N802  # as torch spells it
        return types.SimpleNamespace(
            record=lambda stream: self.done.append(("record", stream, threading.current_thread())),
            synchronize=lambda: self.done.append(("wait", threading.current_thread())),
        )


def test_the_writer_waits_for_what_the_callers_stream_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Stream()
    monkeypatch.setattr(stores, "module_of", lambda tensor: module)
    with MemoryStore() as store:
        assert store.offer(1, embedding())
        store.written()
    record, wait = module.done
    assert record == ("record", "stream of cpu", threading.current_thread())
    assert wait[0] == "wait"
    assert wait[1] is not threading.current_thread()


def test_a_device_that_has_failed_fails_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stores, "module_of", fail)
    with MemoryStore() as store:
        assert not store.offer(1, embedding())
    assert store.stats().dropped == 1


def test_what_is_open_when_the_interpreter_ends_is_closed() -> None:
    store = MemoryStore()
    assert store.offer(1, embedding())
    stores._close_open_stores()
    assert not store.offer(2, embedding())
    assert store.stats().written == 1


def test_fetched_embeddings_go_to_the_current_cuda_device_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there, expected in ((True, "cuda:3"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert MemoryStore(device=None)._device == torch.device(expected)
    store = filled(1, device="meta")
    assert store.fetch([1])[1].device.type == "meta"


# The end


def test_a_closed_store_misses_and_refuses() -> None:
    store = filled(1)
    with store as same:
        assert same is store
        assert store.offer(2, embedding())
    assert name(2) in store.values  # what was pending is written
    assert store.fetch([1, 2]) == {}
    assert not store.offer(3, embedding())
    store.close()
    assert store.flush()
    assert (store.stats().misses, store.stats().dropped) == (2, 1)


def test_what_is_closed_meanwhile_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its question whether it is closed and its first step."""
    store = filled(1)
    store.close()
    store._closed = False
    assert store.fetch([1]) == {}
    assert not store.offer(1, embedding())


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    store = filled(1)
    store.fetch([1])
    assert store.offer(2, embedding())
    assert threading.active_count() == before + 2
    store.close(LIMIT)
    assert threading.active_count() == before


def test_close_waits_no_longer_than_told() -> None:
    store = filled(1, timeout=SOON)
    store.on_set = store.on_get = store.hang
    assert store.offer(1, embedding())
    assert store.offer(2, embedding())
    assert store.hanging.acquire(timeout=LIMIT)
    assert store.fetch([1]) == {}
    for timeout in (0, SOON, None, -1):
        began = time.monotonic()
        store.close(timeout)
        assert time.monotonic() - began < 30
    store.gate.set()
    store._writer.join(time.monotonic() + LIMIT)
    assert store.writes == [[name(1)]]  # what waited is dropped
    assert store.stats().dropped == 1


def test_close_waits_for_no_rest() -> None:
    store = MemoryStore(retry_after=10_000.0)

    def fail() -> None:
        raise OSError("refused")

    store.on_set = fail
    assert store.offer(1, embedding())
    assert store.offer(2, embedding()) in (True, False)
    began = time.monotonic()
    store.close(LIMIT)
    assert time.monotonic() - began < LIMIT / 2


def test_a_back_end_may_close_its_own_store() -> None:
    store = MemoryStore(timeout=SOON)
    store.on_set = store.close
    assert store.offer(1, embedding())
    store._writer.join(time.monotonic() + LIMIT)
    assert store.stats().written == 1


def test_to_give_up_what_is_back_does_nothing() -> None:
    store = filled(1, clock=Clock())
    side = store._reader._side
    ask = side.begin()
    assert ask
    side.end(ask)
    side.give_up(ask, "too late")
    assert found(store.fetch([1])) == {1: 1}


def test_a_fetch_goes_on_while_the_store_is_closed() -> None:
    store = filled(1)
    store.on_get = lambda asked: (store.hang(), store.values[asked])[1]
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(store.fetch, [1])
        assert store.hanging.acquire(timeout=LIMIT)
        store.close(0)
        store.gate.set()
        assert found(fetch.result(LIMIT)) == {1: 1}


def test_a_store_that_nobody_holds_is_collected_and_its_threads_end() -> None:
    store = filled(1)
    store.fetch([1])
    assert store.offer(2, embedding())
    store.written()
    reader, writer = store._reader, store._writer
    alive = weakref.ref(store)
    del store
    deadline = time.monotonic() + LIMIT
    while alive() is not None:  # the threads let go of it in their own time
        gc.collect()
        assert time.monotonic() < deadline
    reader.join(deadline)
    writer.join(deadline)
    assert writer._thread
    assert not any(thread.is_alive() for thread in [writer._thread, *reader._threads._threads])


PROCESS = """
import sys, threading
import torch
from multimodal_cache.stores import EmbeddingStore

class Store(EmbeddingStore):
    def _get_many(self, names):
        {get}
        return []

    def _set_many(self, values):
        {set}
        print("written", flush=True)

store = Store(namespace="test", timeout=0.5)
store.fetch([1])
assert store.offer(1, torch.zeros(2_000_000))
sys.exit(7)
"""
HANG = "threading.Event().wait()"


@pytest.mark.parametrize(("get", "set_"), [("pass", "pass"), (HANG, "pass"), ("pass", HANG)])
def test_a_process_that_never_closes_its_store_exits_with_its_own_status(
    get: str, set_: str
) -> None:
    code = PROCESS.format(get=get, set=set_)
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (shown.returncode, shown.stderr.replace(WARNED, "")) == (7, "")
    assert shown.stdout == ("" if set_ == HANG else "written\n")


WARNED = "reads from Store(namespace='test') fail, resting for 5 s at a time: no answer in 0.5 s\n"


# Arguments


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"namespace": ""}, ValueError),
        ({"namespace": b""}, ValueError),
        ({"namespace": None}, TypeError),
        ({"secret": "k" * 32}, TypeError),
        ({"secret": b"k" * 31}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"timeout": -1.0}, ValueError),
        ({"timeout": float("nan")}, ValueError),
        ({"timeout": float("inf")}, ValueError),
        ({"timeout": "1"}, TypeError),
        ({"timeout": True}, TypeError),
        ({"retry_after": -1}, ValueError),
        ({"max_pending_bytes": -1}, ValueError),
        ({"max_pending_bytes": 1.5}, TypeError),
        ({"device": "nowhere"}, RuntimeError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        MemoryStore(**options)


@pytest.mark.parametrize("key", [None, "1", 1.0, True, CombinedHash((1, 2))], ids=str)
def test_a_key_that_is_none_is_a_type_error(key: Any) -> None:
    with MemoryStore() as store:
        with pytest.raises(TypeError):
            store.fetch([1, key])
        with pytest.raises(TypeError):
            store.offer(key, embedding())
        with pytest.raises(TypeError, match="embedding must be a tensor, got list"):
            store.offer(1, [1.0])  # type: ignore[arg-type]
        assert store.stats() == StoreStats()


def test_keys_may_be_any_ints_and_come_twice() -> None:
    class Index:
        def __index__(self) -> int:
            return -(2**80)

    with MemoryStore() as store:
        assert store.offer(Index(), embedding(7))
        store.written()
        assert found(store.fetch([Index(), -(2**80), 5])) == {-(2**80): 7}
        assert store.fetch([]) == {}
        assert store.reads == [[name(-(2**80)), name(5)]]
    assert repr(store) == "MemoryStore(namespace='test')"


def test_a_back_end_must_define_both_methods() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EmbeddingStore(namespace="test")  # type: ignore[abstract]


def test_the_package_itself_imports_no_store() -> None:
    code = "import sys, multimodal_cache; assert 'multimodal_cache.stores' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
