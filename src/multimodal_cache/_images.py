"""What a Pillow image consists of, asked so that nothing on the image changes."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal_cache._errors import copy_error

if TYPE_CHECKING:
    from PIL import Image

STRIP_PIXELS = 2**17
"""So many pixels fit into the CPU's caches, unpacked and packed."""

OLDEST_PILLOW = (11, 3)
"""Older ones read the orientation of XMP data and of MPO frames otherwise."""

_logger = logging.getLogger(__name__)

_load_locks = [threading.RLock() for _ in range(64)]
"""Pillow can't load an image in two threads; this many load at once, if they aren't the same."""

_IMAGE_BYTES = 64
"""Ids of images are multiples of this apart: only so divided do they spread over all locks."""


class _Undecodable(NamedTuple):
    """An image that Pillow takes for loaded after an error."""

    image: weakref.ref[Image.Image]
    frame: int
    error: Exception


_undecodable: dict[int, _Undecodable] = {}
"""By the id of the image. What is remembered here can't be found on the image."""

_asked_pillow = False
"""Whether its version is known by now."""


def _begin_anew_in_forked_child() -> None:  # pragma: no cover  # in another process
    """Forgets the owners of locks, which aren't there."""
    global _load_locks
    _load_locks = [threading.RLock() for _ in _load_locks]


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_anew_in_forked_child)


def image_class() -> type[Image.Image] | None:
    """Returns Pillow's class, if anybody has imported it; else nothing is an image."""
    return getattr(sys.modules.get("PIL.Image"), "Image", None)


def load(image: Image.Image) -> None:
    """Loads the pixels, and the metadata that a file may have after them.

    Raises:
        Exception: What Pillow raises for pixels that can't be decoded, each time. Pillow itself
            takes the images of some formats for loaded after that.
    """
    _warn_once_of_old_pillow()
    key = id(image)
    with _load_locks[key // _IMAGE_BYTES % len(_load_locks)]:
        unread = getattr(image, "tile", None)
        failed = _undecodable.get(key)
        if failed and not unread and failed.image() is image and failed.frame == image.tell():
            raise _again(failed.error)
        try:
            image.load()
        except BaseException as error:
            if unread and not image.tile:  # type: ignore[attr-defined]
                forget = functools.partial(_forget, key)
                _undecodable[key] = _Undecodable(
                    weakref.ref(image, forget), image.tell(), _again(error)
                )
            raise
        if failed:
            _forget(key)


def _forget(key: int, _: object = None) -> None:
    _undecodable.pop(key, None)


def _again(error: BaseException) -> Exception:
    """Returns such an error anew, without the frames that the first one holds."""
    if isinstance(error, Exception):
        try:
            return copy_error(error)
        except Exception:  # noqa: BLE001  # whatever its class does
            pass
    return OSError(f"the image could not be loaded: {error!r}")


def _warn_once_of_old_pillow() -> None:
    global _asked_pillow
    if _asked_pillow:
        return
    _asked_pillow = True
    version = str(getattr(sys.modules.get("PIL"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_PILLOW:
        oldest = ".".join(map(str, OLDEST_PILLOW))
        _logger.warning(
            "Pillow %s is installed, but hash_feature expects %s or newer: some images get other "
            "keys than elsewhere, for their orientation in XMP data or in MPO files is read "
            "otherwise",
            version,
            oldest,
        )


def palette(image: Image.Image) -> tuple[str, bytes] | tuple[str, bytes, bytes] | None:
    """Returns the mode of the palette and its colours in that mode, if there are any.

    Pillow has a palette for the user and another one for its own use. A conversion adds the
    transparency to the latter, where it stays: so that has more than the former says, if the
    transparency was changed or removed since then. Only in that case the third item is there, the
    alpha that each of 256 indices has after a conversion to RGBA.
    """
    if image.mode not in ("P", "PA"):
        return None
    mode = image.palette.mode if image.palette else "RGB"
    own_mode = image.im.getpalettemode()
    transparency = image.info.get("transparency")
    if image.mode == "PA" or (mode == own_mode and (mode == "RGB" or transparency is None)):
        colours = bytes(image.getpalette(mode) or ())
        return (mode, colours) if colours else None
    return _palette_with_alpha(image, mode, own_mode, transparency)


def _palette_with_alpha(
    image: Image.Image, mode: str, own_mode: str, transparency: Any
) -> tuple[str, bytes] | tuple[str, bytes, bytes] | None:
    seen = _as_rgba(image.im, transparency)
    count = len(image.im.getpalette(own_mode, own_mode)) // len(own_mode)
    if mode == "RGB":
        declared = [bytes(image.im.getpalette("RGB", "RGB"))]
    else:
        assert image.palette is not None
        declared = [bytes(image.palette.palette), seen[: 4 * count]]
    for colours in declared:
        if _as_rgba(_core_palette(mode, colours), transparency) == seen:
            return (mode, colours) if colours else None
    return mode, declared[-1], seen[3::4]


def _core_palette(mode: str, colours: bytes) -> Any:
    made = sys.modules["PIL.Image"].core.new("P", (1, 1))
    if colours:
        made.putpalette(mode, mode, colours)
    return made


def _as_rgba(core: Any, transparency: Any) -> bytes:
    """Returns what each index from 0 to 255 becomes in RGBA."""
    image_module = sys.modules["PIL.Image"]
    every = core.crop((0, 0, 256, 1))
    every.paste(image_module.frombytes("P", (256, 1), bytes(range(256))).im, (0, 0, 256, 1))
    try:
        if isinstance(transparency, bytes):
            every.putpalettealphas(transparency)
        elif isinstance(transparency, int):
            every.putpalettealpha(transparency, 0)
    except (ValueError, OverflowError):  # out of range: Pillow can't convert the image then
        pass
    shown = image_module.new("RGBA", (256, 1))
    shown.im = every.convert("RGBA", 0)
    return bytes(shown.tobytes())


_RAW_MODES = {"I": "I;32S", "F": "F;32F"}
"""The little-endian ones for the modes that are in the byte order of the machine."""


def pixels(image: Image.Image) -> Iterator[bytes]:
    """Yields the packed pixels, strip by strip where they are many.

    That is three times as fast as packing a large image at once, and needs no copy of it all.
    """
    width, height = image.size
    if not width or not height:
        return
    raw_mode = _RAW_MODES.get(image.mode, image.mode)
    encoder = sys.modules["PIL.Image"]._getencoder(image.mode, "raw", raw_mode)
    rows = max(1, min(STRIP_PIXELS // width, height))
    try:
        encoder.setimage(image.im, (0, 0, width, height))
        status = 0
        while not status:
            _, status, strip = encoder.encode(4 * width * rows)
            yield strip
    finally:
        encoder.cleanup()
    if status < 0:
        raise RuntimeError(f"the pixels could not be packed, Pillow's error is {status}")
