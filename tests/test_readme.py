"""The README says what is true."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import multimodal_cache

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_code_runs_as_written_from_the_first_block_to_the_last() -> None:
    namespace: dict[str, Any] = {}
    code = blocks("python")
    assert len(code) == 2
    for block in code:
        exec(compile(block, str(README), "exec"), namespace)


def test_there_is_one_command_for_the_demonstration_and_one_for_the_tests() -> None:
    assert blocks("sh") == [
        'python -m pip install ".[demo]" && python -m multimodal_cache\n',
        'python -m pip install ".[test]" && python -m pytest\n',
    ]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_each_file_that_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_package_tells_its_version() -> None:
    assert multimodal_cache.__version__ == metadata.version("multimodal-cache")
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        _ = multimodal_cache.version
