"""The parts of the demonstration, ``python -m multimodal_cache``."""
