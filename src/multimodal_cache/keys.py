"""From content to key: ``hash_feature``.

The key of a feature is a hash of an encoding of it. The encoding is a format, which other
programs in other languages may write too. It won't change; another one would get another
version byte. All of it:

- A key is the first ``bits / 8`` bytes, read as an unsigned big-endian int, of the BLAKE3 hash
  (256 bits, unkeyed) of the byte 0x01, the version; ``E(namespace)``; ``E(feature)``.
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
  str                 ``s``   ``C`` of its UTF-8; a lone surrogate, which UTF-8 doesn't have, is
                              written in 3 bytes as any other code point of its size
  bytes               ``b``   ``C`` of them
  list                ``l``   ``n64`` items, and ``E`` of each
  tuple               ``t``   ``n64`` items, and ``E`` of each
  dict                ``d``   ``n64`` pairs, and for each pair the BLAKE3 hash (32 bytes) of
                              ``E(key) E(value)``, in ascending order of the hashes
  array               ``a``   ``C`` of the name of its dtype, in ASCII; ``n64`` dimensions;
                              ``n64`` for the size of each; ``C`` of its elements in C order,
                              each little-endian, a complex one as its real and its imaginary
                              part
  image               ``p``   ``E(palette)``, ``E(transparency)``; ``n64`` for its EXIF
                              orientation, its width and its height; ``C`` of the name of its
                              mode, in ASCII; ``C`` of its pixels
  ==================  ======  ================================================================

- The dtypes of an array have the names that NumPy and torch share: ``bool`` (a byte, 0 or 1),
  ``int8``, ``uint16``, ``float32``, ``complex64`` and so on. Torch alone has ``bfloat16``,
  ``float8_e4m3fn`` and others; ``complex32`` is its pair of float16. NumPy alone has ``str`` and
  ``bytes`` followed by the number of bits of an element (UTF-32, padded with zeros: ``str96`` for
  three characters), and ``datetime64[ns]`` or ``timedelta64[ns]`` with their unit.
- The palette of an image is None where it has no colours, else the tuple of its mode, a str such
  as ``RGB``, and its bytes; the transparency is what Pillow has in ``info["transparency"]``, or
  None; the orientation is 1 unless it is one of 2 to 8. The pixels are rows from top to bottom,
  packed as Pillow's raw encoder does for the mode, without padding: 8 pixels a byte for ``1``, the
  first in the highest bit, and each row from a new byte; little-endian int32 and float32 for ``I``
  and ``F``; a byte for each channel, in the order of the mode's name, for most others.

So two values have one encoding only where they are of one kind and equal, and no encoding is the
beginning of another one. What BLAKE3 adds is that nobody can find two inputs with one hash.
"""

from __future__ import annotations

import functools
import operator
import os
import struct
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from blake3 import blake3

from multimodal_cache._tensors import bytes_reached, dense_storage, describe
from multimodal_cache.base import as_int

if TYPE_CHECKING:
    from PIL import Image

VERSION = b"\x01"
MAX_DEPTH = 100
INLINE_BYTES = 1024  # one chunk of BLAKE3
PARALLEL_BYTES = 8 * 2**20  # below, to wake the other threads may cost more than they save
NUMPY_NAMES = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""The dtypes that NumPy and torch share, by the name that both give them."""

BAND_PIXELS = 2**17  # so many fit into the CPU's caches, packed and not

Parents = tuple[int, ...]
"""The ids of the containers that a value is in, the outermost first."""

Bytes = bytes | bytearray | memoryview
"""Contiguous memory, one-dimensional, of single bytes."""

Shape = tuple[int, ...]

Encoder = Callable[[Any, Parents], bytes]

_PROCESS = os.getpid()


def hash_feature(feature: Any, *, namespace: str | bytes = "", bits: SupportsIndex = 256) -> int:
    """Makes a key from content: equal keys mean equal content.

    The key is the same in every process, on every machine and Python, whatever
    ``PYTHONHASHSEED``; it may be stored and sent. It is a BLAKE3 hash over the content and
    all that gives it meaning: the kinds of the values, dtypes, shapes, modes, palettes, and
    where one item ends and the next begins. Engines whose keys left one of these out, or
    had 16 or 64 bits, have answered about another user's image (CVE-2025-46722; vLLM
    #24969; SGLang #25462 and #32404; Dynamo #8341; LMCache #3301).

    Args:
        feature: What the encoder gets, or what that is made from:

            - bytes-like objects: the same bytes are the same feature, in ``bytes``,
              ``bytearray`` or a ``memoryview`` of bytes, strided too. One of another format,
              or of several dimensions, is the array that it views.
            - str, int, float, bool and None. ``1``, ``1.0``, ``True``, ``"1"`` and ``b"1"``
              are five features. Floats count by their bits: ``-0.0`` isn't ``0.0``, and a
              NaN is the same as another of the same bits.
            - list, tuple and dict (any ``Mapping``), nested up to 100 deep. A list isn't the
              tuple of the same items; the order of a dict doesn't count.
            - NumPy arrays and scalars (0-d arrays), torch tensors: dtype and shape count;
              strides, byte order, device, ``requires_grad`` and lazy conjugation don't. A
              tensor and its NumPy twin are the same feature.
            - Pillow images: size, mode, palette, transparency, EXIF orientation and the
              pixels of the current frame. No other metadata counts. The image is loaded if
              it wasn't, and nothing else is changed on it.

            An instance of a subclass is what its base is; what it adds doesn't count.
        namespace: What else changes the embedding, and isn't in the feature: the name and
            the version of the model, the options of the preprocessing. Features in
            different namespaces have different keys; so do ``"a"`` and ``b"a"``.
        bits: The width of the key, a multiple of 8 from 64 to 256. A narrower key is the
            upper part of a wider one. Two of ``n`` features share a key by accident with a
            probability of ``n**2 / 2**(bits + 1)``, and on purpose, at 64 bits, within hours:
            keep to 256 where users choose the features.

    Returns:
        An unsigned int of ``bits`` bits.

    Raises:
        TypeError: The feature, or something in it, is of another type; or is an object,
            structured, masked or longdouble array; or a sparse, quantised, nested or meta
            tensor, or one that wraps others. Or ``namespace`` is neither str nor bytes, or
            ``bits`` no int.
        ValueError: The feature contains itself, is nested more than 100 deep, or has a buffer
            that was closed; or ``bits`` is no multiple of 8 from 64 to 256.
        Exception: What Pillow raises for an image whose pixels can't be decoded.

    Contiguous CPU memory is read in place, without a copy and without the GIL, by all cores
    from 8 MiB up (by one in a forked child, where BLAKE3's threads don't exist). Other memory
    is copied first: what is strided, a tensor on a GPU (once, on the current stream, which is
    waited for), the pixels of an image. Any number of threads may call it; a feature that
    changes meanwhile gets no meaningful key.
    """
    width = as_int("bits", bits)
    if width % 8 or not 64 <= width <= 256:
        raise ValueError(f"bits must be a multiple of 8 from 64 to 256, got {width}")
    if isinstance(namespace, str):
        encoded_namespace = _encode_str(namespace)
    elif isinstance(namespace, bytes):
        encoded_namespace = _encode_bytes(namespace)
    else:
        raise TypeError(f"namespace must be str or bytes, got {_name(namespace)}")
    digest = _digest(VERSION + encoded_namespace + _encode(feature, ()))
    return int.from_bytes(digest[: width // 8], "big")


def _encode(value: Any, parents: Parents) -> bytes:
    kind: type = type(value)
    encoder = _ENCODERS.get(kind) or _inherited_encoder(kind)
    return encoder(value, parents)


@functools.lru_cache(maxsize=256)
def _inherited_encoder(kind: type) -> Encoder:
    for base, encoder in _ENCODERS.items():
        if issubclass(kind, base):
            return encoder
    return _encode_other


def _encode_other(value: Any, parents: Parents) -> bytes:
    """Encodes images, whose class may not be there, and buffers, which have no class."""
    image_class = _image_class()
    if image_class is not None and isinstance(value, image_class):
        return _encode_image(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            "feature must be made of bytes, str, int, float, bool, None, list, tuple, dict, "
            f"NumPy arrays, torch tensors and PIL images, got {_name(value)}"
        ) from None
    return _encode_view(view)


# Scalars and bytes


def _encode_none(value: None, parents: Parents = ()) -> bytes:
    return b"N"


def _encode_bool(value: bool, parents: Parents = ()) -> bytes:
    return b"T" if value else b"F"


def _encode_int(value: int, parents: Parents = ()) -> bytes:
    bits = int.bit_length(value if value >= 0 else ~value)
    return b"i" + _content(int.to_bytes(value, bits // 8 + 1, "little", signed=True))


def _encode_float(value: float, parents: Parents = ()) -> bytes:
    return b"f" + struct.pack("<d", value)


def _encode_str(value: str, parents: Parents = ()) -> bytes:
    return b"s" + _content(str.encode(value, "utf-8", "surrogatepass"))


def _encode_bytes(value: bytes | bytearray, parents: Parents = ()) -> bytes:
    return b"b" + _content(value)


def _encode_view(value: memoryview, parents: Parents = ()) -> bytes:
    if value.ndim == 1 and value.format.lstrip("@=<>!") == "B":
        return b"b" + _content(value if value.c_contiguous else value.tobytes())
    try:
        array = np.asarray(value)
    except (ValueError, RuntimeError):
        raise TypeError(
            f"memoryviews must have a format that NumPy knows, got {value.format!r}"
        ) from None
    return _encode_array(array)


# Containers


def _encode_list(value: list, parents: Parents) -> bytes:  # type: ignore[type-arg]
    return b"l" + _items(value, list(value), parents)


def _encode_tuple(value: tuple, parents: Parents) -> bytes:  # type: ignore[type-arg]
    return b"t" + _items(value, list(value), parents)


def _items(container: Any, items: list[Any], parents: Parents) -> bytes:
    parents = _enter(container, parents)
    return _count(len(items)) + b"".join([_encode(item, parents) for item in items])


def _encode_mapping(value: Mapping, parents: Parents) -> bytes:  # type: ignore[type-arg]
    parents = _enter(value, parents)
    pairs = [
        _digest(_encode(key, parents) + _encode(item, parents)) for key, item in list(value.items())
    ]
    return b"d" + _count(len(pairs)) + b"".join(sorted(pairs))


def _enter(container: Any, parents: Parents) -> Parents:
    if id(container) in parents:
        raise ValueError(f"feature must not contain itself, got a {_name(container)} that does")
    if len(parents) == MAX_DEPTH:
        raise ValueError(f"feature must be nested at most {MAX_DEPTH} deep, got more")
    return (*parents, id(container))


# Arrays and tensors


def _encode_numpy_scalar(value: np.generic, parents: Parents = ()) -> bytes:
    return _encode_array(np.asarray(value))


def _encode_array(array: np.ndarray, parents: Parents = ()) -> bytes:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"arrays must not be masked, got {_name(array)}: fill it, or give its data and mask"
        )
    header, little_endian = _numpy_header(array.dtype, array.shape)
    if little_endian is None:
        raise TypeError(
            "arrays must have a boolean, integer, float, complex, string or time dtype (not an "
            f"object, structured or longdouble one), got {_name(array)} with dtype {array.dtype}"
        )
    return header + _elements(array, little_endian)


def _encode_tensor(tensor: torch.Tensor, parents: Parents = ()) -> bytes:
    storage = dense_storage(tensor)
    if storage is None:
        raise TypeError(
            "tensors must be dense and have memory of their own (not sparse, quantised, nested, "
            "meta, uninitialised or of a subclass with __torch_dispatch__), "
            f"got a {describe(tensor)}"
        )
    if (needed := bytes_reached(tensor)) > storage.nbytes():
        raise TypeError(
            f"tensors must have their memory, got one that needs {needed} bytes of a storage of "
            f"{storage.nbytes()}"
        )
    header, little_endian, view = _torch_header(tensor.dtype, tensor.shape)
    same_bits = tensor if view is None else view(tensor.resolve_conj().resolve_neg())
    # On a GPU it is made contiguous there, so as to be copied once.
    same_bits = same_bits if same_bits.is_cpu else same_bits.contiguous()
    return header + _elements(same_bits.numpy(force=True), little_endian)


def _elements(array: np.ndarray[Any, Any], little_endian: np.dtype[Any]) -> bytes:
    elements = np.ascontiguousarray(array, little_endian)
    if elements.nbytes <= INLINE_BYTES:
        return _content(elements.tobytes())
    flat: Any = elements.reshape(-1).view(np.uint8)
    return _content(flat)


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


def _encode_image(image: Image.Image) -> bytes:
    image.load()  # first: it may change the mode, and a file may have metadata after the pixels
    return b"".join(
        (
            b"p",
            _encode_palette(image),
            _encode(image.info.get("transparency"), ()),
            struct.pack("<3Q", _orientation(image), *image.size),
            _content(image.mode.encode()),
            _encode_pixels(image),
        )
    )


_RAW_MODES = {"I": "I;32S", "F": "F;32F"}
"""The little-endian ones for the modes that are in the byte order of the machine."""


def _encode_pixels(image: Image.Image) -> bytes:
    """Encodes the pixels as content, band by band where they are many.

    Pillow packs a large image three times as fast so, and without twice its memory.
    """
    raw_mode = _RAW_MODES.get(image.mode, image.mode)
    width, height = image.size
    if width * height <= BAND_PIXELS:
        return _content(image.tobytes("raw", raw_mode))
    size, hasher = 0, blake3()
    rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height))).tobytes("raw", raw_mode)
        size += len(band)
        hasher.update(band)
    return _count(size) + hasher.digest()


def _encode_palette(image: Image.Image) -> bytes:
    colors = image.getpalette(None) if image.mode in ("P", "PA") else None
    if not colors:  # an image without a palette becomes one with an empty palette, or back
        return _encode_none(None)
    mode = "RGB" if image.palette is None else image.palette.mode
    return _encode_tuple((mode, bytes(colors)), ())


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation by which Pillow would turn the image, from 1 to 8.

    Pillow remembers on the image what it parsed, which would hide a later change of
    ``image.info``; so the question is put to a stand-in with the image's attributes. It is put
    twice: for malformed EXIF Pillow raises the first time only; and a value that another thread
    fetches just then, from where Pillow parsed it to where Pillow keeps it, is missed once.
    """
    image_class = _image_class()
    assert image_class is not None
    stand_in = image_class()
    vars(stand_in).update(vars(image))
    for _ in range(2):
        try:
            exif = stand_in.getexif()
            orientation = exif.get(0x0112)
            if orientation in range(2, 9):
                return int(orientation)  # type: ignore[arg-type]
            if not exif:
                break
        except Exception:  # noqa: BLE001  # of many types, all for malformed EXIF
            continue
    return 1


# Bytes and hashes


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _content(data: Bytes) -> bytes:
    size = len(data)
    return _count(size) + (bytes(data) if size <= INLINE_BYTES else _digest(data))


def _digest(data: Bytes) -> bytes:
    # BLAKE3 keeps a pool of threads. A forked child has the pool but not the threads, and would
    # wait for them for ever.
    parallel = len(data) >= PARALLEL_BYTES and os.getpid() == _PROCESS
    return blake3(data, max_threads=blake3.AUTO if parallel else 1).digest()


def _name(value: object) -> str:
    kind = type(value)
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


# Which encoder is for what: for the types themselves, and for those that derive from them, where
# the first counts (a np.float64 is a float, a np.str_ a str, a bool an int).
_ENCODERS: dict[type, Encoder] = {
    np.generic: _encode_numpy_scalar,
    type(None): _encode_none,
    bool: _encode_bool,
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
