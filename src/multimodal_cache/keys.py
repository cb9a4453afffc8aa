"""From content to key: ``hash_feature``.

The key of a feature is a hash of its serialised form. That is a format, which other programs in
other languages may write too. It won't change; another one would get another version byte. All of
it:

- A key is the first ``bits / 8`` bytes, read as an unsigned big-endian int, of the BLAKE3 hash
  (256 bits, unkeyed) of the byte 0x01, the version; ``S(namespace)``, which is a str or bytes,
  and the empty str where none is given; ``S(feature)``.
- ``n64`` is a count or a length: 8 bytes, unsigned, little-endian.
- ``C(data)``, the content, is ``n64`` for the length of the data in bytes; then the data itself
  where that is 1024 bytes or fewer, else its BLAKE3 hash (32 bytes).
- ``S(value)`` is one byte for the kind, an ASCII letter, and what belongs to it:

  ==================  ======  ================================================================
  None                ``N``   nothing
  False, True         ``F``,  nothing
                      ``T``
  int                 ``i``   ``C`` of its two's complement, little-endian, in as few bytes as
                              hold it, but at least one: 0 is ``00``, 127 ``7f``, 128 ``80 00``,
                              -128 ``80``, -129 ``7f ff``
  float               ``f``   its 8 bytes as IEEE 754 binary64, little-endian
  str                 ``s``   ``C`` of its code points in UTF-8, without normalisation. Each code
                              point from U+D800 to U+DFFF takes 3 bytes by the same scheme, also
                              where two of them would make a pair
  bytes               ``b``   ``C`` of them
  list                ``l``   ``n64`` items, and ``S`` of each
  tuple               ``t``   ``n64`` items, and ``S`` of each
  dict                ``d``   ``n64`` pairs, and for each pair the BLAKE3 hash (32 bytes) of
                              ``S(key) S(value)``, sorted as byte strings
  array               ``a``   ``C`` of the name of its dtype, in ASCII; ``n64`` dimensions, and
                              one ``n64`` for the size of each; ``C`` of its elements in C order
  image               ``p``   ``S(palette)``, ``S(transparency)``; one ``n64`` each for its
                              orientation, its width and its height; ``C`` of the name of its
                              mode, in ASCII; ``C`` of its pixels
  ==================  ======  ================================================================

Arrays. The elements are little-endian; a complex one is its real part and its imaginary part.
The names of the dtypes are:

- ``bool`` (a byte, 0 or 1), ``uint8``, ``uint16``, ``uint32``, ``uint64``, ``int8``, ``int16``,
  ``int32``, ``int64``, ``float16``, ``float32``, ``float64``, ``complex64``, ``complex128``:
  NumPy and torch share them;
- for any other dtype of torch, the name that torch prints, without ``torch.``: ``bfloat16``,
  ``float8_e4m3fn``, ``complex32`` and others; those of fewer than 8 bits take a byte for each
  element that torch counts;
- ``str`` and the number of bits of an element: UTF-32, padded with zeros, so ``str96`` for three
  characters; ``bytes`` and the number of bits, padded with zeros; without the number where an
  element has no bits;
- ``datetime64`` and ``timedelta64``, with the unit as NumPy prints it where there is one, such as
  ``datetime64[ns]`` or ``timedelta64[25s]``: int64.

Images. All is what Pillow has once the image is loaded:

- the palette is None where there are no colours, else the tuple of the mode of ``image.palette``, a
  str such as ``RGB``, and the bytes of its colours in that mode, a byte for each channel, and as
  many colours as there are. A third item, bytes, is there only where Pillow's own copy of the
  palette, in ``image.im``, was left with another alpha than those two and the transparency say:
  the alpha that each index from 0 to 255 gets in a conversion to RGBA;
- the transparency is ``S(info["transparency"])``. Pillow puts an int, bytes or a tuple of ints
  there, or nothing, which is None; any other value is serialised as in a container;
- the orientation is that of ``image.getexif()`` if Pillow has read that (as it does by itself for
  TIFF), else of the EXIF data in ``info["exif"]`` or ``info["Raw profile type exif"]``: the first
  number of the first entry 0x0112 that counts in the first directory, or 1 if that entry is bytes
  or text. Where there is none, it is the digit after the first ``tiff:Orientation="`` or
  ``tiff:Orientation>`` in the XMP data, which is the str ``info["XML:com.adobe.xmp"]`` or, where
  that is missing or empty, the bytes ``info["xmp"]``. It is 1 unless that is one of 2 to 8, and 1
  whatever the XMP data says where the EXIF data has no TIFF header, for there Pillow raises and
  doesn't turn the image. That is 8 bytes, after ``Exif`` and two zero bytes at most twice, of which
  the first four are, in hexadecimal, 4d4d002a, 4d4d2a00, 4d4d002b, 49492a00 or 4949002a.
  Which entries count is as in Pillow 13, also where they are damaged. Those of any type but 1 to
  13 and 16, of no values, or of the tag of an earlier one that counts are passed over. The sizes
  of the others are summed up where they are over 4 bytes; those by which the sum exceeds the size
  of the data from the header on, and all such after them, are passed over too. One that is not,
  but reaches beyond the end of the data, ends the directory, as that end does;
- the pixels are rows from top to bottom, without padding. ``1`` has 8 pixels a byte, the first in
  the highest bit, white where the bit is set, and begins each row in a new byte. ``I`` and ``F``
  are little-endian int32 and float32, ``I;16`` and ``I;16L`` little-endian uint16, ``I;16B`` a
  big-endian one, ``I;16N`` one in the order of the machine. All others have a byte for each
  channel, in the order of the mode's name: ``L``, ``LA``, ``La``, ``P`` (the index), ``PA``,
  ``RGB``, ``RGBA``, ``RGBa``, ``RGBX``, ``CMYK``, ``YCbCr``, ``HSV`` and ``LAB`` (a and b with
  their sign);
- the name of the mode is ``image.mode``. Damaged files make images whose pixels are in another
  mode than that; there it is followed by ``/`` and the mode of the pixels.

No serialised form is the beginning of another one, and different values have different forms,
unless two contents have the same BLAKE3 hash: no such pair is known.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch

from multimodal_cache import _images
from multimodal_cache._arrays import (
    serialise_array,
    serialise_numpy_scalar,
    serialise_tensor,
    serialise_view,
)
from multimodal_cache._hashing import content, content_of_parts, count, digest, type_name
from multimodal_cache._orientation import orientation
from multimodal_cache.base import CombinedHash, as_int

if TYPE_CHECKING:
    from PIL import Image

_VERSION = b"\x01"
_MAX_DEPTH = 100

_UNWATCHED_ITEMS = 2**14
_FREE_REPEATS = 2**20
_REPEATS_PER_ITEM = 64

_Serialiser = Callable[[Any, "_Nesting | None"], bytes]
"""Takes a value and what it is in, if it is in a container."""


def hash_feature(feature: Any, *, namespace: str | bytes = "", bits: SupportsIndex = 256) -> int:
    """Makes a key: the same for the same content, and another one for any other content.

    It is a BLAKE3 hash over the content and all that gives it meaning: the kinds of the
    values, dtypes, shapes, modes, palettes, and where one item ends and the next begins. It is
    the same in every process, on every machine and Python, whatever ``PYTHONHASHSEED``; it may
    be stored and sent.

    Args:
        feature: What the encoder gets, or what that is made from:

            - bytes-like objects: the same bytes are the same feature, in ``bytes``,
              ``bytearray``, a ``memoryview`` of bytes, strided too, or any other buffer
              (``array``, ``mmap``, ``ctypes``, ``PickleBuffer``). One of another format,
              or of several dimensions, is the array that it views.
            - str, int, float, bool and None. ``1``, ``1.0``, ``True``, ``"1"`` and ``b"1"``
              are five features. Floats count by their bits: ``-0.0`` isn't ``0.0``, and a
              NaN is the same as another of the same bits. complex and Decimal aren't numbers
              here. A str is text, also where it is the base64 of a file, or names one: the
              key is of the name, so a changed file would still hit; give its bytes.
            - list, tuple and dict (any ``Mapping``), nested up to 100 deep. A list isn't the
              tuple of the same items; the order of a dict doesn't count.
            - NumPy arrays and scalars (0-d arrays, so ``np.float64(1)`` isn't ``1.0``), torch
              tensors: dtype and shape count; strides, byte order, device, ``requires_grad``
              and lazy conjugation don't. A tensor and its NumPy twin are the same feature; a
              list of frames and the stack of them aren't.
            - Pillow images: size, mode, palette, transparency, orientation (in EXIF, or in XMP
              where EXIF has none) and the pixels of the current frame. No other metadata
              counts. The image is loaded if it wasn't, and nothing else is changed on it. An
              image isn't the array of its pixels. The ``tobytes`` of a subclass isn't asked.

            An instance of a subclass is what its base is, whatever it adds; a container is
            what iterating over it gives.
        namespace: What else changes the embedding, and isn't in the feature: the name and
            the version of the model, the options of the preprocessing. Features in
            different namespaces have different keys; so do ``"a"`` and ``b"a"``.
        bits: The width of the key, a multiple of 8 from 64 to 256. A narrower key is the
            upper part of a wider one, which it doesn't find. Among ``n`` features the
            probability of an accidental collision is about ``n**2 / 2**(bits + 1)``; at 64 bits
            anybody can make two features with one key in hours, so keep to 256 where users
            choose the features.

    Returns:
        An unsigned int of ``bits`` bits: one of 64 needn't fit into an int64.

    Raises:
        TypeError: The feature, or something in it, is of another type; or is an object,
            structured, masked, longdouble or ``StringDType`` array, or of any dtype of
            ``ml_dtypes`` (give the torch tensor, or a view as integers); or a sparse, quantised,
            nested or meta tensor, or one that wraps others or is negated lazily where torch
            can't negate; or a ``memoryview`` with suboffsets; or a ``CombinedHash``, whose items
            would not count. Or ``namespace`` is neither str nor bytes, or ``bits`` no int.
        ValueError: The feature contains itself, is nested more than 100 deep, contains the same
            containers so often that it would be over 64 times as large, and some million items
            more, if each were a copy; or has a buffer that was closed. Or ``bits`` is no
            multiple of 8 from 64 to 256.
        Exception: What Pillow raises for an image whose pixels can't be decoded, each time. But
            one that was loaded in vain elsewhere is what Pillow has of it then.

    C-contiguous CPU memory is read in place, without a copy and without the GIL, by all cores
    from 8 MiB up (by one in a forked child, where BLAKE3's threads don't exist): 3 to 5 GB/s.
    Other memory is copied first. What is strided, expanded or big-endian is copied in pieces of
    8 MiB; what is conjugated or negated lazily, whole; and a tensor on a GPU, once, on the
    current stream, which is waited for; if it is strided it is made contiguous there. An image
    is packed in small strips, about 1.6 GB/s.

    Any number of threads may call it, also with the same feature. But nothing else may load an
    image meanwhile, since Pillow can't in two threads; and a feature that changes meanwhile gets
    no meaningful key, nor does a tensor under ``FakeTensorMode``, which hides what it holds.

    Keys that left out shape, dtype, mode, palette or where an item ends, or had 16 or 64 bits,
    were reported as CVE-2025-46722, vLLM #24969, SGLang #25462 and #32404, Dynamo #8341 and
    LMCache #3301.
    """
    width = as_int("bits", bits)
    if width % 8 or not 64 <= width <= 256:
        raise ValueError(f"bits must be a multiple of 8 from 64 to 256, got {width}")
    if type(namespace) is str:
        beginning = _beginning(namespace)
    elif isinstance(namespace, str):
        beginning = _VERSION + _serialise_str(namespace)
    elif isinstance(namespace, bytes):
        beginning = _VERSION + _serialise_bytes(namespace)
    else:
        raise TypeError(f"namespace must be str or bytes, got {type_name(namespace)}")
    hashed = digest(beginning + _serialise(feature, None))
    return int.from_bytes(hashed[: width // 8], "big")


@functools.lru_cache(maxsize=64)
def _beginning(namespace: str) -> bytes:
    return _VERSION + _serialise_str(namespace)


def _serialise(value: Any, nesting: _Nesting | None) -> bytes:
    kind: type = type(value)
    serialiser = _find(id(kind)) or _inherited_serialiser(kind)
    return serialiser(value, nesting)


def _inherited_serialiser(kind: type) -> _Serialiser:
    """Returns the serialiser for a class that isn't one of the table's.

    It isn't remembered: a class may become a ``Mapping`` later, and would be kept alive.
    """
    if issubclass(kind, _BASES):
        return next(_SERIALISERS[base] for base in _BASES if issubclass(kind, base))
    return _serialise_other


def _serialise_other(value: Any, nesting: _Nesting | None) -> bytes:
    """Serialises images, whose class may not be there, and buffers, which have no class."""
    image_class = _images.image_class()
    if image_class is not None and isinstance(value, image_class):
        return _serialise_image(value, nesting)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            "feature must be made of bytes, str, int, float, bool, None, list, tuple, dict, "
            f"NumPy arrays, torch tensors and PIL images, got {_in_words(value)}"
        ) from None
    except BufferError as error:
        raise TypeError(f"buffers must be readable, got {type_name(value)}: {error}") from None
    return serialise_view(view)


def _in_words(value: object) -> str:
    """Names the type of a value, and what to give for a file."""
    name = type_name(value)
    if isinstance(value, os.PathLike):
        return f"{name}: give path.read_bytes()"
    return f"{name}: give file.read()" if hasattr(type(value), "read") else name


# Scalars and bytes


def _serialise_none(value: None, nesting: _Nesting | None = None) -> bytes:
    return b"N"


def _serialise_bool(value: bool, nesting: _Nesting | None = None) -> bytes:
    return b"T" if value else b"F"


def _serialise_int(value: int, nesting: _Nesting | None = None) -> bytes:
    plain = int.__index__(value)  # a subclass may have its own arithmetic
    bits = (plain if plain >= 0 else ~plain).bit_length()
    return b"i" + content(plain.to_bytes(bits // 8 + 1, "little", signed=True))


def _refuse_combined_hash(value: CombinedHash, nesting: _Nesting | None = None) -> bytes:
    raise TypeError("feature must not be a CombinedHash, whose items would not count: give them")


def _serialise_float(value: float, nesting: _Nesting | None = None) -> bytes:
    return b"f" + struct.pack("<d", value)


def _serialise_str(value: str, nesting: _Nesting | None = None) -> bytes:
    return b"s" + content(str.encode(value, "utf-8", "surrogatepass"))


def _serialise_bytes(value: bytes | bytearray, nesting: _Nesting | None = None) -> bytes:
    return b"b" + content(memoryview(value))  # a subclass may have its own len and iter


# Containers


class _Nesting:
    """How deep in containers a value is, and how often the same ones were met again."""

    depth = 1  # on the class: most features have one container
    repeated = 0
    seen: dict[int, Any] | None = None

    def __init__(self, size: int) -> None:
        self.items = size

    def enter(self, container: Any, size: int) -> _Nesting:
        if self.depth == _MAX_DEPTH:
            raise ValueError(
                f"feature must be nested at most {_MAX_DEPTH} deep, got more: "
                "does it contain itself?"
            )
        self.depth += 1
        if self.items <= _UNWATCHED_ITEMS:
            self.items += size
        else:
            self.watch(container, size)
        return self

    def leave(self) -> None:
        self.depth -= 1

    def watch(self, container: Any, size: int) -> None:
        if self.seen is None:
            self.seen = {}
        if id(container) not in self.seen:
            self.seen[id(container)] = container  # alive, so that no other one gets its id
            self.items += size
            return
        self.repeated += size + 1
        if self.repeated > _FREE_REPEATS + _REPEATS_PER_ITEM * self.items:
            raise ValueError(
                "feature must not contain the same containers so often, got one of "
                f"{self.items} items that stand for more than {self.repeated}"
            )


def _serialise_list(value: list, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    return b"l" + _items(value, nesting)


def _serialise_tuple(value: tuple, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    return b"t" + _items(value, nesting)


def _items(container: Iterable[Any], nesting: _Nesting | None) -> bytes:
    # A tuple doesn't change; of others the count is right, whoever changes them.
    items = container if type(container) is tuple else _listed(container)
    size = len(items)
    inside = nesting.enter(container, size) if nesting else _Nesting(size)
    serialised = [  # what _serialise does, without the call
        (_find(id(type(item))) or _inherited_serialiser(type(item)))(item, inside) for item in items
    ]
    if nesting:
        nesting.leave()
    return count(size) + b"".join(serialised)


def _serialise_mapping(value: Mapping, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    pairs = list(value.items()) if type(value) is dict else _listed(value.items())
    size = 2 * len(pairs)
    inside = nesting.enter(value, size) if nesting else _Nesting(size)
    hashes = [digest(_serialise(key, inside) + _serialise(item, inside)) for key, item in pairs]
    if nesting:
        nesting.leave()
    return b"d" + count(len(hashes)) + b"".join(sorted(hashes))


def _listed(items: Iterable[Any]) -> list[Any]:
    if type(items) is list:
        return items.copy()
    return [item for item in items]  # noqa: C416  # list() would believe its __len__


# Images


def _serialise_image(image: Image.Image, nesting: _Nesting | None) -> bytes:
    # First of all, since this may change the mode, and a file may have metadata after the pixels.
    _images.load(image)
    mode, consistent = image.mode, image
    if image.im.mode != mode:
        mode, consistent = f"{mode}/{image.im.mode}", image.copy()
    palette = _images.palette(consistent)
    return b"".join(
        (
            b"p",
            _serialise_tuple(palette) if palette else _serialise_none(None),
            _serialise_transparency(image, nesting),
            struct.pack("<3Q", orientation(image), *image.size),
            content(mode.encode()),
            content_of_parts(_images.pixels(consistent)),
        )
    )


def _serialise_transparency(image: Image.Image, nesting: _Nesting | None) -> bytes:
    transparency = image.info.get("transparency")
    if transparency is None:
        return _serialise_none(None)
    inside = nesting.enter(image, 1) if nesting else _Nesting(1)
    serialised = _serialise(transparency, inside)
    if nesting:
        nesting.leave()
    return serialised


# A subclass gets the first that fits: hence NumPy's scalars before float, str and bytes, from
# which some of them derive, and bool and CombinedHash before int.
_SERIALISERS: dict[type, _Serialiser] = {
    np.generic: serialise_numpy_scalar,
    type(None): _serialise_none,
    bool: _serialise_bool,
    CombinedHash: _refuse_combined_hash,
    int: _serialise_int,
    float: _serialise_float,
    str: _serialise_str,
    bytes: _serialise_bytes,
    bytearray: _serialise_bytes,
    memoryview: serialise_view,
    list: _serialise_list,
    tuple: _serialise_tuple,
    dict: _serialise_mapping,
    Mapping: _serialise_mapping,
    np.ndarray: serialise_array,
    torch.Tensor: serialise_tensor,
}

_SERIALISERS_BY_ID = {id(kind): serialiser for kind, serialiser in _SERIALISERS.items()}
"""A metaclass may say that its classes are equal to others."""

_find = _SERIALISERS_BY_ID.get

_BASES = tuple(_SERIALISERS)
