"""How large the cache should be: ``python -m multimodal_cache plan``."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multimodal_cache import _plan
from multimodal_cache.__main__ import main

MIB = 2**20


def trace(tmp_path: Path, *rows: str, name: str = "trace.csv") -> str:
    path = tmp_path / name
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line.removeprefix("python -m multimodal_cache plan: error: ")


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """Two rounds of four items of a MiB, and a third of one of them."""
    return trace(tmp_path, "key,nbytes", *[f"{key},{MIB}" for key in (1, 2, 3, 4, 1, 2, 3, 4, 4)])


def test_the_text_says_all_that_matters(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recorded, "--max-size", "2.5"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "9 requests for 4 items of 4 MiB, up to 1 MiB each",
        "The ceiling is 55.6%: no cache of any size answers more, since the first request for an "
        "item is a miss.",
        "",
        "      size     hit rate  bytes saved      entries",
        "0.0625 MiB         0.0%         0.0%            0",
        " 0.125 MiB         0.0%         0.0%            0",
        "  0.25 MiB         0.0%         0.0%            0",
        "   0.5 MiB         0.0%         0.0%            0",
        "     1 MiB        11.1%        11.1%            1",
        "     2 MiB        11.1%        11.1%            2",
        "     4 MiB        55.6%        55.6%            4",
        "",
        "50% of the ceiling: 4 MiB, hit rate 55.6%",
        "90% of the ceiling: 4 MiB, hit rate 55.6%",
        "95% of the ceiling: 4 MiB, hit rate 55.6%",
        "99% of the ceiling: 4 MiB, hit rate 55.6%",
        "today's 2.5 MiB: hit rate 11.1%, which is 20.0% of the ceiling; 11.1% of bytes saved",
    ]


def test_encoder_seconds_and_kv_tokens_are_columns_when_asked_for(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ["--seconds-per-mib", "0.5", "--kv-bytes-per-token", "1024"]
    assert main(["plan", recorded, *costs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].endswith("  encoder seconds saved  KV tokens it costs")
    assert lines[10].split() == ["4", "MiB", "55.6%", "55.6%", "4", "2.5", "4,096"]


def test_json_has_the_same_figures_in_bytes(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planned(capsys, recorded, "--seconds-per-mib", "1", "--kv-bytes-per-token", "100.5")
    points, reaching = figures.pop("points"), figures.pop("reaching")
    assert figures == {
        "trace": recorded,
        "requests": 9,
        "requested_bytes": 9 * MIB,
        "items": 4,
        "footprint": 4 * MIB,
        "largest": MIB,
        "ceiling": 5 / 9,
        "today": None,
    }
    assert points[-1] == {
        "size": 4 * MIB,
        "hits": 5,
        "hit_bytes": 5 * MIB,
        "hit_rate": 5 / 9,
        "byte_hit_rate": 5 / 9,
        "entries": 4,
        "encoder_seconds_saved": 5.0,
        "kv_tokens": 41734,
    }
    assert [point["size"] / MIB for point in points] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4]
    assert [(point["percent_of_ceiling"], point["size"]) for point in reaching] == [
        (percent, 4 * MIB) for percent in (50, 90, 95, 99)
    ]


def test_requests_of_the_warm_up_are_not_counted(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planned(capsys, recorded, "--skip", "0.5", "--max-size", "4")
    assert (figures["requests"], figures["ceiling"], figures["items"]) == (5, 1.0, 4)
    assert figures["today"]["hits"] == 5


@pytest.mark.parametrize(
    "rows",
    [
        ["key,nbytes", "a,1", "b,2", "a,1"],
        [" nbytes , model,key", "1,x,a", "2,x,b", "1,y,a"],
        ["\ufeffkey,nbytes", "a,1", "", "b,2", "a, 01 "],
        ["a,1", "b,2", "a,1"],
        ["2026-01-01,a,1", "2026-01-02,b,2", "2026-01-03,a,1"],
        ["key,nbytes,status", "a,1,x", '"b,\nb",2,y', "a,1,"],
        ["1,1", "1,2", "1,1"],
    ],
    ids=["header", "by name", "BOM and blanks", "bare", "last two", "quoted", "another size"],
)
def test_any_csv_with_the_two_columns_will_do(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planned(capsys, trace(tmp_path, *rows))
    assert [figures[name] for name in ("requests", "items", "footprint")] == [3, 2, 3]


def test_keys_are_any_text_and_none_are_confused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"caf\xe9,1\ncaf\xe8,1\n1,1\n01,1\n -1,1\n")
    assert planned(capsys, str(path))["items"] == 5


def test_a_compressed_trace_is_read_and_one_cut_off_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("key,nbytes\n" + "1,5\n" * 1000)
    assert planned(capsys, str(path))["requests"] == 1000
    path.write_bytes(path.read_bytes()[:-8])
    assert main(["plan", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 1000
    assert err == f"{path} is cut off after row 1001: what is after it isn't counted\n"
    path.write_bytes(b"not compressed")
    assert refused(capsys, str(path)).startswith(f"{path} can't be read: Not a gzipped file")


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ("1,-1", "'-1'"),
        ("1,1.0", "'1.0'"),
        ("1,1_0", "'1_0'"),
        ("1,", "''"),
        ("1,nan", "'nan'"),
        ("1,4611686018427387905", "'4611686018427387905'"),
        ("1," + "9" * 5000, repr("9" * 40)),
        ("1,\u0661", "'\u0661'"),
        ("1", "'1'"),
        ("k" * 200_000 + ",1", "field larger than field limit (131072)"),
    ],
    ids=lambda text: text[:12],
)
def test_a_bad_row_is_named_and_nothing_is_printed(
    row: str, got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, "key,nbytes", "1,4611686018427387904", row, "1,5")
    assert refused(capsys, path) == (
        f"{path}, row 3: expected key,nbytes with nbytes a whole number from 0 to 2**62, got {got}"
    )


def test_a_header_without_the_names_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, "image,bytes", "1,5")
    assert ", row 1: expected key,nbytes" in refused(capsys, path)


@pytest.mark.parametrize("rows", [[], ["key,nbytes"], ["", ""]], ids=str)
def test_an_empty_trace_is_refused(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, *rows)
    assert refused(capsys, path) == f"{path}: there are no requests in it"


def test_what_cannot_be_read_or_added_up_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing\n.csv")
    expected = f"{missing} can't be read: No such file or directory".replace("\n", " ")
    assert refused(capsys, missing) == expected
    path = trace(tmp_path, *[f"{key},{2**62}" for key in range(3)])
    assert refused(capsys, path) == "sizes must add up to less than 2**63"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--skip", "1", "a number from 0 to less than 1"),
        ("--skip", "x", "a number from 0 to less than 1"),
        ("--seconds-per-mib", "0", "a number greater than 0"),
        ("--kv-bytes-per-token", "inf", "a number greater than 0"),
        ("--max-size", "-1", "MiB, from 0 to 2**40"),
        ("--plot", "t.jpg", "a name ending in .png or .svg"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    option: str, value: str, expected: str, recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, recorded, f"{option}={value}")
    assert line == f"argument {option}: expected {expected}, got {value!r}"


ITEMS_OF_NO_BYTES = ["1,0", "2,0", "1,0"]


def test_items_without_bytes_need_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = planned(capsys, trace(tmp_path, *ITEMS_OF_NO_BYTES), "--max-size", "0")
    (point,) = figures["points"]
    assert (point["size"], point["hits"], point["byte_hit_rate"], point["entries"]) == (0, 1, 0, 2)
    assert figures["today"] == point


def test_where_nothing_recurs_the_ceiling_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", trace(tmp_path, "1,5", "2,5"), "--max-size", "1"]) == 0
    out = capsys.readouterr().out
    assert "The ceiling is 0.0%" in out
    assert "99% of the ceiling: 0 MiB, hit rate 0.0%" in out
    assert "today's 1 MiB: hit rate 0.0%, which is 100.0% of the ceiling" in out


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
@pytest.mark.parametrize("rows", [ITEMS_OF_NO_BYTES, ["1,5", "2,5"], None], ids=str)
def test_it_draws_what_it_prints(
    rows: list[str] | None,
    name: str,
    recorded: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="of the extra plan")
    plot = tmp_path / name
    path = recorded if rows is None else trace(tmp_path, *rows)
    arguments = ["plan", path, "--plot", str(plot), "--max-size", "2"]
    assert main(arguments) == 0
    drawn = plot.read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert main(arguments[:-2]) == 0
    assert plot.read_bytes() != drawn  # without today's size
    assert capsys.readouterr().err == ""


def test_a_picture_that_cannot_be_written_is_said(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="of the extra plan")
    line = refused(capsys, recorded, "--plot", str(tmp_path / "none" / "t.png"))
    assert "No such file or directory" in line


def test_without_matplotlib_the_extra_is_named(
    recorded: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, recorded, "--plot", "t.png")
    assert line == "--plot needs matplotlib: pip install 'multimodal-cache[plan]'"


def test_a_trace_of_one_size_is_drawn_without_computing_many_points_again(
    tmp_path: Path,
) -> None:
    keys, sizes = _plan.read_trace(Path(trace(tmp_path, *[f"{key},{2**20}" for key in range(9)])))
    curve = _plan.hit_curve(keys, sizes)
    for per_doubling in (1, 16):
        grid = curve.grid(per_doubling)
        assert grid == sorted(set(grid))
        assert len([size for size in grid if size < curve.largest]) == 4
        assert (grid[-1], max(grid)) == (curve.footprint, curve.footprint)
