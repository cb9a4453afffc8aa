"""The plugin that puts this cache into an SGLang server, without a change to SGLang.

When a server and its schedulers start, SGLang calls the entry points of the group
``sglang.srt.plugins``: all of them, or those that ``SGLANG_PLUGINS`` names. They register
replacements, which SGLang then puts in wherever the originals have been imported.

``python -m multimodal_cache.integrations.sglang`` says whether that would happen.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from typing import Any, SupportsIndex

from multimodal_cache.base import EmbeddingResult
from multimodal_cache.integrations._sglang_watch import Report, new_trace, watch
from multimodal_cache.static_cache import MultiModalStaticCache
from multimodal_cache.tiered import TieredCache

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache"
HOST_SIZE = "MULTIMODAL_CACHE_HOST_SIZE_MB"

# What ours stands in for: the methods of SGLang's class, how they are called, and its attributes.
_METHODS = {
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
_ATTRIBUTES = {"current_size", "max_size", "mm_cache"}


class _InScheduler(MultiModalStaticCache):
    """What both of the classes below do besides caching."""

    _log: Report

    def _begin(self, budget: str) -> None:
        logger.info(
            "%s is in place of SGLang's cache, with a budget of %s", name_of(type(self)), budget
        )
        self._log = Report(self)
        watch(self, self._log)

    def set(
        self,
        mm_hash: SupportsIndex | None,
        embedding: EmbeddingResult,
        loc: object = None,
        *,
        generation: int | None = None,
    ) -> bool:
        """Stores a result, and returns whether the device has it.

        SGLang looks up again what it was told is stored, and uses the answer unasked: it must not
        depend on a copy from host memory, for which there may be no room.
        """
        stored = super().set(mm_hash, embedding, generation=generation)
        return self._log.after_set(mm_hash, stored and mm_hash in self.mm_cache)

    def __repr__(self) -> str:
        return f"{__name__}.{super().__repr__()}"  # SGLang has caches of its own


class SchedulerCache(_InScheduler):
    """What SGLang makes in place of its own class: ours, which says so in the log.

    SGLang makes it after it has set up its log, unlike the plugin's own lines.

    Args:
        max_size: The budget in bytes. One below 0 is 0: SGLang's own class takes it, and refuses
            every value.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max(max_size, 0), trace=new_trace())
        self._begin(f"{_bytes(self.max_size)}{'' if self.max_size else ': it keeps nothing'}")


class TieredSchedulerCache(_InScheduler, TieredCache):
    """What SGLang makes where ``MULTIMODAL_CACHE_HOST_SIZE_MB`` is set: with that much host memory.

    Args:
        max_size: As for ``SchedulerCache``.

    Raises:
        ValueError: The variable isn't a number of MiB, or less than ``max_size``. (It is raised
            here, where it stops the scheduler: what ``register`` raises SGLang logs and forgets.)
    """

    def __init__(self, max_size: int) -> None:
        size = max(max_size, 0)
        TieredCache.__init__(self, size, host_size(size), trace=new_trace())
        self._begin(f"{_bytes(size)}, and of {_bytes(self.host.max_size)} in host memory")


def scheduler_cache() -> type[SchedulerCache] | type[TieredSchedulerCache]:
    """Returns the class for SGLang's schedulers, as the environment says."""
    return TieredSchedulerCache if os.environ.get(HOST_SIZE) else SchedulerCache


def host_size(max_size: int) -> int:
    """Returns the bytes of host memory that the environment gives each scheduler.

    Raises:
        ValueError: It isn't a number of MiB, or less than the device's ``max_size`` bytes.
    """
    text = os.environ[HOST_SIZE]
    try:
        mebibytes = float(text)
    except ValueError:
        mebibytes = math.nan
    if math.isfinite(mebibytes) and mebibytes * 2**20 >= max_size:
        return int(mebibytes * 2**20)
    raise ValueError(
        f"{HOST_SIZE} must be a number of MiB, and no less than the device's {_bytes(max_size)}, "
        f"got {text!r}; without host memory leave it unset"
    )


def name_of(cls: type) -> str:
    """Returns the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _bytes(size: int) -> str:
    return f"{size} bytes ({size / 2**20:.1f} MiB)"


def register() -> None:
    """Registers ``scheduler_cache()`` in place of SGLang's class. SGLang calls this.

    SGLang's ``EmbeddingResult`` and its subclasses stay SGLang's own, and ours takes them.

    Logs one line: what is replaced (INFO); or why SGLang's class stays in place (WARNING).
    """
    if reason := obstacle():
        logger.warning("%s stays in place: %s", TARGET, reason)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cls = scheduler_cache()
    HookRegistry.register(TARGET, cls, HookType.REPLACE)
    logger.info("replacing %s with %s", TARGET, name_of(cls))


def obstacle() -> str | None:
    """Says why SGLang's class must stay in place, or None.

    It or SGLang's plugins can't be imported, or its public methods or their parameters aren't
    those that ours stands in for.
    """
    try:
        from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache as SGLangCache
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: F401
    except ImportError as error:
        return str(error)
    if changes := _changes(SGLangCache):
        return f"it has changed: {'; '.join(changes)}"
    return None


def _changes(cls: Any) -> list[str]:
    """Says in what a class differs from ``_METHODS`` and ``_ATTRIBUTES``, as far as is public."""
    names = {name for name in dir(cls) if name in _METHODS or not name.startswith("_")}
    found = {name: _call_form(getattr(cls, name)) for name in names}
    changes = [
        f"{name}: expected {_METHODS.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in sorted(names | _METHODS.keys())
        if found.get(name) != _METHODS.get(name)
    ]
    if not changes:
        attributes = {name for name in vars(cls(0)) if not name.startswith("_")}
        if attributes != _ATTRIBUTES:
            changes = [f"attributes: expected {sorted(_ATTRIBUTES)}, found {sorted(attributes)}"]
    return changes


def _call_form(attribute: Any) -> str:
    """Returns the parameters of a method, without types; or what it is, if it isn't a method."""
    if not inspect.isfunction(attribute):
        return f"a {type(attribute).__name__}"
    signature = inspect.signature(attribute)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    untyped = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return f"async {untyped}" if inspect.iscoroutinefunction(attribute) else str(untyped)


if __name__ == "__main__":
    from multimodal_cache._command import run
    from multimodal_cache.integrations._sglang_check import main

    run(main)
