"""What one of vLLM's workers keeps in host memory. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from multimodal_cache.integrations import _vllm_pages
from multimodal_cache.integrations._vllm_index import PAGE
from multimodal_cache.integrations._vllm_pages import Pages


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found.dtype, found.device, found.shape) == (
        expected.dtype,
        expected.device,
        expected.shape,
    ) and torch.equal(
        found.contiguous().view(-1).view(torch.uint8),
        expected.contiguous().view(-1).view(torch.uint8),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "rows", [0, 1, 1023, PAGE // 256, PAGE // 256 + 1], ids=lambda rows: f"{rows} rows"
)
def test_what_comes_back_is_byte_for_byte_what_was_saved(
    rows: int, dtype: torch.dtype, device: str
) -> None:
    pages = Pages()
    batch = random(2 * rows, 64, dtype=dtype, device=device)
    tensor = batch[rows:]
    expected = tensor.clone()
    assert pages.save(7, tensor, limit=4 * PAGE) == tensor.nbytes
    batch.zero_()
    assert same(pages.load(7), expected)
    pages.load(7).zero_()
    assert same(pages.load(7), expected)


def test_strides_do_not_matter() -> None:
    pages = Pages()
    tensor = random(64, 32).t()
    pages.save(0, tensor, limit=PAGE)
    assert same(pages.load(0), tensor)


def test_what_takes_more_than_its_limit_is_not_kept() -> None:
    pages = Pages()
    tensor = random(1, PAGE // 4 + 1)
    assert pages.save(0, tensor, limit=PAGE) == tensor.nbytes
    assert pages.size == 0
    with pytest.raises(KeyError):
        pages.load(0)


def test_a_slot_keeps_what_it_has() -> None:
    pages = Pages()
    first = random(4, 4)
    pages.save(0, first, limit=PAGE)
    assert pages.save(0, random(2, 2), limit=PAGE) == first.nbytes
    assert same(pages.load(0), first)


def test_evicted_slots_are_empty_and_others_stay() -> None:
    pages = Pages()
    for slot in range(3):
        pages.save(slot, random(slot + 1, 4), limit=PAGE)
    assert pages.size == 3 * PAGE
    pages.evict([0, 2, 99])
    assert pages.size == PAGE
    assert same(pages.load(1), random(2, 4))


def test_without_memory_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out_of_memory(pinned: bool) -> torch.Tensor:
        raise RuntimeError("out of memory")

    pages = Pages()
    monkeypatch.setattr(_vllm_pages, "_new_page", out_of_memory)
    assert pages.save(0, random(4, 4), limit=PAGE) is None
    assert pages.size == 0
    assert caplog.messages == ["no host memory to keep an item of 64 bytes: out of memory"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_is_copied_from_cuda_is_kept_in_pinned_memory() -> None:
    pages = Pages()
    pages.save(0, random(4, 4, device="cuda"), limit=PAGE)
    assert all(page.is_pinned() for page in pages._items[0].pages)
