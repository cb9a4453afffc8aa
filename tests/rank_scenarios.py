"""What the ranks of a process group do, for ``test_parallel.py``: in processes or in threads.

Each scenario is a function of a rank, its group and the number of ranks, and returns what it saw.
Their encoders have a collective in ``encode``, which hangs, or brings another sum, unless all ranks
encode the same list; the group's timeout ends it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from multimodal_cache import CachedEncoder, EmbeddingResult, MultiModalStaticCache
from multimodal_cache.stores import EmbeddingStore

ROW = 4  # bytes
TIMEOUT = timedelta(seconds=60)  # only a hang takes that long


class Rank:
    """A rank with a cache, and an encoder of numbers that needs the other ranks."""

    def __init__(self, group: Any, budget: int = 10**6, **options: Any) -> None:
        self.group = group
        self.cache = MultiModalStaticCache(budget)
        self.calls: list[list[int]] = []
        self.answers: list[Any] = []
        self.encoder = CachedEncoder(self.cache, self.encode, group=group, **options)

    def encode(self, numbers: list[int]) -> list[torch.Tensor]:
        """Returns one row for each number, half of it summed over the ranks."""
        self.calls.append(list(numbers))
        sums = torch.tensor([*numbers, len(numbers)], dtype=torch.float64)
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.group)
        assert sums.tolist() == [n * self.group.size() for n in [*numbers, len(numbers)]]
        return [torch.full((1, 1), float(number)) for number in numbers]

    def ask(self, numbers: Any, **options: Any) -> None:
        """Calls the encoder, with the numbers as keys, and keeps the answer or the error."""
        options = {"mm_hashes": numbers, **options}
        try:
            found = self.encoder(numbers, **options)
        except Exception as error:  # noqa: BLE001  # it is the answer
            self.answers.append(f"{type(error).__name__}: {error}")
        else:
            self.answers.append([embedding.item() for embedding in found])

    def saw(self) -> dict[str, Any]:
        """Returns what happened, as plain data."""
        stats = self.encoder.stats()
        counters = {"hits": stats.hits, "encoded": stats.encoded, "gave up": stats.disagreements}
        return {"calls": self.calls, "answers": self.answers, **counters}


def caches_of_different_sizes(rank: int, group: Any) -> Any:
    """Random calls, after which the ranks hold different images."""
    it = Rank(group, budget=ROW * (1 + 3 * rank))
    rng = random.Random(5)
    for _ in range(60):
        it.ask([rng.randrange(8) for _ in range(rng.randrange(4))])
    return it.saw()


def a_cleared_cache(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([1, 2, 3])
    if rank == 1:
        it.cache.clear()
    it.ask([3, 4])
    it.ask([1, 3])
    it.ask([1, 3])
    return it.saw()


def many_features(rank: int, group: Any) -> Any:
    """More than the first message has flags for."""
    it = Rank(group)
    it.ask(list(range(200)))
    for number in range(200):
        if number % 50 == 10 + rank:
            it.cache.free(number)
    it.ask([*range(200), 7, 7])
    return it.saw()


def different_features(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([1, 2])
    it.ask([1, 5 + rank])
    it.ask([1, 2] if rank else [2, 1])
    it.ask([1, 2, 3][: 2 + (rank > 0)])
    it.ask([] if rank else [1])
    it.ask([1], num_tokens=[1 + (rank > 0)])
    it.ask([1, 9])
    return it.saw()


def no_features(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([])
    it.ask([1])
    it.ask([])
    return it.saw()


def bad_arguments_on_one_rank(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([1])
    it.ask([1], mm_hashes=[1, 2] if rank == 1 else [1])
    it.ask([1], mm_hashes=["1"] if rank == 1 else [1])
    it.ask([1], num_tokens=[-1] if rank == 1 else [1])
    it.ask([1, 2])
    return it.saw()


def a_key_that_cannot_be_made_on_one_rank(rank: int, group: Any) -> Any:
    def key(number: int) -> int:
        if number == 3 and rank == 0:
            raise OSError("no such file")
        return number

    it = Rank(group, key=key)
    for number in (1, 3, 4):
        it.ask([number], mm_hashes=None)
    return it.saw()


def a_lookup_that_fails_on_one_rank(rank: int, group: Any) -> Any:
    it = Rank(group)
    get_single = it.cache.get_single

    def broken(key: Any) -> Any:
        raise OSError("no such cache")

    it.ask([1])
    if rank == 0:
        it.cache.get_single = broken  # type: ignore[method-assign]
    it.ask([1])
    it.cache.get_single = get_single  # type: ignore[method-assign]
    it.ask([1])
    return it.saw()


def an_encode_that_fails_on_one_rank(rank: int, group: Any) -> Any:
    it = Rank(group)
    encode = it.encode

    def failing(numbers: list[int]) -> Any:
        embeddings = encode(numbers)
        if rank == 0 and len(it.calls) == 1:
            raise ValueError("out of luck")
        return embeddings

    it.encoder = CachedEncoder(it.cache, failing, group=group)
    it.ask([1, 2])
    it.ask([1, 2])
    it.ask([1, 2])
    return it.saw()


def another_number_of_calls(rank: int, group: Any) -> Any:
    """One rank's encoder has had a call that the others have not."""
    it = Rank(group)
    alone = Rank(group)
    it.ask([1])
    it.ask([1])
    (alone if rank == 0 else it).ask([1])
    it.ask([2])
    it.ask([2, 3])
    return {**it.saw(), "answers": [*it.answers, *alone.answers]}


def lengths_that_do_not_fit_on_one_rank(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([1, 2])
    if rank == 0:
        it.cache.free(1)
        it.cache.set(1, EmbeddingResult(embedding=torch.zeros(3, 1)))
    it.ask([1, 2], num_tokens=[1, 1])
    it.ask([1, 2], num_tokens=[1, 1])
    return {**it.saw(), "mismatches": it.encoder.stats().row_mismatches}


def features_without_a_key(rank: int, group: Any) -> Any:
    it = Rank(group)
    for _ in range(2):
        it.ask([4, 5, 5], mm_hashes=[None, 5, None])
    return it.saw()


def a_call_inside_a_call(rank: int, group: Any) -> Any:
    it = Rank(group)
    encode = it.encode

    def nesting(numbers: list[int]) -> Any:
        it.ask([7])
        return encode(numbers)

    it.encoder = CachedEncoder(it.cache, nesting, group=group)
    it.ask([1])
    try:
        asyncio.run(it.encoder.encode_async([1], [1]))
    except RuntimeError as error:
        it.answers.append(str(error))
    it.ask([1])
    return it.saw()


def a_closed_encoder_on_one_rank(rank: int, group: Any) -> Any:
    it = Rank(group)
    it.ask([1])
    if rank == 1:
        it.encoder.close()
    it.ask([1])
    return it.saw()


class StoreOf(EmbeddingStore):
    """Has some keys, and fails for another."""

    def __init__(self, keys: list[int], failing: int | None = None) -> None:
        super().__init__(namespace="ranks", device="cpu")
        self.keys = keys
        self.failing = failing

    def fetch(self, keys: Any) -> dict[int, torch.Tensor]:
        asked = list(keys)
        if self.failing in asked:
            raise OSError("what a store never does")
        return {key: torch.full((1, 1), float(key)) for key in asked if key in self.keys}

    def offer(self, key: Any, embedding: torch.Tensor) -> bool:
        return False

    def _get_many(self, names: Any) -> Any:
        raise NotImplementedError

    def _set_many(self, values: Any) -> None:
        raise NotImplementedError


def stores_that_differ(rank: int, group: Any) -> Any:
    """One has what the others miss, and fails once."""
    with StoreOf([1, 2, 5], failing=9) if rank == 0 else StoreOf([2, 5]) as store:
        it = Rank(group, store=store)
        it.ask([1, 2, 3])
        it.ask([5, 2])
        it.ask([7, 9])
        it.ask([7, 1, 2])
        return it.saw() | {"fetched": it.encoder.stats().fetched}


SCENARIOS: dict[str, Callable[[int, Any], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        caches_of_different_sizes,
        a_cleared_cache,
        many_features,
        different_features,
        no_features,
        bad_arguments_on_one_rank,
        a_key_that_cannot_be_made_on_one_rank,
        a_lookup_that_fails_on_one_rank,
        an_encode_that_fails_on_one_rank,
        another_number_of_calls,
        lengths_that_do_not_fit_on_one_rank,
        features_without_a_key,
        a_call_inside_a_call,
        a_closed_encoder_on_one_rank,
        stores_that_differ,
    )
}


def run_all(rank: int, group: Any) -> dict[str, Any]:
    """Returns what one rank saw in each scenario."""
    return {name: scenario(rank, group) for name, scenario in SCENARIOS.items()}


def main() -> None:
    """Runs all scenarios as one of several processes, and writes what it saw."""
    rank, size, meeting, output = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=TIMEOUT
    )
    alone = [dist.new_group([other]) for other in range(size)][rank]
    seen = run_all(rank, dist.group.WORLD)
    it = Rank(alone)
    it.ask([1])
    asyncio.run(it.encoder.encode_async([1], [1]))  # it has nobody to agree with
    seen["a_group_of_one"] = it.saw()
    Path(output).write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
