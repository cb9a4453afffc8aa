"""Says whether SGLang, in this environment, would put the cache in, and what stands against it.

It does what a scheduler does, with SGLang's own functions, in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from multimodal_cache._command import version_of
from multimodal_cache.integrations.sglang import (
    HOST_SIZE,
    TARGET,
    host_size,
    name_of,
    obstacle,
    scheduler_cache,
)

NAME = "multimodal_cache"  # of the entry point, not of the package
ENTRY_POINT = "multimodal_cache.integrations.sglang:register"
PLUGINS = "sglang.srt.plugins"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line about each thing that matters.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 0 if SGLang's schedulers would make our cache, else 1.

    Raises:
        SystemExit: With status 2 if there are arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m multimodal_cache.integrations.sglang",
        description="Says whether SGLang, as it is installed and configured here, would put the "
        "cache in. Exit status: 0 if so, else 1.",
    )
    parser.parse_args(arguments)
    sglang = version_of("sglang")
    if sglang is None and importlib.util.find_spec("sglang") is None:
        _say("not in place: sglang isn't installed in this environment")
        return 1
    versions = (version_of("multimodal-cache"), sglang)
    _say(
        "multimodal-cache {}, SGLang {}".format(*(each or "(version unknown)" for each in versions))
    )
    obstacles = [*_obstacles_of_the_environment()]
    if reason := _why_it_cannot_be_imported():
        obstacles.append(reason)
    else:
        obstacles += [*_obstacles_of_the_budget(), *_obstacles_of_the_class()]
    if not obstacles:
        obstacles += _obstacles_of_loading()
    if not obstacles:
        _say(f"in place: SGLang's schedulers make a {name_of(scheduler_cache())}")
        return 0
    for line in obstacles:
        _say(f"not in place: {line}")
    return 1


def _say(line: str) -> None:
    sys.stdout.write(f"{' '.join(line.split())}\n")


def _obstacles_of_the_environment() -> Iterator[str]:
    """Yields what can be said without SGLang's code."""
    points = metadata.entry_points(group=PLUGINS)
    if not any(point.value == ENTRY_POINT for point in points):
        yield (
            "multimodal-cache isn't installed in this environment: it has no entry point "
            f"{NAME} in the group {PLUGINS} here"
        )
    listed = os.environ.get("SGLANG_PLUGINS")
    names = [name for name in map(str.strip, (listed or "").split(",")) if name]
    if listed and NAME not in names:
        misspelt = [name for name in names if re.sub(r"[-_.\s]+", "_", name).lower() == NAME]
        advice = f"write {NAME} for {misspelt[0]}" if misspelt else f"add {NAME}, or unset it"
        yield f"SGLANG_PLUGINS={listed!r} leaves it out: {advice}"


def _why_it_cannot_be_imported() -> str | None:
    try:
        importlib.import_module(PLUGINS)
    except Exception as error:  # noqa: BLE001  # importing a server can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == PLUGINS:
            return "this SGLang has no plugins: a newer one has"
        return f"SGLang can't be imported: {_in_words(error)}"
    return None


def _obstacles_of_the_class() -> list[str]:
    try:
        reason = obstacle()
    except Exception as error:  # noqa: BLE001  # whatever another version does
        reason = _in_words(error)
    return [f"{TARGET} stays in place: {reason}"] if reason else []


def _obstacles_of_the_budget() -> Iterator[str]:
    """Says the sizes that a scheduler gives its cache; yields what is wrong with them."""
    name = "SGLANG_VLM_CACHE_SIZE_MB"
    size = 0
    try:
        environ: Any = importlib.import_module("sglang.srt.environ")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mebibytes = getattr(environ.envs, name).get()
        size = max(mebibytes, 0) * 2**20
    except Exception as error:  # noqa: BLE001  # whatever another version does
        _say(f"budget: unknown: {_in_words(error)}")
    else:
        given = os.environ.get(name)
        unset = f"{name} is unset, and some models set it to 0"
        notes = [unset if given is None else f"{name}={given}"]
        notes += [str(warning.message) for warning in caught]
        if not size:
            notes.append("it keeps nothing")
        _say(_in_each_scheduler("budget", size, notes))
    if given_host_size := os.environ.get(HOST_SIZE):
        try:
            size = host_size(size)
        except ValueError as error:
            yield f"a scheduler would end with {_in_words(error)}"
        else:
            _say(_in_each_scheduler("host memory", size, [f"{HOST_SIZE}={given_host_size}"]))


def _in_each_scheduler(what: str, size: int, notes: list[str]) -> str:
    return f"{what}: {size} bytes ({size / 2**20:.0f} MiB) in each scheduler: {'; '.join(notes)}"


def _obstacles_of_loading() -> list[str]:
    """Loads the plugins, as a scheduler does when it starts, and looks at the class."""
    with _records_of(PLUGINS) as records:
        try:
            importlib.import_module(PLUGINS).load_plugins()
        except Exception as error:  # noqa: BLE001  # other plugins are loaded, too
            return [f"SGLang can't load its plugins: {_in_words(error)}"]
    module, _, name = TARGET.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if found is scheduler_cache():
        return []
    return [
        f"after SGLang has loaded its plugins, {TARGET} is {found!r}",
        *(f"SGLang's log has: {_message(record)}" for record in records),
    ]


class _Collector(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@contextlib.contextmanager
def _records_of(name: str) -> Iterator[list[logging.LogRecord]]:
    """Keeps the warnings and errors of a logger, and of those below it, from the terminal."""
    records: list[logging.LogRecord] = []
    handler = _Collector(records)
    logger = logging.getLogger(name)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _message(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return record.getMessage() + (f": {error}" if error is not None else "")
