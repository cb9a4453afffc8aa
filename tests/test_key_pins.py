"""Keys that were made once, of features of all kinds: they must stay, for others have stored them.

``known_keys.txt`` has a line for each feature. Run as a script, this file writes it anew: that is
for more features, while the keys are as they were. No line in it may change.
"""

from __future__ import annotations

import collections
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal_cache import _arrays, _images, hash_feature

KNOWN = Path(__file__).with_name("known_keys.txt")

Named = Iterator[tuple[str, Any]]


def data(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def scalars() -> Named:
    yield from [("None", None), ("False", False), ("True", True)]
    for bits in (0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 1000):
        for number in (2**bits - 1, 2**bits, -(2**bits), -(2**bits) - 1):
            yield f"int {number:#x}", number
    yield "int of 1024 bytes", 2**8190
    yield "int of 1025 bytes", 2**8191
    for number in ("0", "-0", "1", "-1.5", "1e-320", "1e308", "inf", "-inf", "nan"):
        yield f"float {number}", float(number)
    for text in (
        "",
        "a",
        "naïve",
        "nai\u0308ve",
        "\0",
        "日本",
        "\U0001f600",
        "\ud800",
        "\udfff\ud800",
    ):
        yield f"str {text!a}", text
    for size in (0, 1, 2, 63, 64, 1023, 1024, 1025, 4096, 2**17):
        yield f"bytes {size}", data(size)
        yield f"bytearray strided {size}", memoryview(bytearray(data(2 * size)))[::2]
        yield f"str {size}", data(size).hex()[:size]


def nested() -> Named:
    yield "list", []
    yield "tuple", ()
    yield "dict", {}
    yield "list of 10", list(range(10))
    yield "list of 1000", list(range(1000))
    yield "subclass of tuple", torch.Size([1, 2])
    yield (
        "chat",
        [{"role": "user", "content": [{"type": "text", "text": "?"}, {"image": data(99)}]}],
    )
    yield (
        "keys of all kinds",
        {None: 0, True: 1, 2: 2, 3.5: 3, "4": 4, b"5": 5, (6, "7"): [6, {7: 8}]},
    )
    yield "ordered", collections.OrderedDict(b=1, a=2)
    yield "user", collections.UserDict(b=1, a=[2])
    yield "dict of 100", {f"key {n}": n for n in range(100)}
    shared = [1, (2,)]
    yield "shared", [shared, {"a": shared}, (shared, shared)]
    feature: Any = 1
    for depth in range(1, 101):
        feature = ([feature], (feature,), {"k": feature})[depth % 3]
        if depth in (2, 10, 99, 100):
            yield f"{depth} deep", feature


SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (4, 5, 6), (1, 1, 1, 4), (16, 16, 5)]


def arrays() -> Named:
    for name in sorted(_arrays.NUMPY_NAMES - {"bool"}):
        dtype = np.dtype(name)
        for shape in SHAPES:
            size = int(np.prod(shape, dtype=int))
            yield (
                f"array {name} {shape}",
                np.frombuffer(data(max(size * dtype.itemsize, 1)), dtype, size).reshape(shape),
            )
    for shape in SHAPES:
        flat = np.arange(int(np.prod(shape, dtype=int))) % 3 == 1
        yield f"array bool {shape}", flat.reshape(shape)
        yield f"tensor bool {shape}", torch.from_numpy(flat.reshape(shape))
    for name in ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        for size in (0, 1, 5, 600):
            raw = torch.frombuffer(
                bytearray(data(size * dtype.itemsize) or b"0"), dtype=torch.uint8
            )
            yield f"tensor {name} {size}", raw[: size * dtype.itemsize].view(dtype)
    grid = np.frombuffer(data(24_000), "<i4").reshape(20, 30, 10)
    yield "transposed", grid.T
    yield "every second", grid[::2, ::-1]
    yield "big-endian", grid.astype(">i4")
    yield "expanded", torch.tensor(grid[:, :, :1]).expand(20, 30, 10)
    yield "conjugated", torch.tensor([1 + 2j, 3 - 4j]).conj()
    yield "negated", torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    for dtype_name in ("U0", "U1", "U3", "S0", "S1", "S5"):
        yield f"array {dtype_name}", np.array(["ab", "c", ""]).astype(dtype_name)
    for unit in ("D", "ns", "25s", "7D", "Y"):
        for kind in ("M8", "m8"):
            yield f"array {kind}[{unit}]", np.array([0, 1, -1, 99], "i8").view(f"{kind}[{unit}]")
    yield (
        "numpy scalars",
        [np.float32(1.5), np.uint8(3), np.bool_(True), np.str_("a"), np.bytes_(b"a")],
    )
    yield "array in a list", [grid, torch.tensor(grid), (grid[0],)]
    for size in (255, 256, 257, 2 * 2**20 - 1, 2 * 2**20, 2 * 2**20 + 1):
        yield f"array of {size} floats", np.arange(size, dtype="<f4")
    yield "large, strided", np.arange(5 * 2**20, dtype="<u4")[::2]
    yield "large bytes", data(8 * 2**20) + b"end"


MODES = [
    *("1", "L", "P", "PA", "LA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
]


def picture(mode: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(data(len(image.tobytes())))
    return image


def indexed(colours: int = 3, mode: str = "RGB", transparency: Any = None) -> Image.Image:
    image = Image.frombytes("P", (3, 2), b"\0\1\2\2\1\0")
    image.putpalette(data(colours * len(mode)), mode)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def read(image: Image.Image, image_format: str, **options: Any) -> Image.Image:
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def images() -> Named:
    for mode in MODES:
        for size in ((7, 5), (1, 1), (40, 30)):
            yield f"image {mode} {size}", picture(mode, size)
    for size in ((0, 0), (0, 3), (3, 0), (1, 3)):
        yield f"image empty {size}", Image.new("L", size)
    for pixels in (_images.STRIP_PIXELS - 1, _images.STRIP_PIXELS, _images.STRIP_PIXELS + 1):
        yield f"image tall {pixels}", picture("L", (1, pixels))
        yield f"image wide {pixels}", picture("RGB", (pixels, 1))
    for mode in ("1", "P", "RGB", "RGBA", "I", "I;16", "F"):
        yield f"image large {mode}", picture(mode, (613, 419))
    for colours in (1, 2, 3, 16, 255, 256):
        for mode in ("RGB", "RGBA"):
            yield f"palette {mode} {colours}", indexed(colours, mode)
    yield "palette of none", Image.frombytes("P", (2, 1), b"\0\1")
    for transparency in (0, 1, 255, b"\0", b"\x80\xff\0", (1, 2, 3)):
        yield f"transparency {transparency!r}", indexed(3, "RGB", transparency)
        yield f"transparency {transparency!r} RGB", other_transparency("RGB", transparency)
        yield f"transparency {transparency!r} L", other_transparency("L", transparency)
    yield "PA of P", indexed().convert("PA")
    for orientation in range(10):
        turned = picture("RGB", (4, 3))
        turned.info["exif"] = oriented(orientation)
        yield f"orientation {orientation} in EXIF", turned
        tagged = picture("RGB", (4, 3))
        tagged.info["xmp"] = f'<rdf tiff:Orientation="{orientation}"/>'.encode()
        yield f"orientation {orientation} in XMP", tagged
        asked = picture("RGB", (4, 3))
        asked.getexif()[0x0112] = orientation
        yield f"orientation {orientation} in getexif", asked
    yield from files()


def other_transparency(mode: str, transparency: Any) -> Image.Image:
    image = picture(mode, (3, 2))
    image.info["transparency"] = transparency
    return image


def files() -> Named:
    colours = picture("RGB", (9, 6))
    for image_format in ("PNG", "TIFF", "BMP", "PPM", "TGA"):
        yield f"file {image_format}", read(colours, image_format)
    for image_format in ("PNG", "TIFF"):
        yield f"file {image_format}, turned", read(colours, image_format, exif=oriented(6))
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield f"file PNG {mode}", read(picture(mode, (9, 6)), "PNG")
    yield "file PNG, transparency", read(indexed(256, "RGB", data(256)), "PNG")
    frames = [indexed(3), indexed(4), indexed(5)]
    animation = read(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    for frame in range(3):
        animation.seek(frame)
        yield f"file TIFF frame {frame}", animation


def features() -> Named:
    for kind in (scalars, nested, arrays, images):
        yield from kind()


def made() -> dict[str, str]:
    """Returns the keys now: one at a time, for a frame is gone when the next is sought."""
    return {name: f"{hash_feature(feature):064x}" for name, feature in features()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_the_keys_are_those_that_were_made_before() -> None:
    lines = KNOWN.read_text(encoding="ascii").splitlines()
    known = dict(line.rsplit(" ", 1) for line in lines)
    assert len(known) == len(lines) > 400
    assert made() == known


if __name__ == "__main__":
    KNOWN.write_text("".join(f"{name} {key}\n" for name, key in made().items()), encoding="ascii")
