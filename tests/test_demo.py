"""The demonstration, ``python -m multimodal_cache``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import DEVICES

from multimodal_cache import EmbeddingResult, MultiModalStaticCache
from multimodal_cache.__main__ import main
from multimodal_cache._demo import images, serving
from multimodal_cache._demo.encoder import NUM_TOKENS, WIDTH, VisionTransformer


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A folder with an image of each format, and other files."""
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    pixels.save(tmp_path / "a.png")
    pixels.save(tmp_path / "b.JPG", format="JPEG")
    pixels.save(tmp_path / "c.webp")
    pixels.quantize(16).save(tmp_path / "d.gif", transparency=3)
    pixels.convert("L").save(tmp_path / "e.jpeg")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "folder.png").mkdir()
    return tmp_path


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--json", *arguments]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_the_figures_agree_with_each_other(capsys: pytest.CaptureFixture[str], device: str) -> None:
    shown = figures(capsys, "--requests", "8", "--device", device)
    assert shown["requests"] == shown["encoder_calls_without"] == 8
    assert shown["encoder_calls_with"] <= shown["images_encoded_with"]
    assert shown["images_encoded_with"] + shown["hits"] == shown["images_encoded_without"]
    assert 1 <= shown["images_encoded_with"] < shown["images_encoded_without"] <= 24
    assert shown["hit_rate"] == shown["hits"] / shown["images_encoded_without"] > 0
    assert shown["bytes_held"] % (NUM_TOKENS * WIDTH * 4) == 0 < shown["bytes_held"]
    assert shown["max_size"] == 64 * 2**20
    assert shown["speed_up"] == shown["seconds_without"] / shown["seconds_with"]
    assert shown["largest_difference"] <= serving.TOLERANCE
    assert (shown["device"], shown["images"], shown["evictions"]) == (device, 12, 0)


def test_the_same_seed_draws_the_same_requests() -> None:
    drawn = serving.plan_requests(40, num_images=12, seed=1)
    assert serving.plan_requests(40, num_images=12, seed=1) == drawn
    assert serving.plan_requests(40, num_images=12, seed=2) != drawn
    assert {len(request) for request in drawn} == {1, 2, 3}
    assert all(len(set(request)) == len(request) for request in drawn)
    assert len(set(drawn)) <= 10
    assert serving.plan_requests(3, num_images=1, seed=0) == [(0,)] * 3


def test_a_small_budget_evicts_and_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    shown = figures(capsys, "--requests", "12", "--max-size", "0.9")
    assert shown["evictions"] > 0
    assert shown["bytes_held"] <= shown["max_size"] == int(0.9 * 2**20)


def test_a_budget_of_zero_encodes_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    shown = figures(capsys, "--requests", "3", "--max-size", "0")
    assert (shown["encoder_calls_with"], shown["bytes_held"]) == (3, 0)


def test_image_files_of_all_formats_are_read(
    capsys: pytest.CaptureFixture[str], photographs: Path
) -> None:
    shown = figures(capsys, "--images", str(photographs), "--requests", "3")
    assert shown["images"] == 5


def test_files_keep_their_pixels(photographs: Path) -> None:
    paths = images.find_images(photographs)
    assert [path.name for path in paths] == ["a.png", "b.JPG", "c.webp", "d.gif", "e.jpeg"]
    read = images.read_images(paths)
    assert {(tuple(image.shape), image.dtype) for image in read} == {((3, 224, 224), torch.uint8)}
    png, grey = read[0].float(), read[4].float()
    assert torch.equal(grey[0], grey[2])
    with Image.open(paths[0]) as image:
        assert png.mean().item() == pytest.approx(np.asarray(image).mean(), abs=1)


def test_the_same_picture_in_two_files_is_one_image(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pixels = Image.fromarray(np.arange(3 * 400, dtype=np.uint8).reshape(20, 20, 3))
    pixels.save(tmp_path / "a.png")
    pixels.save(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to(tmp_path / "a.png")
    shown = figures(capsys, "--images", str(tmp_path), "--requests", "6", "--seed", "3")
    assert shown["encoder_calls_with"] + shown["hits"] == 6


def test_sixteen_bits_a_pixel_are_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    (read,) = images.read_images([tmp_path / "ramp.png"])
    assert read.float().mean().item() == pytest.approx(127, abs=2)
    assert read.min() <= 2
    assert read.max() >= 253


def test_the_table_says_what_the_figures_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "4"]) == 0
    table = capsys.readouterr().out
    for row in (
        r"requests +4 +4",
        r"encoder calls +4 +1",
        r"images encoded +8 +2",
        r"hit rate +- +75.0%",
        r"bytes held / budget +- +0.6 / 64.0 MiB",
        r"seconds +\d+\.\d\d +\d+\.\d\d",
        r"speed-up +1.0x +\d+\.\dx",
        r"all 6 hits equal what was encoded, bit for bit; the embeddings of both runs (are|diff)",
    ):
        assert re.search(row, table), row


REQUESTS = "a whole number from 1 to 999999"
MIB = "MiB, from 0 to 2**40"
SEED = "a whole number to 999999999"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *[("--requests", value, REQUESTS) for value in ("0", "-3", "2.5", "x", "1000000")],
        *[("--max-size", value, MIB) for value in ("-1", "nan", "inf", "1e308", "big")],
        *[("--seed", value, SEED) for value in ("-1", "x", "1000000000")],
    ],
)
def test_a_bad_number_gets_one_line_and_status_2(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        error_of(capsys, option, value) == f"argument {option}: expected {expected}, got {value!r}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "toaster"], "--device: expected cpu, cuda or cuda:N, got 'toaster'"),
        (["--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda:99"], "--device: there is no cuda:99 on this machine"),
        (["--images", "/no/such/folder"], "--images: expected a folder, got /no/such/folder"),
        (["--images", "two\nlines"], "--images: expected a folder, got two lines"),
        (["--images", "x" * 300], f"--images: can't read {'x' * 300}: File name too long"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_bad_argument_gets_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, *arguments) == message


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the demonstration and returns the one line in which it fails with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    prefix, _, message = captured.err.partition(": error: ")
    assert (prefix, captured.out, message.count("\n")) == ("python -m multimodal_cache", "", 1)
    return message.removesuffix("\n")


def broken_files() -> dict[str, bytes]:
    return {
        "empty.png": b"",
        "text.jpg": b"this is no image\n" * 9,
        "header.png": b"\x89PNG\r\n\x1a\n" + bytes(40),
        "header.gif": b"GIF89a" + b"\xff" * 20,
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_broken_image_is_named_in_one_line(
    name: str, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photographs / name).write_bytes(broken_files()[name])
    message = error_of(capsys, "--images", str(photographs))
    assert message.startswith(f"--images: can't read {photographs / name} as an image: ")


def test_a_truncated_image_is_named_in_one_line(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (photographs / "b.JPG").read_bytes()
    (photographs / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    assert "cut.jpg as an image: " in error_of(capsys, "--images", str(photographs))


def test_a_folder_without_images_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, "--images", str(tmp_path)).endswith(f".webp file in {tmp_path}")


def test_without_pillow_it_says_how_to_get_it(
    photographs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    message = error_of(capsys, "--images", str(photographs))
    assert message == "--images needs Pillow: pip install pillow"


def test_without_tqdm_it_runs_without_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert figures(capsys, "--requests", "1")["hits"] == 0


class Forgetful(MultiModalStaticCache):
    """Returns wrong embeddings."""

    def get_single(self, mm_hash: Any) -> EmbeddingResult | None:
        found = super().get_single(mm_hash)
        if found is not None:
            wrong = found.embedding.clone()
            wrong.view(torch.int32)[-1, -1] ^= 1  # one bit
            found = EmbeddingResult(embedding=wrong)
        return found


def test_one_wrong_bit_of_a_hit_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multimodal_cache.__main__.MultiModalStaticCache", Forgetful)
    assert main(["--requests", "4"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"the cache is wrong: image \d+ got what wasn't encoded for it", captured.err)


def test_runs_that_differ_are_found() -> None:
    one, other = (serving.Run(1, 1, 1.0, {0: torch.full((2, 2), x)}) for x in (0.0, 0.1))
    assert serving.largest_difference(one, one) == 0.0
    with pytest.raises(serving.WrongEmbeddingError, match="differ by 0.1"):
        serving.largest_difference(one, other)
    nan = serving.Run(1, 1, 1.0, {0: torch.full((2, 2), float("nan"))})
    with pytest.raises(serving.WrongEmbeddingError):
        serving.largest_difference(one, nan)


@pytest.mark.parametrize("device", DEVICES)
def test_the_encoder_is_a_vision_transformer_with_seeded_weights(device: str) -> None:
    state = torch.random.get_rng_state()
    encoders = [VisionTransformer(seed).eval().to(device) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    parameters = sum(p.numel() for p in encoders[0].parameters())
    assert 21e6 < parameters < 23e6  # as ViT-S/16
    pixels = torch.stack(images.make_images(2, seed=0)).to(device)
    with torch.inference_mode():
        outputs = [encoder(pixels) for encoder in encoders]
    assert outputs[0].shape == (2, NUM_TOKENS, WIDTH)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=0.1)
    assert not torch.allclose(outputs[0][0], outputs[0][1], atol=0.1)


def test_the_library_imports_nothing_but_its_dependencies() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import multimodal_cache\n"
        "print(sorted(set(sys.modules) - before))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = [
        "",
        "._errors",
        "._images",
        "._modes",
        "._orientation",
        "._outputs",
        "._ownership",
        "._tensors",
        "._turns",
        ".base",
        ".encoder",
        ".keys",
        ".static_cache",
        ".stats",
    ]
    names = ["blake3", "blake3.blake3", *(f"multimodal_cache{name}" for name in own)]
    assert shown.stdout == f"{names}\n"


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "multimodal_cache", "--requests", "2", "--device", "cpu"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "encoder calls" in shown.stdout
    assert shown.stderr == ""
