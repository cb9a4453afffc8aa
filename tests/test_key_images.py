"""The keys of Pillow images."""

from __future__ import annotations

import io
import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from PIL import Image
from support import assert_distinct, assert_same, run_python

from multimodal_cache import _images, hash_feature


def noise(mode: str = "RGB", size: tuple[int, int] = (6, 4), seed: int = 0) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(random.Random(seed).randbytes(len(image.tobytes())))
    return image


def saved(image: Image.Image, image_format: str, **options: Any) -> Image.Image:
    """Returns the image as it is read from a file, not yet loaded."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


MODES = [
    *("1", "L", "P", "PA", "LA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
]


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_each_mode(mode: str) -> None:
    image = noise(mode, (7, 5))
    other = noise(mode, (7, 5), seed=1)
    assert_same(image, image.copy(), image.crop((0, 0, 7, 5)), pickle.loads(pickle.dumps(image)))
    assert_distinct(image, other, image.transpose(Image.Transpose.ROTATE_90), image.tobytes())


def test_modes_differ_where_the_pixels_are_the_same() -> None:
    assert_distinct(*[Image.new(mode, (4, 4)) for mode in MODES])
    assert_distinct(*[Image.new("L", size) for size in ((0, 0), (0, 3), (3, 0), (1, 3), (3, 1))])


@pytest.mark.parametrize("mode", MODES)
def test_strips_do_not_show(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(mode, (150, 150))
    whole = hash_feature(image)
    for pixels in (1, 151, 7000, 22_499):
        monkeypatch.setattr(_images, "STRIP_PIXELS", pixels)
        assert hash_feature(image) == whole


def test_palettes() -> None:
    def indexed(palette: Sequence[int], mode: str = "RGB") -> Image.Image:
        image = Image.frombytes("P", (2, 2), b"\0\1\2\0")
        image.putpalette(palette, mode)
        return image

    nine = [*range(9)]
    assert_distinct(
        Image.frombytes("P", (2, 2), b"\0\1\2\0"),
        indexed(nine),
        indexed([*range(8), 99]),
        indexed([*range(12)], "RGBA"),
        indexed([*range(12)]),
        indexed(nine).convert("PA"),
        indexed(nine).convert("RGB"),
        Image.frombytes("L", (2, 2), b"\0\1\2\0"),
    )
    assert_same(indexed(nine), indexed(nine), indexed(nine).copy())
    assert_distinct(*[indexed(colours).convert("PA") for colours in (nine, nine[::-1])])
    changed = indexed(nine)
    assert_same(changed, indexed(nine))
    assert changed.palette is not None
    changed.palette.getcolor((200, 200, 200), changed)
    assert_distinct(changed, indexed(nine))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency expressed in bytes")
@pytest.mark.parametrize("transparency", [1, b"\x00\x80\xff"])
@pytest.mark.parametrize("mode", ["RGBA", "PA", "LA", "RGB"])
def test_a_conversion_does_not_change_the_key_of_its_source(
    mode: str, transparency: int | bytes
) -> None:
    """Pillow adds the transparency to its own copy of the palette then."""
    image = Image.frombytes("P", (2, 2), b"\0\1\2\0")
    image.putpalette([*range(9)])
    image.info["transparency"] = transparency
    before = hash_feature(image)
    image.convert(mode)
    assert hash_feature(image) == before == hash_feature(image.copy())


def test_pixels_of_another_mode_than_the_image_says() -> None:
    """Damaged files make such images, with colours where the mode has none."""
    images = []
    for palette in (range(9), range(9, 18)):
        image = Image.frombytes("P", (2, 2), b"\0\1\2\0")
        image.putpalette([*palette])
        vars(image)["_mode"] = "L"
        assert (image.mode, image.im.mode) == ("L", "P")
        images.append(image)
    plain = Image.frombytes("L", (2, 2), b"\0\1\2\0")
    assert images[0].convert("RGB").tobytes() != images[1].convert("RGB").tobytes()
    assert_distinct(*images, plain, images[0].copy(), images[1].copy())


def test_the_transparent_colour_counts() -> None:
    images = []
    for transparency in (None, 0, 1, b"\x00\xff", b"\x80\xff", (1, 2, 3)):
        image = Image.new("P", (2, 2))
        image.putpalette([*range(6)])
        if transparency is not None:
            image.info["transparency"] = transparency
        images.append(image)
    assert_distinct(*images)
    assert_same(images[4], images[4].copy(), saved(images[4], "PNG"))


def test_orientations() -> None:
    image = noise()
    files = [saved(image, "PNG", exif=oriented(n)) for n in range(1, 9)]
    assert_distinct(*files)
    assert_same(files[0], image, saved(image, "PNG"))
    for file in files:
        assert_same(file, file.copy())
    in_memory = []
    for n in range(1, 9):
        copied = image.copy()
        copied.getexif()[0x0112] = n
        in_memory.append(copied)
    assert [*map(hash_feature, in_memory)] == [*map(hash_feature, files)]


@pytest.mark.parametrize("nonsense", [0, 9, 255, 65535])
def test_an_orientation_that_is_none_is_as_absent(nonsense: int) -> None:
    assert_same(noise(), saved(noise(), "PNG", exif=oriented(nonsense)))


def test_an_orientation_in_xmp_counts() -> None:
    image = noise()
    tagged = image.copy()
    tagged.info["xmp"] = b'<rdf tiff:Orientation="6"/>'
    assert_same(tagged, saved(image, "PNG", exif=oriented(6)))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "MPO"])
def test_no_other_metadata_counts(image_format: str) -> None:
    image = noise(size=(32, 16))
    exif = oriented(1)
    exif[0x010E] = "a description"
    exif[0xA420] = "a unique id"
    options = {"quality": 90} if image_format in ("JPEG", "MPO") else {"lossless": True}
    plain = saved(image, image_format, **options)
    tagged = saved(image, image_format, exif=exif, dpi=(300, 300), **options)
    tagged.info["comment"] = b"a comment"
    assert_same(plain, tagged)
    assert_distinct(plain, noise(size=(32, 16), seed=1))


def test_a_file_may_have_metadata_after_its_pixels() -> None:
    image = noise()
    file = io.BytesIO()
    image.save(file, "PNG", exif=oriented(3))
    data = file.getvalue()
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    late = Image.open(io.BytesIO(moved))
    assert "exif" not in late.info
    assert_same(late, saved(image, "PNG", exif=oriented(3)))
    assert_distinct(late, image)


def test_the_current_frame_is_hashed() -> None:
    frames = [noise("P", seed=seed) for seed in range(3)]
    for frame in frames:
        frame.putpalette([*range(256)] * 3)
    file = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)
    made = []
    for index in (0, 1, 2):
        file.seek(index)
        made.append(hash_feature(file))
        assert made[-1] == hash_feature(file.copy())
    assert len(set(made)) == 3
    file.seek(0)
    assert hash_feature(file) == made[0]


def test_nothing_is_remembered_on_an_image() -> None:
    image = noise()
    before = dict(vars(image))
    first = hash_feature(image)
    assert vars(image) == before
    image.info["exif"] = oriented(6).tobytes()
    turned = hash_feature(image)
    image.info["exif"] = oriented(8).tobytes()
    assert len({first, turned, hash_feature(image)}) == 3
    del image.info["exif"]
    assert hash_feature(image) == first
    image.putpixel((0, 0), (1, 2, 3))
    assert hash_feature(image) != first


MALFORMED_EXIF = [
    b"",
    b"Exif\0\0",
    b"Exif\0\0BADBADBADBAD",
    b"BADBADBADBAD",
    b"Exif\0\0II*\0\x08\0\0\0",
    b"Exif\0\0II*\0\xff\xff\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02A\0\0\0",
    oriented(6).tobytes()[:-8],
]


@pytest.mark.parametrize("exif", MALFORMED_EXIF)
def test_malformed_exif_is_no_error(exif: bytes) -> None:
    image = noise()
    image.info["exif"] = exif
    with_exif = hash_feature(image)
    assert with_exif == hash_feature(image.copy())
    image.putpixel((0, 0), (1, 2, 3))
    assert hash_feature(image) != with_exif


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("exif", MALFORMED_EXIF)
def test_malformed_exif_is_the_same_once_pillow_has_seen_it(exif: bytes) -> None:
    image = noise()
    image.info["exif"] = exif
    unseen = hash_feature(image)
    for _ in range(2):
        try:
            dict(image.getexif())
        except Exception:  # noqa: BLE001
            pass
        assert hash_feature(image) == unseen


def test_an_image_that_can_not_be_decoded_raises_what_pillow_raises() -> None:
    file = io.BytesIO()
    noise(size=(64, 64)).save(file, "PNG")
    data = file.getvalue()
    cut = Image.open(io.BytesIO(data[: len(data) // 2]))
    with pytest.raises(OSError, match="truncated"):
        hash_feature(cut)
    with pytest.raises(OSError, match="truncated"):
        hash_feature([cut])


@pytest.mark.parametrize(
    "errors",
    [
        {"__getitem__": KeyError},
        {"__len__": RuntimeError},
        {"__getitem__": KeyError, "__len__": RuntimeError},
    ],
)
def test_a_value_that_another_thread_fetches_is_not_missed(
    errors: dict[str, type[Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = saved(noise(), "PNG", exif=oriented(6))
    expected = hash_feature(turned)

    def raise_once(error: type[Exception], method: Callable[..., Any]) -> Callable[..., Any]:
        ahead = [error]

        def called(*arguments: Any) -> Any:
            if ahead:
                raise ahead.pop()
            return method(*arguments)

        return called

    for name, error in errors.items():
        monkeypatch.setattr(Image.Exif, name, raise_once(error, getattr(Image.Exif, name)))
    assert hash_feature(turned) == expected


def test_threads_that_hash_one_turned_image_agree() -> None:
    """Pillow fetches a value of its EXIF when first asked, and two may ask at once."""
    file = io.BytesIO()
    noise().save(file, "JPEG", exif=oriented(6))
    expected = hash_feature(Image.open(file))

    def ask(image: Image.Image, barrier: threading.Barrier) -> int:
        barrier.wait(60)
        return hash_feature(image)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(50):
                image = Image.open(file)
                image.load()
                barrier = threading.Barrier(4)
                asked = [pool.submit(ask, image, barrier) for _ in range(4)]
                assert {future.result(60) for future in asked} == {expected}
    finally:
        sys.setswitchinterval(switching)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_threads_that_hash_one_image_load_it_once(image_format: str) -> None:
    file = io.BytesIO()
    frames = {"save_all": True, "append_images": [noise(size=(300, 200), seed=1)]}
    noise(size=(300, 200)).save(file, image_format, **(frames if image_format == "GIF" else {}))
    expected = hash_feature(Image.open(file))

    def ask(image: Image.Image, barrier: threading.Barrier) -> int:
        barrier.wait(60)
        return hash_feature([image, 1])

    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            image = Image.open(file)
            barrier = threading.Barrier(4)
            asked = [pool.submit(ask, image, barrier) for _ in range(4)]
            assert len({future.result(60) for future in asked}) == 1
            assert hash_feature(image) == expected


def test_an_image_that_contains_itself_is_refused() -> None:
    image = noise()
    image.info["transparency"] = [image]
    with pytest.raises(ValueError, match="does it contain itself?"):
        hash_feature(image)


def test_images_with_transparency_in_a_row_are_not_nested() -> None:
    image = Image.new("RGB", (2, 2))
    image.info["transparency"] = (1, 2, 3)
    hash_feature([image.copy() for _ in range(200)])


def test_pillow_is_not_imported_and_not_needed() -> None:
    without = (
        "import sys\n"
        "sys.modules['PIL'] = sys.modules['PIL.Image'] = None\n"
        "import torch\n"
        "from multimodal_cache import hash_feature\n"
        "print(hash_feature([torch.zeros(2), b'x', {'a': memoryview(b'y')}]))\n"
        "try:\n"
        "    hash_feature(object())\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    key, error = run_python(without).splitlines()
    assert int(key) == hash_feature([torch.zeros(2), b"x", {"a": b"y"}])
    assert error.endswith("got object")
    unasked = (
        "import sys, multimodal_cache as m; m.hash_feature(bytearray(b'')); print(*sys.modules)"
    )
    assert not [name for name in run_python(unasked).split() if name.startswith("PIL")]
