"""Times ``hit_curve`` beside replays of the same requests, and hits that are recorded.

    python benchmarks/planner.py --output benchmarks/results/planner.md

The requests are drawn from a Zipf distribution, their sizes from those of images of 64 to 2,048
tokens. A replay is the shortest there is: an ``OrderedDict`` with a count of bytes, without
threads, tensors and statistics. It is made at 40 sizes, and the hits are compared with the curve.

A recorded hit is timed with its share of the writing of the trace.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import QUARTILES, Calls, Parser, conditions, run, spread, table, take_turns

from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.planner import hit_curve
from multimodal_cache.trace import Trace

OFF = "off"
TOKEN_BYTES = 2 * 4096


def draw(requests: int, seed: int) -> tuple[Any, Any]:
    """Draws keys and sizes: a quarter as many items as requests, at most."""
    rng = np.random.default_rng(seed)
    items = max(requests // 4, 1)
    sizes = rng.integers(64, 2049, items) * TOKEN_BYTES
    keys = rng.zipf(1.1, requests) % items
    return keys, sizes[keys]


def replay(keys: list[int], sizes: list[int], size: int) -> int:
    """Returns the hits of a least-recently-used cache."""
    held: OrderedDict[int, int] = OrderedDict()
    used = hits = 0
    for key, nbytes in zip(keys, sizes, strict=True):
        if key in held:
            held.move_to_end(key)
            hits += 1
        elif nbytes <= size:
            used += nbytes
            while used > size:
                used -= held.popitem(last=False)[1]
            held[key] = nbytes
    return hits


def seconds(function: Any) -> tuple[float, Any]:
    """Returns the time of a call, and what it returned."""
    start = time.perf_counter()
    made = function()
    return time.perf_counter() - start, made


def compare(requests: int, options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Returns the rows of the table for so many requests."""
    keys, sizes = draw(requests, options.seed)
    samples = [seconds(lambda: hit_curve(keys, sizes))[0] for _ in range(options.rounds)]
    tracemalloc.start()
    curve = hit_curve(keys, sizes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    replayed = 0.0
    listed = keys.tolist(), sizes.tolist()
    for size in np.linspace(curve.largest, curve.footprint, options.sizes, dtype=np.int64).tolist():
        taken, hits = seconds(lambda size=size: replay(*listed, size))
        replayed += taken
        assert curve.at(size).hits == hits
    middle = sorted(samples)[len(samples) // 2]
    return [
        (f"{requests:,}", "`hit_curve`, all sizes", spread(samples, 2), f"{peak / 1e6:.0f}", "1.0"),
        (
            f"{requests:,}",
            f"replays at {options.sizes} sizes",
            f"{replayed:.2f}",
            "-",
            f"{replayed / middle:.1f}",
        ),
    ]


def record(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Returns the rows of the table of hits, with a trace and without."""
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as traces:
        subjects: dict[str, Calls] = {}
        for name, suffix in {
            OFF: None,
            "`trace=`": ".csv",
            "`trace=`, compressed": ".csv.gz",
        }.items():
            path = Path(folder, f"trace{suffix}")
            trace = traces.enter_context(Trace(path)) if suffix else None
            cache = MultiModalStaticCache(1000 * 40, trace=trace)
            for key in range(1000):
                cache.set(key, EmbeddingResult(embedding=torch.zeros(10)))
            keys = [rng.randrange(1000) for _ in range(options.calls)]
            subjects[name] = cache.get_single, keys
        samples = take_turns(subjects, options.rounds, rng)
    rows = []
    for name, taken in samples.items():
        more = [a - b for a, b in zip(taken, samples[OFF], strict=True)]
        nanoseconds = [each * 1e9 for each in taken]
        rows.append(
            (name, "`get_single`, hit", spread(nanoseconds), f"{statistics.median(more) * 1e9:.0f}")
        )
    return rows


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    yield conditions(options.seed, ["numpy", "torch"])
    yield (
        f"The hits at every size, {QUARTILES} of {options.rounds} calls, beside replays at "
        f"{options.sizes} sizes, once each. The replays had the hits that the curve says:"
    )
    rows = [row for number in options.requests for row in compare(number, options)]
    yield table(("Requests", "How", "Seconds", "MB", "Time / ours"), rows)
    yield f"A hit, {QUARTILES} of {options.rounds} rounds of {options.calls:,} calls:"
    yield table(("Recording", "Call", "ns per hit", "More"), record(options))


def main() -> None:
    """Runs the benchmark."""
    parser = Parser(
        "Times hit_curve beside replays of the same requests, and hits that are recorded."
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[10**5, 10**6], metavar="N", help="how many"
    )
    parser.add_number("--rounds", 5, 2, "calls of hit_curve, and rounds of hits")
    parser.add_number("--calls", 100_000, 1, "hits in a round")
    parser.add_number("--sizes", 40, 1, "sizes at which the requests are replayed")
    run(parser, report)


if __name__ == "__main__":
    main()
