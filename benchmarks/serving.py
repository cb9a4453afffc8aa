"""What a cache around a vision encoder is worth, and what it costs where nothing repeats.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    python benchmarks/serving.py

The encoder is SigLIP base (patch 16, 224 pixels) of ``transformers``, built from its configuration
with seeded random weights, without downloads; ``--model tiny`` is a toy. The defaults take some
minutes on two cores. The report is Markdown, on standard output, and with ``--output`` also in a
file; ``--plot PATH`` draws its first table.

How to read it: a server answers requests for one image each, one after another, from a stream in
which a part of the requests repeats an earlier image. With the cache it makes a key from the
pixels, looks it up, and encodes and stores what is missing; all of this is in the time. Ten
requests are served with the cache and the same ten without, in an order that is drawn anew, then
the next ten, so that a machine that slows down slows both. Requests per second are the median of
the rounds and their quartiles; the ratio is the median of the ratios, round by round, with its
quartiles; the ideal is 1 / (1 - hit rate). Nothing is evicted. At 0 % reuse the ratio says what the
cache costs. An encoder that is faster gains less and loses more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from reporting import (
    QUARTILES,
    Calls,
    Parser,
    conditions,
    plot,
    run,
    spread,
    table,
    take_turns,
)
from transformers import SiglipVisionConfig, SiglipVisionModel

from multimodal_cache import CachedEncoder, MultiModalStaticCache

REUSE = (0.0, 0.5, 0.8, 0.95)
CALLERS = 64
ITEMS = 8
BUDGET = 2**30
BLOCK = 10
CALLS = 2_000
CALL_ROUNDS = 11
MODELS = {
    "base": SiglipVisionConfig(),
    "tiny": SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
    ),
}

Embed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class VisionEncoder:
    """A vision encoder of a server, which counts its calls."""

    def __init__(self, config: SiglipVisionConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = SiglipVisionModel(config).eval()
        self.image_size = config.image_size
        self.calls = 0
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, images: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Encodes images ``[3, size, size]`` of bytes to ``[images, tokens, hidden]``."""
        with self._lock:
            self.calls += 1
        pixels = torch.stack(images).float() / 127.5 - 1.0
        output: torch.Tensor = self._model(pixels).last_hidden_state
        return output  # type: ignore[return-value]  # a tensor is a sequence of its rows

    def new_image(self, generator: torch.Generator) -> torch.Tensor:
        """Returns random pixels."""
        shape = (3, self.image_size, self.image_size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@dataclass
class Stream:
    """Requests of which a part repeats an earlier image, and what was measured on them."""

    reuse: float
    images: list[torch.Tensor]
    encodes: dict[bool, int] = field(default_factory=dict)
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


def new_stream(encoder: VisionEncoder, reuse: float, requests: int, rng: random.Random) -> Stream:
    """Draws a stream: each of its images at least once, and the rest at random."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    distinct = max(1, round(requests * (1 - reuse)))
    images = [encoder.new_image(generator) for _ in range(distinct)]
    requested = images + rng.choices(images, k=requests - distinct)
    rng.shuffle(requested)
    return Stream(reuse, requested)


def serve(encoder: VisionEncoder, stream: Stream, rng: random.Random) -> None:
    """Serves a stream with the cache and without, block by block, and notes what it took."""
    cache = MultiModalStaticCache(BUDGET)
    embed: dict[bool, Embed] = {
        True: CachedEncoder(cache, encoder, namespace="SigLIP"),
        False: encoder,
    }
    seconds = dict.fromkeys(embed, 0.0)
    encodes = dict.fromkeys(embed, 0)
    for begin in range(0, len(stream.images), BLOCK):
        for cached in rng.sample((True, False), 2):
            encoder.calls = 0
            start = time.perf_counter()
            for image in stream.images[begin : begin + BLOCK]:
                embed[cached]([image])
            seconds[cached] += time.perf_counter() - start
            encodes[cached] += encoder.calls
    stream.encodes = encodes
    for cached in embed:
        stream.seconds[cached].append(seconds[cached])


def compare(encoder: VisionEncoder, streams: list[Stream], rounds: int, rng: random.Random) -> None:
    """Serves all the streams, round by round."""
    encoder([streams[0].images[0]])  # the first call pays for torch's own set-up
    for _ in range(rounds):
        for stream in rng.sample(streams, len(streams)):
            serve(encoder, stream, rng)


def ratios(stream: Stream) -> list[float]:
    """Returns how many times as fast the cache made each round."""
    pairs = zip(stream.seconds[False], stream.seconds[True], strict=True)
    return [without / cached for without, cached in pairs]


def ideal(stream: Stream) -> float:
    """Returns 1 / (1 - hit rate)."""
    return len(stream.images) / stream.encodes[True]


def rows(streams: list[Stream]) -> Iterator[tuple[str, ...]]:
    """Yields the row of each stream."""
    for stream in streams:
        count = len(stream.images)
        rates = {
            cached: spread([count / each for each in seconds], digits=2)
            for cached, seconds in stream.seconds.items()
        }
        yield (
            f"{stream.reuse:.0%}",
            f"{stream.encodes[False]} / {stream.encodes[True]}",
            rates[False],
            rates[True],
            spread(ratios(stream), digits=3),
            f"{ideal(stream):.2f}",
            f"{statistics.median(ratios(stream)) / ideal(stream):.3f}",
        )


def concurrent_callers(encoder: VisionEncoder, rounds: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Yields what it takes to serve many callers that want one new image at once."""
    generator = torch.Generator().manual_seed(seed)

    def count(serve_all: Callable[[CachedEncoder, torch.Tensor], None]) -> tuple[str, str, str]:
        encodes, milliseconds = set(), []
        for _ in range(rounds):
            cached = CachedEncoder(MultiModalStaticCache(BUDGET), encoder)
            image = encoder.new_image(generator)
            encoder.calls = 0
            start = time.perf_counter()
            serve_all(cached, image)
            milliseconds.append((time.perf_counter() - start) * 1e3)
            encodes.add(encoder.calls)
        return str(CALLERS), " or ".join(map(str, sorted(encodes))), spread(milliseconds)

    def alone(cached: CachedEncoder, image: torch.Tensor) -> None:
        cached([image])

    def threads(cached: CachedEncoder, image: torch.Tensor) -> None:
        barrier = threading.Barrier(CALLERS)

        def call() -> None:
            barrier.wait()
            cached([image])

        with ThreadPoolExecutor(CALLERS) as pool:
            for future in [pool.submit(call) for _ in range(CALLERS)]:
                future.result()

    def tasks(cached: CachedEncoder, image: torch.Tensor) -> None:
        async def main() -> None:
            await asyncio.gather(*[cached.encode_async([image]) for _ in range(CALLERS)])

        asyncio.run(main())

    _, *one = count(alone)
    yield ("one call", "1", *one)
    yield ("threads", *count(threads))
    yield ("asyncio tasks", *count(tasks))


def overhead(rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yields what a call whose items are all cached takes, and its lookups alone."""
    cache = MultiModalStaticCache(BUDGET)
    cached = CachedEncoder(cache, lambda items: torch.zeros(len(items), 2, 4))
    items, keys = [None] * ITEMS, [*range(ITEMS)]
    cached(items, keys)

    def look_up(keys: list[int]) -> None:
        for key in keys:
            cache.get_single(key)

    subjects: dict[str, Calls] = {
        "the call": (lambda keys: cached(items, keys), [keys] * CALLS),
        "`get_single` of each": (look_up, [keys] * CALLS),
    }
    samples = take_turns(subjects, CALL_ROUNDS, rng)
    call, single = samples.values()
    samples["the call beyond that"] = [one - other for one, other in zip(call, single, strict=True)]
    for name, seconds in samples.items():
        yield name, str(ITEMS), spread([each * 1e6 for each in seconds], digits=1)


def draw(streams: list[Stream], path: Path) -> None:
    """Draws requests/s without the cache and with it, and the ratio over each pair of bars."""
    with plot(path) as axes:
        for cached, color in ((False, "0.75"), (True, "#0b5fa5")):
            rates = [
                len(stream.images) / statistics.median(stream.seconds[cached]) for stream in streams
            ]
            places = [x + 0.38 * cached for x in range(len(streams))]
            label = "with the cache" if cached else "without"
            bars = axes.bar(places, rates, width=0.36, color=color, label=label)
        times = [statistics.median(ratios(stream)) for stream in streams]
        axes.bar_label(bars, [f"{each:.3g}\N{MULTIPLICATION SIGN}" for each in times], padding=2)
        axes.set_xticks([x + 0.19 for x in range(len(streams))])
        axes.set_xticklabels([f"{stream.reuse:.0%}" for stream in streams])
        axes.set(xlabel="requests that repeat an image", ylabel="requests per second")
        axes.spines[["top", "right"]].set_visible(False)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    rng = random.Random(options.seed)
    encoder = VisionEncoder(MODELS[options.model], options.seed)
    packages = ["multimodal-cache", "torch", "transformers", "numpy"]
    yield f"{conditions(options.seed, packages)}; {torch.get_num_threads()} threads of torch"
    streams = [new_stream(encoder, reuse, options.requests, rng) for reuse in REUSE]
    compare(encoder, streams, options.rounds, rng)
    yield (
        f"SigLIP {options.model}, {options.requests} requests a stream, {options.rounds} rounds, "
        f"{QUARTILES}:"
    )
    header: tuple[str, ...] = (
        "Reuse",
        "Encodes without / with the cache",
        "Requests/s without",
        "Requests/s with",
        "Ratio",
        "Ideal",
        "Ratio / ideal",
    )
    yield table(header, rows(streams))
    if options.plot:
        draw(streams, options.plot)
    yield "Callers that want one new image at the same time:"
    callers = concurrent_callers(encoder, options.rounds, options.seed)
    yield table(("Callers", "Number", "Encodes", "ms in all"), callers)
    yield (
        f"Microseconds for a call whose {ITEMS} items are all cached, "
        f"{CALL_ROUNDS} rounds of {CALLS:,} calls, {QUARTILES}:"
    )
    yield table(("What", "Items", "us"), overhead(rng))


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Serves requests with a cache around a vision encoder and without.")
    parser.add_number("--requests", 60, 1, "requests in each stream")
    parser.add_number("--rounds", 5, 2, "rounds behind each cell")
    parser.add_argument("--model", choices=MODELS, default="base", help="the encoder")
    parser.add_plot("draw the first table here")
    run(parser, report)


if __name__ == "__main__":
    main()
