"""What several test modules share."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import peers
import torch

from multimodal_cache import CacheStats, EmbeddingResult, MultiModalStaticCache, hash_feature

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


def deltas(before: CacheStats, after: CacheStats, *more: str) -> dict[str, int]:
    """The counters that moved, and by how much; those of bytes among ``more`` alone."""
    names = [
        *more,
        "hits", "misses", "insertions", "evictions", "evicted_bytes", "rejections", "collisions",
    ]  # fmt: skip
    moved = {name: getattr(after, name) - getattr(before, name) for name in names}
    return {name: by for name, by in moved.items() if by}


class Wrapper(torch.Tensor):
    """A subclass that wraps another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def freed() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.zeros(10)[2:]
    tensor.untyped_storage().resize_(36)
    return tensor


# What has no memory that could be counted or read.
UNCOUNTABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse COO": lambda: torch.sparse_coo_tensor([[5]], [1.0], (10**6,)),
    "sparse CSR": lambda: torch.eye(3).to_sparse_csr(),
    "opaque": lambda: torch.zeros(4, 4).to_mkldnn(),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
    "quantised below a byte": lambda: torch.quantize_per_tensor(
        torch.zeros(4), 1.0, 0, torch.quint4x2
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.zeros(4, device="meta"),
    "uninitialised": torch.nn.UninitializedParameter,
    "wrapper": lambda: Wrapper(torch.zeros(4)),
    "freed": freed,
    "shrunk": shrunk,
}


def assert_same(*features: Any) -> None:
    """All are one feature."""
    assert len({hash_feature(feature) for feature in features}) == 1


def assert_distinct(*features: Any) -> None:
    """No two are one feature."""
    made = [hash_feature(feature) for feature in features]
    pairs = itertools.combinations(zip(features, made, strict=True), 2)
    assert [(one, other) for (one, key), (other, its_key) in pairs if key == its_key] == []


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Runs a script in another process and returns what it printed."""
    shown = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


class EncoderOfNumbers:
    """Encodes a number as a tensor full of it, and remembers what it was given."""

    def __init__(self, tokens: int = 2) -> None:
        self.tokens = tokens
        self.calls: list[list[Any]] = []

    def __call__(self, features: list[Any]) -> torch.Tensor:
        self.calls.append(features)
        return torch.stack([torch.full((self.tokens, 1), float(number)) for number in features])


def numbers(embeddings: list[torch.Tensor]) -> list[float]:
    """Returns the numbers of which the embeddings are full."""
    found = []
    for embedding in embeddings:
        assert embedding.ndim == 2
        assert (embedding == embedding[0, 0]).all()
        found.append(embedding[0, 0].item())
    return found
