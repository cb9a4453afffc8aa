"""The types of the public names, as mypy sees them. Never executed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import assert_type

from multimodal_cache import (
    CachedEncoder,
    CacheStats,
    CombinedHash,
    EmbeddingResult,
    EncoderStats,
    MultimodalCache,
    MultiModalStaticCache,
    hash_feature,
)
from multimodal_cache.static_cache import _get_tensor_size


@dataclass(kw_only=True)
class WithFrames(EmbeddingResult):
    num_tokens_per_frame: list[int]


class OwnCache(MultimodalCache):
    """Written against the signatures of the reference."""

    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> EmbeddingResult | None:
        return None

    def set(self, mm_hash: int, embedding: EmbeddingResult, mm_embedding_allocator: object) -> bool:
        return False

    def has(self, mm_hash: int) -> bool:
        return False

    def free(self, mm_hash: int, mm_embedding_allocator: object) -> bool:
        return False

    def clear(self) -> None:
        return None

    def available_size(self) -> int:
        return 0


def heard(mm_hash: int, result: EmbeddingResult) -> None:
    return None


cache = MultiModalStaticCache(2**20, copy=True, on_evict=heard)
as_base: MultimodalCache = cache
tensor = torch.zeros(2, 3)

assert_type(MultimodalCache.combine_hashes([1, 2]), CombinedHash | None)
assert_type(MultimodalCache.combine_hashes((np.int64(1), None)), CombinedHash | None)
assert_type(MultimodalCache.combine_hashes(None), CombinedHash | None)
assert_type(CombinedHash([1]).mm_hashes, tuple[int, ...])

assert_type(cache.get([1]), EmbeddingResult | None)
assert_type(cache.get((1, np.int64(2)), combined_hash=5), EmbeddingResult | None)
assert_type(cache.get_single(1), EmbeddingResult | None)
assert_type(cache.get_single(None), EmbeddingResult | None)
assert_type(cache.set(1, EmbeddingResult(embedding=tensor)), bool)
assert_type(cache.set(1, WithFrames(embedding=tensor, num_tokens_per_frame=[2])), bool)
assert_type(cache.set(np.int64(1), EmbeddingResult(embedding=tensor), None), bool)
assert_type(cache.set(None, EmbeddingResult(embedding=tensor), generation=0), bool)
assert_type(cache.has(1), bool)
assert_type(1 in cache, bool)
assert_type(cache.free(1), bool)
assert_type(cache.free(1, None), bool)
assert_type(len(cache), int)
assert_type(cache.available_size(), int)
assert_type(cache.current_size, int)
assert_type(cache.max_size, int)
assert_type(cache.generation, int)
assert_type(cache.mm_cache, OrderedDict[int, EmbeddingResult])
assert_type(cache.stats(), CacheStats)
assert_type(cache.stats().hit_rate, float)
assert_type(_get_tensor_size(tensor), int)

encoder = CachedEncoder(cache, torch.nn.Identity(), namespace="model", key=None)


def encode(features: list[torch.Tensor]) -> list[torch.Tensor]:
    return features


async def encode_later(features: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    assert_type(await encoder.encode_async([tensor], num_tokens=[2]), list[torch.Tensor])
    return (*features,)


CachedEncoder(as_base, encode, key=lambda feature: None)
CachedEncoder(OwnCache(), encode_later, namespace=b"model")
assert_type(encoder([tensor], [None, np.int64(1)], (2,)), list[torch.Tensor])
assert_type(encoder.stats(), EncoderStats)
assert_type(OwnCache().get_single(1), EmbeddingResult | None)

assert_type(hash_feature(tensor), int)
assert_type(hash_feature({"pixels": [tensor, np.zeros(2)]}, namespace="model", bits=64), int)
assert_type(hash_feature(b"", namespace=b"model", bits=np.int64(64)), int)

with CachedEncoder(cache, encode, max_concurrency=1) as entered:
    assert_type(entered, CachedEncoder)
assert_type(encoder.stats().hit_rate, float)

cache.max_size = 5
cache.current_size = 5  # type: ignore[misc]
cache.set("key", EmbeddingResult(embedding=tensor))  # type: ignore[arg-type]
cache.get([1.5])  # type: ignore[list-item]
MultiModalStaticCache(2**20, True)  # type: ignore[call-arg]
EmbeddingResult(tensor)  # type: ignore[call-arg]
CachedEncoder(cache, 5)  # type: ignore[arg-type]
CachedEncoder(cache, encode, "model")  # type: ignore[call-arg]
encoder([tensor], ["key"])  # type: ignore[list-item]
hash_feature(tensor, "model")  # type: ignore[call-arg]
hash_feature(tensor, namespace=1)  # type: ignore[arg-type]
