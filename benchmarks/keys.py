"""How fast ``hash_feature`` makes a key, beside the bare hash functions.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    python benchmarks/keys.py

The defaults take about half a minute. The report is Markdown, on standard output, and with
``--output`` also in a file.

How to read it: a cell such as ``6.31 (6.28-6.35)`` is GB/s (of 10**9 bytes) or microseconds, the
median of the rounds and their quartiles. In a round each function is called once, in an order
that is drawn anew; so a call finds the CPU's caches, and the threads of BLAKE3, as other work
left them, as in a server. Where the quartiles are far apart the machine was busy, or it is one
that takes long to wake a sleeping core: the third table shows how much several threads are
worth there. A ratio is the median of the ratios, round by round.

BLAKE3 is the ``blake3`` package on the same bytes, on one thread and on all. SHA-256 is
``hashlib``'s; SGLang's keys are the first 64 bits of one. The arrays and tensors are contiguous
float32, the images RGB, whose pixels Pillow must pack first.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from PIL import Image
from reporting import QUARTILES, Parser, conditions, ratio, spread, table

from multimodal_cache import hash_feature, keys

MEGABYTES = (0.2, 3, 12, 64)
MEBIBYTES = (1, 2, 4, 8, 16, 32)

Call = tuple[Callable[[Any], object], Any]
"""A function and its argument."""

Samples = dict[str, list[float]]
"""Seconds, round by round, for each call."""


def measure(calls: dict[str, Call], rounds: int, rng: random.Random, repeat: int = 1) -> Samples:
    """Times the calls, round by round, each ``repeat`` times in a row."""
    samples: Samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name in rng.sample(sorted(calls), len(calls)):
            function, argument = calls[name]
            start = time.perf_counter()
            for _ in range(repeat):
                function(argument)
            samples[name].append((time.perf_counter() - start) / repeat)
    return samples


def speed(size: int, seconds: Sequence[float]) -> str:
    """Formats GB/s."""
    return spread([size / each / 1e9 for each in seconds], digits=2)


def hash_feature_on_one_thread(feature: Any) -> int:
    """Makes the key as below the size from which several threads are used."""
    usual = keys.PARALLEL_BYTES
    keys.PARALLEL_BYTES = sys.maxsize
    try:
        return hash_feature(feature)
    finally:
        keys.PARALLEL_BYTES = usual


def blake3_on_one_thread(data: bytes) -> bytes:
    """The bare hash function."""
    return blake3(data).digest()


def blake3_on_all_threads(data: bytes) -> bytes:
    """The bare hash function."""
    return blake3(data, max_threads=blake3.AUTO).digest()


def sha256(data: bytes) -> bytes:
    """The bare hash function."""
    return hashlib.sha256(data).digest()


def features(size: int, rng: random.Random) -> dict[str, Any]:
    """Returns an input of each kind, of about that many bytes, each in memory of its own."""
    side = math.isqrt(size // 3)
    words = size // 4
    return {
        "bytes": rng.randbytes(size),
        "array": np.frombuffer(rng.randbytes(words * 4), np.float32).reshape(1, words),
        "tensor": torch.frombuffer(bytearray(rng.randbytes(words * 4)), dtype=torch.float32),
        "PIL image": Image.frombytes("RGB", (side, side), rng.randbytes(side * side * 3)),
    }


def compare(size: int, rounds: int, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yields the rows for one size."""
    ours: dict[str, Call] = {
        **{name: (hash_feature, feature) for name, feature in features(size, rng).items()},
        "bytes, on one thread": (hash_feature_on_one_thread, rng.randbytes(size)),
    }
    bare: dict[str, Call] = {
        function.__name__: (function, rng.randbytes(size))
        for function in (blake3_on_one_thread, blake3_on_all_threads, sha256)
    }
    samples = measure({**ours, **bare}, rounds, rng)
    one, all_, sha = (samples[name] for name in bare)
    for name in ours:
        yield (
            f"{size / 1e6:g} MB",
            name,
            speed(size, samples[name]),
            *(speed(size, seconds) for seconds in (one, all_, sha)),
            ratio(min(one, all_, key=statistics.median), samples[name]),
            ratio(sha, samples[name]),
        )


def compare_small(rounds: int, calls: int, rng: random.Random) -> Iterator[tuple[str, ...]]:
    """Yields the rows for small inputs."""
    inputs = {
        "None": None,
        "int of 64 bits": rng.getrandbits(64),
        "str of 64 characters": f"{rng.getrandbits(256):064x}",
        "list of 10 ints": [rng.getrandbits(30) for _ in range(10)],
        **{f"{name}, 1 KB": each for name, each in features(1000, rng).items()},
    }
    samples = measure(
        {name: (hash_feature, each) for name, each in inputs.items()}, rounds, rng, calls
    )
    for name, each in inputs.items():
        microseconds = [seconds * 1e6 for seconds in samples[name]]
        yield name, f"`{type(each).__name__}`", spread(microseconds, digits=1)


def compare_threads(size: int, rounds: int, rng: random.Random) -> tuple[str, ...]:
    """Returns the row for one size."""
    data = rng.randbytes(size)
    functions = (blake3_on_one_thread, blake3_on_all_threads)
    calls: dict[str, Call] = {each.__name__: (each, data) for each in functions}
    samples = measure({**calls, "other work": (sha256, rng.randbytes(2**20))}, rounds, rng)
    one, all_ = (samples[name] for name in calls)
    used = "all" if size >= keys.PARALLEL_BYTES else "one"
    return f"{size / 2**20:g} MiB", used, speed(size, one), speed(size, all_), ratio(one, all_)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    rng = random.Random(options.seed)
    yield conditions(options.seed, ["multimodal-cache", "blake3", "torch", "numpy", "pillow"])
    yield f"GB/s, {options.rounds} rounds, {QUARTILES}:"
    header = (
        "Size",
        "Input",
        "`hash_feature`",
        "BLAKE3, one thread",
        "BLAKE3, all threads",
        "SHA-256",
        "Times the better BLAKE3",
        "Times SHA-256",
    )
    sizes = [int(each * 10**6) for each in MEGABYTES if each <= options.max_megabytes]
    yield table(header, [row for size in sizes for row in compare(size, options.rounds, rng)])
    yield (
        f"Microseconds for small inputs, {options.rounds} rounds of {options.calls:,} calls, "
        f"{QUARTILES}:"
    )
    yield table(("Input", "Type", "us"), compare_small(options.rounds, options.calls, rng))
    yield f"BLAKE3 alone, in GB/s, {options.rounds} rounds, {QUARTILES}; other work in between:"
    header = ("Size", "What `hash_feature` uses", "One thread", "All threads", "All / one")
    sizes = [each * 2**20 for each in MEBIBYTES if each <= options.max_megabytes]
    yield table(header, [compare_threads(size, options.rounds, rng) for size in sizes])


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Times hash_feature, beside the bare hash functions.")
    parser.add_number("--rounds", 31, 2, "rounds behind each cell")
    parser.add_number("--calls", 2_000, 1, "calls with each small input in one round")
    parser.add_number("--max-megabytes", 64, 1, "the size of the largest input")
    parser.run(report)


if __name__ == "__main__":
    main()
