"""The demonstration, ``python -m multimodal_cache``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib import metadata
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
    ratio = shown["images_encoded_without"] / shown["images_encoded_with"]
    assert shown["encode_ratio"] == ratio > 1
    assert shown["left_out"] == []
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
    read, left_out = images.read_images(paths)
    assert left_out == []
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


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L", "I"])
def test_sixteen_bits_a_pixel_are_scaled(mode: str, tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64)
    dtype = {"I;16B": ">u2", "I": "<i4"}.get(mode, "<u2")
    path = tmp_path / "ramp.png"  # Pillow goes by what is in it
    Image.frombytes(mode, (64, 64), ramp.astype(dtype).tobytes()).save(path, "TIFF")
    with Image.open(path) as image:
        assert image.mode in (mode, "I;16")
    read = read_one(path).float()
    assert read.mean().item() == pytest.approx(127, abs=2)
    assert read[:, 0].max() <= 4
    assert read[:, -1].min() >= 251


def test_big_endian_files_of_sixteen_bits_are_what_pillow_calls_so(tmp_path: Path) -> None:
    # That the test above tests what it says, whatever modes Pillow writes.
    path = tmp_path / "ramp.png"
    Image.frombytes("I;16B", (2, 2), bytes(8)).save(path, "TIFF")
    with Image.open(path) as image:
        assert image.mode == "I;16B"


def read_one(path: Path) -> torch.Tensor:
    (read,), left_out = images.read_images([path])
    assert left_out == []
    return read


STORED = {  # how the sensor sees a photograph of each orientation
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
def test_photographs_are_turned_upright(orientation: int, tmp_path: Path) -> None:
    corners = np.array([[10, 90], [170, 250]], dtype=np.uint8).repeat(32, 0).repeat(32, 1)
    upright = Image.fromarray(corners)
    method = STORED[orientation]
    stored = upright if method is None else upright.transpose(method)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "stored.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    assert torch.equal(read_one(tmp_path / "stored.png"), read_one(tmp_path / "upright.png"))


def test_a_photograph_whose_exif_data_are_malformed_is_read(tmp_path: Path) -> None:
    pixels = Image.new("RGB", (8, 8), (10, 20, 30))
    pixels.save(tmp_path / "a.png", exif=b"Exif\0\0not EXIF")
    with Image.open(tmp_path / "a.png") as image, pytest.raises(SyntaxError):
        image.getexif()
    assert read_one(tmp_path / "a.png")[:, 0, 0].tolist() == [10, 20, 30]


def test_the_table_says_what_the_figures_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "4"]) == 0
    table = capsys.readouterr().out
    for row in (
        r"requests +4 +4",
        r"encoder calls +4 +1",
        r"images encoded +8 +2",
        r"hit rate +- +75.0%",
        r"bytes held / budget +- +0.6 / 64.0 MiB",
        r"fewer encoded +1.0x +4.0x",
        r"seconds +\d+\.\d\d +\d+\.\d\d",
        r"speed-up +1.0x +\d+\.\dx",
        r"all 6 hits equal what was encoded, bit for bit; the embeddings of both runs (are|diff)",
    ):
        assert re.search(row, table), row


def test_a_trace_of_it_says_how_large_the_cache_should_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, entry = tmp_path / "t 1.csv", NUM_TOKENS * WIDTH * 4
    shown = figures(capsys, "--requests", "12", "--max-size", "0.9", "--trace", str(path))
    assert shown["trace"] == str(path)
    assert main(["plan", str(path), "--max-size", "0.9", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["requests"] == shown["images_encoded_without"]
    assert planned["today"]["hits"] == shown["hits"]
    assert planned["largest"] == entry
    assert main(["--requests", "1", "--trace", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"? python -m multimodal_cache plan '{path}'")


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
        (
            ["--trace", "/no/such/t.csv"],
            "--trace: can't write /no/such/t.csv: No such file or directory",
        ),
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


def add_broken_files(folder: Path) -> list[str]:
    """Adds files that can't be read as images; returns their names, sorted."""
    broken = broken_files()
    whole = (folder / "b.JPG").read_bytes()
    broken["cut.jpg"] = whole[: len(whole) // 2]
    broken["._b.JPG"] = b"\0\x05\x16\x07\0\x02\0\0Mac OS X        " + bytes(80)
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    (folder / "nowhere.png").symlink_to(folder / "no such file")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    return sorted([*broken, "nowhere.png", "loop.png"])


def test_what_can_be_read_is_served_and_the_rest_is_named(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = add_broken_files(photographs)
    assert main(["--images", str(photographs), "--requests", "2", "--json"]) == 0
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert shown["images"] == 5
    assert [file["file"] for file in shown["left_out"]] == names
    reasons = {file["file"]: file["reason"] for file in shown["left_out"]}
    assert reasons["nowhere.png"] == "No such file or directory"
    assert captured.err.splitlines() == [
        f"python -m multimodal_cache: left out {name}: {reasons[name]}" for name in names
    ]


def test_the_table_says_how_many_were_left_out(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photographs / "two\nlines.png").write_bytes(b"")
    assert main(["--images", str(photographs), "--requests", "1"]) == 0
    captured = capsys.readouterr()
    assert re.match(r"ViT-S/16 on \w+, 5 images, 1 left out\n", captured.out)
    assert captured.err.startswith("python -m multimodal_cache: left out two lines.png: cannot ")
    assert captured.err.count("\n") == 1


def test_many_files_that_are_left_out_are_no_flood(
    photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(25):
        (photographs / f"{number:02}.png").write_bytes(b"")
    assert main(["--images", str(photographs), "--requests", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert "left out 09.png: " in lines[9]
    assert lines[10] == "python -m multimodal_cache: left out 15 more, which --json lists"


@pytest.mark.parametrize("name", broken_files())
def test_where_nothing_is_left_one_line_says_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(broken_files()[name])
    (tmp_path / "zzz.png").write_bytes(b"")
    message = error_of(capsys, "--images", str(tmp_path))
    start = f"--images: can't read any file (2 tried), the first of them {tmp_path / name}: "
    assert message.startswith(start)


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
    one, other, nan = ({0: torch.full((2, 2), x)} for x in (0.0, 0.1, float("nan")))
    assert serving.largest_difference(one, one) == 0.0
    with pytest.raises(serving.WrongEmbeddingError, match="differ by 0.1"):
        serving.largest_difference(one, other)
    with pytest.raises(serving.WrongEmbeddingError):
        serving.largest_difference(one, nan)


def test_a_neighbour_that_comes_halfway_slows_both_runs_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def clock() -> float:
        """A tick a call, of which each serving makes two; ten from the half of them on."""
        nonlocal calls
        calls += 1
        return float(calls if calls <= 40 else 40 + 10 * (calls - 40))

    monkeypatch.setattr(time, "perf_counter", clock)
    shown = figures(capsys, "--requests", "20")
    assert calls == 80
    assert shown["seconds_without"] == shown["seconds_with"] == 110
    assert shown["speed_up"] == 1


def test_requests_are_served_in_turn_and_the_first_changes() -> None:
    class Recorder(serving.Run):
        def __init__(self, name: str) -> None:
            self.name = name

        def serve(self, request: serving.Request) -> None:
            served.append(f"{self.name}{request[0]}")

    served: list[str] = []
    serving.serve_in_turn([(1,), (2,), (3,)], [Recorder("a"), Recorder("b")])
    assert served == ["a1", "b1", "b2", "a2", "a3", "b3"]


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
        "._arrays",
        "._calls",
        "._errors",
        "._flights",
        "._gate",
        "._hashing",
        "._images",
        "._modes",
        "._orientation",
        "._outputs",
        "._ownership",
        "._streams",
        "._tensors",
        "._turns",
        ".base",
        ".encoder",
        ".keys",
        ".leases",
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


def test_it_says_which_version_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"multimodal-cache {metadata.version('multimodal-cache')}\n"


def test_it_runs_where_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert figures(capsys, "--requests", "1")["requests"] == 1
