"""What an image is in the arguments of ``get_image_features``, and in what it returns.

Nothing in a tensor says that row i of it is image i: a rule does. Each takes the arguments of a
whole batch apart (``split``), makes those of one call out of some images (``join``), and finds in
the output of that call what belongs to each (``parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Image: TypeAlias = dict[str, Any]
"""The arguments for one image: tensors, joined by their first dimension, and options."""


class Rule:
    """*rows*: an image is row i of every tensor."""

    tensors: tuple[str, ...] = ("pixel_values",)
    """The arguments that are tensors, and have to be there."""

    def split(self, model: Any, arguments: dict[str, Any]) -> list[list[Image]] | None:
        """Finds the images.

        Args:
            model: Whose ``get_image_features`` it is.
            arguments: By name, without those that are None; those in ``tensors`` are there.

        Returns:
            The images of each output, without padding; or None where the arguments aren't what
            the rule is about.
        """
        rows = {
            name: torch.split(value, 1)
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and value.ndim
        }
        return _images(arguments, **rows)

    def join(self, images: Sequence[Image]) -> dict[str, Any]:
        """Returns the arguments of one call for images with the same options."""
        first = images[0]
        return {
            name: _concatenated([image[name] for image in images])
            if isinstance(value, torch.Tensor)
            else value
            for name, value in first.items()
        }

    def parts(self, output: Any, images: Sequence[Image]) -> list[torch.Tensor]:
        """Returns what belongs to each image, ``[tokens, hidden]``, in the output for ``join``.

        Raises:
            ValueError: It isn't one part for each image.
        """
        if len(output) != len(images) or any(part.ndim != 2 for part in output):
            shapes = [list(part.shape) for part in output]
            raise ValueError(
                f"the rule doesn't fit this model: expected [tokens, hidden] for each of "
                f"{len(images)} images, got {shapes}"
            )
        return list(output)


class Grid(Rule):
    """*grid*: an image is the next ``grid[i].prod()`` rows."""

    tensors: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    def split(self, model: Any, arguments: dict[str, Any]) -> list[list[Image]] | None:
        """Cuts the packed patches."""
        pixels, grid = arguments["pixel_values"], arguments["image_grid_thw"]
        rows = grid.prod(-1).tolist()
        if sum(rows) != len(pixels):
            return None
        return _images(arguments, pixel_values=pixels.split(rows), image_grid_thw=grid.split(1))


class Sizes(Rule):
    """*sizes*: an image is its real patches, or its real pixels, and ``image_sizes[i]``.

    In LLaVA-NeXT and its kin, whose configuration has ``image_grid_pinpoints``, the size says how
    many patches are real. Elsewhere (Pixtral) it is that of the image in its padding.
    """

    tensors: tuple[str, ...] = ("pixel_values", "image_sizes")

    def split(self, model: Any, arguments: dict[str, Any]) -> list[list[Image]] | None:
        """Cuts off the padding.

        The images of a sample of several aren't cut into patches: ``batch_num_images`` becomes 2
        for each of them, and None for the others.
        """
        pixels, sizes = arguments["pixel_values"], arguments["image_sizes"]
        if getattr(model.config, "image_grid_pinpoints", None) is None:
            if len(pixels) != len(sizes):
                return None
            crops = [
                image[..., :height, :width]
                for image, (height, width) in zip(pixels.split(1), sizes.tolist(), strict=True)
            ]
            return _images(arguments, pixel_values=crops, image_sizes=sizes.split(1))
        arguments = dict(arguments)
        counts = arguments.pop("batch_num_images", [1] * len(sizes))
        samples = [None if int(n) == 1 else 2 for n in counts for _ in range(int(n))]
        if len(samples) != len(sizes):
            return None
        real = [
            1 if sample else _number_of_patches(model.config, size)
            for sample, size in zip(samples, sizes.tolist(), strict=True)
        ]
        if pixels.ndim == 5 and len(pixels) == len(real):
            patches = [image[:count] for image, count in zip(pixels, real, strict=True)]
        elif pixels.ndim == 4 and len(pixels) == sum(real):
            patches = list(pixels.split(real))
        else:
            return None
        groups = _images(arguments, pixel_values=patches, image_sizes=sizes.split(1))
        if groups is not None:
            for (image,), sample in zip(groups, samples, strict=True):
                image["batch_num_images"] = sample
        return groups

    def join(self, images: Sequence[Image]) -> dict[str, Any]:
        """Puts what came from samples of several images into such a sample."""
        if images[0].get("batch_num_images") is None:
            return super().join(images)
        if len(images) == 1:  # alone it would be cut into patches
            images = [*images, *images]
        return {**super().join(images), "batch_num_images": torch.tensor([len(images)])}

    def parts(self, output: Any, images: Sequence[Image]) -> list[torch.Tensor]:
        """Leaves out the second of what was doubled."""
        doubled = len(images) == 1 and images[0].get("batch_num_images") is not None
        return super().parts(output[:1] if doubled else output, images)


class RowsOrSizes(Sizes):
    """*rows*, or where there are ``image_sizes``, *sizes*: LLaVA with CLIP, and with Pixtral."""

    tensors: tuple[str, ...] = ("pixel_values",)

    def split(self, model: Any, arguments: dict[str, Any]) -> list[list[Image]] | None:
        """Asks the arguments which."""
        sizes = arguments.get("image_sizes")
        if sizes is None:
            return ROWS.split(model, arguments)
        return super().split(model, arguments) if isinstance(sizes, torch.Tensor) else None


_TILED = ("pixel_values", "pixel_attention_mask")


class Tiles(Rule):
    """*tiles*: an image is a tile that isn't all zero, and its mask; an output is a sample."""

    def split(self, model: Any, arguments: dict[str, Any]) -> list[list[Image]] | None:
        """Leaves out the padding, which the model knows by its zeros."""
        tensors = {name: arguments[name] for name in _TILED if name in arguments}
        pixels = arguments["pixel_values"]
        if pixels.ndim != 5 or len({tuple(each.shape[:2]) for each in tensors.values()}) != 1:
            return None
        groups = []
        for sample, real in enumerate((pixels.to(model.dtype) != 0).flatten(2).any(-1)):
            indexes = real.nonzero().flatten().tolist()
            tiles = {
                name: [value[sample, index : index + 1] for index in indexes]
                for name, value in tensors.items()
            }
            images = _images(arguments, **tiles)
            if images is None:
                return None
            groups.append([image for (image,) in images])
        return groups

    def join(self, images: Sequence[Image]) -> dict[str, Any]:
        """Makes one sample of all tiles."""
        joined = super().join(images)
        return {
            name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else value
            for name, value in joined.items()
        }

    def parts(self, output: Any, images: Sequence[Image]) -> list[torch.Tensor]:
        """Cuts the sample; all tiles have as many tokens."""
        if len(output) == 1 and len(output[0]) % len(images) == 0:
            output = output[0].chunk(len(images))
        return super().parts(output, images)


ROWS, GRID, SIZES, TILES = Rule(), Grid(), Sizes(), Tiles()
RULES: dict[str, Rule] = {"rows": ROWS, "grid": GRID, "sizes": SIZES, "tiles": TILES}

MODELS: dict[str, Rule] = {
    "Gemma3Model": ROWS,
    "Idefics3Model": TILES,
    "InternVLModel": ROWS,
    "LlavaModel": RowsOrSizes(),
    "LlavaNextModel": SIZES,
    "LlavaOnevisionModel": SIZES,
    "Qwen2VLModel": GRID,
    "Qwen2_5_VLModel": GRID,
    "Qwen3VLModel": GRID,
    "SmolVLMModel": TILES,
}
"""The rule for each class of ``base_model``."""


def _images(arguments: dict[str, Any], **parts: Sequence[torch.Tensor]) -> list[list[Image]] | None:
    """Returns an image for each part; None if there is a tensor too many, or a part too few."""
    others = {name: value for name, value in arguments.items() if name not in parts}
    if any(isinstance(value, torch.Tensor) for value in others.values()):
        return None
    if len({len(each) for each in parts.values()}) != 1:
        return None
    return [
        [{**others, **dict(zip(parts, each, strict=True))}]
        for each in zip(*parts.values(), strict=True)
    ]


def _concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the rows, each with zeros to the size of the largest."""
    largest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True)]
    padded = []
    for each in tensors:
        missing = [size - has for size, has in zip(largest, each.shape[1:], strict=True)]
        ends = [end for size in reversed(missing) for end in (0, size)]
        padded.append(torch.nn.functional.pad(each, ends) if any(ends) else each)
    return torch.cat(padded)


def _number_of_patches(config: Any, size: Sequence[int]) -> int:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    count: int = image_size_to_num_patches(
        size, config.image_grid_pinpoints, config.vision_config.image_size
    )
    return count
