"""From content to key: ``hash_feature``.

The key of a feature is a hash of an encoding of it. The encoding is a format, which other
programs in other languages may write too. It won't change; another one would get another
version byte. All of it:

- A key is the first ``bits / 8`` bytes, read as an unsigned big-endian int, of the BLAKE3 hash
  (256 bits, unkeyed) of the byte 0x01, the version; ``E(namespace)``, which is a str or bytes,
  and the empty str where none is given; ``E(feature)``.
- ``n64`` is a count or a length: 8 bytes, unsigned, little-endian.
- ``C(data)``, the content, is ``n64`` for the length of the data in bytes; then the data itself
  where that is 1024 bytes or fewer, else its BLAKE3 hash (32 bytes).
- ``E(value)`` is one byte for the kind, an ASCII letter, and what belongs to it:

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
  list                ``l``   ``n64`` items, and ``E`` of each
  tuple               ``t``   ``n64`` items, and ``E`` of each
  dict                ``d``   ``n64`` pairs, and for each pair the BLAKE3 hash (32 bytes) of
                              ``E(key) E(value)``, sorted as byte strings
  array               ``a``   ``C`` of the name of its dtype, in ASCII; ``n64`` dimensions, and
                              one ``n64`` for the size of each; ``C`` of its elements in C order
  image               ``p``   ``E(palette)``, ``E(transparency)``; one ``n64`` each for its
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
- the transparency is ``E(info["transparency"])``. Pillow puts an int, bytes or a tuple of ints
  there, or nothing, which is None; any other value is encoded as in a container;
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

No encoding is the beginning of another one, and different values have different encodings, unless
two contents have the same BLAKE3 hash: no such pair is known.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from blake3 import blake3

from multimodal_cache import _images
from multimodal_cache._orientation import orientation
from multimodal_cache._tensors import dense_storage, plain_tensor, require_memory
from multimodal_cache.base import CombinedHash, as_int

if TYPE_CHECKING:
    from PIL import Image

NUMPY_NAMES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""The dtypes that NumPy and torch share, by the name that both give them."""

PARALLEL_BYTES = 8 * 2**20
"""From this size on, all threads are no slower than one, even if they have to wake up first."""

PIECE_BYTES = PARALLEL_BYTES
"""What isn't contiguous is copied in pieces of about that size."""

_VERSION = b"\x01"
_MAX_DEPTH = 100
_INLINE_BYTES = 1024

_UNWATCHED_ITEMS = 2**14
_FREE_REPEATS = 2**20
_REPEATS_PER_ITEM = 64

_max_threads = blake3.AUTO

Bytes = bytes | memoryview
"""Contiguous memory, one-dimensional, of single bytes."""

Shape = tuple[int, ...]

Encoder = Callable[[Any, "_Nesting | None"], bytes]
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
              here. A str is text, also where it names a file or is the base64 of one.
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
        beginning = _VERSION + _encode_str(namespace)
    elif isinstance(namespace, bytes):
        beginning = _VERSION + _encode_bytes(namespace)
    else:
        raise TypeError(f"namespace must be str or bytes, got {_type_name(namespace)}")
    digest = _digest(beginning + _encode(feature, None))
    return int.from_bytes(digest[: width // 8], "big")


@functools.lru_cache(maxsize=64)
def _beginning(namespace: str) -> bytes:
    return _VERSION + _encode_str(namespace)


def _begin_anew_in_forked_child() -> None:  # pragma: no cover  # in another process
    """Forgets BLAKE3's other threads, which aren't there."""
    global _max_threads
    _max_threads = 1


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_anew_in_forked_child)


def _encode(value: Any, nesting: _Nesting | None) -> bytes:
    kind: type = type(value)
    encoder = _find(id(kind)) or _inherited_encoder(kind)
    return encoder(value, nesting)


def _inherited_encoder(kind: type) -> Encoder:
    """Returns the encoder for a class that isn't one of the table's.

    It isn't remembered: a class may become a ``Mapping`` later, and would be kept alive.
    """
    if issubclass(kind, _BASES):
        return next(encoder for base, encoder in _ENCODERS.items() if issubclass(kind, base))
    return _encode_other


def _encode_other(value: Any, nesting: _Nesting | None) -> bytes:
    """Encodes images, whose class may not be there, and buffers, which have no class."""
    image_class = _images.image_class()
    if image_class is not None and isinstance(value, image_class):
        return _encode_image(value, nesting)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            "feature must be made of bytes, str, int, float, bool, None, list, tuple, dict, "
            f"NumPy arrays, torch tensors and PIL images, got {_type_name(value)}"
        ) from None
    except BufferError as error:
        raise TypeError(f"buffers must be readable, got {_type_name(value)}: {error}") from None
    return _encode_view(view)


# Scalars and bytes


def _encode_none(value: None, nesting: _Nesting | None = None) -> bytes:
    return b"N"


def _encode_bool(value: bool, nesting: _Nesting | None = None) -> bytes:
    return b"T" if value else b"F"


def _encode_int(value: int, nesting: _Nesting | None = None) -> bytes:
    plain = int.__index__(value)  # a subclass may have its own arithmetic
    bits = (plain if plain >= 0 else ~plain).bit_length()
    return b"i" + _content(plain.to_bytes(bits // 8 + 1, "little", signed=True))


def _encode_float(value: float, nesting: _Nesting | None = None) -> bytes:
    return b"f" + struct.pack("<d", value)


def _encode_str(value: str, nesting: _Nesting | None = None) -> bytes:
    return b"s" + _content(str.encode(value, "utf-8", "surrogatepass"))


def _encode_bytes(value: bytes | bytearray, nesting: _Nesting | None = None) -> bytes:
    return b"b" + _content(memoryview(value))  # a subclass may have its own len and iter


def _encode_view(value: memoryview, nesting: _Nesting | None = None) -> bytes:
    if value.suboffsets:  # NumPy would take the pointers for elements
        raise TypeError("memoryviews must not have suboffsets: give a copy")
    # ctypes gives the format of a byte to packed structures too.
    if value.ndim != 1 or value.itemsize != 1 or value.format.lstrip("@=<>!") != "B":
        try:
            array = np.asarray(value)
        except (BufferError, ValueError, RuntimeError, RuntimeWarning):
            raise TypeError(
                f"memoryviews must have a format that NumPy knows, got {value.format!r}"
            ) from None
        return _encode_array(array)
    if not value.c_contiguous:
        return b"b" + _content_of_parts(value.nbytes, _parts_of_view(value))
    if value.format != "B":  # "<B", as ctypes has it, is the same but not to BLAKE3
        value = np.frombuffer(value, np.uint8).data
    return b"b" + _content(value)


def _parts_of_view(view: memoryview) -> Iterator[Bytes]:
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES].tobytes()


# Containers


class _Nesting:
    """Where in a feature its encoding is, and how often it met the same containers again."""

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


def _encode_list(value: list, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    return b"l" + _items(value, nesting)


def _encode_tuple(value: tuple, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    return b"t" + _items(value, nesting)


def _items(container: Iterable[Any], nesting: _Nesting | None) -> bytes:
    # A tuple doesn't change; of others the count is right, whoever changes them.
    items = container if type(container) is tuple else _listed(container)
    size = len(items)
    inside = nesting.enter(container, size) if nesting else _Nesting(size)
    encoded = [  # what _encode does, without the call
        (_find(id(type(item))) or _inherited_encoder(type(item)))(item, inside) for item in items
    ]
    if nesting:
        nesting.depth -= 1
    return _count(size) + b"".join(encoded)


def _encode_mapping(value: Mapping, nesting: _Nesting | None = None) -> bytes:  # type: ignore[type-arg]
    pairs = list(value.items()) if type(value) is dict else _listed(value.items())
    size = 2 * len(pairs)
    inside = nesting.enter(value, size) if nesting else _Nesting(size)
    hashes = [_digest(_encode(key, inside) + _encode(item, inside)) for key, item in pairs]
    if nesting:
        nesting.depth -= 1
    return b"d" + _count(len(hashes)) + b"".join(sorted(hashes))


def _listed(items: Iterable[Any]) -> list[Any]:
    if type(items) is list:
        return items.copy()
    return [item for item in items]  # noqa: C416  # list() would believe its __len__


# Arrays and tensors

_PLAIN_DTYPES = {np.dtype(char).num: char for char in "?bBhHiIlLqQefdFD"}
_FLEXIBLE_DTYPES = {np.dtype(char).num for char in "SUmM"}
"""By NumPy's number: those of other packages have other numbers, whatever their kind is."""

_NUMPY_DIMENSIONS = 32
"""So many have the arrays of every NumPy."""


def _encode_numpy_scalar(value: np.generic, nesting: _Nesting | None = None) -> bytes:
    return _encode_array(np.asarray(value))


def _encode_array(array: np.ndarray, nesting: _Nesting | None = None) -> bytes:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"arrays must not be masked, got {_type_name(array)}: fill it or give its parts"
            )
        array = np.asarray(array)  # a subclass may have its own shape
    spelling = _PLAIN_DTYPES.get(array.dtype.num) or _flexible_dtype(array)
    header, little_endian = _numpy_header(spelling, array.shape)
    return header + _elements(array, little_endian)


def _flexible_dtype(array: np.ndarray[Any, Any]) -> str:
    """Returns the spelling of a dtype that has a size or a unit."""
    if array.dtype.num not in _FLEXIBLE_DTYPES:
        raise TypeError(
            "arrays must have a boolean, integer, float, complex, fixed-width string or time dtype "
            "(no object, structured, longdouble or ml_dtypes one), got "
            f"{_type_name(array)} with dtype {array.dtype}"
        )
    return str(array.dtype.str)


def _encode_tensor(tensor: torch.Tensor, nesting: _Nesting | None = None) -> bytes:
    storage = dense_storage(tensor)
    if type(tensor) is not torch.Tensor:
        tensor = plain_tensor(tensor)
    require_memory(tensor, storage)
    header, little_endian, view = _torch_header(tensor.dtype, tensor.shape)
    plain = tensor
    if view or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        plain = _viewed(tensor, view)
    # On a GPU it is made contiguous there, so as to be copied once.
    plain = plain if plain.is_cpu else plain.contiguous().cpu()
    plain = plain if plain.ndim <= _NUMPY_DIMENSIONS else plain.reshape(-1)
    return header + _elements(plain.numpy(), little_endian)


def _viewed(
    tensor: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Returns the elements as NumPy can have them."""
    try:
        plain = tensor.detach().resolve_conj().resolve_neg()
        return view(plain) if view else plain
    except (AssertionError, NotImplementedError) as error:
        # That is FakeTensorMode, and dtypes that torch can't negate.
        raise TypeError(
            f"tensors must have elements that can be read, got dtype={tensor.dtype}, "
            f"requires_grad={tensor.requires_grad}, is_neg={tensor.is_neg()}: {error}"
        ) from None


def _elements(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> bytes:
    as_it_is = array.dtype == little_endian and array.dtype.kind != "b"
    if as_it_is and array.nbytes <= _INLINE_BYTES:
        return _content(array.tobytes())
    if array.nbytes <= PIECE_BYTES or (as_it_is and array.flags.c_contiguous):
        return _content(_in_memory(array, little_endian))
    parts = (_in_memory(piece, little_endian) for piece in _pieces(array))
    return _content_of_parts(array.nbytes, parts)


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the elements in C order, in arrays of few bytes."""
    if array.nbytes <= PIECE_BYTES or not array.ndim:
        yield array
    elif len(array) == 1:
        yield from _pieces(array[0])
    else:
        rows = max(1, PIECE_BYTES * len(array) // array.nbytes)
        for start in range(0, len(array), rows):
            yield from _pieces(array[start : start + rows])


def _in_memory(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> Bytes:
    elements = np.ascontiguousarray(array, little_endian)
    if little_endian.kind == "b":
        numbers = elements.view(np.uint8)
        elements = numbers != 0 if numbers.max(initial=0) > 1 else elements
    if elements.nbytes <= _INLINE_BYTES:
        return elements.tobytes()  # an element of no bytes has no view
    return elements.reshape(-1).view(np.uint8).data


# What doesn't depend on the elements is remembered: it takes longer than all the rest.


@functools.lru_cache(maxsize=1024)
def _numpy_header(spelling: str, shape: Shape) -> tuple[bytes, np.dtype[Any]]:
    """Returns what stands before the elements, and their dtype in little-endian order.

    By the spelling of a dtype, for NumPy says of some that they are equal which aren't the same.
    """
    dtype = np.dtype(spelling)
    return _header(dtype.name, shape), dtype.newbyteorder("<")


@functools.lru_cache(maxsize=1024)
def _torch_header(
    dtype: torch.dtype, shape: Shape
) -> tuple[bytes, np.dtype[Any], Callable[[torch.Tensor], torch.Tensor] | None]:
    """Returns what stands before the elements, their dtype in NumPy, and how to view them so.

    That is None where NumPy has the dtype too.
    """
    name = str(dtype).removeprefix("torch.")
    numpy_name = name
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    if dtype is torch.complex32:
        numpy_name, view = "float16", torch.view_as_real
    elif name not in NUMPY_NAMES:
        numpy_name = f"int{8 * dtype.itemsize}"
        view = operator.methodcaller("view", getattr(torch, numpy_name))
    return _header(name, shape), np.dtype(numpy_name).newbyteorder("<"), view


def _header(dtype_name: str, shape: Shape) -> bytes:
    sizes = [_count(size) for size in shape]
    return b"".join((b"a", _content(dtype_name.encode()), _count(len(sizes)), *sizes))


# Images


def _encode_image(image: Image.Image, nesting: _Nesting | None) -> bytes:
    # First of all, since this may change the mode, and a file may have metadata after the pixels.
    _images.load(image)
    mode, consistent = image.mode, image
    if image.im.mode != mode:
        mode, consistent = f"{mode}/{image.im.mode}", image.copy()
    palette = _images.palette(consistent)
    return b"".join(
        (
            b"p",
            _encode_tuple(palette) if palette else _encode_none(None),
            _encode_transparency(image, nesting),
            struct.pack("<3Q", orientation(image), *image.size),
            _content(mode.encode()),
            _encode_pixels(consistent),
        )
    )


def _encode_transparency(image: Image.Image, nesting: _Nesting | None) -> bytes:
    transparency = image.info.get("transparency")
    if transparency is None:
        return _encode_none(None)
    inside = nesting.enter(image, 1) if nesting else _Nesting(1)
    encoded = _encode(transparency, inside)
    if nesting:
        nesting.depth -= 1
    return encoded


def _encode_pixels(image: Image.Image) -> bytes:
    strips = _images.pixels(image)
    first = next(strips, b"")
    second = next(strips, None)
    if second is None:
        return _content(first)
    size, hasher = len(first) + len(second), blake3(first)
    hasher.update(second)
    for strip in strips:
        size += len(strip)
        hasher.update(strip)
    return _count(size) + hasher.digest()  # so many pixels are more than _INLINE_BYTES


# Bytes and hashes


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _content(data: Bytes) -> bytes:
    size = len(data)
    length = size.to_bytes(8, "little")  # _count(size), without the call
    return length + (bytes(data) if size <= _INLINE_BYTES else _digest(data))


def _content_of_parts(size: int, parts: Iterable[Bytes]) -> bytes:
    if size <= PIECE_BYTES:
        return _content(b"".join(parts))
    hasher = blake3(max_threads=_max_threads)
    for part in parts:
        hasher.update(part)
    return _count(size) + hasher.digest()


def _digest(data: Bytes) -> bytes:
    max_threads = _max_threads if len(data) >= PARALLEL_BYTES else 1
    return blake3(data, max_threads=max_threads).digest()


def _type_name(value: object) -> str:
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _refuse_combined_hash(value: CombinedHash, nesting: _Nesting | None = None) -> bytes:
    raise TypeError("feature must not be a CombinedHash, whose items would not count: give them")


# A subclass gets the first that fits: hence NumPy's scalars before float, str and bytes, from
# which some of them derive, and bool and CombinedHash before int.
_ENCODERS: dict[type, Encoder] = {
    np.generic: _encode_numpy_scalar,
    type(None): _encode_none,
    bool: _encode_bool,
    CombinedHash: _refuse_combined_hash,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    memoryview: _encode_view,
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_mapping,
    Mapping: _encode_mapping,
    np.ndarray: _encode_array,
    torch.Tensor: _encode_tensor,
}

_ENCODERS_BY_ID = {id(kind): encoder for kind, encoder in _ENCODERS.items()}
"""A metaclass may say that its classes are equal to others."""

_find = _ENCODERS_BY_ID.get

_BASES = tuple(_ENCODERS)
