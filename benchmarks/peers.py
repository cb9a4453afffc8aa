"""Other caches, from their installed packages, for comparison with ours.

None of them is a dependency: a loader returns None where its package is missing.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType
from unittest import mock


def load_reference() -> ModuleType | None:
    """Loads SGLang's cache module, unmodified, from the files of the ``sglang`` package."""
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    try:
        stand_ins = {name: sglang_package(name) for name in names}
    except metadata.PackageNotFoundError:
        return None
    with mock.patch.dict(sys.modules, stand_ins | sglang_allocator()):
        return importlib.import_module("sglang.srt.mem_cache.multimodal_cache")


def sglang_package(name: str) -> ModuleType:
    """Returns a package of SGLang's with its folder, to import from, but without its code.

    That would import a server's worth of other packages.

    Raises:
        metadata.PackageNotFoundError: SGLang isn't installed.
    """
    package = ModuleType(name)
    folder = metadata.distribution("sglang").locate_file(name.replace(".", "/"))
    package.__path__ = [str(folder)]
    return package


def sglang_allocator() -> dict[str, ModuleType]:
    """Returns what stands in for the module that SGLang's cache imports, for annotations."""
    allocator = ModuleType("sglang.srt.mem_cache.allocator")
    allocator.BaseTokenToKVPoolAllocator = object  # type: ignore[attr-defined]
    return {allocator.__name__: allocator}
