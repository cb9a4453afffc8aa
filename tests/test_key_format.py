"""What ``hash_feature`` hashes is a format: what is stored under a key must be found again.

If a known answer changes, every key that anybody has stored or sent is lost: that is a breaking
change of the library, and needs another version byte. Don't mend this test, mend the code.
"""

from __future__ import annotations

import array
import struct
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from PIL import Image

from multimodal_cache import hash_feature

# The format, written again from its description in multimodal_cache/keys.py.


def n64(number: int) -> bytes:
    return struct.pack("<Q", number)


def content(data: bytes) -> bytes:
    return n64(len(data)) + (data if len(data) <= 1024 else blake3(data).digest())


def text(characters: bytes) -> bytes:
    return b"s" + content(characters)


def pair(key: bytes, value: bytes) -> bytes:
    return blake3(key + value).digest()


def elements(dtype: bytes, shape: tuple[int, ...], data: bytes) -> bytes:
    return b"a" + content(dtype) + n64(len(shape)) + b"".join(map(n64, shape)) + content(data)


def picture(
    mode: bytes,
    size: tuple[int, int],
    pixels: bytes,
    palette: bytes = b"N",
    transparency: bytes = b"N",
    orientation: int = 1,
) -> bytes:
    sizes = n64(orientation) + n64(size[0]) + n64(size[1])
    return b"p" + palette + transparency + sizes + content(mode) + content(pixels)


def colours(mode: bytes) -> bytes:
    return b"t" + n64(2) + text(mode) + b"b" + content(COLOURS)


def key_of(serialised: bytes, namespace: bytes = text(b"")) -> int:
    return int.from_bytes(blake3(b"\x01" + namespace + serialised).digest(), "big")


def palette_image(mode: str, palette: str, transparency: int | bytes) -> Image.Image:
    image = Image.frombytes(mode, (2, 1), bytes(range(2 * len(mode))))
    image.putpalette(COLOURS, palette)
    image.info["transparency"] = transparency
    return image


def mislabelled_image() -> Image.Image:
    """Returns such an image as damaged files make."""
    image = Image.frombytes("P", (2, 1), b"\0\1")
    image.putpalette(COLOURS)
    vars(image)["_mode"] = "L"
    return image


def turned_image() -> Image.Image:
    image = Image.frombytes("RGB", (2, 1), b"abcdef")
    image.getexif()[0x0112] = 6
    return image


COLOURS = bytes(range(1, 13))
ONE = b"i" + content(b"\x01")
TWO = b"i" + content(b"\x02")
RAMP = bytes(range(256)) * 5
KNOWN: list[tuple[str, Any, bytes, str]] = [
    ("None", None, b"N", "22b068db4f33869746db4363d348fefb617e7cff696a4ed76255ed45ecf1ae44"),
    ("False", False, b"F", "fd4af1ee5d5a5d6570cc8c5872639c5b26f931084f6e28cb0debc73e2dbf9eea"),
    ("True", True, b"T", "2f60b8395de68b4342d0223a674ac5f6333c6b6ae175c047a67ed36416713be7"),
    (
        "0",
        0,
        b"i" + content(b"\x00"),
        "ae09d2b8f9b50a6cfc8ef3171fd356d92d9ba58e6c6a5050c48be3fefcdeab35",
    ),
    (
        "127",
        127,
        b"i" + content(b"\x7f"),
        "08531a10c842c42811e233326923c2631258932e459a98fc901eefe9aa66d697",
    ),
    (
        "128",
        128,
        b"i" + content(b"\x80\x00"),
        "2f2daccd36be7bb3d0a2a2c8bc33e7c7636268969cd2d983ace30c2d55714b10",
    ),
    (
        "-128",
        -128,
        b"i" + content(b"\x80"),
        "3892466c910f56c8f930aa19de5b665a33cacae9b2df5bbf0e71051b77b771cc",
    ),
    (
        "-129",
        -129,
        b"i" + content(b"\x7f\xff"),
        "c8c1f540fa155fd51f4b23dce1dfbc4e5a2d143c05df15deed3ab6ac5821cb90",
    ),
    (
        "2**64",
        2**64,
        b"i" + content(bytes(8) + b"\x01"),
        "8e7dfdd5370d7149ef29cc1d1e52f8c7413adbd2ba0e9059a6c30d29d5e2a333",
    ),
    (
        "1.5",
        1.5,
        b"f" + bytes.fromhex("000000000000f83f"),
        "749b0c1d9cd54a419b13a9df660bc48c52bc02f55f8501728ebe08648e5dba67",
    ),
    (
        "-0.0",
        -0.0,
        b"f" + bytes.fromhex("0000000000000080"),
        "4ff7fd5a2498bbd51c019f53c6d513dae807ff9992a8e83e0b0892d996035919",
    ),
    (
        "empty str",
        "",
        text(b""),
        "03b0aeecf105bb22149b1d2fa58e33db773598f147698c55da7cd9455f7c5b02",
    ),
    (
        "str",
        "naïve",
        text(b"na\xc3\xafve"),
        "584fbb53bfdd82209eafb280cb168d3e72962ac9d8be8ee77b65f1feffed73fc",
    ),
    (
        "lone surrogate",
        "\ud800",
        text(b"\xed\xa0\x80"),
        "538fcb28e032b746fbece93767655fff594fbad020a05ee1a35bc5a4b9454199",
    ),
    (
        "surrogate pair",
        "\ud83d\ude00",
        text(b"\xed\xa0\xbd\xed\xb8\x80"),
        "c5afd051f3c0742c70bdda13f1df3b711a3592b4d36c1695dc7c2f7687b536ec",
    ),
    (
        "emoji",
        "\U0001f600",
        text(b"\xf0\x9f\x98\x80"),
        "200c5b017a6822dd2df39d815dc8dda32c1cfdea25893235c17f0ee6442757da",
    ),
    (
        "empty bytes",
        b"",
        b"b" + n64(0),
        "997136da517dfc8a4adba0a5b5afa17b406a485127191f40963193b2f745c8ab",
    ),
    (
        "1024 bytes",
        RAMP[:1024],
        b"b" + n64(1024) + RAMP[:1024],
        "144033ac51859fa0a91540cebc61d041aa0e10ca9148b996f31380a60c71a295",
    ),
    (
        "1025 bytes",
        RAMP[:1025],
        b"b" + n64(1025) + blake3(RAMP[:1025]).digest(),
        "f9b24e908959550ed520c03571ccf0310d5acf22925f9c2ab65e00eb8a824390",
    ),
    ("[]", [], b"l" + n64(0), "f0060ed528beb9e26e1912af7aa7c630a20a060e282173319f7e34b1a634215b"),
    (
        "[1, (2,)]",
        [1, (2,)],
        b"l" + n64(2) + ONE + b"t" + n64(1) + TWO,
        "390d4033e86a7b34d4a6d78bc870c6d3058e7a55ed906c026b66bdec4aee4fc2",
    ),
    ("()", (), b"t" + n64(0), "d489148b82ce9582296bc222489f2579f5327b409bfcafeb47a2f24a89c305ac"),
    (
        "dict",
        {"b": 2, "a": 1},
        b"d" + n64(2) + b"".join(sorted((pair(text(b"a"), ONE), pair(text(b"b"), TWO)))),
        "8c14d8da3b612277d083d4fdc2763b042b55edcb217c8d75291e3eece4330c37",
    ),
    (
        "int32 [2, 2]",
        np.array([[1, 2], [3, 4]], ">i4"),
        elements(b"int32", (2, 2), struct.pack("<4i", 1, 2, 3, 4)),
        "5e04b6fedc6a84336616854f20935df1847f7ff686582f6c2794eb093974e67c",
    ),
    (
        "empty float64",
        np.zeros((3, 0)),
        elements(b"float64", (3, 0), b""),
        "1030a7e3d4ab1df6e9ede48418061c73903b3e05993a4b2284b64d5ef66dbea7",
    ),
    (
        "0-d bool",
        np.bool_(True),
        elements(b"bool", (), b"\x01"),
        "9683f2aa7d65054789dbe211b66272f34cd029e783d044ee67181ffb64f3a6ee",
    ),
    (
        "complex64",
        torch.tensor([1 + 2j]),
        elements(b"complex64", (1,), struct.pack("<2f", 1, 2)),
        "e0b8bb7b306ed335cea287aca055659ca26d1f526e0e062ad0aff93cf47e9753",
    ),
    (
        "bfloat16",
        torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        elements(b"bfloat16", (2,), bytes.fromhex("803f00c0")),
        "50d0cc15845b635ba501fce68e35ac68da5089f9a59726fc81d353e58ca907de",
    ),
    (
        "float8",
        torch.tensor([1.0], dtype=torch.float32).to(torch.float8_e4m3fn),
        elements(b"float8_e4m3fn", (1,), b"\x38"),
        "d5e92300aba202a9725f245f234057af5c52ec7a3d0b5e464466a3853fe4839b",
    ),
    (
        "str array",
        np.array(["a", "bc"]),
        elements(b"str64", (2,), b"a\0\0\0\0\0\0\0b\0\0\0c\0\0\0"),
        "2c1b7c2980865dbcd1ffdc9137fef1690ff2dd922294ba2395a80056a86c9f9d",
    ),
    (
        "datetime64",
        np.datetime64("1970-01-02", "D"),
        elements(b"datetime64[D]", (), n64(1)),
        "43302e73910e854fc5c3340d7dbeee55a5f1131a8e8add9db5c9cac1b2a0eaba",
    ),
    (
        "timedelta64",
        np.array([1, -1], "m8[25s]"),
        elements(b"timedelta64[25s]", (2,), n64(1) + b"\xff" * 8),
        "62c4073c067fe508658c29b26a72611174e56b9cef20671ea2c170f1622f3e62",
    ),
    (
        "bytes array",
        np.array([b"a", b"bc"]),
        elements(b"bytes16", (2,), b"a\0bc"),
        "544d760cbe4b20e00bb9cf968dbc9915c24485cecbc0eb4bf3fee4c12421bc44",
    ),
    (
        "large uint8",
        np.frombuffer(RAMP, np.uint8),
        elements(b"uint8", (1280,), RAMP),
        "6c608e717f1fd07831c6ed109f8280bba9b7cda0cc03e7ec624dc78c0d1db085",
    ),
    (
        "complex32",
        torch.tensor([1.0, -2.0], dtype=torch.float16).view(torch.complex32),
        elements(b"complex32", (1,), bytes.fromhex("003c00c0")),
        "b10cca488adba79e2a70ccf3ade0a5239d981c306b890616444130237da89d19",
    ),
    (
        "typed buffer",
        array.array("H", [1, 2]),
        elements(b"uint16", (2,), b"\1\0\2\0"),
        "13ac283d82242e46371cd8d5a58d30cfd30212fe72bbbf66251779a953ccdd37",
    ),
    (
        "RGB",
        Image.frombytes("RGB", (2, 1), b"abcdef"),
        picture(b"RGB", (2, 1), b"abcdef"),
        "4c48431d4927cddd6a5fd59c9db998a7a555bd30b59a38cea3e8ceb5cb8ddd99",
    ),
    (
        "RGB, turned",
        turned_image(),
        picture(b"RGB", (2, 1), b"abcdef", orientation=6),
        "c90d50a14b022a5a2b79105f3e03b25512d28dff059c9b0761b097694cd9fc6b",
    ),
    (
        "P, RGB, int",
        palette_image("P", "RGB", 1),
        picture(b"P", (2, 1), b"\0\1", colours(b"RGB"), ONE),
        "aa45b59fa82fa48486eebfc4b9a8e42cf88efab29d5d64beea8d1a3a9ee47228",
    ),
    (
        "PA, RGBA, bytes",
        palette_image("PA", "RGBA", b"\x80"),
        picture(b"PA", (2, 1), b"\0\1\2\3", colours(b"RGBA"), b"b" + content(b"\x80")),
        "fa7a3061c60b0e8911511498d631a07090a8af5387f3245c948e2ef965da496f",
    ),
    (
        "L/P",
        mislabelled_image(),
        picture(b"L/P", (2, 1), b"\0\1", colours(b"RGB")),
        "cdb51fa504f1f33da1fe9b9b981a51aff439cbbc51e6e352a95c0db179ffe926",
    ),
    (
        "1",
        Image.new("1", (9, 2), 1),
        picture(b"1", (9, 2), b"\xff\x80\xff\x80"),
        "5e4aaf7703af7baeac58f369971d9ef51d4943cabc5a120a3e3075d32658a2d9",
    ),
    (
        "I",
        Image.new("I", (1, 1), -2),
        picture(b"I", (1, 1), b"\xfe\xff\xff\xff"),
        "4d61443b26668ee29dc161580f25112b346982c294fe25be9d01eb9569659767",
    ),
    (
        "F",
        Image.new("F", (1, 1), 1.5),
        picture(b"F", (1, 1), bytes.fromhex("0000c03f")),
        "2c2a4d02cd94dae15155e9ac8d2b2fdd4b22a21039e6da078903991c3f4cb40c",
    ),
    (
        "I;16B",
        Image.new("I;16B", (1, 1), 258),
        picture(b"I;16B", (1, 1), b"\1\2"),
        "807b41351ac4a5e9e3f92a541ada811aedede679b4fba122f8db19880c97b9aa",
    ),
    (
        "large L",
        Image.new("L", (1000, 500), 7),
        picture(b"L", (1000, 500), b"\7" * 500_000),
        "ac9e173920078aaa8d2a95cb409f03aa5795b2a975c5a64c2f5bd487a5c424c8",
    ),
]


@pytest.mark.parametrize(
    ("feature", "serialised", "known"),
    [pytest.param(*row[1:], id=row[0]) for row in KNOWN],
)
def test_the_known_answers_stand(feature: Any, serialised: bytes, known: str) -> None:
    assert f"{hash_feature(feature):064x}" == known
    assert hash_feature(feature) == key_of(serialised)


def test_namespaces_and_widths_are_part_of_the_format() -> None:
    feature, serialised = "x", text(b"x")
    known = "11cbf61c4df4c8876dbd50933ee3bc0364602abf2c3ad4c668353e9a35207520"
    assert hash_feature(feature, namespace="model") == key_of(serialised, text(b"model"))
    assert hash_feature(feature, namespace=b"model") == key_of(serialised, b"b" + content(b"model"))
    assert f"{hash_feature(feature, namespace='model'):064x}" == known
    assert f"{hash_feature(feature, namespace='model', bits=64):016x}" == known[:16]
    assert hash_feature(feature, bits=128) == key_of(serialised) >> 128
