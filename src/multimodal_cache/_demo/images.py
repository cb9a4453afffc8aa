"""Images for the demonstration: from files, or made from a seed."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from multimodal_cache._demo.encoder import IMAGE_SIZE

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".webp")


class ImageError(Exception):
    """The images asked for can't be had; the message says why, in one line."""


@dataclass(frozen=True)
class LeftOut:
    """A file that can't be read as an image.

    Attributes:
        path: Where it is.
        reason: What is wrong with it, in one line.
    """

    path: Path
    reason: str


def find_images(folder: Path) -> list[Path]:
    """Returns the files in a folder that are images by their name, sorted.

    Raises:
        ImageError: There is no such folder, or no image in it, or Pillow isn't installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ImageError("--images needs Pillow: pip install pillow") from None
    try:
        if not folder.is_dir():
            raise ImageError(f"--images: expected a folder, got {folder}")
        named = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        paths = sorted(path for path in named if _may_be_file(path))
    except OSError as error:
        raise ImageError(f"--images: can't read {folder}: {error.strerror}") from error
    if not paths:
        raise ImageError(f"--images: no {', '.join(SUFFIXES)} file in {folder}")
    return paths


def read_images(paths: Iterable[Path]) -> tuple[list[torch.Tensor], list[LeftOut]]:
    """Reads image files as ``[3, 224, 224]`` bytes each, upright.

    Returns:
        The images, and the files that can't be read as one.

    Raises:
        ImageError: No file can be read.
    """
    images: list[torch.Tensor] = []
    left_out: list[LeftOut] = []
    for path in paths:
        try:
            images.append(_read_image(path))
        except Exception as error:  # noqa: BLE001  # a broken file can raise nearly anything
            left_out.append(LeftOut(path, _reason(error)))
    if left_out and not images:
        raise ImageError(
            f"--images: can't read any file ({len(left_out)} tried), the first of them "
            f"{left_out[0].path}: {left_out[0].reason}"
        )
    return images, left_out


def make_images(count: int, seed: int) -> list[torch.Tensor]:
    """Makes images of ``[3, 224, 224]`` bytes each: smooth random colours."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=IMAGE_SIZE, mode="bicubic")
    return list((smooth.clamp(0, 1) * 255).to(torch.uint8))


def _may_be_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:  # a link to nowhere, for one: reading it says what is wrong
        return True


def _read_image(path: Path) -> torch.Tensor:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large photographs and odd palettes are no errors
        with Image.open(path) as image:
            image.load()
            small = _to_rgb(_upright(image)).resize((IMAGE_SIZE, IMAGE_SIZE))
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous()


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001  # malformed EXIF data, while the pixels are good
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel, which convert("L") would clip
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGBA").convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path
    return " ".join(str(error).split()) or type(error).__name__
