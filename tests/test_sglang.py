"""The plugin for SGLang, and SGLang's own code on it.

The latter is in ``sglang_paths.py``, which runs in a process of its own, since SGLang replaces
classes for good and since most of SGLang is stood in for there.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import pytest
from support import REFERENCE, run_python

from multimodal_cache import MultiModalStaticCache
from multimodal_cache.integrations.sglang import register

TARGET = "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache"


@pytest.mark.skipif(REFERENCE is None, reason="the sglang wheel is not installed")
def test_sglang_s_own_code_runs_on_it() -> None:
    paths = Path(__file__).with_name("sglang_paths.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(paths)]
    environment = {**os.environ, "SGLANG_PLUGINS": "multimodal_cache", "SGLANG_PLATFORM": ""}
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    # Nothing was skipped.
    assert re.search(r"= \d+ passed in [^,]*=$", shown.stdout.rstrip()), shown.stdout


class Known:
    """A class with what SGLang's offers."""

    def __init__(self, max_size: int) -> None:
        self.max_size, self.current_size, self.mm_cache = max_size, 0, {}

    def __len__(self) -> int: ...
    def available_size(self) -> int: ...
    def clear(self) -> None: ...
    @staticmethod
    def combine_hashes(mm_hashes: list[int]) -> int | None: ...
    def free(self, mm_hash: int, mm_embedding_allocator: Any) -> bool: ...
    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> Any: ...
    def get_single(self, mm_hash: int) -> Any: ...
    def has(self, mm_hash: int) -> bool: ...
    def set(self, mm_hash: int, embedding: Any, loc: Any = None) -> bool: ...


class Retyped(Known):
    """What makes no difference to callers."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self._pinned = 0

    def set(self, mm_hash, embedding, loc=None):  # type: ignore[no-untyped-def]
        """Has no types."""

    def _evict(self, down_to: int) -> None: ...


class WithLimitOfEntries(Known):
    def __init__(self, max_size: int, max_entries: int) -> None: ...


class WithExpiry(Known):
    def set(self, mm_hash: int, embedding: Any, loc: Any = None, *, ttl: float = 0) -> bool: ...


class WithShortSet(Known):
    def set(self, mm_hash: int, embedding: Any) -> bool: ...


class WithOtherNames(Known):
    def free(self, key: int, mm_embedding_allocator: Any) -> bool: ...


class WithAsyncGet(Known):
    async def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> Any: ...


class WithOwnHashes(Known):
    def combine_hashes(self, mm_hashes: list[int]) -> int | None: ...  # type: ignore[override]


class WithPin(Known):
    def pin(self, mm_hash: int) -> bool: ...


class WithUsage(Known):
    @property
    def usage(self) -> float: ...


class WithHitCount(Known):
    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.hit_count = 0


WithoutGetSingle = type(
    "WithoutGetSingle", (), {k: v for k, v in vars(Known).items() if k != "get_single"}
)

CHANGES = {
    WithLimitOfEntries: "__init__: expected (self, max_size), found (self, max_size, max_entries)",
    WithExpiry: "set: expected (self, mm_hash, embedding, loc=None), "
    "found (self, mm_hash, embedding, loc=None, *, ttl=0)",
    WithShortSet: "set: expected (self, mm_hash, embedding, loc=None), "
    "found (self, mm_hash, embedding)",
    WithOtherNames: "free: expected (self, mm_hash, mm_embedding_allocator), "
    "found (self, key, mm_embedding_allocator)",
    WithAsyncGet: "get: expected (self, mm_hashes, combined_hash=None), "
    "found async (self, mm_hashes, combined_hash=None)",
    WithOwnHashes: "combine_hashes: expected (mm_hashes), found (self, mm_hashes)",
    WithPin: "pin: expected nothing, found (self, mm_hash)",
    WithUsage: "usage: expected nothing, found a property",
    WithHitCount: "attributes: expected ['current_size', 'max_size', 'mm_cache'], "
    "found ['current_size', 'hit_count', 'max_size', 'mm_cache']",
    WithoutGetSingle: "get_single: expected (self, mm_hash), found nothing",
}


class Plugins:
    """An SGLang of which only what the plugin looks at is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.monkeypatch = monkeypatch
        self.caplog = caplog
        self.registered: list[tuple[Any, ...]] = []
        caplog.set_level(logging.INFO)
        for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.plugins"):
            self.module(name)
        self.module(
            "sglang.srt.plugins.hook_registry",
            HookRegistry=SimpleNamespace(register=lambda *hook: self.registered.append(hook)),
            HookType=SimpleNamespace(REPLACE="replace"),
        )

    def module(self, name: str, **attributes: Any) -> None:
        self.monkeypatch.setitem(sys.modules, name, peers.new_module(name, **attributes))

    def line(self) -> tuple[str, str]:
        """What the plugin logs: one line."""
        register()
        (record,) = self.caplog.records
        return record.levelname, record.getMessage()

    def line_about(self, cls: Any) -> tuple[str, str]:
        """What it logs if ``cls`` is SGLang's class."""
        self.module("sglang.srt.mem_cache.multimodal_cache", MultiModalStaticCache=cls)
        return self.line()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Plugins:
    return Plugins(monkeypatch, caplog)


@pytest.mark.parametrize("cls", [Known, Retyped])
def test_the_class_is_replaced_in_one_line(sglang: Plugins, cls: type) -> None:
    line = f"replacing {TARGET} with multimodal_cache.MultiModalStaticCache"
    assert sglang.line_about(cls) == ("INFO", line)
    assert sglang.registered == [(TARGET, MultiModalStaticCache, "replace")]


@pytest.mark.parametrize(("cls", "change"), CHANGES.items(), ids=[cls.__name__ for cls in CHANGES])
def test_a_class_that_has_changed_stays(sglang: Plugins, cls: type, change: str) -> None:
    line = f"{TARGET} stays in place, since it has changed: {change}"
    assert sglang.line_about(cls) == ("WARNING", line)
    assert sglang.registered == []


def test_a_class_that_has_become_something_else_stays(sglang: Plugins) -> None:
    level, line = sglang.line_about(lambda max_size: None)
    assert level == "WARNING"
    assert "__init__: expected (self, max_size), found a method-wrapper; __len__: " in line
    assert sglang.registered == []


def test_a_class_that_has_moved_stays(sglang: Plugins) -> None:
    sglang.module("sglang.srt.mem_cache.multimodal_cache")
    level, line = sglang.line()
    assert level == "WARNING"
    assert f"{TARGET} stays in place: cannot import name 'MultiModalStaticCache'" in line
    assert sglang.registered == []


def test_without_sglang_nothing_fails(sglang: Plugins) -> None:
    sglang.monkeypatch.setitem(sys.modules, TARGET.rpartition(".")[0], None)
    level, line = sglang.line()
    assert level == "WARNING"
    assert f"{TARGET} stays in place: import of sglang.srt.mem_cache" in line


def test_importing_it_imports_nothing_else() -> None:
    code = (
        "import sys, multimodal_cache\n"
        "before = set(sys.modules)\n"
        "import multimodal_cache.integrations.sglang\n"
        "print(sorted(set(sys.modules) - before))"
    )
    names = ["multimodal_cache.integrations", "multimodal_cache.integrations.sglang"]
    assert run_python(code) == f"{names}\n"


def test_the_entry_point_that_sglang_calls() -> None:
    (point,) = metadata.entry_points(group="sglang.srt.plugins", name="multimodal_cache")
    assert point.load() is register
