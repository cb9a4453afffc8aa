"""What every serialised form is made of: counts, contents and BLAKE3 hashes."""

from __future__ import annotations

import os
from collections.abc import Iterable

from blake3 import blake3

Bytes = bytes | memoryview
"""Contiguous memory, one-dimensional, of single bytes."""

PARALLEL_BYTES = 8 * 2**20
"""From this size on, all threads are no slower than one, even if they have to wake up first."""

INLINE_BYTES = 1024
"""Longer contents are replaced by their hashes."""

_max_threads = blake3.AUTO


def _begin_anew_in_forked_child() -> None:  # pragma: no cover  # in another process
    """Forgets BLAKE3's other threads, which aren't there."""
    global _max_threads
    _max_threads = 1


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_anew_in_forked_child)


def count(number: int) -> bytes:
    """Returns ``n64``, a count or a length."""
    return number.to_bytes(8, "little")


def content(data: Bytes) -> bytes:
    """Returns ``C(data)``: its length, and itself or, where it is long, its hash."""
    size = len(data)
    length = size.to_bytes(8, "little")  # count(size), without the call
    return length + (bytes(data) if size <= INLINE_BYTES else digest(data))


def content_of_parts(parts: Iterable[Bytes], *, parallel: bool = False) -> bytes:
    """Returns ``C`` of what the parts make up, without joining them.

    ``parallel`` says that they are of about ``PARALLEL_BYTES`` each.
    """
    size, inline, hasher = 0, b"", None
    for part in parts:
        size += len(part)
        if size <= INLINE_BYTES:
            inline += part
            continue
        if hasher is None:
            hasher = blake3(inline, max_threads=_max_threads if parallel else 1)
        hasher.update(part)
    return count(size) + (hasher.digest() if hasher else inline)


def digest(data: Bytes) -> bytes:
    """Returns the BLAKE3 hash."""
    return blake3(data, max_threads=threads_for(len(data))).digest()


def threads_for(size: int) -> int:
    """Returns how many threads BLAKE3 may use for so many bytes."""
    return _max_threads if size >= PARALLEL_BYTES else 1


def type_name(value: object) -> str:
    """Names the class of a value, with its module unless that is builtins, for errors."""
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
