"""Tiny models of ``transformers`` with random weights, their processors, and generated photographs.

Import it after ``pytest.importorskip("transformers")``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

transformers.logging.set_verbosity_error()

IMAGE, VIDEO, START, END = 60, 61, 62, 63
SIDE = 16
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA, QWEN = TEXT | {"model_type": "llama"}, TEXT | {"model_type": "qwen2"}
GEMMA = TEXT | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 64}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = TOWER | {"model_type": "pixtral", "image_size": 32, "head_dim": 8}
INTERN = TOWER | {"image_size": [SIDE, SIDE], "patch_size": [4, 4]}
PATCHES = {
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Returns waves of light and some noise, from a JPEG file."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 30
    channels = []
    for _ in range(3):
        a, b, phase = 6 * rng.random(3)
        waves = 128 + 90 * np.sin(a * x + b * y + phase)
        channels.append(waves + rng.normal(0, 8, (height, width)))
    pixels = np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return Image.open(file)


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        name: Of the model class, without its head.
        configure: Makes its configuration.
        processor: The class of its image processor, which needs no torchvision, and its options.
        by_sample: Whether the processor takes the images of each sample apart.
        token_types: The name under which the model takes the kind of each token.
    """

    name: str
    configure: Callable[[], Any]
    processor: tuple[str, dict[str, Any]]
    by_sample: bool = False
    token_types: str = ""

    def model(self, seed: int = 0) -> Any:
        """Returns a model that generates."""
        torch.manual_seed(seed)
        name = self.name.removesuffix("Model") + "ForConditionalGeneration"
        return getattr(transformers, name)(self.configure()).eval()

    def pixels(self, *samples: list[Image.Image]) -> dict[str, Any]:
        """Returns what the image processor makes of the images of some samples."""
        module, options = self.processor
        modules = importlib.import_module(f"transformers.models.{module}")
        (made,) = (
            getattr(modules, name) for name in dir(modules) if name.endswith("ImageProcessorPil")
        )
        images = samples if self.by_sample else [image for sample in samples for image in sample]
        return dict(made(**options)(list(images), return_tensors="pt"))

    def inputs(self, model: Any, *samples: list[Image.Image]) -> dict[str, Any]:
        """Returns what the model takes: text around the images of each sample, padded left."""
        rows = []
        for number, sample in enumerate(samples):
            with torch.no_grad():
                output = image_features(model, self.pixels(sample)).pooler_output
            row = [1, 2 + number]
            for embedding in output:
                row += [START, *[IMAGE] * len(embedding), END]
            rows.append([*row, 9])
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), **self.pixels(*samples)}
        if self.token_types:
            inputs[self.token_types] = (ids == IMAGE).long()
        taken = inspect.signature(model.forward).parameters
        return {name: value for name, value in inputs.items() if name in taken}


def image_features(model: Any, pixels: dict[str, Any], **options: Any) -> Any:
    """Calls ``get_image_features`` of the base model with what it takes of a processor's output."""
    method = model.base_model.get_image_features
    names = inspect.signature(method).parameters
    return method(**{name: pixels[name] for name in names if name in pixels}, **options)


def _qwen(vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    text = TEXT | {"rope_parameters": ROPE} | text
    return {"text_config": text, "vision_config": PATCHES | vision, **TOKENS}


def _llava(text: dict[str, Any], vision: dict[str, Any], **options: Any) -> dict[str, Any]:
    tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    return {"text_config": text, "vision_config": vision, **tokens, **options}


_SQUARE = {"height": SIDE, "width": SIDE}
_QWEN = (
    "qwen2_vl.image_processing_pil_qwen2_vl",
    {
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
)
_TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": SIDE}}

FAMILIES = [
    Family(
        "Qwen2VLModel",
        lambda: transformers.Qwen2VLConfig(
            **_qwen({"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2})
        ),
        _QWEN,
        token_types="mm_token_type_ids",
    ),
    Family(
        "Qwen2_5_VLModel",
        lambda: transformers.Qwen2_5_VLConfig(
            **_qwen(
                {
                    "depth": 2,
                    "intermediate_size": 16,
                    "out_hidden_size": 32,
                    "window_size": 16,
                    "fullatt_block_indexes": [1],
                }
            )
        ),
        _QWEN,
        token_types="mm_token_type_ids",
    ),
    Family(
        "Qwen3VLModel",
        lambda: transformers.Qwen3VLConfig(
            **_qwen(
                {
                    "depth": 3,
                    "intermediate_size": 16,
                    "out_hidden_size": 32,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 1],
                },
                head_dim=8,
            )
        ),
        _QWEN,
        token_types="mm_token_type_ids",
    ),
    Family(
        "LlavaModel",
        lambda: transformers.LlavaConfig(**_llava(LLAMA, CLIP, image_seq_length=16)),
        (
            "clip.image_processing_pil_clip",
            {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
        ),
    ),
    Family(
        "LlavaNextModel",
        lambda: transformers.LlavaNextConfig(**_llava(LLAMA, CLIP, image_grid_pinpoints=PINPOINTS)),
        (
            "llava_next.image_processing_pil_llava_next",
            {
                "size": {"shortest_edge": SIDE},
                "crop_size": _SQUARE,
                "image_grid_pinpoints": PINPOINTS,
            },
        ),
    ),
    Family(
        "LlavaOnevisionModel",
        lambda: transformers.LlavaOnevisionConfig(
            **_llava(QWEN, SIGLIP, image_grid_pinpoints=PINPOINTS, video_token_id=VIDEO),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
        (
            "llava_onevision.image_processing_pil_llava_onevision",
            {"size": _SQUARE, "image_grid_pinpoints": PINPOINTS},
        ),
        by_sample=True,
    ),
    Family(
        "Gemma3Model",
        lambda: transformers.Gemma3Config(**_llava(GEMMA, SIGLIP, mm_tokens_per_image=4)),
        ("gemma3.image_processing_pil_gemma3", {"size": _SQUARE}),
        token_types="token_type_ids",
    ),
    Family(
        "InternVLModel",
        lambda: transformers.InternVLConfig(**_llava(QWEN, INTERN, image_seq_length=4)),
        (
            "got_ocr2.image_processing_pil_got_ocr2",
            {"size": _SQUARE, "crop_to_patches": True, "max_patches": 4},
        ),
    ),
    Family(
        "Idefics3Model",
        lambda: transformers.Idefics3Config(
            text_config=LLAMA,
            vision_config=SIGLIP | {"model_type": "idefics3_vision"},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        ("idefics3.image_processing_pil_idefics3", _TILES),
        by_sample=True,
    ),
    Family(
        "SmolVLMModel",
        lambda: transformers.SmolVLMConfig(
            text_config=LLAMA,
            vision_config=SIGLIP | {"model_type": "smolvlm_vision"},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        ("smolvlm.image_processing_pil_smolvlm", _TILES),
        by_sample=True,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}

PIXTRAL_FAMILY = Family(
    "LlavaModel",
    lambda: transformers.LlavaConfig(
        **_llava(LLAMA, PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full")
    ),
    ("pixtral.image_processing_pil_pixtral", {"size": {"longest_edge": 32}, "patch_size": 4}),
)


def llava_with_processor() -> tuple[Any, Any]:
    """Returns LLaVA with a whole processor, of images and of text, whose words mean nothing."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"<{number}>": number for number in range(64) if number != IMAGE} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pixels = BY_NAME["LlavaModel"].processor[1]
    template = (
        "{% for message in messages %}{{ message.role }}"
        "{% for part in message.content %}"
        "{{ ' <image> ' if part.type == 'image' else part.text }}"
        "{% endfor %} {% endfor %}"
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(**pixels),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<0>",
            unk_token="<2>",
            additional_special_tokens=["<image>"],
        ),
        patch_size=4,
        vision_feature_select_strategy="default",
        chat_template=template,
        num_additional_image_tokens=1,
    )
    return BY_NAME["LlavaModel"].model(), processor
