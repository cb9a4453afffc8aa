"""Properties of ``hash_feature``: equal keys for equal content, and for nothing else.

``HYPOTHESIS_PROFILE=soak`` runs them for many minutes.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import io
import itertools
import random
import struct
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image, ImageOps, ImageSequence
from PIL import __version__ as pillow_version

from multimodal_cache import _arrays, hash_feature

# Values are drawn from small sets, so that two of them are often nearly the same.

DTYPES = st.sampled_from(
    [
        "?",
        "i1",
        "u1",
        "<i2",
        ">u2",
        "<i4",
        ">i4",
        "<f4",
        ">f4",
        "<f8",
        "<c8",
        ">c8",
        "<M8[s]",
        "<U2",
    ]
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(DTYPES))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if dtype.kind == "U":
        return draw(npst.arrays(dtype, shape, elements=st.text("ab", max_size=2)))
    if dtype.kind == "b":
        return draw(npst.arrays(dtype, shape))
    count = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count) | st.just(bytes(count)))
    return np.frombuffer(data, dtype).reshape(shape)


TEXTS = st.text("ab", max_size=3) | st.text(st.characters(exclude_categories=()), max_size=3)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.integers()
    | st.sampled_from([0.0, -0.0, 1.0, 2.0, float("nan"), float("inf")])
    | st.floats()
    | TEXTS
    | st.binary(max_size=3)
    | arrays()
)
KEYS = st.none() | st.booleans() | st.integers(-2, 2) | TEXTS | st.binary(max_size=2)


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=3)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, values, max_size=3)


VALUES = st.recursive(LEAVES, containers, max_leaves=12)


def content(value: Any) -> Any:
    """Describes the content of a value: two descriptions are equal where the content is."""
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return ("array", value.dtype.name, value.shape, little.tobytes())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(content, value))
    if isinstance(value, dict):
        pairs = [(content(key), content(item)) for key, item in value.items()]
        return ("dict", *sorted(pairs, key=repr))
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    return (type(value).__name__, value)


@given(VALUES, VALUES)
@example([[1], 2], [[1, 2]])
@example({1: None}, {True: None})
@example([], ())
def test_keys_are_equal_where_the_content_is(one: Any, other: Any) -> None:
    assert (hash_feature(one) == hash_feature(other)) == (content(one) == content(other))


@given(VALUES, st.randoms(use_true_random=False))
def test_layout_and_container_do_not_count(value: Any, rng: random.Random) -> None:
    assert hash_feature(value) == hash_feature(laid_out_anew(value, rng))


def laid_out_anew(value: Any, rng: random.Random) -> Any:
    """Returns the same content in other objects and other memory."""
    if isinstance(value, np.ndarray):
        return rng.choice(LAYOUTS)(value)
    if isinstance(value, bytes):
        return rng.choice(BUFFERS)(value)
    if isinstance(value, (list, tuple)):
        return type(value)(laid_out_anew(item, rng) for item in value)
    if isinstance(value, dict):
        pairs = [(key, laid_out_anew(item, rng)) for key, item in value.items()]
        rng.shuffle(pairs)
        kinds: list[Callable[[Any], Any]] = [
            dict,
            collections.OrderedDict,
            collections.UserDict,
            lambda pairs: types.MappingProxyType(dict(pairs)),
        ]
        return rng.choice(kinds)(pairs)
    return value


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.name not in _arrays.NUMPY_NAMES:
        return array
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def spaced(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copies the array into every third element of a larger one."""
    wide = np.zeros((*array.shape, 3), array.dtype)
    wide[..., 1] = array
    return wide[..., 1]


LAYOUTS: list[Callable[[Any], Any]] = [
    np.copy,
    lambda array: array.copy(order="F"),
    spaced,
    as_tensor,
    lambda array: array.astype(array.dtype.newbyteorder()),
    lambda array: array.T.copy().T,
    lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    lambda array: array if array.ndim or array.dtype.kind == "U" else array[()],
]
BUFFERS: list[Callable[[bytes], Any]] = [
    bytearray,
    memoryview,
    lambda data: memoryview(data[::-1])[::-1],
    lambda data: memoryview(bytes(2 * len(data))[1::2] + data)[len(data) :],
]

# Single bits, and where one item ends


@given(
    st.binary(min_size=1, max_size=3000),
    st.integers(0, 7),
    st.data(),
    st.sampled_from(["bytes", "str", "array", "tensor", "strided", "image", "nested"]),
)
def test_each_bit_counts(data: bytes, bit: int, draw: st.DataObject, kind: str) -> None:
    position = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytearray(data)
    flipped[position] ^= 1 << bit
    make: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes,
        "str": lambda data: data.decode("latin-1"),
        "array": lambda data: np.frombuffer(data, np.uint8),
        "tensor": lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8),
        "strided": lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8).flip(0)[::2],
        "image": lambda data: Image.frombytes("L", (len(data), 1), data),
        "nested": lambda data: {"x": [data, ("y", data)]},
    }
    if kind == "strided":
        assume((len(data) - 1 - position) % 2 == 0)
    assert hash_feature(make[kind](data)) != hash_feature(make[kind](bytes(flipped)))


@given(
    st.binary(min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.integers(0, 40), max_size=5),
    st.sampled_from([bytes, lambda part: np.frombuffer(part, np.uint8), lambda part: part.hex()]),
)
def test_where_the_parts_end_counts(
    data: bytes, cuts: list[int], others: list[int], make: Callable[[bytes], Any]
) -> None:
    one, other = parts(data, cuts), parts(data, others)
    assume(one != other)
    assert hash_feature([*map(make, one)]) != hash_feature([*map(make, other)])


def parts(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


# Anything at all

FOREIGN = st.sampled_from(
    [
        *(set(), 1j, object(), int, range(3), iter(()), NotImplemented, ..., np.zeros(1, "O")),
        *(
            np.zeros(1, "V2"),
            np.ma.masked,
            torch.zeros(1, device="meta"),
            (ctypes.c_void_p * 1)(),
        ),
        *(np.dtype("f4"), np.zeros(1, "i4,f4"), torch.eye(2).to_sparse(), Image, torch.float16),
    ]
)


@given(st.recursive(LEAVES | FOREIGN, containers, max_leaves=12))
def test_anything_has_a_key_or_a_clear_error(value: Any) -> None:
    try:
        key = hash_feature(value)
    except TypeError as error:
        refused = str(error)
    else:
        assert hash_feature(value) == key
        return
    assert "got " in refused


# Image files with errors in them


def files() -> dict[str, bytes]:
    """Returns small image files of many formats, with all that counts in them."""
    rng = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "described"
    colours = Image.frombytes("RGB", (20, 12), rng.randbytes(720))
    indexed = colours.quantize(16)
    indexed.info["transparency"] = 3
    frames = [indexed, indexed.transpose(Image.Transpose.ROTATE_180)]
    options: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "PNG": (indexed, {"exif": exif}),
        "JPEG": (colours, {"exif": exif, "progressive": True}),
        "GIF": (frames[0], {"save_all": True, "append_images": frames[1:]}),
        "WEBP": (colours.convert("RGBA"), {"exif": exif, "lossless": True}),
        "TIFF": (colours, {"exif": exif, "compression": "tiff_lzw"}),
        "BMP": (indexed, {}),
        "PPM": (colours, {}),
        "TGA": (indexed, {"compression": "tga_rle"}),
        "MPO": (colours, {"save_all": True, "append_images": [colours], "exif": exif}),
        "ICO": (colours.convert("RGBA"), {"sizes": [(12, 12)]}),
        "PCX": (indexed, {}),
        "DDS": (colours, {}),
    }
    found = {}
    for name, (image, how) in options.items():
        file = io.BytesIO()
        image.save(file, name, **how)
        found[name] = file.getvalue()
    return found


FILES = files()


def damaged(image_format: str, seed: int) -> bytes:
    """Returns the file with a few bytes changed, dropped, repeated or cut off."""
    rng = random.Random(seed)
    data = bytearray(FILES[image_format])
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        start = rng.randrange(len(data) or 1)
        end = start + rng.choice([1, 1, 2, 4, 16])
        how = rng.choice(["change"] * 8 + ["drop", "repeat", "cut"])
        if how == "cut":
            del data[max(start, 1) :]
        else:
            changed = rng.randbytes(end - start)
            data[start:end] = {"change": changed, "drop": b"", "repeat": data[start:end] * 2}[how]
    return bytes(data)


@pytest.mark.filterwarnings("ignore")
@given(st.sampled_from(sorted(FILES)), st.integers(0, 2**32), st.integers(0, 1))
def test_damaged_image_files(image_format: str, seed: int, frame: int) -> None:
    data = damaged(image_format, seed)
    with mock.patch.object(Image, "MAX_IMAGE_PIXELS", 10**5):

        def opened() -> Image.Image:
            image = Image.open(io.BytesIO(data))
            image.seek(frame)
            return image

        try:
            opened()
        except Exception:  # noqa: BLE001  # of many types: it isn't an image
            return
        try:
            loaded = opened()
            loaded.load()
        except Exception as error:  # noqa: BLE001
            damaged_image = opened()
            with pytest.raises(type(error)):
                hash_feature([damaged_image])
            with pytest.raises(Exception):  # noqa: B017, PT011  # of whatever type
                hash_feature(damaged_image)
            return
        key = hash_feature(opened())
        assert hash_feature(loaded) == key
        assert hash_feature(loaded) == key
        # Pillow's copies have the mode of the pixels, and no metadata of another frame.
        copied = loaded.copy()
        same = orientation(copied) == orientation(loaded) and copied.mode == loaded.mode
        assert (hash_feature(copied) == key) == same


def orientation(image: Image.Image) -> int:
    """Returns the orientation that Pillow tells when asked again after an error."""
    for _ in range(2):
        try:
            told = image.getexif().get(0x0112)
        except Exception:  # noqa: BLE001
            continue
        return told if told in range(2, 9) else 1
    return 1


MARKED = Image.frombytes("L", (3, 2), bytes(range(6)))
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HEADERS = [b"MM\0*", b"MM*\0", b"II*\0", b"II\0*"] * 5 + [b"MM\0+", b"II+\0", b"MM**"]
XMPS = [f"<tiff:Orientation{rest}" for rest in ('="0"', ">1<", '="7"', ">9<", "=7")]


def metadata(rng: random.Random) -> dict[str, Any]:
    """Makes the ``info`` of an image."""
    exif, xmp = exif_blob(rng), rng.choice(XMPS)
    profile = f"\nexif\n  99\n{exif.hex()}"
    info: dict[str, Any] = {}
    info |= rng.choice([{"exif": exif}] * 6 + [{"Raw profile type exif": profile}, {}])
    info |= rng.choice([{"xmp": xmp.encode()}, {"XML:com.adobe.xmp": xmp}, {}, {}])
    return info


def exif_blob(rng: random.Random) -> bytes:
    """Makes a directory with some data after it, which may be damaged in any way."""
    header = rng.choice(HEADERS)
    order = ">" if header.startswith(b"M") else "<"

    def value() -> bytes:
        if rng.random() < 0.7:
            return struct.pack(f"{order}2H", rng.randrange(10), rng.randrange(10))
        return struct.pack(f"{order}L", rng.choice([rng.randrange(100), 2**31, 2**32 - 1]))

    def entry() -> bytes:
        tag = rng.choice([0x0112, 0x0112, 0x010F, 0x0110])
        kind = rng.choice([3, 4, 8, 9, rng.randrange(20)])
        count = rng.choice(
            [1, 1, rng.randrange(9), rng.randrange(30), rng.choice([2**31, 2**32 - 1])]
        )
        offset = struct.pack(f"{order}L", rng.randrange(100))
        return struct.pack(f"{order}2HL", tag, kind, count) + rng.choice([value(), offset])

    good = struct.pack(f"{order}2HL2H", 0x0112, 3, 1, *[rng.randrange(2, 9)] * 2)
    entries = [entry() for _ in range(rng.randrange(5))] + [good] * rng.randrange(2)
    start = rng.choice([8] * 20 + [0, 10, 2**32 - 1])
    count = rng.choice([len(entries)] * 5 + [rng.randrange(6), 2**16 - 1])
    data = header + struct.pack(f"{order}LH", start, count) + b"".join(entries)
    data += b"".join(value() for _ in range(rng.randrange(20)))
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    return b"Exif\0\0" * rng.choice([0, 1, 1, 1, 1, 2, 3]) + data


@pytest.mark.skipif(int(pillow_version.split(".")[0]) < 13, reason="it reads some EXIF otherwise")
@pytest.mark.filterwarnings("ignore")
@given(st.integers(0, 2**32))
def test_the_key_says_how_pillow_turns_the_image(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        image = MARKED.copy()
        image.info.update(metadata(rng))
        key, turned = hash_feature(image), image.copy()
        with contextlib.suppress(Exception):  # of any type; some come when it is turned already
            ImageOps.exif_transpose(turned, in_place=True)
        with contextlib.suppress(Exception):
            image.getexif()
        expected = MARKED.copy()
        (expected.getexif()[0x0112],) = (
            orientation
            for orientation, turn in TURNS.items()
            if np.array_equal(turned, MARKED if turn is None else MARKED.transpose(turn))
        )
        assert hash_feature(expected) == key
        assert hash_feature(image) == key


def test_the_undamaged_files_are_images() -> None:
    made = []
    for data in FILES.values():
        image = Image.open(io.BytesIO(data))
        made += [hash_feature(frame) for frame in ImageSequence.Iterator(image)]
    assert len(made) == len(FILES) + 2
