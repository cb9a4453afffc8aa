"""The orientation of a Pillow image: what Pillow would find, without what Pillow does on the way.

Pillow reads all entries of the EXIF data, warns of those that are damaged, which can be silenced
only for all threads, and remembers them on the image. Here the entries before the orientation are
passed over, by the rules of Pillow 13, for what is damaged there decides what counts. Older ones
differ in two of them: the last entry of a tag counts, not the first; and one that is larger than
all the data ends the directory, and isn't passed over.
"""

from __future__ import annotations

import re
import struct
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

_TAG = 0x0112
_FORMATS = {
    3: "H",
    4: "L",
    5: "2L",
    6: "b",
    8: "h",
    9: "l",
    10: "2l",
    11: "f",
    12: "d",
    13: "L",
    16: "Q",
}
"""How a number of each TIFF type is packed; a rational one is two."""

_SIZES = {1: 1, 2: 1, 7: 1, **{kind: struct.calcsize(f"<{how}") for kind, how in _FORMATS.items()}}
"""The bytes of a value of each TIFF type that Pillow knows."""

_MARK = b"Exif\0\0"
_BYTE_ORDERS = {b"MM\0*": ">", b"MM*\0": ">", b"MM\0+": ">", b"II*\0": "<", b"II\0*": "<"}
"""By the first bytes. One of them is for BigTIFF, but Pillow reads on as if it weren't."""


class _MalformedError(Exception):
    """The EXIF data has no beginning that could be read."""


def orientation(image: Image.Image) -> int:
    """Returns the orientation by which Pillow would turn a loaded image, from 1 to 8."""
    try:
        value = _raw_orientation(image)
    except _MalformedError:
        return 1
    return int(value) if value in range(2, 9) else 1


def _raw_orientation(image: Image.Image) -> Any:
    exif = vars(image).get("_exif")
    if exif is not None and exif._loaded:  # Pillow asks the file no more, and it may be changed
        return _from_pillows_exif(exif)
    value = _in_exif(_exif_data(image.info))
    return _in_xmp(image.info) if value is None else value


def _from_pillows_exif(exif: Image.Exif) -> Any:
    """Asks Pillow for what it has read.

    That is decoded when first asked for. A value that another thread asks for just then is missed
    once, so a second question follows.
    """
    for _ in range(2):
        try:
            value = exif.get(_TAG)
        except Warning:
            value = _from_pillows_exif_without_warnings(exif)
        except (LookupError, TypeError, ValueError, struct.error):
            continue
        if value is not None:
            return value
    return None


def _from_pillows_exif_without_warnings(exif: Image.Exif) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exif.get(_TAG)


def _exif_data(info: dict[Any, Any]) -> bytes:
    data = info.get("exif")
    if data is None and "Raw profile type exif" in info:
        try:
            data = bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:]))
        except (AttributeError, TypeError, ValueError):
            raise _MalformedError from None
    if data is None:
        return b""
    try:
        data = bytes(memoryview(data))
    except TypeError:
        raise _MalformedError from None
    # As Pillow does: some files have it twice.
    return data.removeprefix(_MARK).removeprefix(_MARK)


def _in_exif(data: bytes) -> Any:
    """Returns the orientation in the first directory, 0 for no number, and None if none counts."""
    if not data:
        return None
    order = _BYTE_ORDERS.get(data[:4])
    if order is None or len(data) < 8:
        raise _MalformedError
    (start,) = struct.unpack_from(f"{order}L", data, 4)
    if start + 2 > len(data):
        return None
    (entries,) = struct.unpack_from(f"{order}H", data, start)
    end = min(start + 2 + 12 * entries, len(data) - 11)
    layout = struct.Struct(f"{order}HHLL")
    seen, total = set(), 0
    for entry in range(start + 2, end, 12):
        tag, kind, count, offset = layout.unpack_from(data, entry)
        size = count * _SIZES.get(kind, 0)
        if not size or tag in seen:
            continue
        if size <= 4:
            offset = entry + 8
        else:
            total += size
            if total > len(data):
                continue
            if offset + size > len(data):
                return None
        if tag == _TAG:
            return _value(data, kind, offset, order)
        seen.add(tag)
    return None


def _value(data: bytes, kind: int, offset: int, order: str) -> Any:
    """Returns the first number of an entry, and 0 for what is none."""
    if kind not in _FORMATS:
        return 0
    number, *divisor = struct.unpack_from(f"{order}{_FORMATS[kind]}", data, offset)
    if not divisor:
        return number
    return number / divisor[0] if divisor[0] else 0


def _in_xmp(info: dict[Any, Any]) -> Any:
    text = info.get("XML:com.adobe.xmp")
    pattern: Any = r'tiff:Orientation(?:="|>)([0-9])'
    if not text:
        text, pattern = info.get("xmp"), pattern.encode()
    if not text:
        return None
    try:
        found = re.search(pattern, text)
    except TypeError:
        return None
    return int(found[1]) if found else None
