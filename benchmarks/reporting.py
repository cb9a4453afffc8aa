"""What the benchmarks share: their options, how they take turns, and how they print."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

QUARTILES = "median (quartiles)"

Calls = tuple[Callable[[Any], object], Sequence[Any]]
"""A function, and the arguments with which it is called one after another."""

Samples = dict[str, list[float]]
"""Seconds a call, round by round."""


def take_turns(subjects: dict[str, Calls], rounds: int, rng: random.Random) -> Samples:
    """Times the calls of each subject, round by round, in an order that is drawn anew."""
    samples: Samples = {name: [] for name in subjects}
    for _ in range(rounds):
        for name in rng.sample(sorted(subjects), len(subjects)):
            function, arguments = subjects[name]
            start = time.perf_counter()
            for argument in arguments:
                function(argument)
            samples[name].append((time.perf_counter() - start) / len(arguments))
    return samples


def spread(samples: Sequence[float], digits: int = 0) -> str:
    """Formats the median and the quartiles."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(samples: Sequence[float], others: Sequence[float]) -> str:
    """Formats the median of the ratios, round by round, of two samples of the same rounds."""
    pairs = zip(samples, others, strict=True)
    return f"{statistics.median(sample / other for sample, other in pairs):.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table whose first two columns are text and the others numbers."""
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def conditions(seed: int, packages: Iterable[str]) -> str:
    """Describes the command, the machine and the versions, in one line."""
    parts = (
        f"`python {shlex.join(sys.argv)}`",
        f"seed {seed}",
        f"Python {platform.python_version()}",
        *(f"{package} {metadata.version(package)}" for package in packages),
        platform.platform(),
        _cpu_model(),
        f"{os.cpu_count()} cores",
    )
    return "; ".join(parts)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


class Parser(argparse.ArgumentParser):
    """A command line of numbers, with ``--seed`` and ``--output``.

    It reports an error in one line, without the usage.
    """

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        self.add_number("--seed", 0, 0, "the seed of every random choice")
        self.add_argument("--output", type=Path, metavar="PATH", help="also write the report here")

    def add_number(self, name: str, default: int, minimum: int, text: str) -> None:
        """Adds an option for an integer of ``minimum`` or more."""
        self.add_argument(name, type=_at_least(minimum), default=default, metavar="N", help=text)

    def add_plot(self, text: str) -> None:
        """Adds ``--plot``, for a drawing of the report."""
        self.add_argument("--plot", type=Path, metavar="PATH", help=text)

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _at_least(minimum: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        with contextlib.suppress(ValueError):
            number = int(text)
            if number >= minimum:
                return number
        raise argparse.ArgumentTypeError(f"must be an integer, {minimum} or more, got {text!r}")

    return convert


@contextlib.contextmanager
def plot(path: Path) -> Iterator[Any]:
    """Gives the axes of a new figure, and writes the figure to ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def run(parser: Parser, report: Callable[[argparse.Namespace], Iterable[str]]) -> None:
    """Prints the paragraphs of the report, and writes them where the command line says so."""
    options = parser.parse_args()
    for name in ("output", "plot"):
        path = getattr(options, name, None)
        if path and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"argument --{name}: {path} can't be a file")
    if getattr(options, "plot", None) and not importlib.util.find_spec("matplotlib"):
        parser.error("argument --plot: matplotlib isn't installed")
    paragraphs = []
    for paragraph in report(options):
        separator = "\n" if paragraphs else ""
        sys.stdout.write(f"{separator}{paragraph}\n")
        sys.stdout.flush()
        paragraphs.append(f"{separator}{paragraph}\n")
    if options.output:
        options.output.write_text("".join(paragraphs), encoding="utf-8")
