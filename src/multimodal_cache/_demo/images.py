"""Images for the demonstration: from files, or made from a seed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from multimodal_cache._demo.encoder import IMAGE_SIZE

SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".webp")


class ImageError(Exception):
    """The images asked for can't be had; the message says why, in one line."""


def find_images(folder: Path) -> list[Path]:
    """Returns the image files in a folder, by name.

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
        paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    except OSError as error:
        raise ImageError(f"--images: can't read {folder}: {error.strerror}") from error
    if not paths:
        raise ImageError(f"--images: no {', '.join(SUFFIXES)} file in {folder}")
    return paths


def read_images(paths: Iterable[Path]) -> list[torch.Tensor]:
    """Reads image files as ``[3, 224, 224]`` bytes each.

    Raises:
        ImageError: A file can't be read as an image.
    """
    return [_read_image(path) for path in paths]


def make_images(count: int, seed: int) -> list[torch.Tensor]:
    """Makes images of ``[3, 224, 224]`` bytes each: smooth random colours."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=IMAGE_SIZE, mode="bicubic")
    return list((smooth.clamp(0, 1) * 255).to(torch.uint8))


def _read_image(path: Path) -> torch.Tensor:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large photographs and odd palettes are no errors
            with Image.open(path) as image:
                if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
                    image = image.point(lambda value: value * (1 / 256)).convert("L")
                small = image.convert("RGBA").convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE))
    except Exception as error:  # a broken file can raise nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImageError(f"--images: can't read {path} as an image: {reason}") from error
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous()
