"""A real vision encoder without downloads."""

from __future__ import annotations

import torch
from torch import nn

IMAGE_SIZE = 224
PATCH_SIZE = 16
WIDTH = 384
NUM_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2


class VisionTransformer(nn.Module):
    """A vision transformer of the size ViT-S/16, with seeded random weights.

    Args:
        seed: The weights are a function of it. Torch's global generator is left alone.

    Attributes:
        version: Names all that an embedding depends on, beside the pixels.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.version = f"ViT-S/16, weights from seed {seed}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH_SIZE, stride=PATCH_SIZE)
            self.positions = nn.Parameter(0.02 * torch.randn(NUM_TOKENS, WIDTH))
            layer = nn.TransformerEncoderLayer(
                WIDTH,
                nhead=6,
                dim_feedforward=4 * WIDTH,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.layers = nn.TransformerEncoder(
                layer, num_layers=12, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
            )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encodes ``[images, 3, 224, 224]`` bytes to ``[images, 196, 384]`` floats."""
        patches = self.patches(pixels.float() / 127.5 - 1.0)
        encoded: torch.Tensor = self.layers(patches.flatten(2).transpose(1, 2) + self.positions)
        return encoded
