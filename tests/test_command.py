"""How ``python -m multimodal_cache`` and its like end."""

from __future__ import annotations

import builtins
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import multimodal_cache
from multimodal_cache import _command
from multimodal_cache._command import run, size_text

COMMANDS = ["multimodal_cache", "multimodal_cache.integrations.sglang"]
INTERRUPTED = "import signal\nsignal.raise_signal(signal.SIGINT)\n"


def python(*arguments: str, path: Path | None = None, **options: Any) -> Any:
    """Runs Python, with a folder of modules to be found first."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, check=False, timeout=120, env=environment, **options)


@pytest.fixture
def interrupted_torch(tmp_path: Path) -> Path:
    """A folder with a torch that gets a Ctrl-C while it is imported."""
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    return tmp_path


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize("options", [[], ["-X", "dev", "-W", "ignore"], ["-s"]], ids=str)
def test_ctrl_c_while_torch_is_imported_ends_quietly(
    module: str, options: list[str], interrupted_torch: Path
) -> None:
    for arguments in (["-m", module, "--help"], [f"-m{module}"]):
        shown = python(*options, *arguments, path=interrupted_torch)
        assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "")


def test_who_imports_the_package_gets_the_ctrl_c(interrupted_torch: Path) -> None:
    code = (
        "try:\n    import multimodal_cache\nexcept KeyboardInterrupt as error:\n    print(error)\n"
    )
    shown = python("-c", code, "-m", "multimodal_cache", path=interrupted_torch)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "\n", "")
    package = interrupted_torch / "server"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "__main__.py").touch()
    shown = python("-m", "server", path=interrupted_torch)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "\n", "")


@pytest.mark.parametrize(
    ("argv", "command", "ends"),
    [
        (["-m", "--json"], ["python", "-m", "multimodal_cache", "--json"], True),
        (["-m"], ["python", "-I", "-mmultimodal_cache.integrations.sglang"], True),
        (["-m"], ["python", "-m", "multimodal_cache_server"], False),
        (["serve.py"], ["python", "serve.py", "multimodal_cache"], False),
        ([], ["python"], False),
    ],
)
def test_which_imports_end_the_process_when_interrupted(
    argv: list[str], command: list[str], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, *arguments: Any) -> Any:
        if name == "multimodal_cache.base":
            raise KeyboardInterrupt
        return importing(name, *arguments)

    importing = builtins.__import__
    spec: Any = multimodal_cache.__spec__
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", command)
    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit if ends else KeyboardInterrupt) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert getattr(caught.value, "code", None) == (130 if ends else None)


def test_ctrl_c_while_it_serves_ends_quietly() -> None:
    code = (
        "import runpy, signal\n"
        "from multimodal_cache._demo.serving import Server\n"
        "class Interrupted(Server):\n"
        "    calls = 0\n"
        "    def encode(self, images):\n"
        "        self.calls += 1\n"
        "        if self.calls == 5: signal.raise_signal(signal.SIGINT)\n"
        "        return super().encode(images)\n"
        "runpy.sys.modules[Server.__module__].Server = Interrupted\n"
        "runpy.run_module('multimodal_cache', run_name='__main__')\n"
    )
    shown = python("-c", code)
    assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "")


def closed_pipe() -> int:
    """The end to write to of a pipe from which nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("argument", "unread", "status"), [("--help", "stdout", 0), ("--frobnicate", "stderr", 2)]
)
def test_a_reader_of_the_help_that_has_gone_ends_it_quietly(
    module: str, buffering: list[str], argument: str, unread: str, status: int
) -> None:
    pipe = closed_pipe()
    shown = python(*buffering, "-m", module, argument, **{unread: pipe})
    os.close(pipe)
    assert not shown.stdout
    assert not shown.stderr
    assert shown.returncode in (status, 141)  # argparse may have swallowed the error


@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_of_the_table_that_has_gone_ends_it_quietly(buffering: list[str]) -> None:
    pipe = closed_pipe()
    shown = python(*buffering, "-m", "multimodal_cache", "--requests", "1", stdout=pipe)
    os.close(pipe)
    assert (shown.returncode, shown.stderr) == (141, "")


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_is_that_of_the_command(status: int) -> None:
    with pytest.raises(SystemExit) as caught:
        run(lambda: status)
    assert caught.value.code == status


def test_ctrl_c_in_a_command_is_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        sys.stdout.write("begun\n")
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == _command.INTERRUPTED
    assert tuple(capsys.readouterr()) == ("begun\n", "")


def test_a_closed_pipe_is_status_141(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(closed_pipe(), "w") as stdout, open(os.dup(2), "w") as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as caught:
            run(lambda: stdout.write("unread"))
    assert caught.value.code == _command.PIPE_CLOSED


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 MiB"),
        (1000, "1,000 bytes"),
        (2**19, "0.5 MiB"),
        (123_456_789, "118 MiB"),
        (117 * 2**20 + 1, "118 MiB"),
        (2**30 - 1, "1,024 MiB"),
        (2**30, "1 GiB"),
        (21 * 2**30 // 2 + 1, "10.6 GiB"),
        (3000 * 2**30, "3,000 GiB"),
    ],
)
def test_a_size_is_written_so_that_there_is_room_for_it(size: int, text: str) -> None:
    assert size_text(size) == text
