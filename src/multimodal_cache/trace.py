"""Records what is requested of a cache, for ``python -m multimodal_cache plan``."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import zlib
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

LONG = 1000
"""How many events may wait before they are written."""

_GZIP = 31  # zlib's wbits for a gzip file
_REQUEST, _HIT_OF_ITEM, _SET_OF_ITEM, _SET_OF_LIST, _FORGET = range(5)


class _Event:
    """What happened to a key, or to all for None; and its row, once it is known.

    The hits of an entry are one event until that has a row, and then that row itself, again and
    again: the entry keeps its number, as it has left the cache when its key gets another one.
    """

    __slots__ = ("key", "kind", "nbytes", "row")

    def __init__(self, kind: int, key: int | None, nbytes: int = 0) -> None:
        self.kind = kind
        self.key = key
        self.nbytes = nbytes
        self.row = ""


class Trace:
    """A CSV of the requests to one cache: ``MultiModalStaticCache(..., trace=Trace(path))``.

    The header is ``key,nbytes``. There is one row for each hit, each ``set`` that stored, and each
    ``set`` refused for want of room: the same rows whatever the size of the cache, so that one of
    size 0 records all there is to save. Of a ``TieredCache`` these are the requests to the whole.
    ``nbytes`` is what the entry is charged (in host memory, for a ``TieredCache``).

    Keys are numbered from 1 in the order of first sight; no hash of anybody's image is written. A
    key is a new one after each ``free`` of it, and all are after ``clear``, as what is requested
    then isn't what was stored before. What stands under one hash is one key.

    Rows are written a thousand at a time, by the thread that finds so many waiting; all that wait
    at ``flush``, ``close``, the end of a ``with`` and the exit of the process. One that is killed
    loses them.

    Recording never fails a call of the cache. If the file can't be written (a full disk), that is
    logged as a warning and ends it; what was written before stays readable.

    Threads may share it as they share the cache; calls at the same time are recorded in one order
    or the other. A forked child records nothing.

    Args:
        path: Where to write; an existing file is replaced. If it ends in ``.gz`` it is compressed.
        max_rows: Ends it, with a line in the log, after so many rows: 10 million take 100 to
            150 MB.
        skip_first_hit: Leave out the first hit of a single item after a ``set`` of it that
            returned True, for servers which look it up again right then, as SGLang does.

    Raises:
        OSError: The file can't be created.
        ValueError: ``max_rows`` is negative.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_rows: int = 10_000_000,
        skip_first_hit: bool = False,
    ) -> None:
        if max_rows < 0:
            raise ValueError(f"max_rows must be 0 or more, got {max_rows}")
        self.path = os.fspath(path)
        self._rows_left = max_rows
        self._skip_first_hit = skip_first_hit
        self._events: list[_Event | str] = []
        self._numbers: dict[int | None, int] = {}
        self._last_number = 0
        self._looked_up_next: set[int | None] = set()  # the numbers of their keys
        self._lock = threading.RLock()
        self._is_writing = False
        self._is_open = True
        self._size = 0
        self._process = os.getpid()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # nothing for a child to flush
        gzipped = self.path.endswith(".gz")
        self._compressor = zlib.compressobj(1, wbits=_GZIP) if gzipped else None
        atexit.register(self.close)
        self._write("key,nbytes\n")

    # What a cache calls. Under its lock nothing is written, where hits don't take that.

    def hit_of(self, key: int, nbytes: int, *, is_list: bool) -> Callable[[], object]:
        """Returns what each hit of an entry is to call. It may write."""
        event = _Event(_REQUEST if is_list else _HIT_OF_ITEM, key, nbytes)
        events = self._events
        append = events.append

        def hit() -> None:
            append(event.row or event)
            if len(events) > LONG:
                self._drain()

        return hit

    def request(self, key: int, nbytes: int) -> None:
        """Records a ``set`` that stored, or was refused for want of room. It doesn't write."""
        self._events.append(_Event(_REQUEST, key, nbytes))

    def forget(self, key: int | None) -> None:
        """Makes a key a new one, or all of them for None. It doesn't write."""
        self._events.append(_Event(_FORGET, key))

    def after_set(self, key: int, is_there: bool, *, is_list: bool) -> None:
        """Hears what ``set`` is about to return. It may write."""
        if is_there and self._skip_first_hit:
            self._events.append(_Event(_SET_OF_LIST if is_list else _SET_OF_ITEM, key))
        self.tend()

    def tend(self) -> None:
        """Writes if many wait."""
        if len(self._events) > LONG:
            self._drain()

    def flush(self) -> None:
        """Writes what is waiting."""
        if os.getpid() != self._process:
            return  # the parent's lock may be held here for good
        with self._lock:
            self._drain()

    def close(self) -> None:
        """Writes what is waiting, and ends the recording. Closing again does nothing."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        with self._lock:
            self._drain()
            self._end()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trace({self.path!r})"

    def _drain(self) -> None:
        """Numbers and writes what is waiting, unless somebody is at it."""
        if not self._is_open or os.getpid() != self._process:
            self._events.clear()
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._is_writing:  # else this is a finalizer that has come in between
                self._write_events()
        finally:
            self._lock.release()

    def _write_events(self) -> None:
        self._is_writing = True
        try:
            text, count = self._next_rows()
            self._write(text)
        finally:
            self._is_writing = False
        self._rows_left -= count
        if self._is_open and not self._rows_left:
            logger.info("%s has all the rows it may have: no more is recorded", self.path)
            self._end()

    def _next_rows(self) -> tuple[str, int]:
        """Takes what is waiting, and returns the rows that it makes, as many as there may be."""
        events = self._events[:]
        del self._events[: len(events)]  # others may have appended meanwhile
        if not self._looked_up_next and len(events) <= self._rows_left:
            try:
                return "".join(events), len(events)  # type: ignore[arg-type]  # rows alone, mostly
            except TypeError:
                pass
        rows = [row for event in events if (row := self._row_of(event))][: self._rows_left]
        return "".join(rows), len(rows)

    def _row_of(self, event: _Event | str) -> str:
        """Returns the row that an event makes, if any, and does what else it does."""
        if isinstance(event, str):
            number = int(event.partition(",")[0]) if self._looked_up_next else None
            return "" if self._is_first_hit(number) else event
        key = event.key
        if event.kind == _FORGET:
            self._forget(key)
        elif event.kind == _SET_OF_ITEM:
            if key in self._numbers:  # else it was freed meanwhile
                self._looked_up_next.add(self._numbers[key])
        elif event.kind == _SET_OF_LIST:  # which has taken the place of an item, if there was one
            self._looked_up_next.discard(self._numbers.get(key))
        elif event.kind != _HIT_OF_ITEM or not self._is_first_hit(self._numbers.get(key)):
            event.row = event.row or f"{self._number(key)},{event.nbytes}\n"
            return event.row
        return ""

    def _is_first_hit(self, number: int | None) -> bool:
        """Whether a hit is the one that is left out after a ``set``."""
        if number not in self._looked_up_next:
            return False
        self._looked_up_next.remove(number)
        return True

    def _number(self, key: int | None) -> int:
        number = self._numbers.get(key)
        if number is None:
            self._last_number += 1
            number = self._numbers[key] = self._last_number
        return number

    def _forget(self, key: int | None) -> None:
        if key is None:
            self._numbers.clear()
            self._looked_up_next.clear()
        else:
            self._looked_up_next.discard(self._numbers.pop(key, None))

    def _write(self, text: str) -> None:
        data = text.encode()
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._append(data)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._is_open:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            logger.warning("%s can't be written, no more is recorded: %s", self.path, error)
            self._end_at(self._size)
        else:
            self._size += len(data)

    def _end(self) -> None:
        if self._is_open and self._compressor is not None:
            self._append(self._compressor.flush())
        self._end_at(None)

    def _end_at(self, size: int | None) -> None:
        """Closes the file, after it is cut to the rows that were written as a whole."""
        if not self._is_open:
            return
        self._is_open = False
        self._events.clear()
        self._forget(None)
        try:
            with self._file:
                if size is not None:
                    self._file.truncate(size)
        except OSError:
            pass  # a file that has no size, or a disk that doesn't answer
