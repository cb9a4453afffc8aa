"""What several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peers
import torch

from multimodal_cache import CacheStats, EmbeddingResult, MultiModalStaticCache

REFERENCE = peers.load_reference()
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

WRAP = 2**61 - 1  # ints hash modulo this prime, so k and k + WRAP share a hash


def result(*shape: int, **options: Any) -> EmbeddingResult:
    """Returns a result of zeros: 4 bytes an element, unless a dtype is given."""
    return EmbeddingResult(embedding=torch.zeros(*shape, **options))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, found without the library's help."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_of(vars(value))


def kept_bytes(value: Any) -> int:
    """Returns the bytes of the storages that a value keeps alive, each storage once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors_of(value))
    }
    return sum(storages.values())


def recount(cache: MultiModalStaticCache) -> int:
    """Returns the bytes that the entries of a cache keep alive, counted anew."""
    return sum(kept_bytes(entry) for entry in cache.mm_cache.values())


def keys(cache: MultiModalStaticCache) -> list[int]:
    """Returns the keys, the least recent first."""
    return list(cache.mm_cache)


def filled(max_size: int, *mm_hashes: int, **options: Any) -> MultiModalStaticCache:
    """Returns a cache with an entry of 40 bytes for each key."""
    cache = MultiModalStaticCache(max_size, **options)
    for mm_hash in mm_hashes:
        assert cache.set(mm_hash, result(10))
    return cache


def deltas(before: CacheStats, after: CacheStats) -> dict[str, int]:
    """The counters that moved, and by how much."""
    names = [
        "hits", "misses", "insertions", "evictions", "evicted_bytes", "rejections", "collisions",
    ]  # fmt: skip
    moved = {name: getattr(after, name) - getattr(before, name) for name in names}
    return {name: by for name, by in moved.items() if by}
