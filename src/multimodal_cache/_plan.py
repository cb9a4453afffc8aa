"""How large the cache should be: ``python -m multimodal_cache plan TRACE``."""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import gzip
import json
import math
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from multimodal_cache._command import MIB, Parser, mebibytes, size_text
from multimodal_cache._plan_figure import draw
from multimodal_cache.planner import LARGEST_SIZE, HitCurve, HitPoint, hit_curve

REACHED = (50, 90, 95, 99)
"""Of the ceiling, in per cent: what sizes are printed for."""

_EXPECTED = "expected key,nbytes with nbytes a whole number from 0 to 2**62"


class TraceError(Exception):
    """The trace can't be read; the message is one line that says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints, and draws, what a cache of each size would have made of recorded requests.

    Args:
        arguments: The command line behind ``plan``; that of the process by default.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: With status 2 if the arguments or the trace are bad.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        keys, sizes = read_trace(options.trace)
        curve = hit_curve(keys, sizes, skip=int(options.skip * len(keys)))
        figures = _figures(curve, options)
        if options.plot:
            draw(curve, options.plot, today=options.max_size)
    except (TraceError, ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    text = json.dumps(figures, indent=2) if options.json else "\n".join(_lines(figures))
    sys.stdout.write(f"{text}\n")
    return 0


def read_trace(path: Path) -> tuple[array[int], array[int]]:
    """Reads a CSV with the columns ``key`` and ``nbytes``, or whose last two columns they are.

    Returns:
        The keys, numbered by first sight, and the sizes.

    Raises:
        TraceError: It can't be read, has a bad row, or is empty.
    """
    numbers: dict[str, int] = {}
    known: dict[str, int] = {}  # sizes recur
    keys, sizes = array("q"), array("q")
    with contextlib.closing(_rows(path)) as rows:
        for line, key, text in rows:
            nbytes = known.get(text)
            if nbytes is None:
                nbytes = known[text] = _whole_number(text)
            if nbytes < 0:
                raise TraceError(f"{path}, row {line}: {_EXPECTED}, got {text[:40]!r}")
            keys.append(numbers.setdefault(key, len(numbers)))
            sizes.append(nbytes)
    if not keys:
        raise TraceError(f"{path}: there are no requests in it")
    return keys, sizes


def _rows(path: Path) -> Generator[tuple[int, str, str], None, None]:
    """Yields the number of each row, its key, and its size as it is written."""
    opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    line = 0
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file)
            key, nbytes = -2, -1
            for row in reader:
                names = [name.strip() for name in row] if line == 0 else []
                line = reader.line_num
                if {"key", "nbytes"} <= {*names}:
                    key, nbytes = names.index("key"), names.index("nbytes")
                elif len(row) > max(key, nbytes, 1):
                    yield line, row[key], row[nbytes]
                elif row:
                    raise TraceError(f"{path}, row {line}: {_EXPECTED}, got {','.join(row)[:40]!r}")
    except csv.Error as error:
        raise TraceError(f"{path}, row {line + 1}: {_EXPECTED}, got {error}") from None
    except EOFError:  # who recorded it was killed
        sys.stderr.write(f"{path} is cut off after row {line}: what is after it isn't counted\n")
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path} can't be read: {reason}") from None


def _whole_number(text: str) -> int:
    """Returns the size, or -1 if that isn't one."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits.lstrip("0")) < 20):
        return -1
    return int(digits) if int(digits) <= LARGEST_SIZE else -1


def _figures(curve: HitCurve, options: argparse.Namespace) -> dict[str, Any]:
    def point(size: int) -> dict[str, Any]:
        return _with_extras(curve.at(size), options)

    return {
        "trace": str(options.trace),
        "requests": curve.requests,
        "requested_bytes": curve.requested_bytes,
        "items": curve.items,
        "footprint": curve.footprint,
        "largest": curve.largest,
        "ceiling": curve.ceiling,
        "points": [point(size) for size in curve.grid()],
        "reaching": [
            {"percent_of_ceiling": percent, **point(curve.size_reaching(percent))}
            for percent in REACHED
        ],
        "today": None if options.max_size is None else point(options.max_size),
    }


def _with_extras(point: HitPoint, options: argparse.Namespace) -> dict[str, Any]:
    shown = dataclasses.asdict(point)
    if options.seconds_per_mib is not None:
        shown["encoder_seconds_saved"] = point.hit_bytes / MIB * options.seconds_per_mib
    if options.kv_bytes_per_token is not None:
        shown["kv_tokens"] = int(point.size / options.kv_bytes_per_token)
    return shown


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['requests']:,} requests for {figures['items']:,} items of "
        f"{size_text(figures['footprint'])}, up to {size_text(figures['largest'])} each"
    )
    yield (
        f"The ceiling is {figures['ceiling']:.1%}: no cache of any size answers more, "
        "since the first request for an item is a miss."
    )
    yield ""
    yield from _table(figures["points"])
    yield ""
    for point in figures["reaching"]:
        yield (
            f"{point['percent_of_ceiling']}% of the ceiling: {size_text(point['size'])}, "
            f"hit rate {point['hit_rate']:.1%}"
        )
    if today := figures["today"]:
        share = today["hit_rate"] / figures["ceiling"] if figures["ceiling"] else 1.0
        yield (
            f"today's {size_text(today['size'])}: hit rate {today['hit_rate']:.1%}, "
            f"which is {share:.1%} of the ceiling; {today['byte_hit_rate']:.1%} of bytes saved"
        )


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "hit_rate": ("hit rate", "{:.1%}".format),
    "byte_hit_rate": ("bytes saved", "{:.1%}".format),
    "entries": ("entries", "{:,}".format),
    "encoder_seconds_saved": ("encoder seconds saved", "{:,.1f}".format),
    "kv_tokens": ("KV tokens it costs", "{:,}".format),
}


def _table(points: list[dict[str, Any]]) -> Iterator[str]:
    columns = [_COLUMNS[name] for name in _COLUMNS if name in points[0]]
    yield "".join([f"{'size':>10}", *(f"  {title:>11}" for title, _ in columns)])
    for point in points:
        cells = (
            f"  {form(point[name]):>{max(len(title), 11)}}"
            for name, (title, form) in _COLUMNS.items()
            if name in point
        )
        yield "".join([f"{size_text(point['size']):>10}", *cells])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m multimodal_cache plan",
        description="Says what a cache of each size would have made of the requests in a trace.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a CSV of the requests, as MultiModalStaticCache(..., trace=) records it: the columns "
        "key and nbytes, or any others and these two last; compressed if it ends in .gz",
    )
    parser.add_argument(
        "--max-size", type=mebibytes, metavar="MIB", help="today's size: says where that stands"
    )
    parser.add_argument(
        "--seconds-per-mib",
        type=_positive,
        metavar="X",
        help="seconds that the encoder takes for a MiB of embeddings: says how many are saved",
    )
    parser.add_argument(
        "--kv-bytes-per-token",
        type=_positive,
        metavar="B",
        help="bytes that the server's KV cache takes for a token: says how many tokens "
        "a size costs",
    )
    parser.add_argument(
        "--skip",
        type=_fraction,
        default=0.0,
        metavar="FRACTION",
        help="the share of the requests, at the beginning, that fill the cache and aren't counted "
        "(default: 0)",
    )
    parser.add_argument(
        "--plot", type=_picture, metavar="PATH", help="also draw it, as PNG or SVG (extra: plan)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes")
    return parser


def _fraction(text: str) -> float:
    return _number(text, "a number from 0 to less than 1", lambda number: 0 <= number < 1)


def _positive(text: str) -> float:
    return _number(text, "a number greater than 0", lambda number: 0 < number < math.inf)


def _number(text: str, expected: str, is_good: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not is_good(number):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number


def _picture(text: str) -> Path:
    if not text.endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"expected a name ending in .png or .svg, got {text!r}")
    return Path(text)
