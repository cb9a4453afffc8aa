"""Other caches, from their installed packages, for comparison with ours.

None of them is a dependency: a loader returns None where its package is missing.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest import mock


def load_reference() -> ModuleType | None:
    """Loads SGLang's cache module, unmodified, from the files of the ``sglang`` package."""
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    try:
        stand_ins = {name: sglang_package(name) for name in names}
    except metadata.PackageNotFoundError:
        return None
    allocator = "sglang.srt.mem_cache.allocator"
    stand_ins[allocator] = module(allocator, BaseTokenToKVPoolAllocator=object)
    with mock.patch.dict(sys.modules, stand_ins):
        return importlib.import_module("sglang.srt.mem_cache.multimodal_cache")


def sglang_package(name: str) -> ModuleType:
    """Returns what stands in for a package of SGLang's, and lets its modules be imported.

    The package's own code isn't run: it imports a server's worth of other packages.

    Raises:
        metadata.PackageNotFoundError: SGLang isn't installed.
    """
    folder = metadata.distribution("sglang").locate_file(name.replace(".", "/"))
    return module(name, __path__=[str(folder)])


def module(name: str, **attributes: Any) -> ModuleType:
    """Makes a module by hand."""
    made = ModuleType(name)
    vars(made).update(attributes)
    return made
