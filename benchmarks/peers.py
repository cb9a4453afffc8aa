"""Ours and other caches, from their installed packages, behind one interface.

None of the others is a dependency: what isn't installed is left out of the tables.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from multimodal_cache import EmbeddingResult, MultiModalStaticCache

OURS = "multimodal-cache"
REFERENCE = "SGLang's, no lock"
CACHETOOLS = "cachetools + RLock"
CACHEBOX = "cachebox"
DYNAMO = "Dynamo's, no lock"
INSTALL = {
    REFERENCE: "pip install --no-deps sglang==0.5.23",
    CACHETOOLS: "pip install cachetools",
    CACHEBOX: "pip install cachebox",
    DYNAMO: "pip install --no-deps ai-dynamo==1.6.1",
}


@dataclass(frozen=True)
class Implementation:
    """A cache with ``get_single(key)``, ``set(key, result)`` and ``len``, and what goes with it.

    Attributes:
        name: As it is called in the tables.
        package: What has to be installed.
        new_cache: Makes a cache from a budget in bytes.
        new_result: Makes what is stored from a tensor.
        charged: Returns the bytes that a cache says it holds.
        key: Makes the key of an item from an int.
        by_list: It has ``get(mm_hashes)`` and ``combine_hashes(mm_hashes)``.
    """

    name: str
    package: str
    new_cache: Callable[[int], Any]
    new_result: Callable[[torch.Tensor], Any]
    charged: Callable[[Any], int]
    key: Callable[[int], Any] = int
    by_list: bool = True


def installed(names: Iterable[str] = (OURS, *INSTALL)) -> list[Implementation]:
    """Returns those of these that are installed."""
    return [found for name in names if (found := _LOADERS[name]()) is not None]


def left_out(found: Sequence[Implementation], names: Iterable[str] = INSTALL) -> Iterator[str]:
    """Yields a line for each of these that isn't installed."""
    for name in names:
        if name not in {each.name for each in found}:
            yield f"Left out, not installed: {name} (`{INSTALL[name]}`)."


def _ours() -> Implementation:
    return _like_sglang(OURS, "multimodal-cache", MultiModalStaticCache, EmbeddingResult)


def _sglang() -> Implementation | None:
    module = load_reference()
    if module is None:
        return None
    return _like_sglang(REFERENCE, "sglang", module.MultiModalStaticCache, module.EmbeddingResult)


def _like_sglang(name: str, package: str, cache: Any, result: Any) -> Implementation:
    return Implementation(
        name,
        package,
        cache,
        lambda tensor: result(embedding=tensor),
        lambda cache: int(cache.current_size),
    )


def _cachetools() -> Implementation | None:
    if not importlib.util.find_spec("cachetools"):
        return None
    return Implementation(CACHETOOLS, "cachetools", LockedLRUCache, _result, LockedLRUCache.charged)


def _cachebox() -> Implementation | None:
    if not importlib.util.find_spec("cachebox"):
        return None
    return Implementation(CACHEBOX, "cachebox", Cachebox, _result, Cachebox.charged)


def _dynamo() -> Implementation | None:
    module = _load_dynamo()
    if module is None:
        return None

    def new_cache(max_size: int) -> DynamoCache:
        return DynamoCache(module.MultimodalEmbeddingCacheManager(max_size))

    return Implementation(
        DYNAMO,
        "ai-dynamo",
        new_cache,
        module.CachedEmbedding,
        DynamoCache.charged,
        key="{:064x}".format,
        by_list=False,
    )


_LOADERS: dict[str, Callable[[], Implementation | None]] = {
    OURS: _ours,
    REFERENCE: _sglang,
    CACHETOOLS: _cachetools,
    CACHEBOX: _cachebox,
    DYNAMO: _dynamo,
}


# Adapters


def _result(tensor: torch.Tensor) -> EmbeddingResult:
    return EmbeddingResult(embedding=tensor)


class LockedLRUCache:
    """The cache that one would write by hand around ``cachetools.LRUCache``."""

    def __init__(self, max_size: int) -> None:
        from cachetools import LRUCache

        self._cache: Any = LRUCache(max_size, getsizeof=lambda result: result.embedding.nbytes)
        self._lock = threading.RLock()

    @staticmethod
    def combine_hashes(keys: list[int]) -> int:
        """Returns the key of a list of items."""
        return hash(tuple(keys))

    def get(self, keys: list[int]) -> object:
        """Looks a list of items up."""
        with self._lock:
            return self._cache.get(hash(tuple(keys)))

    def get_single(self, key: int) -> object:
        """Looks one key up."""
        with self._lock:
            return self._cache.get(key)

    def set(self, key: int, result: EmbeddingResult) -> None:
        """Stores a result; one that can't fit is a ValueError."""
        with self._lock:
            self._cache[key] = result

    def charged(self) -> int:
        """Returns the bytes held."""
        return int(self._cache.currsize)

    def __len__(self) -> int:
        return len(self._cache)


class Cachebox:
    """``cachebox.LRUCache``, which has a lock of its own, in Rust."""

    def __init__(self, max_size: int) -> None:
        from cachebox import LRUCache

        self._cache: Any = LRUCache(max_size, getsizeof=lambda key, result: result.embedding.nbytes)
        self.get_single = self._cache.get
        self.set = self._cache.insert

    @staticmethod
    def combine_hashes(keys: list[int]) -> int:
        """Returns the key of a list of items."""
        return hash(tuple(keys))

    def get(self, keys: list[int]) -> object:
        """Looks a list of items up."""
        return self._cache.get(hash(tuple(keys)))

    def charged(self) -> int:
        """Returns the bytes held."""
        return int(self._cache.current_size())

    def __len__(self) -> int:
        return len(self._cache)


class DynamoCache:
    """Dynamo's ``MultimodalEmbeddingCacheManager``, whose keys are digests in hexadecimal."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.get_single = manager.get
        self.set = manager.set

    def charged(self) -> int:
        """Returns the bytes held."""
        return int(self._manager.stats["current_bytes"])

    def __len__(self) -> int:
        return int(self._manager.stats["entries"])


# Modules of large packages, without the packages


def load_reference() -> ModuleType | None:
    """Loads SGLang's cache module, unmodified, from the files of the ``sglang`` package."""
    allocator = "sglang.srt.mem_cache.allocator"
    stand_in = new_module(allocator, BaseTokenToKVPoolAllocator=object)
    return _load("sglang", "sglang.srt.mem_cache.multimodal_cache", {allocator: stand_in})


def _load_dynamo() -> ModuleType | None:
    name = "dynamo.common.memory.multimodal_embedding_cache_manager"
    logging.getLogger(name).setLevel(logging.ERROR)  # it warns of each value that it refuses
    return _load("ai-dynamo", name, {})


def _load(distribution: str, name: str, stand_ins: dict[str, ModuleType]) -> ModuleType | None:
    """Loads one module of a distribution, or returns None if that isn't installed."""
    parts = name.split(".")
    packages = [".".join(parts[:length]) for length in range(1, len(parts))]
    try:
        modules = {package: package_of(distribution, package) for package in packages}
    except metadata.PackageNotFoundError:
        return None
    with mock.patch.dict(sys.modules, modules | stand_ins):
        return importlib.import_module(name)


def package_of(distribution: str, name: str) -> ModuleType:
    """Returns what stands in for a package of a distribution, and lets its modules be imported.

    The package's own code isn't run: it may import a server's worth of other packages.

    Raises:
        metadata.PackageNotFoundError: The distribution isn't installed.
    """
    folder = metadata.distribution(distribution).locate_file(name.replace(".", "/"))
    return new_module(name, __path__=[str(folder)])


def new_module(name: str, **attributes: Any) -> ModuleType:
    """Makes a module by hand."""
    made = ModuleType(name)
    vars(made).update(attributes)
    return made
