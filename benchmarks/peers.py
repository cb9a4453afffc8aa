"""Other caches, from their installed packages, for comparison with ours.

None of them is a dependency: a loader returns None where its package is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from types import ModuleType
from unittest import mock

REFERENCE = "sglang/srt/mem_cache/multimodal_cache.py"


def load_reference() -> ModuleType | None:
    """Loads SGLang's cache module, unmodified, from the files of the ``sglang`` package.

    SGLang itself is not imported, since that takes a server's worth of packages. The one
    thing that the module imports from it, a class for annotations, is replaced.
    """
    try:
        path = metadata.distribution("sglang").locate_file(REFERENCE)
    except metadata.PackageNotFoundError:
        return None
    allocator = ModuleType("sglang.srt.mem_cache.allocator")
    allocator.BaseTokenToKVPoolAllocator = object  # type: ignore[attr-defined]
    name = "sglang.srt.mem_cache.multimodal_cache"
    spec = importlib.util.spec_from_file_location(name, str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    parents = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    stand_ins = {parent: ModuleType(parent) for parent in parents}
    with mock.patch.dict(sys.modules, {**stand_ins, allocator.__name__: allocator, name: module}):
        spec.loader.exec_module(module)
    return module
