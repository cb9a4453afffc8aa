"""How many bytes a cache keeps alive, beside its budget, in the ways in which servers fill it.

Run it from the root of the repository::

    pip install -e '.[bench]'
    pip install --no-deps sglang==0.5.23 ai-dynamo==1.6.1
    python benchmarks/memory.py

The peers are optional: one that isn't installed is left out, and a line says so. It takes some
seconds, on the CPU. The report is Markdown, on standard output, and with ``--output`` also in a
file.

How to read it: the numbers are parts of the budget. "Charged" is what the cache says that it holds.
"Kept" is the memory of all tensors that are alive when the caller has dropped its own. "Peak" is
the most that was alive at any moment beside what the caller held then: the outputs of the encode
whose items it was storing, and their graph. Above 1.00 the cache breaks its budget; where charged
and kept differ, its accounting is wrong. "Entries" are those left at the end. How far a cache gets
above 1.00 depends on the encoder: on the size of a batch where slices keep it, and on the depth
where a graph keeps the activations. Nothing here is timed: the numbers are the same on every run.
``--seed`` is for the sizes of "churn at the limit".

Memory is seen from below: a dispatch mode sees every operation of torch, of autograd and those
inside the caches too, and each storage that one returns is followed until it is freed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from peers import CACHETOOLS, DYNAMO, OURS, REFERENCE, Implementation, installed, left_out
from reporting import Parser, conditions, run, table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHOWN = (OURS, REFERENCE, CACHETOOLS, DYNAMO)
HIDDEN = 64
ROW_BYTES = HIDDEN * torch.float32.itemsize
BATCH = 12  # items


class Memory(TorchDispatchMode):
    """Follows the storages that torch's operations make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._callers: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                made = StorageWeakRef(storage)
                self._alive[made.cdata] = (made, storage.nbytes())
        self.look()
        return output

    def live(self) -> dict[int, int]:
        """Returns the bytes of each storage that is alive."""
        expired = [key for key, (made, _) in self._alive.items() if made.expired()]
        for key in expired:
            del self._alive[key]
            self._callers.discard(key)
        return {key: nbytes for key, (_, nbytes) in self._alive.items()}

    def look(self) -> None:
        """Raises the peak to what is alive now besides what the caller holds."""
        beside = (nbytes for key, nbytes in self.live().items() if key not in self._callers)
        self.peak = max(self.peak, sum(beside))

    @contextlib.contextmanager
    def callers(self) -> Iterator[None]:
        """All that is made inside is the caller's, until ``dropped``."""
        before = set(self.live())
        peak = self.peak
        yield
        self._callers |= set(self.live()) - before
        self.peak = peak

    def dropped(self) -> None:
        """The caller holds nothing any more: what is still alive is kept by the cache."""
        self._callers.clear()
        self.look()


@dataclass
class Filling:
    """A cache that is being filled, in one of the ways."""

    implementation: Implementation
    rows: int  # of an item
    memory: Memory
    rng: random.Random
    weights: torch.Tensor
    stored: int = 0
    refusals: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cache = self.implementation.new_cache(self.budget)

    def store(self, encode: Callable[[], list[torch.Tensor]], first_key: int | None = None) -> None:
        """Encodes some items, stores each under a key of its own, and drops them."""
        with self.memory.callers():
            outputs = encode()
        key = self.stored if first_key is None else first_key
        self.stored += len(outputs)
        for number, output in enumerate(outputs):
            try:
                self.cache.set(
                    self.implementation.key(key + number), self.implementation.new_result(output)
                )
            except (AssertionError, ValueError) as error:
                self.refusals.add(type(error).__name__)
            self.memory.look()
        del outputs, output
        self.memory.dropped()

    @property
    def budget(self) -> int:
        """The bytes of 16 items."""
        return 16 * self.rows * ROW_BYTES


def own_tensors(filling: Filling) -> None:
    """Each item is a tensor of its own; twice as many as the budget holds."""
    for _ in range(32):
        filling.store(lambda: [torch.ones(filling.rows, HIDDEN)])


def slices(filling: Filling) -> None:
    """The items of a batch are slices of one tensor, as ``torch.split`` makes them."""
    for _ in range(3):
        filling.store(lambda: list(torch.ones(BATCH * filling.rows, HIDDEN).split(filling.rows)))


def one_of_each_batch(filling: Filling) -> None:
    """Of each batch one item is new, and only its slice is stored."""
    for _ in range(16):
        filling.store(lambda: [torch.ones(BATCH * filling.rows, HIDDEN)[: filling.rows]])


def expanded(filling: Filling) -> None:
    """The rows of each item are one row, expanded. A copy is larger than what it is made from."""
    for _ in range(32):
        filling.store(lambda: [torch.ones(1, HIDDEN).expand(filling.rows, HIDDEN)])


def with_a_graph(filling: Filling) -> None:
    """The encoder runs without ``no_grad``: its outputs hold its activations."""

    def encode() -> list[torch.Tensor]:
        hidden = torch.ones(4 * filling.rows, HIDDEN)
        for _ in range(4):
            hidden = (hidden @ filling.weights).tanh()
        return [hidden.reshape(filling.rows, 4, HIDDEN).mean(dim=1)]

    for _ in range(32):
        filling.store(encode)


def duplicates(filling: Filling) -> None:
    """Each key is stored twice, the second time with twice as many rows."""
    for key in range(16):
        for times in (1, 2):
            filling.store(lambda times=times: [torch.ones(times * filling.rows, HIDDEN)], key)


def oversized(filling: Filling) -> None:
    """The cache is full, then comes an item of twice its budget."""
    own_tensors(filling)
    filling.store(lambda: [torch.ones(32 * filling.rows, HIDDEN)])


def churn(filling: Filling) -> None:
    """Slices of random size, out of batches of random size, at the limit all the time."""
    for _ in range(100):
        sizes = [filling.rng.randint(1, 2 * filling.rows) for _ in range(BATCH)]
        filling.store(lambda sizes=sizes: list(torch.ones(sum(sizes), HIDDEN).split(sizes)))


WAYS: dict[str, Callable[[Filling], None]] = {
    "own tensors": own_tensors,
    "slices of batches": slices,
    "one slice of each batch": one_of_each_batch,
    "expanded": expanded,
    "with a graph": with_a_graph,
    "duplicates": duplicates,
    "one oversized item": oversized,
    "churn at the limit": churn,
}


@dataclass(frozen=True)
class Kept:
    """What a cache has kept: bytes, and the number of entries."""

    budget: int
    charged: int
    kept: int
    peak: int
    entries: int
    refusals: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """Formats the bytes as parts of the budget."""
        parts = (self.charged, self.kept, self.peak)
        refusals = f" ({', '.join(self.refusals)})" if self.refusals else ""
        return *(f"{part / self.budget:.2f}" for part in parts), f"{self.entries}{refusals}"


def measure(
    way: Callable[[Filling], None], implementation: Implementation, rows: int, seed: int
) -> Kept:
    """Fills a cache with items of so many rows and returns what it has kept."""
    weights = torch.ones(HIDDEN, HIDDEN, requires_grad=True)
    with Memory() as memory:
        filling = Filling(implementation, rows, memory, random.Random(seed), weights)
        way(filling)
        gc.collect()
        kept = sum(memory.live().values())
    return Kept(
        filling.budget,
        implementation.charged(filling.cache),
        kept,
        memory.peak,
        len(filling.cache),
        tuple(sorted(filling.refusals)),
    )


def report(options: argparse.Namespace) -> Iterator[str]:
    """Runs everything and yields the paragraphs of the report."""
    found = installed(SHOWN)
    yield conditions(options.seed, ["torch", *(each.package for each in found)])
    yield from left_out(found, SHOWN[1:])
    yield (
        f"Parts of a budget for 16 items of {options.rows} x {HIDDEN} float32; batches are of "
        f"{BATCH} items, the encoder with a graph has 4 layers:"
    )
    rows = [
        (name, each.name, *measure(way, each, options.rows, options.seed).cells())
        for name, way in WAYS.items()
        for each in found
    ]
    yield table(("Stored", "Cache", "Charged", "Kept", "Peak", "Entries"), rows)


def main() -> None:
    """Runs the benchmark."""
    logging.getLogger("multimodal_cache").setLevel(logging.ERROR)  # what is refused is meant to be
    parser = Parser("Counts the bytes that caches keep alive, beside their budget.")
    parser.add_number("--rows", 256, 1, "rows of an item")
    run(parser, report)


if __name__ == "__main__":
    main()
