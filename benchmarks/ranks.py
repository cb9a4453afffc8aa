"""What it costs tensor-parallel ranks to agree before each call.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e .
    python benchmarks/ranks.py

It takes some seconds, and starts a process for each rank. The report is Markdown, on standard
output, and with ``--output`` also in a file.

How to read it: processes are joined by gloo, as CPU groups of servers are, on one machine. Each
makes calls whose items are all cached, so that nothing is encoded, with the group and without. The
bare all-reduce is of as many bytes as the message that the ranks agree with. What agreement costs
is the call with the group less that without; the goal is 1.5 times the bare all-reduce. Each row is
of rank 0. All take their turn in each round; a barrier is before each, outside of the time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from reporting import QUARTILES, Parser, Samples, conditions, ratio, run, spread, table
from torch import multiprocessing

from multimodal_cache import CachedEncoder, MultiModalStaticCache

ITEMS = (1, 8, 64)
MESSAGE_WORDS = 79  # of the message that a call costs
BARE = "the all-reduce alone"


def work(rank: int, size: int, port: int, calls: int, rounds: int, seed: int, found: Any) -> None:
    """Measures, as one of the ranks; rank 0 puts its samples into ``found``."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    rng = random.Random(seed)  # of one seed on all ranks, which must take the same turns
    group = dist.group.WORLD
    cache = MultiModalStaticCache(2**20)
    together = CachedEncoder(cache, encode, group=group)
    alone = CachedEncoder(cache, encode)
    message = torch.zeros(MESSAGE_WORDS, dtype=torch.int64)
    subjects: dict[str, Callable[[], object]] = {
        BARE: lambda: dist.all_reduce(message, dist.ReduceOp.MAX, group)
    }
    for items in ITEMS:
        features, keys = [0] * items, list(range(items))
        alone(features, keys)
        subjects[f"{items} with"] = lambda f=features, k=keys: together(f, k)  # type: ignore[misc]
        subjects[f"{items} without"] = lambda f=features, k=keys: alone(f, k)  # type: ignore[misc]
    samples: Samples = {name: [] for name in subjects}
    for _ in range(rounds):
        for name in rng.sample(sorted(subjects), len(subjects)):
            call = subjects[name]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append((time.perf_counter() - start) / calls)
    if rank == 0:
        found.put(samples)
    dist.destroy_process_group()


def encode(features: list[int]) -> torch.Tensor:
    """Returns one row for each."""
    return torch.zeros(len(features), 1, 4)


def measure(size: int, options: argparse.Namespace) -> Samples:
    """Starts the ranks and returns the samples of the first."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    port = free_port()
    arguments = (size, port, options.calls, options.rounds, options.seed, found)
    multiprocessing.spawn(work, arguments, nprocs=size)  # type: ignore[no-untyped-call]
    samples: Samples = found.get()
    return samples


def free_port() -> int:
    """Returns a port that nothing listens on."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rows(samples: Samples) -> Iterator[tuple[str, ...]]:
    """Yields the bare all-reduce, and then what agreement costs."""
    bare = samples[BARE]
    yield BARE, "", spread([each * 1e6 for each in bare]), "1.00"
    for items in ITEMS:
        both = [samples[f"{items} {which}"] for which in ("with", "without")]
        for which, seconds in zip(("with", "without"), both, strict=True):
            cells = spread([each * 1e6 for each in seconds]), "-"
            yield f"a call {which} the group", str(items), *cells
        cost = [one - other for one, other in zip(*both, strict=True)]
        yield "what agreement costs", str(items), spread([c * 1e6 for c in cost]), ratio(cost, bare)


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    yield conditions(options.seed, ["multimodal-cache", "torch"])
    yield (
        f"Microseconds, {options.ranks} ranks over gloo, {options.rounds} rounds of "
        f"{options.calls:,} calls, {QUARTILES}:"
    )
    samples = measure(options.ranks, options)
    yield table(("What", "Items", "us", "Times the all-reduce"), rows(samples))


def main() -> None:
    """Runs the benchmark."""
    parser = Parser("Measures what it costs ranks to agree on what to encode.")
    parser.add_number("--ranks", 2, 2, "processes")
    parser.add_number("--calls", 500, 1, "calls behind each sample")
    parser.add_number("--rounds", 11, 2, "rounds behind each cell")
    run(parser, report)


if __name__ == "__main__":
    main()
