"""Faults of keys that public reports describe, and their kin."""

from __future__ import annotations

import collections
import gc
import io
import itertools
import logging
import random
import struct
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin
from support import assert_distinct, assert_same, run_python
from torch._subclasses.fake_tensor import FakeTensorMode

from multimodal_cache import _arrays, _images, _orientation, hash_feature, keys
from multimodal_cache._tensors import dense_storage, require_memory

# Palettes (Pillow #9834, #6348)


def indexed(transparency: Any = None, colours: Any = range(9), mode: str = "RGB") -> Image.Image:
    image = Image.frombytes("P", (4, 1), bytes([0, 1, 2, 200]))
    image.putpalette(colours, mode)
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def converted(image: Image.Image) -> Image.Image:
    image.convert("RGBA")
    return image


def saved_as_webp(image: Image.Image) -> Image.Image:
    image.save(io.BytesIO(), "WEBP")
    return image


def by_way_of_pa(image: Image.Image) -> Image.Image:
    return image.convert("PA").convert("P")


@pytest.mark.parametrize("transparency", [1, 200, b"\x80", b"\xff\x00\x07"], ids=repr)
@pytest.mark.parametrize("change", [converted, saved_as_webp, by_way_of_pa])
def test_two_palette_images_have_one_key_where_they_are_one_picture(
    transparency: Any, change: Any
) -> None:
    changed = change(indexed(transparency))
    changed.info.pop("transparency", None)
    fresh = indexed()
    same = changed.copy().convert("RGBA").tobytes() == fresh.copy().convert("RGBA").tobytes()
    assert (hash_feature(changed) == hash_feature(fresh)) == same


def test_an_alpha_that_stayed_counts_beside_another_transparency() -> None:
    changed = converted(indexed(1))
    changed.info["transparency"] = 2
    before = hash_feature(changed)
    assert before != hash_feature(indexed(2))
    assert hash_feature(converted(changed)) == before


@pytest.mark.filterwarnings("ignore:Palette images with Transparency expressed in bytes")
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("transparency", [None, 0, 200, b"\x01\x02"], ids=repr)
def test_an_image_keeps_its_key_when_it_is_converted_or_saved(mode: str, transparency: Any) -> None:
    image = indexed(transparency, range(12), mode)
    before = hash_feature(image)
    assert hash_feature(image.copy()) == before
    for convert in ("RGBA", "LA", "PA"):
        image.convert(convert)
        assert hash_feature(image) == before
    for image_format in ("PNG", "GIF", "WEBP", "TIFF"):
        image.save(io.BytesIO(), image_format)
        assert hash_feature(image) == before


def test_a_palette_without_colours_and_transparencies_out_of_range() -> None:
    bare = Image.frombytes("P", (2, 1), b"\0\1")
    bare.palette = None
    bare.info["transparency"] = 1
    before = hash_feature(bare)
    bare.convert("RGBA")
    assert hash_feature(bare) == before
    del bare.info["transparency"]
    assert hash_feature(bare) != hash_feature(Image.frombytes("P", (2, 1), b"\0\1"))
    image = converted(indexed(1))
    keys_by_transparency = set()
    for transparency in (-1, 256, 2**70, b"x" * 257, (1, 2, 3), "text"):
        image.info["transparency"] = transparency
        keys_by_transparency.add(hash_feature(image))
    assert len(keys_by_transparency) == 6


# Damaged images (Pillow #2977)


def png_with_corrupt_pixels() -> bytes:
    image = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = bytearray(file.getvalue())
    start = data.index(b"IDAT") + 500
    data[start : start + 100] = bytes(100)
    return bytes(data)


def cut_jpeg_2000() -> bytes:
    image = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3))
    file = io.BytesIO()
    image.save(file, "JPEG2000")
    return file.getvalue()[: len(file.getvalue()) // 2]


@pytest.mark.parametrize("make", [png_with_corrupt_pixels, cut_jpeg_2000])
def test_a_damaged_image_raises_each_time(make: Any) -> None:
    image = Image.open(io.BytesIO(make()))
    with pytest.raises(OSError, match="image file") as first:
        hash_feature(image)
    left = dict(vars(image))
    with pytest.raises(type(first.value)) as second:
        hash_feature([image])
    assert vars(image) == left
    assert str(first.value) == str(second.value)
    assert first.value is not second.value


def test_a_damaged_image_raises_in_each_thread() -> None:
    image = Image.open(io.BytesIO(png_with_corrupt_pixels()))
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(hash_feature, image) for _ in range(8)]
        assert [type(future.exception(60)) for future in asked] == [OSError] * 8


def test_a_damaged_image_is_not_kept_alive() -> None:
    image = Image.open(io.BytesIO(png_with_corrupt_pixels()))
    with pytest.raises(OSError):  # noqa: PT011
        hash_feature(image)
    assert id(image) in _images._undecodable
    known, gone = id(image), weakref.ref(image)
    del image
    gc.collect()
    assert gone() is None
    assert known not in _images._undecodable


def uncopyable_error() -> OSError:
    error = OSError("bad")
    error.args = (2, "bad")  # of which Python makes a FileNotFoundError
    return error


@pytest.mark.parametrize(
    ("error", "again"), [(uncopyable_error(), OSError), (KeyboardInterrupt(), OSError)]
)
def test_an_interrupted_load_is_not_taken_for_a_picture(error: Any, again: type[Any]) -> None:
    file = io.BytesIO()
    Image.new("L", (4, 4), 9).save(file, "PNG")
    image = Image.open(file)
    interrupted = mock.patch.object(PngImagePlugin.PngImageFile, "load_end", side_effect=error)
    with interrupted, pytest.raises(type(error)):
        hash_feature(image)
    with pytest.raises(again, match="could not be loaded"):
        hash_feature(image)
    assert image.tile == []
    whole = Image.open(file)
    image.tile, image.fp = whole.tile, whole.fp
    image.png = whole.png  # type: ignore[attr-defined]
    vars(image).update({name: value for name, value in vars(whole).items() if "idat" in name})
    assert hash_feature(image) == hash_feature(image) == hash_feature(Image.new("L", (4, 4), 9))


# What is remembered


def test_a_key_does_not_depend_on_what_was_hashed_before() -> None:
    code = (
        "import numpy as np, sys; from multimodal_cache import hash_feature\n"
        "units = sys.argv[1:]\n"
        "print({u: hash_feature(np.array([5, 7], f'm8[{u}]')) for u in units} == "
        "{u: hash_feature(np.array([5, 7], f'm8[{u}]')) for u in units[::-1]})\n"
        "for u in sorted(units): print(hash_feature(np.array([5, 7], f'm8[{u}]')))\n"
    )
    one = run_python(code, "1000ms", "s")
    assert one == run_python(code, "s", "1000ms")
    assert len(set(one.split())) == 3


def test_classes_that_say_they_are_equal_are_told_apart() -> None:
    class Liar(type):
        def __eq__(cls, other: object) -> bool:
            return True

        def __hash__(cls) -> int:
            return hash(list)

    class Text(str, metaclass=Liar):
        pass

    class Number(int, metaclass=Liar):
        pass

    class Unhashable(type):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(cls, other: object) -> bool:
            return False

    class Items(list[int], metaclass=Unhashable):
        pass

    assert_same(Text("a"), "a")
    assert_same(Number(3), 3)
    assert_same(Items([1]), [1])


def test_a_class_may_become_a_mapping_later() -> None:
    class Pairs:
        def items(self) -> list[tuple[str, int]]:
            return [("a", 1)]

    with pytest.raises(TypeError, match="Pairs"):
        hash_feature(Pairs())
    Mapping.register(Pairs)
    assert hash_feature(Pairs()) == hash_feature({"a": 1})


def test_classes_are_not_kept_alive() -> None:
    class Text(str):
        pass

    hash_feature(Text("a"))
    gone = weakref.ref(Text)
    del Text
    gc.collect()
    assert gone() is None


# Bools


@pytest.mark.parametrize("size", [3, 2000, _arrays.PIECE_BYTES + 5])
def test_any_byte_but_0_is_true(size: int) -> None:
    numbers = np.arange(size) % 3
    plain = numbers > 0
    odd = (numbers * 127).astype(np.uint8).view(bool)
    tensor = torch.from_numpy((numbers * 127).astype(np.uint8)).view(torch.bool)
    strided = np.repeat(odd.view(np.uint8), 2).view(bool)[::2]
    assert_same(plain, odd, tensor, memoryview(odd), strided)
    assert_distinct(plain, ~plain)


def test_the_array_of_a_bilevel_image_is_that_of_its_bools() -> None:
    image = Image.frombytes("1", (8, 1), b"\x55")
    assert_same(np.asarray(image), np.array([[0, 1] * 4], bool))


# Orientation


def oriented(orientation: int = 6) -> Image.Image:
    image = Image.new("L", (3, 2))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    return image


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyboardInterrupt])
def test_errors_of_the_machine_are_raised(error: type[BaseException]) -> None:
    image = oriented()
    image.getexif()
    with mock.patch.object(Image.Exif, "__getitem__", side_effect=error), pytest.raises(error):
        hash_feature(image)


def test_at_the_recursion_limit_an_error_and_no_other_key() -> None:
    image = oriented()
    hash_feature(image)
    expected, made = hash_feature(image), set()

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        else:
            made.add(hash_feature(image))

    frame, depth = sys._getframe(), 0
    while frame.f_back:
        frame, depth = frame.f_back, depth + 1
    for left in range(sys.getrecursionlimit() - depth - 40, sys.getrecursionlimit() - depth):
        try:
            deeper(left)
        except RecursionError:
            continue
    assert made <= {expected}
    assert made


def exif_of(*entries: tuple[int, int, int, bytes], order: str = "<", rest: bytes = b"") -> bytes:
    head = b"II*\0" if order == "<" else b"MM\0*"
    packed = [struct.pack(f"{order}HHL4s", *entry) for entry in entries]
    start = struct.pack(f"{order}LH", 8, len(entries))
    return b"Exif\0\0" + head + start + b"".join(packed) + rest


OTHER = (0x010F, 3, 1, b"\1\0")
ONE = (0x0112, 3, 1, b"\1\0")
SIX = (0x0112, 3, 1, b"\6\0")
EIGHT = (0x0112, 3, 1, b"\x08\0")
CUT = (0x010F, 2, 5, b"\xff")  # the data of another entry is beyond the end
CUT_TURN = (0x0112, 4, 3, b"\xff")
HUGE = (0x010E, 2, 2**31, b"\x08")  # larger than all the data
TURNED_EXIF = {
    "short": exif_of(OTHER, SIX),
    "big-endian": exif_of((0x0112, 3, 1, b"\0\6"), order=">"),
    "long": exif_of((0x0112, 4, 1, b"\6\0\0\0")),
    "signed": exif_of((0x0112, 8, 1, b"\6\0")),
    "two, of which the first counts": exif_of((0x0112, 3, 2, b"\6\0\3\0")),
    "three, elsewhere": exif_of((0x0112, 3, 3, b"\x1a\0\0\0"), rest=b"\0\0\0\0\6\0\3\0\3\0"),
    "rational": exif_of((0x0112, 5, 1, b"\x1a\0\0\0"), rest=b"\0\0\0\0\x0c\0\0\0\2\0\0\0"),
    "empty, then another": exif_of((0x0112, 3, 0, b""), SIX),
    "unknown type, then another": exif_of((0x0112, 99, 1, b"\6"), SIX),
    "more entries than there are": exif_of(SIX)[:14] + b"\x09\0" + exif_of(SIX)[16:],
    "twice the head": b"Exif\0\0" + exif_of(SIX),
    "before another that is cut": exif_of(SIX, CUT),
    "BigTIFF's header": b"MM\0+" + exif_of((0x0112, 3, 1, b"\0\6"), order=">")[10:],
}
UNTURNED_EXIF = {
    "bytes": exif_of((0x0112, 1, 1, b"\6")),
    "text": exif_of((0x0112, 2, 2, b"6\0")),
    "rational by 0": exif_of((0x0112, 5, 1, b"\x1a\0\0\0"), rest=b"\0\0\0\0\6\0\0\0\0\0\0\0"),
    "beyond the end": exif_of((0x0112, 3, 9, b"\xff\xff")),
    "beyond the end, then another": exif_of(CUT_TURN, SIX),
    "after another that is cut": exif_of(CUT, SIX),
    "the entry itself is cut": exif_of(OTHER, SIX)[:-1],
    "directory beyond the end": b"II*\0\xff\xff\0\0",
    "BigTIFF's header, little-endian": b"II+\0" + exif_of(SIX)[10:],
    "no directory": b"MM\0*\0\0\0\x08",
    "none": exif_of(OTHER),
}


@pytest.mark.parametrize("name", [*TURNED_EXIF, *UNTURNED_EXIF])
def test_the_orientation_is_the_one_that_pillow_finds_and_no_warning_matters(name: str) -> None:
    image = Image.new("L", (3, 2))
    image.info["exif"] = {**TURNED_EXIF, **UNTURNED_EXIF}[name]
    key = hash_feature(image)
    assert key == hash_feature(oriented(6 if name in TURNED_EXIF else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image.getexif()
        except Exception:  # noqa: BLE001
            pass
    assert hash_feature(image) == key


@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_damaged_exif_in_a_file_does_not_hide_how_pillow_turns_it(image_format: str) -> None:
    files = []
    for exif in (exif_of(CUT, SIX), exif_of(SIX)):
        file = io.BytesIO()
        Image.frombytes("L", (3, 2), bytes(range(6))).save(file, image_format, exif=exif)
        files.append(Image.open(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [ImageOps.exif_transpose(file.copy()).size for file in files] == [(3, 2), (2, 3)]
    assert_distinct(*files)


@pytest.mark.parametrize(
    ("exif", "orientation"),
    [
        (exif_of(SIX, EIGHT), 6),
        (exif_of(SIX, (0x0112, 3, 9, b"\xff"), EIGHT), 6),
        (exif_of(OTHER, CUT, EIGHT), 8),
        (exif_of(HUGE, EIGHT), 8),
        (exif_of(HUGE, CUT, EIGHT), 8),
        (exif_of(HUGE, (0x0112, 3, 3, b"\x08"), EIGHT), 8),
        (exif_of((0x0112, 3, 2**31, b"\6"), EIGHT), 8),
    ],
)
def test_damaged_exif_counts_as_in_the_format_under_any_pillow(
    exif: bytes, orientation: int
) -> None:
    image = Image.new("L", (3, 2))
    image.info["exif"] = exif
    assert_same(image, oriented(orientation))


@pytest.mark.parametrize("view", [bytearray, memoryview])
def test_metadata_may_be_in_any_bytes(view: Any) -> None:
    for info in ({"exif": exif_of(SIX)}, {"xmp": XMP.encode()}):
        image = Image.new("L", (3, 2))
        image.info.update({name: view(data) for name, data in info.items()})
        assert_same(image, oriented())


def test_a_raw_profile_is_exif_too() -> None:
    image = Image.new("L", (3, 2))
    image.info["Raw profile type exif"] = "\nexif\n  99\n" + exif_of(SIX).hex()
    assert_same(image, oriented())
    image.info["Raw profile type exif"] = "\nexif\n  99\nnonsense"
    assert_same(image, oriented(1))
    for nonsense in (5, None):
        image.info.update({"Raw profile type exif": nonsense, "xmp": XMP.encode()})
        assert_same(image, oriented(1))


XMP = '<rdf tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("info", "turned"),
    [
        ({"xmp": XMP.encode()}, True),
        ({"XML:com.adobe.xmp": XMP}, True),
        ({"XML:com.adobe.xmp": "", "xmp": XMP.encode()}, True),
        ({"xmp": b"<tiff:Orientation>6</tiff:Orientation>"}, True),
        ({"xmp": XMP}, False),
        ({"xmp": b"<rdf/>"}, False),
        ({"XML:com.adobe.xmp": "<rdf/>", "xmp": XMP.encode()}, False),
        ({"xmp": XMP.encode(), "exif": exif_of(OTHER)}, True),
        ({"xmp": XMP.encode(), "exif": exif_of(ONE)}, False),
        ({"xmp": XMP.encode(), "exif": exif_of(CUT_TURN, EIGHT)}, True),
        ({"xmp": XMP.encode(), "exif": exif_of(CUT, EIGHT)}, True),
        ({"xmp": XMP.encode(), "exif": exif_of(ONE, CUT)}, False),
        ({"xmp": XMP.encode(), "exif": exif_of((0x0112, 2, 2, b"8"), EIGHT)}, False),
        ({"xmp": XMP.encode(), "exif": b""}, True),
        ({"xmp": XMP.encode(), "exif": b"malformed"}, False),
        ({"xmp": XMP.encode(), "exif": "malformed"}, False),
    ],
    ids=repr,
)
def test_which_xmp_counts(info: dict[str, Any], turned: bool) -> None:
    image = Image.new("L", (3, 2))
    image.info.update(info)
    assert_same(image, oriented(6 if turned else 1))


@pytest.mark.parametrize("error", [KeyError, ValueError, struct.error])
def test_a_loaded_value_that_cannot_be_decoded_is_none(error: type[Exception]) -> None:
    image, unturned = oriented(), hash_feature(oriented(1))
    image.getexif()
    with mock.patch.object(Image.Exif, "__getitem__", side_effect=error):
        assert hash_feature(image) == unturned


# Cliffs


def test_the_metadata_of_a_large_image_costs_no_time() -> None:
    image = Image.new("L", (1000, 1000))
    image.info = mock.MagicMock(wraps={}, spec=dict)
    image.info.get = lambda *_: None  # type: ignore[method-assign]
    hash_feature(image)
    assert not image.info.items.called
    assert not image.info.copy.called


def test_what_fails_otherwise_than_for_want_of_an_operation_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "resolve_conj", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        hash_feature(torch.zeros(3, dtype=torch.complex64).conj())


def test_containers_shared_at_many_levels_are_bounded() -> None:
    for wrap in (
        lambda x: [x, x],
        lambda x: (x, [x]),
        lambda x: {"a": x, "b": x},
        lambda x: collections.UserDict(a=x, b=[x]),
    ):
        feature: Any = 1
        for _ in range(45):
            feature = wrap(feature)
        with pytest.raises(ValueError, match="must not contain the same containers so often"):
            hash_feature(feature)
    few: list[int] = [1, 2]
    for count in (1000, 100_000):
        assert hash_feature([few] * count) == hash_feature([[1, 2] for _ in range(count)])


def test_containers_may_give_other_items_each_time() -> None:
    class Counter(list[int]):
        calls = itertools.count()

        def __iter__(self) -> Iterator[int]:
            return iter([next(self.calls)])

    counter = Counter()
    assert hash_feature([counter, counter]) == hash_feature([[0], [1]])


def test_a_shared_container_may_not_stand_too_deep() -> None:
    shared: Any = [[1]]
    deep: Any = shared
    for _ in range(98):
        deep = [deep]
    hash_feature(deep)
    with pytest.raises(ValueError, match="nested at most 100 deep"):
        hash_feature([shared, deep])


def test_exif_with_many_entries_is_not_read_whole() -> None:
    image = Image.new("L", (3, 2))
    image.info["exif"] = exif_of(*[(n, 3, 1, b"\1\0") for n in range(0x0113, 0xFFFF)], SIX)
    with mock.patch.object(_orientation, "_value", wraps=_orientation._value) as read:
        assert_same(image, oriented())
    assert read.call_count == 2


@pytest.mark.parametrize("piece", [1, 7, 100, 3000])
def test_pieces_do_not_show(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = np.arange(3 * 40 * 50, dtype=np.int16).reshape(3, 1, 40, 50)
    views = [grid.T, grid[:, :, ::2], grid.astype(">i2"), grid[:, ::-1, ::-1], grid[:1, 0].T]
    views.append(np.broadcast_to(grid[0, 0, :, :1], (9, 40, 50)))
    wide = memoryview(bytes(range(250)) * 20)[::3]
    expected = [hash_feature(view.copy()) for view in views]
    monkeypatch.setattr(_arrays, "PIECE_BYTES", piece)
    assert [*map(hash_feature, views)] == expected
    assert_same(torch.from_numpy(grid[0, 0, :, :1]).expand(9, 40, 50), views[-1])
    assert_same(wide, wide.tobytes())


# Refusals


def test_strides_that_lie_are_not_believed() -> None:
    class Liar(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if name == "stride":
                return (0,)
            if name == "is_contiguous":
                return False
            return super().__torch_function__(func, types, args, kwargs or {})

        nbytes = 0  # type: ignore[assignment]

    liar = torch.zeros(10).as_subclass(Liar)
    liar.untyped_storage().resize_(4)
    with pytest.raises(TypeError, match="tensors must have their memory"):
        hash_feature(liar)
    with pytest.raises(TypeError, match="tensors must have their memory"):
        require_memory(liar, dense_storage(liar))


def test_more_dimensions_than_numpy_has() -> None:
    tensor = torch.arange(6).reshape((2,) + (1,) * 70 + (3,))
    made = {hash_feature(tensor), hash_feature(tensor.transpose(0, 71)), hash_feature(tensor[0])}
    assert len(made) == 3
    assert_same(tensor, tensor.clone())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_what_torch_cannot_negate_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="tensors must have elements that can be read"):
        hash_feature(torch._neg_view(torch.zeros(4, dtype=torch.uint8).view(torch.uint8).to(dtype)))


def test_a_tensor_with_gradients_under_fake_tensor_mode_is_refused() -> None:
    tensor = torch.zeros(4, requires_grad=True)
    with FakeTensorMode(), pytest.raises(TypeError, match="elements that can be read"):
        hash_feature(tensor)


def test_a_length_that_lies_is_not_believed() -> None:
    class Items(list[int]):
        def __len__(self) -> int:
            return 2**62

        def __iter__(self) -> Iterator[int]:
            return (item for item in [1, 2])

    class Pairs(dict[str, int]):
        def __len__(self) -> int:
            return 2**62

    assert_same(Items(), [1, 2])
    assert_same(Pairs(a=1), {"a": 1})


def test_a_limit_of_pixels_does_not_count_once_an_image_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = Image.new("L", (1000, 500))
    expected = hash_feature(image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert hash_feature(image) == expected


def test_pixels_that_cannot_be_packed_are_an_error() -> None:
    with mock.patch.object(Image, "_getencoder") as made:
        made.return_value.encode.return_value = (0, -8, b"")
        with pytest.raises(RuntimeError, match="could not be packed"):
            hash_feature(Image.new("L", (2, 2)))


def test_a_subclass_of_an_image_has_the_pixels_of_its_base() -> None:
    class Other(Image.Image):
        def tobytes(self, *args: Any, **options: Any) -> bytes:
            return b"other"

    image = Other()
    vars(image).update(vars(Image.new("L", (2, 2))))
    assert_same(image, Image.new("L", (2, 2)))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_a_view_of_a_quantised_dtype_is_refused(dtype: Any) -> None:
    view = torch.zeros(4, dtype=torch.uint8).view(dtype)
    assert not view.is_quantized
    with pytest.raises(TypeError, match="quantised"):
        hash_feature(view)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"])
def test_the_dtypes_of_ml_dtypes_are_refused(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match=f"ml_dtypes one.*{name}"):
        hash_feature(np.zeros(2, getattr(ml_dtypes, name)))


def test_a_buffer_that_cannot_be_read_is_refused() -> None:
    class Buffer:
        pass

    unreadable = mock.patch.object(keys, "memoryview", side_effect=BufferError("no"), create=True)
    with unreadable, pytest.raises(TypeError, match="buffers must be readable, got .*Buffer: no"):
        hash_feature(Buffer())


def test_a_buffer_of_pointers() -> None:
    testbuffer = pytest.importorskip("_testbuffer")
    pointers = testbuffer.ndarray(list(range(6)), shape=[2, 3], format="B", flags=testbuffer.ND_PIL)
    with pytest.raises(TypeError, match="must not have suboffsets"):
        hash_feature(memoryview(pointers))


# Old Pillow


@pytest.mark.parametrize(
    ("version", "warned"),
    [("11.2.1", 1), ("9.5.0", 1), ("11.3.0", 0), ("13.0.0.dev0", 0), ("unknown", 0)],
)
def test_an_old_pillow_is_told_once(
    version: str, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import PIL

    monkeypatch.setattr(_images, "_asked_pillow", False)
    monkeypatch.setattr(PIL, "__version__", version)
    with caplog.at_level(logging.WARNING):
        hash_feature([Image.new("L", (1, 1)), Image.new("L", (1, 1))])
        hash_feature(Image.new("L", (1, 1)))
    assert len(caplog.records) == warned
    assert all(f"Pillow {version} is installed" in record.message for record in caplog.records)
