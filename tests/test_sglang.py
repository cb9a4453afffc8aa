"""The plugin for SGLang, and SGLang's own code on it.

The latter is in ``sglang_paths.py``, which runs in a process of its own, since SGLang replaces
classes for good and since most of SGLang is stood in for there.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peers
import pytest
from support import REFERENCE, result, run_python

from multimodal_cache import MultiModalStaticCache
from multimodal_cache.integrations import _sglang_check
from multimodal_cache.integrations import sglang as plugin
from multimodal_cache.integrations._sglang_check import main
from multimodal_cache.integrations.sglang import (
    HOST_SIZE,
    SchedulerCache,
    TieredSchedulerCache,
    register,
)

OURS = "multimodal_cache.integrations.sglang.SchedulerCache"
TIERED = "multimodal_cache.integrations.sglang.TieredSchedulerCache"
TARGET = "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache"


@pytest.mark.skipif(REFERENCE is None, reason="the sglang wheel is not installed")
def test_sglang_s_own_code_runs_on_it() -> None:
    paths = Path(__file__).with_name("sglang_paths.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(paths)]
    environment = {**os.environ, "SGLANG_PLUGINS": "multimodal_cache", "SGLANG_PLATFORM": ""}
    environment.pop("PYTEST_ADDOPTS", None)  # that is of the run that this test is in
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
    line = f"replacing {TARGET} with {OURS}"
    assert sglang.line_about(cls) == ("INFO", line)
    assert sglang.registered == [(TARGET, SchedulerCache, "replace")]


@pytest.mark.parametrize(("cls", "change"), CHANGES.items(), ids=[cls.__name__ for cls in CHANGES])
def test_a_class_that_has_changed_stays(sglang: Plugins, cls: type, change: str) -> None:
    line = f"{TARGET} stays in place: it has changed: {change}"
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


@pytest.mark.parametrize(
    ("max_size", "budget"),
    [
        (100 * 2**20, "104857600 bytes (100.0 MiB)"),
        (2**19, "524288 bytes (0.5 MiB)"),
        (0, "0 bytes (0.0 MiB): it keeps nothing"),
        (-(2**20), "0 bytes (0.0 MiB): it keeps nothing"),
    ],
)
def test_the_scheduler_s_cache_says_so_in_the_log(
    max_size: int, budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = SchedulerCache(max_size)
    (record,) = caplog.records
    line = f"{OURS} is in place of SGLang's cache, with a budget of {budget}"
    assert (record.levelname, record.getMessage()) == ("INFO", line)
    assert isinstance(cache, MultiModalStaticCache)
    assert cache.max_size == max(max_size, 0)


def test_it_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(SchedulerCache(5)) == f"{OURS}(entries=0, current_size=0, max_size=5)"
    monkeypatch.setenv(HOST_SIZE, "1")
    assert repr(TieredSchedulerCache(5)) == (
        f"{TIERED}(entries=0, current_size=0, max_size=5, host_entries=0, host_current_size=0, "
        "host_size=1048576)"
    )


@pytest.mark.parametrize("cls", [SchedulerCache, TieredSchedulerCache])
def test_it_is_called_as_sglang_s_class_is(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_SIZE, "1")
    changed = [line for line in plugin._changes(cls) if line.startswith("__init__")]
    assert changed == []


def test_host_memory_takes_one_variable(sglang: Plugins) -> None:
    sglang.monkeypatch.setenv(HOST_SIZE, "512")
    sglang.module(TARGET.rpartition(".")[0], MultiModalStaticCache=Known)
    assert sglang.line() == ("INFO", f"replacing {TARGET} with {TIERED}")
    ((_, cls, _),) = sglang.registered
    assert cls is TieredSchedulerCache


@pytest.mark.parametrize(
    ("given", "max_size", "sizes"),
    [
        ("512", 100 * 2**20, "104857600 bytes (100.0 MiB), and of 536870912 bytes (512.0 MiB)"),
        ("0.5", 2**19, "524288 bytes (0.5 MiB), and of 524288 bytes (0.5 MiB)"),
        ("1e3", -1, "0 bytes (0.0 MiB), and of 1048576000 bytes (1000.0 MiB)"),
    ],
)
def test_the_scheduler_s_cache_says_how_much_host_memory_it_has(
    given: str,
    max_size: int,
    sizes: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(HOST_SIZE, given)
    caplog.set_level(logging.INFO)
    TieredSchedulerCache(max_size)
    line = f"{TIERED} is in place of SGLang's cache, with a budget of {sizes} in host memory"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize("given", ["", "0.9", "0", "-1", "nan", "inf", "8 GB", "2**10"])
def test_a_bad_size_of_host_memory_stops_the_scheduler(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOST_SIZE, given)
    message = (
        f"{HOST_SIZE} must be a number of MiB, and no less than the device's 1048576 bytes "
        f"(1.0 MiB), got {given!r}; without host memory leave it unset"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        TieredSchedulerCache(2**20)


def test_sglang_is_told_that_an_item_is_stored_if_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HOST_SIZE, "1")
    cache = TieredSchedulerCache(100)
    assert cache.set(1, result(10))
    assert not cache.set(2, result(30))
    assert cache.has(2)
    assert cache.get_single(2) is not None
    assert not cache.set(2, result(30))
    assert not cache.set(3, result(2**20))
    assert not cache.set(None, result(10))


def test_importing_it_imports_nothing_else() -> None:
    code = (
        "import sys, multimodal_cache\n"
        "before = set(sys.modules)\n"
        "import multimodal_cache.integrations.sglang\n"
        "print(sorted(set(sys.modules) - before))"
    )
    names = ["integrations", "integrations._sglang_watch", "integrations.sglang", "tiered"]
    assert run_python(code) == f"{[f'multimodal_cache.{name}' for name in names]}\n"


def test_the_entry_point_that_sglang_calls() -> None:
    (point,) = metadata.entry_points(group="sglang.srt.plugins", name="multimodal_cache")
    assert point.load() is register


# The check, `python -m multimodal_cache.integrations.sglang`.


class Installed(Plugins):
    """An SGLang in which the plugin is in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(monkeypatch, caplog)
        self.versions: dict[str, str] = {"multimodal-cache": "0.1.0", "sglang": "0.5.23"}
        self.points = [metadata.EntryPoint("multimodal_cache", _sglang_check.ENTRY_POINT, "")]
        self.size: Any = 100
        monkeypatch.setattr(metadata, "version", self.version)
        monkeypatch.setattr(metadata, "entry_points", lambda group: self.points)
        for name in ("SGLANG_PLUGINS", "SGLANG_VLM_CACHE_SIZE_MB", HOST_SIZE):
            monkeypatch.delenv(name, raising=False)
        self.cache = peers.new_module("", MultiModalStaticCache=Known)
        monkeypatch.setitem(sys.modules, TARGET.rpartition(".")[0], self.cache)
        self.module("sglang.srt.plugins", load_plugins=self.load_plugins)
        field = SimpleNamespace(get=lambda: self.size)
        self.module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_VLM_CACHE_SIZE_MB=field))

    def version(self, name: str) -> str:
        try:
            return self.versions[name]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    def load_plugins(self) -> None:
        register()
        self.cache.MultiModalStaticCache = self.registered[-1][1]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Installed:
    return Installed(monkeypatch, caplog)


def checked(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Runs the check; returns its lines. It is not in place if and only if one of them says so."""
    status = main([])
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert status == any(line.startswith("not in place: ") for line in lines)
    assert status == (f"in place: SGLang's schedulers make a {OURS}" not in lines)
    return lines


BUDGET = "budget: 104857600 bytes (100 MiB) in each scheduler: "
UNSET = f"{BUDGET}SGLANG_VLM_CACHE_SIZE_MB is unset, and some models set it to 0"


def test_the_check_says_that_it_would_be_in_place(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(capsys) == [
        "multimodal-cache 0.1.0, SGLang 0.5.23",
        UNSET,
        f"in place: SGLang's schedulers make a {OURS}",
    ]


def test_the_check_needs_an_sglang(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    del installed.versions["sglang"]
    installed.monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert checked(capsys) == ["not in place: sglang isn't installed in this environment"]


def test_the_check_takes_an_sglang_that_pip_does_not_know(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    del installed.versions["sglang"]
    installed.monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert checked(capsys)[0] == "multimodal-cache 0.1.0, SGLang (version unknown)"


def test_the_check_looks_for_the_entry_point(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.points = [metadata.EntryPoint("multimodal_cache", "another.package:register", "")]
    assert checked(capsys)[2:] == [
        "not in place: multimodal-cache isn't installed in this environment: it has no entry "
        "point multimodal_cache in the group sglang.srt.plugins here"
    ]


@pytest.mark.parametrize(
    ("plugins", "advice"),
    [
        ("multimodal-cache", "write multimodal_cache for multimodal-cache"),
        ("other, Multimodal.Cache", "write multimodal_cache for Multimodal.Cache"),
        ("none", "add multimodal_cache, or unset it"),
        (" ", "add multimodal_cache, or unset it"),
        ("", None),
        ("multimodal_cache", None),
        ("other , multimodal_cache,", None),
    ],
)
def test_the_check_reads_sglang_plugins(
    plugins: str, advice: str | None, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    lines = checked(capsys)[2:]
    if advice is None:
        assert lines == [f"in place: SGLang's schedulers make a {OURS}"]
    else:
        assert lines == [f"not in place: SGLANG_PLUGINS={plugins!r} leaves it out: {advice}"]


def test_the_check_says_that_an_sglang_is_too_old(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.monkeypatch.delitem(sys.modules, "sglang.srt.plugins")
    assert checked(capsys)[1:] == ["not in place: this SGLang has no plugins: a newer one has"]


class HalfInstalled:
    """Finds modules of SGLang that raise when they are imported."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, *arguments: Any) -> None:
        if name == "sglang.srt.plugins":
            raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'orjson'", name="orjson"),
            "No module named 'orjson'",
        ),
        (OSError("libcudart.so.12: cannot open\nshared object"), "libcudart.so.12: cannot open sh"),
        (RuntimeError("no driver"), "no driver"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_check_says_why_sglang_cannot_be_imported(
    error: Exception, words: str, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.module("sglang.srt", __path__=[])
    installed.monkeypatch.delitem(sys.modules, "sglang.srt.plugins")
    installed.monkeypatch.setattr(sys, "meta_path", [HalfInstalled(error), *sys.meta_path])
    installed.monkeypatch.setenv("SGLANG_PLUGINS", "none")
    _, plugins, reason = checked(capsys)
    assert "SGLANG_PLUGINS='none'" in plugins
    start = f"not in place: SGLang can't be imported: {type(error).__name__}: {words}"
    assert reason.startswith(start)


@pytest.mark.parametrize(("cls", "change"), CHANGES.items(), ids=[cls.__name__ for cls in CHANGES])
def test_the_check_says_that_sglang_s_class_has_changed(
    cls: type, change: str, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.cache.MultiModalStaticCache = cls
    line = f"not in place: {TARGET} stays in place: it has changed: {change}"
    assert checked(capsys)[2:] == [line]


class Broken(Known):
    def __init__(self, max_size: int) -> None:
        raise RuntimeError("no allocator")


def test_the_check_says_that_sglang_s_class_cannot_be_made(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.cache.MultiModalStaticCache = Broken
    line = f"not in place: {TARGET} stays in place: RuntimeError: no allocator"
    assert checked(capsys)[2:] == [line]


def test_the_check_says_who_else_has_taken_the_place(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_plugins() -> None:
        installed.load_plugins()
        installed.cache.MultiModalStaticCache = Retyped
        logging.getLogger("sglang.srt.plugins").info("Loaded")
        logging.getLogger("sglang.srt.plugins.hook_registry").warning("Multiple %s", "hooks")
        try:
            raise RuntimeError("no\ndevice")
        except RuntimeError:
            logging.getLogger("sglang.srt.plugins").exception("Failed to load plugin")

    installed.module("sglang.srt.plugins", load_plugins=load_plugins)
    assert checked(capsys)[2:] == [
        f"not in place: after SGLang has loaded its plugins, {TARGET} is {Retyped!r}",
        "not in place: SGLang's log has: Multiple hooks",
        "not in place: SGLang's log has: Failed to load plugin: no device",
    ]
    assert [record for record in installed.caplog.records if "sglang.srt" in record.name] == []
    logger = logging.getLogger("sglang.srt.plugins")
    assert (logger.propagate, logger.handlers) == (True, [])


def test_the_check_survives_plugins_that_cannot_be_loaded(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_plugins() -> None:
        raise AttributeError("name")

    installed.module("sglang.srt.plugins", load_plugins=load_plugins)
    line = "not in place: SGLang can't load its plugins: AttributeError: name"
    assert checked(capsys)[2:] == [line]


@pytest.mark.parametrize(
    ("given", "size", "budget"),
    [
        ("512", 512, "budget: 536870912 bytes (512 MiB) in each scheduler: {}"),
        ("0", 0, "budget: 0 bytes (0 MiB) in each scheduler: {}; it keeps nothing"),
        ("-5", -5, "budget: 0 bytes (0 MiB) in each scheduler: {}; it keeps nothing"),
        ("1", None, "budget: unknown: TypeError: "),
    ],
)
def test_the_check_says_the_size(
    given: str, size: Any, budget: str, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", given)
    installed.size = size
    _, line, _ = checked(capsys)
    assert line.startswith(budget.format(f"SGLANG_VLM_CACHE_SIZE_MB={given}"))


def test_the_check_says_the_size_of_host_memory(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.monkeypatch.setenv(HOST_SIZE, "512")
    main([])
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"host memory: 536870912 bytes (512 MiB) in each scheduler: {HOST_SIZE}=512",
        f"in place: SGLang's schedulers make a {TIERED}",
    ]


def test_the_check_says_that_a_scheduler_would_refuse_the_size_of_host_memory(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.monkeypatch.setenv(HOST_SIZE, "64")
    assert checked(capsys)[2:] == [
        f"not in place: a scheduler would end with ValueError: {HOST_SIZE} must be a number of "
        "MiB, and no less than the device's 104857600 bytes (100.0 MiB), got '64'; without host "
        "memory leave it unset"
    ]


@pytest.mark.skipif(REFERENCE is None, reason="the sglang wheel is not installed")
@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, [UNSET, f"in place: SGLang's schedulers make a {OURS}"]),
        (
            {"SGLANG_PLUGINS": "multimodal-cache", "SGLANG_VLM_CACHE_SIZE_MB": "many"},
            [
                f"{BUDGET}SGLANG_VLM_CACHE_SIZE_MB=many; Invalid value for "
                "SGLANG_VLM_CACHE_SIZE_MB: "
                '"many" is not a valid integer value, using default "100"',
                "not in place: SGLANG_PLUGINS='multimodal-cache' leaves it out: write "
                "multimodal_cache for multimodal-cache",
            ],
        ),
    ],
    ids=["as installed", "misspelt"],
)
def test_the_check_asks_sglang_s_own_code(environment: dict[str, str], lines: list[str]) -> None:
    code = (
        "import sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "import sglang_stand_ins\n"
        "from multimodal_cache.integrations._sglang_check import main\n"
        "main([])\n"
    )
    tests = Path(__file__).parent
    shown = run_python(code, str(tests), str(tests.parent / "benchmarks"), **environment)
    assert shown.splitlines()[1:] == lines


@pytest.mark.skipif(REFERENCE is None, reason="the sglang wheel is not installed")
def test_a_half_installed_sglang_is_a_line_and_status_1() -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['sglang.srt.environ'] = None\n"
        "runpy.run_module('multimodal_cache.integrations.sglang', run_name='__main__')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "\nnot in place: SGLang can't be imported: ModuleNotFoundError: import" in shown.stdout


def test_the_module_runs_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(plugin.__file__), run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m multimodal_cache.integrations.sgl")
