"""A byte-exact, thread-safe cache for the embeddings of vision, audio and video encoders."""

try:
    from multimodal_cache.base import (
        CombinedHash,
        EmbeddingResult,
        EmbeddingTypeError,
        MultimodalCache,
    )
    from multimodal_cache.encoder import CachedEncoder
    from multimodal_cache.keys import hash_feature
    from multimodal_cache.static_cache import MultiModalStaticCache
    from multimodal_cache.stats import CacheStats, EncoderStats
except KeyboardInterrupt:  # torch takes seconds
    from multimodal_cache._command import end_if_starting

    end_if_starting()
    raise


def __getattr__(name: str) -> str:
    if name == "__version__":  # looked up where somebody asks
        from importlib import metadata

        return metadata.version("multimodal-cache")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CacheStats",
    "CachedEncoder",
    "CombinedHash",
    "EmbeddingResult",
    "EmbeddingTypeError",
    "EncoderStats",
    "MultiModalStaticCache",
    "MultimodalCache",
    "hash_feature",
]
