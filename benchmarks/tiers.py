"""What host memory behind the cache is worth, and what a hit from it costs.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    pip install --no-deps sglang==0.5.23
    python benchmarks/tiers.py

SGLang is optional: if it isn't installed, a line says so. It takes some minutes. The report is
Markdown, on standard output, and with ``--output`` also in a file; ``--plot PATH`` draws the hit
rates.

How to read it: a server answers requests for one image each, of a popularity as on the web (that of
the n-th image is 1 / n) and of 64 to 1024 tokens, from caches whose device budget is a part of what
all images take, with host memory for none of them, for half and for all. The encoder is a toy of
eight layers, some milliseconds an image: one that is slower gains more. Device and host are
ordinary memory here, since nothing needs a GPU; a copy back from a GPU's host goes over its bus.

Each cache serves ten requests, in an order that is drawn anew, then the next ten, so that a machine
that slows down slows all. Requests per second are the median of the rounds and their quartiles; the
last column is the median of the ratios to SGLang's class of the same device budget, round by round.
Hits and encodes are the same in every round.

The second table is of caches whose device holds one of two results, which are asked for in turn, so
that each hit is copied back, beside a bare copy of as many bytes in the place of the last one; and
of a hit on the device, beside that of the plain class.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peers import OURS, REFERENCE, installed, left_out
from reporting import (
    QUARTILES,
    Calls,
    Parser,
    Samples,
    conditions,
    plot,
    ratio,
    run,
    spread,
    table,
    take_turns,
)

from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.tiered import TieredCache

HIDDEN = 256
LAYERS = 8
TOKENS = (64, 1024)
DEVICE = (0.01, 0.05, 0.20)  # of what all images take
HOST = (0.5, 1.0)
BLOCK = 10
MEBIBYTES = (1, 8, 64)
CALLS = 10_000


@dataclass
class Cached:
    """A cache on its way through the stream, and what it took, round by round."""

    name: str
    new_cache: Callable[[], Any]
    new_result: Callable[[torch.Tensor], Any]
    cache: Any = None
    encodes: int = 0
    seconds: list[float] = field(default_factory=list)


class Encoder:
    """A toy encoder of images, which are told apart by their numbers."""

    def __init__(self, images: int, rng: random.Random, seed: int) -> None:
        self.tokens = [rng.randint(*TOKENS) for _ in range(images)]
        self.footprint = sum(self.tokens) * HIDDEN * torch.float32.itemsize
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, HIDDEN, HIDDEN)
        self._weights = torch.randn(shape, generator=generator) / HIDDEN**0.5

    def __call__(self, image: int) -> torch.Tensor:
        """Returns an embedding ``[tokens, hidden]``."""
        rows = torch.full((self.tokens[image], HIDDEN), 1.0 + image)
        for weights in self._weights:
            rows = torch.tanh(rows @ weights)
        return rows


def new_stream(images: int, requests: int, rng: random.Random) -> list[int]:
    """Draws requests for images of which the n-th is asked for 1 / n times as often."""
    popularity = [1 / (rank + 1) for rank in range(images)]
    numbers = rng.sample(range(images), images)
    return rng.choices(numbers, popularity, k=requests)


def contestants(footprint: int, part: float) -> Iterator[Cached]:
    """Yields the caches with a device budget of a part of the footprint."""
    size = int(footprint * part)
    for peer in installed((REFERENCE, OURS)):

        def new_cache(peer: Any = peer) -> Any:
            return peer.new_cache(size)

        yield Cached(peer.name, new_cache, peer.new_result)
    for behind in HOST:
        host_size = int(footprint * behind)

        def new_tiered(host_size: int = host_size) -> TieredCache:
            return TieredCache(size, host_size)

        yield Cached(f"{OURS}, host memory for {behind:.0%}", new_tiered, _result)


def _result(tensor: torch.Tensor) -> EmbeddingResult:
    return EmbeddingResult(embedding=tensor)


def serve(
    all_cached: list[Cached], stream: list[int], encoder: Encoder, rng: random.Random
) -> None:
    """Serves the stream once with each cache, block by block."""
    for cached in all_cached:
        cached.cache, cached.encodes = cached.new_cache(), 0
        cached.seconds.append(0.0)
    for start in range(0, len(stream), BLOCK):
        for cached in rng.sample(all_cached, len(all_cached)):
            began = time.perf_counter()
            for image in stream[start : start + BLOCK]:
                if cached.cache.get_single(image) is None:
                    cached.encodes += 1
                    cached.cache.set(image, cached.new_result(encoder(image)))
            cached.seconds[-1] += time.perf_counter() - began


def rows(part: float, all_cached: list[Cached], requests: int) -> Iterator[tuple[str, ...]]:
    """Yields a row for each cache with a device budget of this part of the footprint."""
    first = all_cached[0]
    for cached in all_cached:
        is_tiered = isinstance(cached.cache, TieredCache)
        from_host = cached.cache.stats().host_hits if is_tiered else 0
        yield (
            f"{part:.0%}",
            cached.name,
            f"{(requests - cached.encodes - from_host) / requests:.1%}",
            f"{from_host / requests:.1%}",
            str(cached.encodes),
            spread([requests / seconds for seconds in cached.seconds], digits=1),
            ratio(first.seconds, cached.seconds) if first.name == REFERENCE else "-",
        )


def hits(rounds: int, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yields what hits cost, beside what they are measured by."""
    for mebibytes in MEBIBYTES:
        size = mebibytes * 2**20
        cache = TieredCache(size, 2 * size)
        for key in (0, 1):
            cache.set(key, _result(torch.zeros(size // 4)))
        source, copies = torch.zeros(size // 4), [torch.zeros(size // 4)]

        def copy(_: int, source: torch.Tensor = source, copies: Any = copies) -> None:
            copies.clear()
            copies.append(source.clone())

        turns = [*range(2)] * max(2, 64 // mebibytes)
        samples = take_turns({"hit": (cache.get_single, turns), "copy": (copy, turns)}, rounds, rng)
        yield from _beside(samples, f"{mebibytes} MiB", "from the host", "a bare copy")
    plain, tiered = MultiModalStaticCache(40_000), TieredCache(40_000, 80_000)
    keys = list(range(1000))
    for key in keys:
        for cache in (plain, tiered):
            cache.set(key, _result(torch.zeros(10)))
    calls = [rng.choice(keys) for _ in range(CALLS)]
    subjects: dict[str, Calls] = {
        "hit": (tiered.get_single, calls),
        "copy": (plain.get_single, calls),
    }
    samples = take_turns(subjects, rounds, rng)
    yield from _beside(samples, "40 bytes", "on the device", "the plain class")


def _beside(samples: Samples, size: str, what: str, other: str) -> Iterator[tuple[str, ...]]:
    for name, label in (("hit", what), ("copy", other)):
        microseconds = [each * 1e6 for each in samples[name]]
        digits = 0 if statistics.median(microseconds) > 10 else 2
        cells = spread(microseconds, digits=digits), ratio(samples[name], samples["copy"])
        yield size, label, *cells


def draw(groups: dict[float, list[Cached]], requests: int, path: Path) -> None:
    """Draws the share of requests that needed no encode, over the device's size."""
    with plot(path) as axes:
        for index, cached in enumerate(groups[DEVICE[0]]):
            if cached.name != REFERENCE:
                rates = [1 - group[index].encodes / requests for group in groups.values()]
                axes.plot([100 * part for part in groups], rates, "o-", label=cached.name)
        axes.set(xlabel="device memory, % of all embeddings", ylabel="requests without an encode")
        axes.set_ylim(0, 1)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    rng = random.Random(options.seed)
    peers = installed((REFERENCE, OURS))
    packages = ["torch", *(peer.package for peer in peers)]
    yield f"{conditions(options.seed, packages)}; {torch.get_num_threads()} threads of torch"
    yield from left_out(peers, (REFERENCE,))
    encoder = Encoder(options.images, rng, options.seed)
    stream = new_stream(options.images, options.requests, rng)
    groups = {part: list(contestants(encoder.footprint, part)) for part in DEVICE}
    for _ in range(options.rounds):
        for group in groups.values():
            serve(group, stream, encoder, rng)
    yield (
        f"{options.requests} requests for {len(set(stream))} of {options.images} images that take "
        f"{encoder.footprint / 2**20:.0f} MiB in all, {options.rounds} rounds, {QUARTILES}:"
    )
    header: tuple[str, ...] = (
        "Device",
        "Cache",
        "Device hits",
        "Host hits",
        "Encodes",
        "Requests/s",
        "Times SGLang's",
    )
    cells = (row for part, group in groups.items() for row in rows(part, group, len(stream)))
    yield table(header, cells)
    if options.plot:
        draw(groups, len(stream), options.plot)
    yield f"Microseconds a hit, {2 * options.rounds + 1} rounds, {QUARTILES}:"
    yield table(("Size", "What", "us", "Ratio"), hits(2 * options.rounds + 1, rng))


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Serves requests from caches with host memory behind them and without.")
    parser.add_number("--images", 300, 1, "images that are asked for")
    parser.add_number("--requests", 3000, 1, "requests in the stream")
    parser.add_number("--rounds", 5, 2, "rounds behind each cell")
    parser.add_plot("draw the hit rates here")
    run(parser, report)


if __name__ == "__main__":
    main()
