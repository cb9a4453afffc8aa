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

- the palette is None where there are no colours, else the tuple of its mode, a str such as
  ``RGB``, and the bytes of its colours in that mode, a byte for each channel, and as many
  colours as there are;
- the transparency is ``info["transparency"]``, an int, bytes or a tuple of ints, or None;
- the orientation is that of the EXIF data, or of the XMP data where EXIF has none, and 1 unless it
  is one of 2 to 8;
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
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from blake3 import blake3

from multimodal_cache._tensors import dense_storage, require_memory
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

STRIP_PIXELS = 2**17
"""So many pixels fit into the CPU's caches, unpacked and packed."""

_VERSION = b"\x01"
_MAX_DEPTH = 100
_INLINE_BYTES = 1024

_max_threads = blake3.AUTO
_load_locks = [threading.RLock() for _ in range(64)]
"""Pillow can't load an image in two threads; this many load at once, if they aren't the same."""

Bytes = bytes | memoryview
"""Contiguous memory, one-dimensional, of single bytes."""

Shape = tuple[int, ...]

Encoder = Callable[[Any, int], bytes]
"""Takes a value and the number of containers that it is in."""


def hash_feature(feature: Any, *, namespace: str | bytes = "", bits: SupportsIndex = 256) -> int:
    """Makes a key: the same for the same content, and another one for any other content.

    It is a BLAKE3 hash over the content and all that gives it meaning: the kinds of the
    values, dtypes, shapes, modes, palettes, and where one item ends and the next begins. It is
    the same in every process, on every machine and Python, whatever ``PYTHONHASHSEED``; it may
    be stored and sent.

    Args:
        feature: What the encoder gets, or what that is made from:

            - bytes-like objects: the same bytes are the same feature, in ``bytes``,
              ``bytearray`` or a ``memoryview`` of bytes, strided too. One of another format,
              or of several dimensions, is the array that it views.
            - str, int, float, bool and None. ``1``, ``1.0``, ``True``, ``"1"`` and ``b"1"``
              are five features. Floats count by their bits: ``-0.0`` isn't ``0.0``, and a
              NaN is the same as another of the same bits. A str is text, also where it names
              a file or is the base64 of one.
            - list, tuple and dict (any ``Mapping``), nested up to 100 deep. A list isn't the
              tuple of the same items; the order of a dict doesn't count.
            - NumPy arrays and scalars (0-d arrays, so ``np.float64(1)`` isn't ``1.0``), torch
              tensors: dtype and shape count; strides, byte order, device, ``requires_grad``
              and lazy conjugation don't. A tensor and its NumPy twin are the same feature; a
              list of frames and the stack of them aren't.
            - Pillow images: size, mode, palette, transparency, orientation (in EXIF, or in XMP
              where EXIF has none) and the pixels of the current frame. No other metadata
              counts. The image is loaded if it wasn't, and nothing else is changed on it. An
              image isn't the array of its pixels.

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
            structured, masked, longdouble or ``StringDType`` array; or a sparse, quantised,
            nested or meta tensor, or one that wraps others; or a ``CombinedHash``, whose items
            would not count. Or ``namespace`` is neither str nor bytes, or ``bits`` no int.
        ValueError: The feature contains itself, is nested more than 100 deep, or has a buffer
            that was closed; or ``bits`` is no multiple of 8 from 64 to 256.
        Exception: What Pillow raises for an image whose pixels can't be decoded.

    C-contiguous CPU memory is read in place, without a copy and without the GIL, by all cores
    from 8 MiB up (by one in a forked child, where BLAKE3's threads don't exist). Other memory
    is copied first: what is strided, big-endian, conjugated or negated lazily; and a tensor on
    a GPU, once, on the current stream, which is waited for; if it is strided it is made
    contiguous there. An image is packed in small strips.

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
    if isinstance(namespace, str):
        encoded_namespace = _encode_str(namespace)
    elif isinstance(namespace, bytes):
        encoded_namespace = _encode_bytes(namespace)
    else:
        raise TypeError(f"namespace must be str or bytes, got {_type_name(namespace)}")
    digest = _digest(_VERSION + encoded_namespace + _encode(feature, 0))
    return int.from_bytes(digest[: width // 8], "big")


def _begin_anew_in_forked_child() -> None:  # pragma: no cover  # in another process
    """Forgets the other threads, which aren't there: those of BLAKE3, and owners of locks."""
    global _max_threads, _load_locks
    _max_threads = 1
    _load_locks = [threading.RLock() for _ in _load_locks]


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_anew_in_forked_child)


def _encode(value: Any, depth: int) -> bytes:
    kind: type = type(value)
    encoder = _ENCODERS.get(kind) or _inherited_encoder(kind)
    return encoder(value, depth)


@functools.lru_cache(maxsize=256)
def _inherited_encoder(kind: type) -> Encoder:
    for base, encoder in _ENCODERS.items():
        if issubclass(kind, base):
            return encoder
    return _encode_other


def _encode_other(value: Any, depth: int) -> bytes:
    """Encodes images, whose class may not be there, and buffers, which have no class."""
    image_class = _image_class()
    if image_class is not None and isinstance(value, image_class):
        return _encode_image(value, depth)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            "feature must be made of bytes, str, int, float, bool, None, list, tuple, dict, "
            f"NumPy arrays, torch tensors and PIL images, got {_type_name(value)}"
        ) from None
    return _encode_view(view)


# Scalars and bytes


def _encode_none(value: None, depth: int = 0) -> bytes:
    return b"N"


def _encode_bool(value: bool, depth: int = 0) -> bytes:
    return b"T" if value else b"F"


def _encode_int(value: int, depth: int = 0) -> bytes:
    plain = int.__index__(value)  # a subclass may have its own arithmetic
    bits = (plain if plain >= 0 else ~plain).bit_length()
    return b"i" + _content(plain.to_bytes(bits // 8 + 1, "little", signed=True))


def _encode_float(value: float, depth: int = 0) -> bytes:
    return b"f" + struct.pack("<d", value)


def _encode_str(value: str, depth: int = 0) -> bytes:
    return b"s" + _content(str.encode(value, "utf-8", "surrogatepass"))


def _encode_bytes(value: bytes | bytearray, depth: int = 0) -> bytes:
    return b"b" + _content(memoryview(value))  # a subclass may have its own len and iter


def _encode_view(value: memoryview, depth: int = 0) -> bytes:
    # ctypes gives the format of a byte to packed structures too.
    if value.ndim != 1 or value.itemsize != 1 or value.format.lstrip("@=<>!") != "B":
        try:
            array = np.asarray(value)
        except (ValueError, RuntimeError, RuntimeWarning):
            raise TypeError(
                f"memoryviews must have a format that NumPy knows, got {value.format!r}"
            ) from None
        return _encode_array(array)
    if not value.c_contiguous:
        return b"b" + _content(value.tobytes())
    if value.format != "B":  # "<B", as ctypes has it, is the same but not to BLAKE3
        value = np.frombuffer(value, np.uint8).data
    return b"b" + _content(value)


# Containers


def _encode_list(value: list, depth: int = 0) -> bytes:  # type: ignore[type-arg]
    return b"l" + _items(value, depth)


def _encode_tuple(value: tuple, depth: int = 0) -> bytes:  # type: ignore[type-arg]
    return b"t" + _items(value, depth)


def _items(container: Iterable[Any], depth: int) -> bytes:
    items = list(container)  # so that the count is right, whoever changes the container
    inside = _deeper(depth)
    return _count(len(items)) + b"".join([_encode(item, inside) for item in items])


def _encode_mapping(value: Mapping, depth: int = 0) -> bytes:  # type: ignore[type-arg]
    pairs = list(value.items())
    inside = _deeper(depth)
    hashes = [_digest(_encode(key, inside) + _encode(item, inside)) for key, item in pairs]
    return b"d" + _count(len(hashes)) + b"".join(sorted(hashes))


def _deeper(depth: int) -> int:
    if depth == _MAX_DEPTH:
        raise ValueError(
            f"feature must be nested at most {_MAX_DEPTH} deep, got more: does it contain itself?"
        )
    return depth + 1


# Arrays and tensors


def _encode_numpy_scalar(value: np.generic, depth: int = 0) -> bytes:
    return _encode_array(np.asarray(value))


def _encode_array(array: np.ndarray, depth: int = 0) -> bytes:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"arrays must not be masked, got {_type_name(array)}: fill it or give its parts"
            )
        array = np.asarray(array)  # a subclass may have its own shape
    header, little_endian = _numpy_header(array.dtype, array.shape)
    if little_endian is None:
        raise TypeError(
            "arrays must have a boolean, integer, float, complex, fixed-width string or time dtype "
            f"(no object, structured or longdouble one), got {_type_name(array)} with dtype "
            f"{array.dtype}"
        )
    return header + _elements(array, little_endian)


def _encode_tensor(tensor: torch.Tensor, depth: int = 0) -> bytes:
    require_memory(tensor, dense_storage(tensor))
    if type(tensor) is not torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(torch.Tensor)  # a subclass may have its own shape
    header, little_endian, view = _torch_header(tensor.dtype, tensor.shape)
    plain = tensor
    if view or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = view(plain) if view else plain
    # On a GPU it is made contiguous there, so as to be copied once.
    plain = plain if plain.is_cpu else plain.contiguous().cpu()
    return header + _elements(plain.numpy(), little_endian)


def _elements(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> bytes:
    elements = np.ascontiguousarray(array, little_endian)
    if elements.nbytes <= _INLINE_BYTES:
        return _content(elements.tobytes())  # an element of no bytes has no view
    return _content(elements.reshape(-1).view(np.uint8).data)


# What doesn't depend on the elements is remembered: it takes longer than all the rest.


@functools.lru_cache(maxsize=1024)
def _numpy_header(dtype: np.dtype[Any], shape: Shape) -> tuple[bytes, np.dtype[Any] | None]:
    """Returns what stands before the elements, and their dtype in little-endian order.

    That is None for a dtype whose elements aren't plain values of the same bytes anywhere.
    """
    if dtype.kind not in "biufcSUmM" or dtype.char in "gG":  # those are longdouble
        return b"", None
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


def _image_class() -> type[Image.Image] | None:
    """Returns Pillow's class, if anybody has imported it; else nothing is an image."""
    return getattr(sys.modules.get("PIL.Image"), "Image", None)


def _encode_image(image: Image.Image, depth: int) -> bytes:
    # First of all, since this may change the mode, and a file may have metadata after the pixels.
    with _load_locks[id(image) // 64 % len(_load_locks)]:
        image.load()
    mode, consistent = image.mode, image
    if image.im.mode != mode:
        mode, consistent = f"{mode}/{image.im.mode}", image.copy()
    return b"".join(
        (
            b"p",
            _encode_palette(consistent),
            _encode(image.info.get("transparency"), _deeper(depth)),
            struct.pack("<3Q", _orientation(image), *image.size),
            _content(mode.encode()),
            _encode_pixels(consistent),
        )
    )


def _encode_palette(image: Image.Image) -> bytes:
    if image.mode not in ("P", "PA"):
        return _encode_none(None)
    # Not the mode of Pillow's own copy of the colours: convert() adds the transparency to that.
    mode = image.palette.mode if image.palette else image.im.getpalettemode()
    colours = image.getpalette(mode)
    return _encode_tuple((mode, bytes(colours))) if colours else _encode_none(None)


_RAW_MODES = {"I": "I;32S", "F": "F;32F"}
"""The little-endian ones for the modes that are in the byte order of the machine."""


def _encode_pixels(image: Image.Image) -> bytes:
    """Encodes the pixels as content, strip by strip where they are many.

    That is three times as fast as packing a large image at once, and needs no copy of it all.
    """
    raw_mode = _RAW_MODES.get(image.mode, image.mode)
    width, height = image.size
    if width * height <= STRIP_PIXELS:
        return _content(image.tobytes("raw", raw_mode))
    size, hasher = 0, blake3()
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height))).tobytes("raw", raw_mode)
        size += len(strip)
        hasher.update(strip)
    return _count(size) + hasher.digest()  # so many pixels are more than _INLINE_BYTES


def _orientation(image: Image.Image) -> int:
    """Returns the orientation by which Pillow would turn the image, from 1 to 8.

    Pillow remembers on the image what it parsed, which would hide a later change of
    ``image.info``; so the question is put to a stand-in with the image's attributes. It is put
    twice: for malformed EXIF Pillow raises the first time only; and a value that another thread
    fetches just then, from where Pillow parsed it to where Pillow keeps it, is missed once.
    """
    stand_in = sys.modules["PIL.Image"].Image()
    vars(stand_in).update(vars(image))
    for _ in range(2):
        try:
            exif = stand_in.getexif()
            orientation = exif.get(0x0112)
            if orientation in range(2, 9):
                return int(orientation)
            if not exif:
                break
        except Exception:  # noqa: BLE001  # of many types, all for malformed EXIF
            pass
    return 1


# Bytes and hashes


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _content(data: Bytes) -> bytes:
    size = len(data)
    return _count(size) + (bytes(data) if size <= _INLINE_BYTES else _digest(data))


def _digest(data: Bytes) -> bytes:
    max_threads = _max_threads if len(data) >= PARALLEL_BYTES else 1
    return blake3(data, max_threads=max_threads).digest()


def _type_name(value: object) -> str:
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _refuse_combined_hash(value: CombinedHash, depth: int = 0) -> bytes:
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
