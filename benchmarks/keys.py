"""How fast ``hash_feature`` makes a key, beside the bare hash functions.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    python benchmarks/keys.py

The defaults take about a minute. The report is Markdown, on standard output, and with
``--output`` also in a file; ``--plot PATH`` draws its first table.

How to read it: a cell such as ``6.31 (6.28-6.35)`` is GB/s (of 10**9 bytes) or microseconds, the
median of the rounds and their quartiles. In a round each function hashes inputs of 24 MB in all,
or one that is larger, in an order of functions that is drawn anew: so it finds the inputs outside
of the CPU's fastest caches, and the threads of BLAKE3 as other work left them, as in a server.
Where the quartiles are far apart the machine was busy, or it is one that takes long to wake a
sleeping core; then "the better BLAKE3" may be the one with the better luck. The third table shows
how much several threads are worth: ``PARALLEL_BYTES`` is about where they stop losing. A ratio is
the median of the ratios, round by round.

BLAKE3 is the ``blake3`` package, on one thread and on all; SHA-256 is ``hashlib``'s, whose first
64 bits are SGLang's keys. Both hash the very bytearray that is also the input "bytes", and the
memory of the contiguous float32 array and tensor. The images are RGB, and Pillow has to pack their
pixels first.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from PIL import Image
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

from multimodal_cache import _hashing, hash_feature

MEGABYTES = (0.2, 3, 12, 64)
MEBIBYTES = (1, 2, 4, 8, 16, 32)
BATCH_BYTES = 24 * 2**20


def speed(size: int, seconds: Sequence[float]) -> str:
    """Formats GB/s."""
    return spread([size / each / 1e9 for each in seconds], digits=2)


def hash_feature_on_one_thread(feature: Any) -> int:
    """Makes the key as below the size from which several threads are used."""
    usual = _hashing.PARALLEL_BYTES
    _hashing.PARALLEL_BYTES = sys.maxsize
    try:
        return hash_feature(feature)
    finally:
        _hashing.PARALLEL_BYTES = usual


def blake3_on_one_thread(data: bytearray) -> bytes:
    """BLAKE3 on the calling thread."""
    return blake3(data).digest()


def blake3_on_all_threads(data: bytearray) -> bytes:
    """BLAKE3 on all cores."""
    return blake3(data, max_threads=blake3.AUTO).digest()


def sha256(data: bytearray) -> bytes:
    """SHA-256."""
    return hashlib.sha256(data).digest()


def features(size: int, rng: random.Random) -> dict[str, Any]:
    """Returns inputs of about that many bytes: on the same memory, but for the image."""
    data = bytearray(rng.randbytes(size // 4 * 4))
    side = math.isqrt(size // 3)
    return {
        "bytes": data,
        "array": np.frombuffer(data, np.float32),
        "tensor": torch.frombuffer(data, dtype=torch.float32),
        "PIL image": Image.frombytes("RGB", (side, side), bytes(data[: side * side * 3])),
    }


def measure_size(size: int, rounds: int, rng: random.Random) -> Samples:
    """Times all ways to hash inputs of one size."""
    batches = [features(size, rng) for _ in range(max(1, BATCH_BYTES // size))]
    inputs = {name: [batch[name] for batch in batches] for name in batches[0]}
    data = inputs["bytes"]
    subjects: dict[str, Calls] = {
        **{f"`hash_feature`, {name}": (hash_feature, each) for name, each in inputs.items()},
        "`hash_feature`, bytes, on one thread": (hash_feature_on_one_thread, data),
        "BLAKE3, one thread": (blake3_on_one_thread, data),
        "BLAKE3, all threads": (blake3_on_all_threads, data),
        "SHA-256": (sha256, data),
    }
    return take_turns(subjects, rounds, rng)


def rows(size: int, samples: Samples) -> Iterator[tuple[str, ...]]:
    """Yields the rows for one size."""
    *_, one, all_, sha = samples.values()
    better = min(one, all_, key=statistics.median)
    for name, seconds in samples.items():
        relative = ratio(better, seconds), ratio(sha, seconds)
        yield f"{size / 1e6:g} MB", name, speed(size, seconds), *relative


def draw(by_size: dict[int, Samples], path: Path) -> None:
    """Draws the speeds over the size."""
    with plot(path) as axes:
        megabytes = [size / 1e6 for size in by_size]
        bare = itertools.cycle(("k--", "k-.", "k:"))
        for name in next(iter(by_size.values())):
            speeds = [size / statistics.median(each[name]) / 1e9 for size, each in by_size.items()]
            style = "o-" if name.startswith("`") else next(bare)
            axes.plot(megabytes, speeds, style, label=name.replace("`", ""))
        axes.set(xlabel="size of the input, MB", ylabel="GB/s", xscale="log")
        axes.set_xticks(megabytes, [f"{each:g}" for each in megabytes])
        axes.minorticks_off()


def compare_small(rounds: int, calls: int, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yields the rows for small inputs."""
    inputs = {
        "None": None,
        "int of 64 bits": rng.getrandbits(64),
        "str of 64 characters": f"{rng.getrandbits(256):064x}",
        "list of 10 ints": [rng.getrandbits(30) for _ in range(10)],
        **{f"{name}, 1 KB": each for name, each in features(1000, rng).items()},
    }
    subjects: dict[str, Calls] = {
        name: (hash_feature, [each] * calls) for name, each in inputs.items()
    }
    samples = take_turns(subjects, rounds, rng)
    for name, each in inputs.items():
        microseconds = [seconds * 1e6 for seconds in samples[name]]
        yield name, f"`{type(each).__name__}`", spread(microseconds, digits=1)


def compare_threads(size: int, rounds: int, rng: random.Random) -> tuple[str, ...]:
    """Returns the row for one size."""
    data = [bytearray(rng.randbytes(size)) for _ in range(max(1, BATCH_BYTES // size))]
    functions = (blake3_on_one_thread, blake3_on_all_threads)
    subjects: dict[str, Calls] = {each.__name__: (each, data) for each in functions}
    samples = take_turns({**subjects, "other work": (sha256, data)}, rounds, rng)
    one, all_ = (samples[name] for name in subjects)
    used = "all" if size >= _hashing.PARALLEL_BYTES else "one"
    return f"{size / 2**20:g} MiB", used, speed(size, one), speed(size, all_), ratio(one, all_)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    rng = random.Random(options.seed)
    yield conditions(options.seed, ["multimodal-cache", "blake3", "torch", "numpy", "pillow"])
    yield f"GB/s, {options.rounds} rounds, {QUARTILES}:"
    header: tuple[str, ...] = (
        "Size",
        "What",
        "GB/s",
        "Times the better BLAKE3",
        "Times SHA-256",
    )
    sizes = [int(each * 10**6) for each in MEGABYTES if each <= options.max_megabytes]
    by_size = {size: measure_size(size, options.rounds, rng) for size in sizes}
    yield table(header, [row for size in sizes for row in rows(size, by_size[size])])
    if options.plot:
        draw(by_size, options.plot)
    yield (
        f"Microseconds for small inputs, {options.rounds} rounds of {options.calls:,} calls, "
        f"{QUARTILES}:"
    )
    yield table(("Input", "Type", "us"), compare_small(options.rounds, options.calls, rng))
    yield f"BLAKE3 alone, in GB/s, {options.rounds} rounds, {QUARTILES}; other work among them:"
    header = ("Size", "What `hash_feature` uses", "One thread", "All threads", "All / one")
    sizes = [each * 2**20 for each in MEBIBYTES if each <= options.max_megabytes]
    yield table(header, [compare_threads(size, options.rounds, rng) for size in sizes])


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Times hash_feature, beside the bare hash functions.")
    parser.add_number("--rounds", 31, 2, "rounds behind each cell")
    parser.add_number("--calls", 2_000, 1, "calls with each small input in one round")
    parser.add_number("--max-megabytes", 64, 1, "the size of the largest input")
    parser.add_plot("draw the first table here")
    run(parser, report)


if __name__ == "__main__":
    main()
