"""The benchmarks run. What they measure is in their own tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lookup_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    output = tmp_path / "lookup.md"
    tiny = ["--entries=20", "--rounds=2", "--size-rounds=2", "--calls=50", f"--output={output}"]
    shown = run("lookup.py", *tiny)
    assert (shown.returncode, shown.stderr) == (0, "")
    for operation in ("get([key])", "get_single(key)", "set(key, result)"):
        assert f"| `{operation}`" in shown.stdout
    assert "| multimodal-cache |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout


def test_keys_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    output = tmp_path / "keys.md"
    shown = run("keys.py", "--max-megabytes=1", "--rounds=2", "--calls=2", f"--output={output}")
    assert (shown.returncode, shown.stderr) == (0, "")
    for row in (
        "0.2 MB | `hash_feature`, tensor",
        "0.2 MB | SHA-256",
        "tensor, 1 KB",
        "1 MiB | one",
    ):
        assert f"| {row} |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout


def test_serving_prints_its_tables_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="of the extra bench")
    pytest.importorskip("matplotlib", reason="of the extra bench")
    output, plot = tmp_path / "serving.md", tmp_path / "serving.png"
    tiny = ["--model=tiny", "--requests=20", "--rounds=2", f"--output={output}", f"--plot={plot}"]
    shown = run("serving.py", *tiny)
    assert shown.returncode == 0, shown.stderr
    for row in ("0% | 20 / 20", "80% | 20 / 4", "threads | 64 | 1", "asyncio tasks | 64 | 1"):
        assert f"| {row} |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "bad"),
    [
        *(("lookup.py", bad) for bad in ("--rounds=1", "--calls=x", "--entries=0", "--output=/")),
        *(("keys.py", bad) for bad in ("--rounds=1", "--max-megabytes=0")),
    ],
)
def test_a_benchmark_says_in_one_line_what_is_wrong(script: str, bad: str) -> None:
    shown = run(script, bad)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"{script}: argument {bad.split('=')[0]}: ")
    assert len(shown.stderr.splitlines()) == 1
