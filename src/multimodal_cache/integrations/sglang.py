"""The plugin that puts this cache into an SGLang server, without a change to SGLang.

At the start of each of its processes, SGLang calls the entry points of the group
``sglang.srt.plugins`` (all of them, or those that ``SGLANG_PLUGINS`` names). Then it replaces the
classes that they have registered, wherever these have been imported.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from multimodal_cache.static_cache import MultiModalStaticCache

logger = logging.getLogger(__name__)

_TARGET = "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache"

# What SGLang's class offers. Ours stands in for this: as much, and no more, is known to be used.
_OFFERED = {
    "__init__": "(self, max_size)",
    "__len__": "(self)",
    "available_size": "(self)",
    "clear": "(self)",
    "combine_hashes": "(mm_hashes)",
    "free": "(self, mm_hash, mm_embedding_allocator)",
    "get": "(self, mm_hashes, combined_hash=None)",
    "get_single": "(self, mm_hash)",
    "has": "(self, mm_hash)",
    "set": "(self, mm_hash, embedding, loc=None)",
}


def register() -> None:
    """Registers our ``MultiModalStaticCache`` in place of SGLang's. For SGLang to call.

    SGLang's ``EmbeddingResult`` and its subclasses stay SGLang's own.

    Logs one line: that the class is replaced (INFO); or why it isn't (WARNING), because it was
    not found, or its methods or their parameters are no longer those that ours stands in for.
    """
    try:
        from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache as SGLangCache
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        logger.warning("%s stays in place: %s", _TARGET, error)
        return
    if SGLangCache is MultiModalStaticCache:
        logger.info("%s has been replaced already", _TARGET)
        return
    if changes := _changes(SGLangCache):
        logger.warning("%s stays in place, since it has changed: %s", _TARGET, "; ".join(changes))
        return
    HookRegistry.register(_TARGET, MultiModalStaticCache, HookType.REPLACE)
    logger.info("%s is replaced by multimodal_cache.MultiModalStaticCache", _TARGET)


def _changes(cls: Any) -> list[str]:
    """Says in what a class offers something else than ``_OFFERED``."""
    names = {name for name in dir(cls) if name in _OFFERED or not name.startswith("_")}
    offered = {name: _description(getattr(cls, name)) for name in names}
    return [
        f"{name} is {offered.get(name, 'missing')}, not {_OFFERED.get(name, 'known')}"
        for name in sorted(names | _OFFERED.keys())
        if offered.get(name) != _OFFERED.get(name)
    ]


def _description(attribute: Any) -> str:
    """Returns how a method is called, without types; or what it is, if it isn't a method."""
    if not inspect.isfunction(attribute):
        return f"a {type(attribute).__name__}"
    signature = inspect.signature(attribute)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    untyped = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return f"async {untyped}" if inspect.iscoroutinefunction(attribute) else str(untyped)
