"""What the commands of the package, ``python -m multimodal_cache...``, share."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import NoReturn

# As a shell reports that a signal, SIGINT or SIGPIPE, has ended a process.
INTERRUPTED = 130
PIPE_CLOSED = 141

MIB = 2**20
GIB = 2**30


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


def mebibytes(text: str) -> int:
    """Converts an option in MiB to bytes.

    Raises:
        argparse.ArgumentTypeError: It isn't a number from 0 to 2**40.
    """
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 <= size <= 2**40:
        raise argparse.ArgumentTypeError(f"expected MiB, from 0 to 2**40, got {text!r}")
    return int(size * MIB)


def size_text(size: float) -> str:
    """Formats bytes in MiB or GiB with three digits, rounded up: what has room for them."""
    if 0 < size < MIB / 1000:
        return f"{size:,.0f} bytes"
    unit, name = (GIB, "GiB") if size >= GIB else (MIB, "MiB")
    scaled = size / unit
    digits = max(2 - math.floor(math.log10(scaled)), 0) if scaled else 0
    rounded = math.ceil(scaled * 10**digits) / 10**digits
    text = f"{rounded:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {name}"


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its status.

    Ctrl-C and a reader that has gone (``| head``) end it too, with statuses of their own and
    without a traceback.
    """
    try:
        try:
            status = main()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # at exit it would be too late to catch what that raises
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = PIPE_CLOSED
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # which Python will try to flush again
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    sys.exit(status)


def end_if_starting() -> None:
    """Exits if Python is looking for the module of such a command, and has not begun it.

    For Ctrl-C while it imports the package, when nothing else in the package can catch it.
    Python has "-m" for ``sys.argv[0]`` then.
    """
    words = [word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv]
    if sys.argv[:1] == ["-m"] and __package__ in words:
        sys.exit(INTERRUPTED)


def version_of(distribution: str) -> str | None:
    """Returns the version of a distribution, or None where it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
