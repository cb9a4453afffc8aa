"""Images of an unmodified model of Hugging Face ``transformers``, from a cache.

A conversation over the same images encodes them again at every turn. Here each image is encoded
once, in either of two ways: ``cache_image_features`` puts a cache into a model, so that
``generate`` and ``forward`` use it; ``encode_images`` changes no model, and puts the embeddings of
the images in the place of their pixels.

One entry is one image, or one tile where a model has tiles: what else is in a batch, and how it is
padded, doesn't count.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from multimodal_cache._modes import outside_graphs
from multimodal_cache.base import MultimodalCache
from multimodal_cache.encoder import CachedEncoder
from multimodal_cache.integrations._image_entries import grouped, packed, unpacked
from multimodal_cache.integrations._image_rules import MODELS, RULES, Image, Rule
from multimodal_cache.keys import hash_feature
from multimodal_cache.stats import EncoderStats

try:
    from transformers.modeling_outputs import BaseModelOutputWithPooling
except ImportError as error:
    raise ImportError(
        "multimodal_cache.integrations.transformers needs transformers: "
        "pip install 'multimodal-cache[transformers]'"
    ) from error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from multimodal_cache.stores import EmbeddingStore

_METHOD = "get_image_features"
_PLAIN = (torch.Tensor, bool, int, float, str, list, tuple)


def cache_image_features(
    model: PreTrainedModel,
    cache: MultimodalCache,
    *,
    namespace: str | bytes,
    rule: str | None = None,
    store: EmbeddingStore | None = None,
) -> CachedImageFeatures:
    """Puts a cache into a model: an image that is there isn't encoded.

    It takes the place of ``get_image_features`` of ``model.base_model``, an attribute of that
    object alone, which ``generate`` and ``forward`` call; until ``remove()``, or the end of the
    ``with`` block. No other thread may run the model while it is put there or removed.

    Args:
        model: One of Gemma3, Idefics3, InternVL, LLaVA, LLaVA-NeXT, LLaVA-OneVision, Qwen2-VL,
            Qwen2.5-VL, Qwen3-VL and SmolVLM, with or without its head; or another, with ``rule``.
        cache: As for ``CachedEncoder``. Entries are embeddings with a header in front: they are
            of use here alone.
        namespace: What changes the embeddings and isn't in the arguments: the name of the model
            and the version of its weights, adapters too, and of its configuration. After they
            have changed, ``clear()`` the cache. The class and the dtype of the model, autocast,
            and the options of the call are a part of each key anyway.
        rule: What an image is in the arguments and the output of ``get_image_features``, for a
            model that isn't in the list. Nothing in a tensor shows it: a wrong one gives
            embeddings of other images.

            - ``"rows"``: row i of every tensor;
            - ``"grid"``: the next ``image_grid_thw[i].prod()`` rows of ``pixel_values``;
            - ``"sizes"``: row i of ``pixel_values``, less its padding, and ``image_sizes[i]``;
            - ``"tiles"``: one tile that isn't all zero, and its mask; an output is a sample.
        store: As for ``CachedEncoder``.

    Returns:
        What is now in the place of ``get_image_features``, with ``stats()`` and ``remove()``.

    Raises:
        TypeError: The model isn't known and has no ``rule``, or has no ``get_image_features``
            with the arguments of the rule. Or as for ``CachedEncoder``.
        ValueError: There is no such rule.
        RuntimeError: The model has a cache already.
    """
    features = CachedImageFeatures(model, cache, namespace=namespace, rule=rule, store=store)
    features.put()
    return features


@torch.no_grad()
def encode_images(
    model: PreTrainedModel,
    inputs: Any,
    cache: MultimodalCache,
    *,
    namespace: str | bytes,
    rule: str | None = None,
    store: EmbeddingStore | None = None,
) -> Any:
    """Puts the embeddings of images in the place of their pixels.

    Nothing is changed on the model, and no graph is made. What ``forward`` and ``generate`` take
    beside the pixels, such as ``image_grid_thw``, stays.

    Args:
        model: As for ``cache_image_features``.
        inputs: What a processor returns, on the model's device: a ``BatchFeature`` or a dict.
            It is left as it is.
        cache: As for ``cache_image_features``.
        namespace: As for ``cache_image_features``; with the same one, both find each other's.
        rule: As for ``cache_image_features``.
        store: As for ``CachedEncoder``.

    Returns:
        A shallow copy of ``inputs`` with ``mm_encoder_outputs={"image": ...}`` and without
        ``pixel_values``; or with neither, where there are no pixels. Use it once: beam search
        changes what is in it.

    Raises:
        TypeError: As for ``cache_image_features``.
        ValueError: As for ``cache_image_features``.
    """
    features = CachedImageFeatures(model, cache, namespace=namespace, rule=rule, store=store)
    encoded = copy.copy(inputs)
    if encoded.get("pixel_values") is None:
        return encoded
    names = inspect.signature(features).parameters
    output = features(**{name: encoded[name] for name in names if name in encoded})
    del encoded["pixel_values"]
    encoded["mm_encoder_outputs"] = {**(encoded.get("mm_encoder_outputs") or {}), "image": output}
    return encoded


class CachedImageFeatures:
    """Stands in for ``get_image_features`` of one model; made by ``cache_image_features``.

    A call returns a new ``ModelOutput`` with ``pooler_output``, and ``deepstack_features`` where
    the model has them: nothing else, so no ``last_hidden_state``, whether an image was cached or
    not. The tensors in it may be the cache's own: treat them as read-only.

    The original is called, and nothing is cached,

    - where gradients are on, and a parameter of the model or an argument requires them: run
      ``forward`` under ``torch.no_grad()``, as ``generate`` does by itself;
    - where hidden states or attentions are asked for, by a keyword or by the configuration;
    - with ``return_dict=False``;
    - with any other keyword that isn't in its signature, unless that is None or False, or
      ``use_cache``; and with arguments that the rule doesn't know.

    Embeddings differ by rounding from those of the uncached batch, since what is missing is
    encoded in a batch of another size: up to 2e-5 in float32. Dropout in a model that isn't in
    ``eval()`` mode isn't drawn anew on a hit.

    Any number of threads may call it, as far as the model allows. It can't be copied or pickled,
    nor can a model that it is in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: MultimodalCache,
        *,
        namespace: str | bytes,
        rule: str | None,
        store: EmbeddingStore | None,
    ) -> None:
        base = model.base_model
        self._rule = _rule_for(base, rule)
        original: Any = getattr(base, _METHOD)
        if isinstance(original, CachedImageFeatures):
            original = original._original
        functools.update_wrapper(self, original)  # `generate` reads its signature
        self._original: Any = original
        self._signature = inspect.signature(original)
        self._model = base
        self._namespace = namespace
        self._previous: Any = None
        self._removed = False
        self._encoder = CachedEncoder(
            cache, self._encode, namespace=namespace, key=self._key, store=store
        )

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what ``get_image_features`` does, as far as the class says."""
        arguments = self._cacheable(args, kwargs)
        groups = None if arguments is None else self._rule.split(self._model, arguments)
        images = list(itertools.chain.from_iterable(groups or ()))
        if groups is None or not images:
            return self._original(*args, **kwargs)
        entries = [unpacked(entry) for entry in self._encoder(images)]
        stacked, _ = entries[0]
        # Tiles that are stacked, as in transformers 5.18, are an output each.
        counts = [1] * len(images) if stacked else [len(group) for group in groups]
        columns = zip(*(parts for _, parts in entries), strict=True)
        embeddings, *layers = [grouped(column, counts) for column in columns]
        return _output(torch.stack(embeddings) if stacked else embeddings, layers)

    def put(self) -> None:
        """Takes the place of the original. ``cache_image_features`` does it."""
        found = getattr(self._model, _METHOD)
        if isinstance(inspect.unwrap(found, stop=_is_in_place), CachedImageFeatures):
            raise RuntimeError(f"{type(self._model).__name__} has a cache already: remove() it")
        self._previous = vars(self._model).get(_METHOD)
        setattr(self._model, _METHOD, self)

    def remove(self) -> None:
        """Gives the model its own ``get_image_features`` back; a second call does nothing.

        What others have put around it meanwhile stays, and reaches the original.
        """
        self._removed = True
        if vars(self._model).get(_METHOD) is self:
            delattr(self._model, _METHOD)
            if self._previous is not None:
                setattr(self._model, _METHOD, self._previous)

    def stats(self) -> EncoderStats:
        """Returns a consistent snapshot of the counters, of images that could be cached."""
        return self._encoder.stats()

    def __enter__(self) -> CachedImageFeatures:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._model).__name__}, {self.stats()!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} and its model can't be copied: remove() it first")

    def _cacheable(self, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """Returns the arguments, as the model resolves them; None where the original is called."""
        if self._removed:
            return None
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None  # the original says why
        config = self._model.config
        if not _wants_only_embeddings(config, given.pop("kwargs", {})):
            return None
        arguments = {}
        for name in self._signature.parameters:
            value = given.get(name)
            value = getattr(config, name, None) if value is None else value
            if value is not None:
                arguments[name] = value
        if not all(isinstance(value, _PLAIN) for value in arguments.values()):
            return None
        tensors = [arguments.get(name) for name in self._rule.tensors]
        if not all(isinstance(each, torch.Tensor) and each.numel() for each in tensors):
            return None
        return None if self._needs_graph(arguments) else arguments

    def _needs_graph(self, arguments: dict[str, Any]) -> bool:
        tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in itertools.chain(tensors, self._model.parameters())
        )

    def _key(self, image: Image) -> int:
        device = image["pixel_values"].device.type
        autocast = torch.is_autocast_enabled(device)
        dtypes = [self._model.dtype, torch.get_autocast_dtype(device) if autocast else None]
        names = [type(self._model).__name__, *map(str, dtypes)]
        return hash_feature([names, image], namespace=self._namespace)

    def _encode(self, images: list[Image]) -> list[torch.Tensor]:
        entries = []
        # Images of one call have the same options, but for this one.
        for _, group in itertools.groupby(images, lambda image: image.get("batch_num_images")):
            entries += self._encode_alike(list(group))
        return entries

    def _encode_alike(self, images: list[Image]) -> list[torch.Tensor]:
        output = self._original(**self._rule.join(images), return_dict=True)
        embeddings = output.pooler_output
        parts = [
            self._rule.parts(each, images)
            for each in (embeddings, *(getattr(output, "deepstack_features", None) or ()))
        ]
        stacked = isinstance(embeddings, torch.Tensor)
        return [packed(each, stacked=stacked) for each in zip(*parts, strict=True)]


def _rule_for(base: Any, name: str | None) -> Rule:
    model = type(base).__name__
    if name is None:
        rule = MODELS.get(model)
        if rule is None:
            raise TypeError(
                f"{model} isn't known: give rule=, one of {', '.join(RULES)}. "
                f"Known are {', '.join(MODELS)}"
            )
        return rule
    rule = RULES.get(name)
    if rule is None:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {name!r}")
    method = getattr(base, _METHOD, None)
    if method is None or not set(rule.tensors) <= set(inspect.signature(method).parameters):
        raise TypeError(f"{model} has no {_METHOD} with {', '.join(rule.tensors)}")
    return rule


def _is_in_place(function: Any) -> bool:
    return isinstance(function, CachedImageFeatures) and not function._removed


def _wants_only_embeddings(config: Any, keywords: dict[str, Any]) -> bool:
    """Whether a ``ModelOutput`` with the embeddings alone is all that was asked for."""
    return_dict = keywords.pop("return_dict", None)
    keywords.pop("use_cache", None)  # which `forward` of some versions passes on
    if not (config.return_dict if return_dict is None else return_dict):
        return False
    if any(value is not None and value is not False for value in keywords.values()):
        return False
    configs = (config, getattr(config, "vision_config", None))
    return not any(
        getattr(each, name, False)
        for each in configs
        for name in ("output_hidden_states", "output_attentions")
    )


def _output(embeddings: Any, layers: list[list[torch.Tensor]]) -> Any:
    """Returns a new output, since beam search changes it in place."""
    if not layers:
        return BaseModelOutputWithPooling(pooler_output=embeddings)
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    return modeling_qwen3_vl.BaseModelOutputWithDeepstackFeatures(
        pooler_output=embeddings, deepstack_features=layers
    )
