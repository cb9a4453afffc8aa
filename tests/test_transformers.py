"""The cache in models of ``transformers``: tiny ones, with the processors that they come with."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import run_python

from multimodal_cache import MultiModalStaticCache

pytest.importorskip("transformers", minversion="5.18", reason="of the extra transformers")

import transformers
from tiny_vlms import (
    BY_NAME,
    FAMILIES,
    IMAGE,
    PIXTRAL_FAMILY,
    Family,
    image_features,
    photograph,
)

from multimodal_cache.integrations import transformers as integration
from multimodal_cache.integrations._image_entries import packed, unpacked
from multimodal_cache.integrations._image_rules import MODELS
from multimodal_cache.integrations.transformers import (
    CachedImageFeatures,
    cache_image_features,
    encode_images,
)

ALL = pytest.mark.parametrize(
    "family",
    [*FAMILIES, PIXTRAL_FAMILY],
    ids=[*(family.name for family in FAMILIES), "LlavaModel with Pixtral"],
)
SMALL, LARGE, WIDE = photograph(0, 20, 20), photograph(1, 60, 60), photograph(2, 48, 24)
ROUNDING = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products take longer on several threads, where other programs run too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cache() -> MultiModalStaticCache:
    return MultiModalStaticCache(2**20)


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> list[list[int]]:
    ids = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
    return ids.tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).logits  # type: ignore[no-any-return]


def wrapped(model: Any, cache: MultiModalStaticCache, **options: Any) -> CachedImageFeatures:
    return cache_image_features(model, cache, namespace="tiny", **options)


@torch.no_grad()
def encoded(family: Family, model: Any, cache: MultiModalStaticCache, *samples: Any) -> int:
    """Returns how many images of a batch aren't in the cache, and encodes them."""
    with wrapped(model, cache) as handle:
        image_features(model, family.pixels(*samples))
        return handle.stats().encoded


def counted(model: Any) -> list[Any]:
    """Puts a list before ``get_image_features`` that gets the keywords of each call."""
    calls = []
    original = model.base_model.get_image_features

    @functools.wraps(original)
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return original(*args, **kwargs)

    model.base_model.get_image_features = count
    return calls


# Each family


@ALL
def test_tokens_and_logits_are_those_of_the_model_alone(
    family: Family, cache: MultiModalStaticCache
) -> None:
    model = family.model()
    inputs = family.inputs(model, [SMALL], [LARGE, WIDE])
    tokens, expected = generated(model, inputs), logits(model, inputs)
    calls = counted(model)
    with wrapped(model, cache) as handle:
        for turn in range(2):
            assert generated(model, inputs) == tokens
            torch.testing.assert_close(logits(model, inputs), expected, **ROUNDING)
            assert handle.stats().encoded == len(cache)
            if not turn:
                made = len(calls)
    assert len(calls) == made
    assert len(cache) >= 3
    cache.check()


@ALL
def test_an_image_is_encoded_once_also_in_another_batch_and_beside_larger_ones(
    family: Family, cache: MultiModalStaticCache
) -> None:
    model = family.model()
    small, large, wide = (
        encoded(family, model, MultiModalStaticCache(2**20), [image])
        for image in (SMALL, LARGE, WIDE)
    )
    assert encoded(family, model, cache, [SMALL]) == small
    assert encoded(family, model, cache, [SMALL], [LARGE], [SMALL]) == large
    assert encoded(family, model, cache, [LARGE], [WIDE], [SMALL]) == wide
    assert encoded(family, model, cache, [WIDE], [SMALL]) == 0


@ALL
def test_beam_search_finds_the_same_and_leaves_the_entries_as_they_are(
    family: Family, cache: MultiModalStaticCache
) -> None:
    model = family.model()
    inputs = family.inputs(model, [SMALL], [LARGE, WIDE])
    tokens = generated(model, inputs, num_beams=3)
    with wrapped(model, cache) as handle:
        for _ in range(2):
            assert generated(model, inputs, num_beams=3) == tokens
            assert handle.stats().encoded == len(cache)
        assert handle.stats().hits == len(cache)
    cache.check()


@ALL
def test_encode_images_puts_embeddings_in_the_place_of_pixels(
    family: Family, cache: MultiModalStaticCache
) -> None:
    model = family.model()
    inputs = transformers.BatchFeature(family.inputs(model, [SMALL], [LARGE, WIDE]))
    tokens, expected = generated(model, inputs), logits(model, inputs)
    names = set(inputs)
    for _ in range(2):
        given = encode_images(model, inputs, cache, namespace="tiny")
        assert type(given) is type(inputs)
        assert set(given) == names - {"pixel_values"} | {"mm_encoder_outputs"}
        assert generated(model, given) == tokens
        given = encode_images(model, inputs, cache, namespace="tiny")
        torch.testing.assert_close(logits(model, given), expected, **ROUNDING)
    assert set(inputs) == names
    assert "get_image_features" not in vars(model.base_model)


@ALL
def test_a_process_that_has_encoded_nothing_yet_reads_what_another_one_stored(
    family: Family, cache: MultiModalStaticCache
) -> None:
    inputs = family.inputs(family.model(), [SMALL], [LARGE, WIDE])
    tokens = generated(family.model(), inputs)
    with wrapped(first := family.model(), cache):
        generated(first, inputs)
    second = family.model()
    calls = counted(second)
    assert generated(second, encode_images(second, inputs, cache, namespace="tiny")) == tokens
    with wrapped(second, cache):
        assert generated(second, inputs) == tokens
    assert calls == []


@ALL
def test_the_output_is_what_the_model_gives_without_what_a_hit_has_not(
    family: Family, cache: MultiModalStaticCache
) -> None:
    model = family.model()
    pixels = family.pixels([SMALL], [LARGE, WIDE])
    with torch.no_grad():
        expected = image_features(model, pixels)
        with wrapped(model, cache):
            outputs = [image_features(model, pixels) for _ in range(2)]
    for output in outputs:
        kept = {"pooler_output", "deepstack_features"} & set(expected)
        assert set(output) == kept
        assert isinstance(output.pooler_output, torch.Tensor) == isinstance(
            expected.pooler_output, torch.Tensor
        )
        for name in kept:
            torch.testing.assert_close(flat(output[name]), flat(expected[name]), **ROUNDING)
    assert outputs[0] is not outputs[1]


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.ndim == 2:
        return [value]
    return [tensor for item in value for tensor in flat(item)]


def test_all_models_that_are_known_are_tested() -> None:
    assert set(MODELS) == set(BY_NAME)


# What an image is


def test_the_grid_is_a_part_of_the_image(cache: MultiModalStaticCache) -> None:
    family = BY_NAME["Qwen2VLModel"]
    model = family.model()
    pixels = family.pixels([WIDE])
    turned = {**pixels, "image_grid_thw": pixels["image_grid_thw"][:, [0, 2, 1]]}
    with torch.no_grad():
        expected = [image_features(model, each).pooler_output[0] for each in (pixels, turned)]
        assert not torch.equal(*expected)
        with wrapped(model, cache) as handle:
            found = [image_features(model, each).pooler_output[0] for each in (pixels, turned)]
    assert handle.stats().encoded == 2
    torch.testing.assert_close(found, expected, **ROUNDING)


@pytest.mark.parametrize("family", [PIXTRAL_FAMILY, BY_NAME["LlavaNextModel"]])
def test_padding_is_no_part_of_the_image(family: Family, cache: MultiModalStaticCache) -> None:
    model = family.model()
    pixels = family.pixels([SMALL], [WIDE], [LARGE])
    alone = family.pixels([WIDE])["pixel_values"][0]
    padding = torch.ones_like(pixels["pixel_values"][1], dtype=torch.bool)
    padding[tuple(slice(size) for size in alone.shape)] = False
    assert padding.any()
    with torch.no_grad(), wrapped(model, cache) as handle:
        expected = image_features(model, pixels).pooler_output
        pixels["pixel_values"][1][padding] = 7.0
        found = image_features(model, pixels).pooler_output
    assert handle.stats().encoded == 3
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["LlavaNextModel", "LlavaOnevisionModel"])
def test_patches_may_come_one_after_another(name: str, cache: MultiModalStaticCache) -> None:
    family = BY_NAME[name]
    model = family.model()
    padded = family.pixels([WIDE], [LARGE])
    counts = [3, 5]
    rows = [each[:count] for each, count in zip(padded["pixel_values"], counts, strict=True)]
    packed = {**padded, "pixel_values": torch.cat(rows)}
    with torch.no_grad(), wrapped(model, cache) as handle:
        first, second = (image_features(model, each).pooler_output for each in (padded, packed))
    assert (handle.stats().encoded, handle.stats().hits) == (2, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_an_image_of_several_in_a_sample_is_another_one_in_onevision(
    cache: MultiModalStaticCache,
) -> None:
    family = BY_NAME["LlavaOnevisionModel"]
    model = family.model()
    seen = []
    for samples, missing in (
        ([[SMALL]], 1),
        ([[SMALL, LARGE]], 2),  # not cut into patches
        ([[WIDE, SMALL]], 1),  # one of the two alone
        ([[WIDE], [LARGE, WIDE], [LARGE]], 2),
        ([[SMALL], [LARGE, WIDE, SMALL], [LARGE]], 0),
    ):
        pixels = family.pixels(*samples)
        with torch.no_grad():
            expected = image_features(model, pixels).pooler_output
            with wrapped(model, cache) as handle:
                found = image_features(model, pixels).pooler_output
        assert handle.stats().encoded == missing
        torch.testing.assert_close(found, expected, **ROUNDING)
        seen.append(found)
    with torch.no_grad(), wrapped(model, cache) as handle:
        single = family.pixels([WIDE])
        del single["batch_num_images"]
        image_features(model, single)
    assert handle.stats().hits == 1


@pytest.mark.parametrize("samples", [[1, 0], [0, 1], [0, 0, 2], [0]])
def test_a_sample_without_a_tile_has_no_embedding(
    samples: list[int], cache: MultiModalStaticCache
) -> None:
    family = BY_NAME["SmolVLMModel"]
    model = family.model()
    tiles = torch.rand(len(samples), 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for sample, count in enumerate(samples):
        tiles[sample, count:] = 0
    with torch.no_grad():
        expected = image_features(model, {"pixel_values": tiles}).pooler_output
        with wrapped(model, cache) as handle:
            found = image_features(model, {"pixel_values": tiles}).pooler_output
    assert handle.stats().encoded == sum(samples)
    torch.testing.assert_close(found, expected, **ROUNDING)


def test_a_tile_that_is_zero_for_the_model_is_padding(cache: MultiModalStaticCache) -> None:
    model = BY_NAME["Idefics3Model"].model().half()
    tiles = torch.full((1, 2, 3, 16, 16), 0.5)
    tiles[0, 1] = 1e-9
    with torch.no_grad(), wrapped(model, cache) as handle:
        (found,) = image_features(model, {"pixel_values": tiles}).pooler_output
    assert (len(found), handle.stats().encoded) == (4, 1)


def test_the_mask_of_a_tile_is_a_part_of_it(cache: MultiModalStaticCache) -> None:
    model = BY_NAME["Idefics3Model"].model()
    tiles, mask = torch.full((1, 1, 3, 16, 16), 0.5), torch.ones(1, 1, 16, 16, dtype=torch.long)
    half = mask.clone()
    half[..., 8:] = 0
    with torch.no_grad(), wrapped(model, cache) as handle:
        for each in (mask, half, mask, half):
            image_features(model, {"pixel_values": tiles, "pixel_attention_mask": each})
    assert (handle.stats().encoded, handle.stats().hits) == (2, 2)


@torch.no_grad()
def test_the_images_of_qwen3_s_videos_are_cached_too(cache: MultiModalStaticCache) -> None:
    family = BY_NAME["Qwen3VLModel"]
    model = family.model()
    pixels = family.pixels([SMALL], [LARGE])
    expected = image_features(model, pixels)
    with wrapped(model, cache) as handle:
        for _ in range(2):
            found = model.base_model.get_video_features(
                pixels["pixel_values"], pixels["image_grid_thw"]
            )
            torch.testing.assert_close(
                flat(found.deepstack_features), flat(expected.deepstack_features), **ROUNDING
            )
    assert (handle.stats().encoded, handle.stats().hits) == (2, 2)


# The key


@torch.no_grad()
def test_options_are_a_part_of_the_key_and_none_is_the_model_s_own(
    cache: MultiModalStaticCache,
) -> None:
    family = BY_NAME["LlavaModel"]
    model = family.model()
    pixels = family.pixels([SMALL])
    own = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    with wrapped(model, cache) as handle:
        for options in ({}, dict.fromkeys(own), own, {"vision_feature_layer": [-2, -1][0]}):
            image_features(model, pixels, **options)
        assert handle.stats().encoded == 1
        for options in ({"vision_feature_layer": -1}, {"vision_feature_select_strategy": "full"}):
            (found,) = image_features(model, pixels, **options).pooler_output
            (expected,) = handle.__wrapped__(**pixels, **options).pooler_output
            torch.testing.assert_close(found, expected, **ROUNDING)
        assert handle.stats().encoded == 3
        positional = model.base_model.get_image_features(pixels["pixel_values"], -1)
        assert handle.stats().encoded == 3
        assert len(positional.pooler_output) == 1


@torch.no_grad()
def test_namespace_class_dtype_and_autocast_are_a_part_of_the_key(
    cache: MultiModalStaticCache,
) -> None:
    smol, idefics = BY_NAME["SmolVLMModel"], BY_NAME["Idefics3Model"]
    pixels = smol.pixels([SMALL])
    model = smol.model()
    encode = functools.partial(encode_images, inputs=pixels, cache=cache)
    encode(model, namespace="a")
    tiles = len(cache)
    for number, (each, namespace) in enumerate(
        ((model, "b"), (model, b"a"), (idefics.model(), "a"), (smol.model().bfloat16(), "a")), 2
    ):
        encode(each, namespace=namespace)
        assert len(cache) == number * tiles
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encode(model, namespace="a")
    assert len(cache) == 6 * tiles
    encode(model, namespace="a")
    assert len(cache) == 6 * tiles


# When the original is called


LLAVA = BY_NAME["LlavaModel"]


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"return_dict": False},
        {"some_mask": torch.ones(1)},
        {"vision_feature_layer": torch.tensor(-2)},
        {"image_sizes": [[16, 16]]},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_is_not_known_goes_to_the_original(
    options: dict[str, Any], cache: MultiModalStaticCache
) -> None:
    base = LLAVA.model().base_model
    base.get_image_features = calls_of(base, lambda **kwargs: kwargs)
    given = {**LLAVA.pixels([SMALL]), **options}
    with wrapped(base, cache):
        assert base.get_image_features(**given) == given
    assert len(cache) == 0


def calls_of(base: Any, function: Any) -> Any:
    """Returns a function with the signature of ``get_image_features``."""

    @functools.wraps(base.get_image_features)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": False, "some_mask": None},
        {"use_cache": True},
        {"return_dict": None},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_changes_nothing_is_cached(
    options: dict[str, Any], cache: MultiModalStaticCache
) -> None:
    model = LLAVA.model()
    with wrapped(model, cache):
        image_features(model, LLAVA.pixels([SMALL]), **options)
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("config", "return_dict", False),
        ("config", "output_hidden_states", True),
        ("vision_config", "output_hidden_states", True),
        ("vision_config", "output_attentions", True),
    ],
)
@torch.no_grad()
def test_what_the_configuration_asks_for_is_not_left_out(
    where: str, name: str, value: bool, cache: MultiModalStaticCache
) -> None:
    model = LLAVA.model()
    model.set_attn_implementation("eager")
    config = model.base_model.config
    setattr(config if where == "config" else config.vision_config, name, value)
    with wrapped(model, cache):
        image_features(model, LLAVA.pixels([SMALL]))
    assert len(cache) == 0


def test_with_gradients_the_original_is_called(cache: MultiModalStaticCache) -> None:
    model = LLAVA.model()
    pixels = LLAVA.pixels([SMALL])
    with wrapped(model, cache):
        (found,) = image_features(model, pixels).pooler_output
        assert found.requires_grad
        model.requires_grad_(False)
        given = {"pixel_values": pixels["pixel_values"].clone().requires_grad_()}
        (found,) = image_features(model, given).pooler_output
        assert found.requires_grad
        assert len(cache) == 0
        (found,) = image_features(model, pixels).pooler_output
    assert not found.requires_grad
    assert len(cache) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen2VLModel", lambda pixels: {"image_grid_thw": pixels["image_grid_thw"] * 2}),
        ("Qwen2VLModel", lambda pixels: {"image_grid_thw": None}),
        ("LlavaNextModel", lambda pixels: {"pixel_values": pixels["pixel_values"][:, 0]}),
        ("LlavaNextModel", lambda pixels: {"image_sizes": pixels["image_sizes"].tolist()}),
        ("LlavaOnevisionModel", lambda pixels: {"batch_num_images": torch.tensor([3])}),
        ("LlavaOnevisionModel", lambda pixels: {"vision_aspect_ratio": torch.ones(1)}),
        ("LlavaModel", lambda pixels: {"image_sizes": torch.tensor([[16, 16]])}),
        ("LlavaModel", lambda pixels: {"vision_feature_layer": torch.tensor([-2])}),
        ("LlavaModel", lambda pixels: {"vision_feature_layer": object()}),
        ("SmolVLMModel", lambda pixels: {"pixel_values": pixels["pixel_values"][0]}),
        (
            "SmolVLMModel",
            lambda pixels: {"pixel_attention_mask": pixels["pixel_attention_mask"][:, 1:]},
        ),
        ("InternVLModel", lambda pixels: {"pixel_values": pixels["pixel_values"][:0]}),
        ("InternVLModel", lambda pixels: {"pixel_values": [*pixels["pixel_values"]]}),
    ],
)
@torch.no_grad()
def test_arguments_that_are_no_images_go_to_the_original(
    name: str, change: Any, cache: MultiModalStaticCache
) -> None:
    family = BY_NAME[name]
    base = family.model().base_model
    base.get_image_features = calls_of(base, lambda **kwargs: kwargs)
    pixels = family.pixels([SMALL], [LARGE])
    given = {**pixels, **change(pixels)}
    with wrapped(base, cache):
        assert set(image_features(base, given)) <= set(given)
    assert len(cache) == 0


def test_what_is_no_call_is_the_original_s_error(cache: MultiModalStaticCache) -> None:
    model = LLAVA.model()
    with wrapped(model, cache), pytest.raises(TypeError, match="pixel_values"):
        model.base_model.get_image_features()


# Other models


def paligemma() -> Any:
    torch.manual_seed(0)
    llava = LLAVA.configure()
    config = transformers.PaliGemmaConfig(
        text_config=BY_NAME["Gemma3Model"].configure().text_config,
        vision_config=BY_NAME["Gemma3Model"].configure().vision_config,
        image_token_id=llava.image_token_id,
        projection_dim=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config).eval()


def test_a_model_that_is_not_known_is_refused_by_name(cache: MultiModalStaticCache) -> None:
    with pytest.raises(TypeError, match=r"PaliGemmaModel isn't known: give rule=.*Qwen2VLModel"):
        wrapped(paligemma(), cache)
    with pytest.raises(ValueError, match="rule must be one of rows, grid, sizes, tiles, got 'row'"):
        wrapped(paligemma(), cache, rule="row")
    with pytest.raises(TypeError, match="PaliGemmaModel has no get_image_features with pixel_"):
        wrapped(paligemma(), cache, rule="grid")
    text = SimpleNamespace()
    text.base_model = text
    with pytest.raises(TypeError, match="SimpleNamespace has no get_image_features"):
        wrapped(text, cache, rule="rows")


@torch.no_grad()
def test_a_model_that_is_not_known_is_cached_by_a_rule(cache: MultiModalStaticCache) -> None:
    model = paligemma()
    pixels = BY_NAME["Gemma3Model"].pixels([SMALL], [LARGE])
    expected = image_features(model, pixels).pooler_output
    with wrapped(model, cache, rule="rows") as handle:
        for _ in range(2):
            found = image_features(model, pixels).pooler_output
            torch.testing.assert_close(found, expected, **ROUNDING)
    assert (handle.stats().encoded, handle.stats().hits) == (2, 2)


@torch.no_grad()
def test_tiles_with_a_tensor_that_is_not_known_go_to_the_original(
    cache: MultiModalStaticCache,
) -> None:
    base = LLAVA.model().base_model
    base.get_image_features = calls_of(base, lambda **kwargs: kwargs)
    given = {
        "pixel_values": torch.ones(1, 2, 3, 16, 16),
        "image_sizes": torch.tensor([[16, 16]]),
    }
    with wrapped(base, cache, rule="tiles"):
        assert image_features(base, given) == given
    assert len(cache) == 0


@torch.no_grad()
def test_tiles_of_unequal_length_are_an_error(cache: MultiModalStaticCache) -> None:
    base = LLAVA.model().base_model
    answer = SimpleNamespace(pooler_output=[torch.zeros(3, 8)])
    base.get_image_features = calls_of(base, lambda **kwargs: answer)
    tiles = torch.rand(1, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    with wrapped(base, cache, rule="tiles"), pytest.raises(ValueError, match="the rule doesn't"):
        base.get_image_features(tiles)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(3, 4, 8), r"expected \[tokens, hidden\] for each of 2 images, got \[\[4, 8\]"),
        (torch.zeros(2, 8), r"for each of 2 images, got \[\[8\], \[8\]\]"),
    ],
)
@torch.no_grad()
def test_a_rule_that_does_not_fit_the_output_is_an_error(
    output: torch.Tensor, message: str, cache: MultiModalStaticCache
) -> None:
    base = LLAVA.model().base_model
    answer = SimpleNamespace(pooler_output=output)
    base.get_image_features = calls_of(base, lambda **kwargs: answer)
    with wrapped(base, cache), pytest.raises(ValueError, match=message):
        base.get_image_features(torch.rand(2, 3, 16, 16, generator=torch.Generator()))
    assert len(cache) == 0


# What is stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [[1], [7], [300], [3584, 3584, 1], [65536, 255]], ids=str)
@pytest.mark.parametrize("tokens", [0, 5])
def test_an_entry_gives_back_what_was_put_in(
    widths: list[int], tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(tokens, width, generator=generator).to(dtype) for width in widths]
    for stacked in (True, False):
        entry = packed(parts, stacked=stacked)
        assert (entry.ndim, entry.dtype) == (2, dtype)
        assert unpacked(entry)[0] is stacked
        found = unpacked(entry)[1]
        assert len(found) == len(parts)
        assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


def test_layers_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="of one dtype"):
        packed([torch.zeros(2, 4), torch.zeros(2, 4).half()], stacked=False)


@torch.no_grad()
def test_half_precision_comes_back_as_it_is(cache: MultiModalStaticCache) -> None:
    family = BY_NAME["Qwen3VLModel"]
    model = family.model().bfloat16()
    pixels = family.pixels([SMALL])
    expected = image_features(model, pixels)
    with wrapped(model, cache):
        for _ in range(2):
            found = image_features(model, pixels)
            assert found.pooler_output[0].dtype == torch.bfloat16
            torch.testing.assert_close(
                flat(found.deepstack_features), flat(expected.deepstack_features), rtol=0, atol=0
            )


# The place


def test_it_is_in_one_model_until_it_is_removed(cache: MultiModalStaticCache) -> None:
    model, other = LLAVA.model(), LLAVA.model()
    original = model.base_model.get_image_features
    handle = wrapped(model, cache)
    assert model.base_model.get_image_features is handle
    assert inspect.signature(handle) == inspect.signature(original)
    assert handle.__name__ == "get_image_features"
    assert repr(handle).startswith("CachedImageFeatures(LlavaModel, EncoderStats(")
    assert "get_image_features" not in vars(other.base_model)
    for _ in range(2):
        handle.remove()
        assert "get_image_features" not in vars(model.base_model)
    assert model.base_model.get_image_features == original
    with wrapped(model.base_model, cache) as again:
        assert model.base_model.get_image_features is again
    assert "get_image_features" not in vars(model.base_model)


@torch.no_grad()
def test_a_second_one_is_refused_also_around_what_others_have_put_around_the_first(
    cache: MultiModalStaticCache,
) -> None:
    model = LLAVA.model()
    pixels = LLAVA.pixels([SMALL])
    first = wrapped(model, cache)
    with pytest.raises(RuntimeError, match="LlavaModel has a cache already"):
        wrapped(model.base_model, cache)
    calls = counted(model)
    with pytest.raises(RuntimeError, match="LlavaModel has a cache already"):
        wrapped(model, cache)
    image_features(model, pixels)
    assert len(cache) == 1
    first.remove()  # from under it
    cache.clear()
    image_features(model, pixels)
    assert (len(calls), len(cache)) == (2, 0)
    with wrapped(model, cache):
        image_features(model, pixels)
    assert (len(calls), len(cache)) == (3, 1)
    image_features(model, pixels)
    assert len(calls) == 4


@torch.no_grad()
def test_encode_images_goes_past_a_cache_in_the_model(cache: MultiModalStaticCache) -> None:
    model = LLAVA.model()
    inner = MultiModalStaticCache(2**20)
    pixels = LLAVA.pixels([SMALL])
    with wrapped(model, inner) as handle:
        encode_images(model, pixels, cache, namespace="tiny")
        assert (len(inner), len(cache), handle.stats().calls) == (0, 1, 0)


def test_a_model_with_a_cache_is_not_copied(cache: MultiModalStaticCache) -> None:
    model = LLAVA.model()
    with wrapped(model, cache):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"can't be copied: remove\(\) it first"):
                attempt(model)
    copy.deepcopy(model)


def test_inputs_without_pixels_stay_as_they_are(cache: MultiModalStaticCache) -> None:
    inputs = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": None}
    assert encode_images(LLAVA.model(), inputs, cache, namespace="tiny") == inputs


def test_other_modalities_that_are_encoded_stay(cache: MultiModalStaticCache) -> None:
    inputs = {**LLAVA.pixels([SMALL]), "mm_encoder_outputs": {"video": "a video"}}
    found = encode_images(LLAVA.model(), inputs, cache, namespace="tiny")["mm_encoder_outputs"]
    assert (set(found), found["video"]) == ({"image", "video"}, "a video")
    assert not found["image"].pooler_output[0].requires_grad


def test_a_store_is_passed_on(
    cache: MultiModalStaticCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    encoder = integration.CachedEncoder

    def make(*args: Any, **options: Any) -> Any:
        made.append(options.pop("store", None))
        return encoder(*args, **options)

    monkeypatch.setattr(integration, "CachedEncoder", make)
    model, store = LLAVA.model(), object()
    wrapped(model, cache, store=store).remove()
    wrapped(model, cache)
    encode_images(model, LLAVA.pixels([SMALL]), cache, namespace="tiny", store=store)
    assert made == [store, None, store]


def test_generate_asks_for_nothing_that_goes_to_the_original(
    cache: MultiModalStaticCache,
) -> None:
    model = LLAVA.model()
    inputs = LLAVA.inputs(model, [SMALL])
    assert IMAGE in inputs["input_ids"]
    with wrapped(model, cache) as handle:
        options = {"output_hidden_states": True, "return_dict_in_generate": True}
        model.generate(**inputs, max_new_tokens=1, **options)
    assert handle.stats().encoded == 1


# The module


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_outputs", None)
    spec = importlib.util.find_spec(integration.__name__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'multimodal-cache\[transformers\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_package_does_not_import_it() -> None:
    code = "import sys, multimodal_cache; print('transformers' in sys.modules)"
    assert run_python(code) == "False\n"
