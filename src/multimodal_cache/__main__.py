"""The demonstration: a vision encoder serves requests, each without the cache and with it.

``python -m multimodal_cache --help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from multimodal_cache import CachedEncoder, MultiModalStaticCache
from multimodal_cache._command import MIB, Parser, mebibytes, run, version_of
from multimodal_cache._demo.encoder import VisionTransformer
from multimodal_cache._demo.images import (
    ImageError,
    LeftOut,
    find_images,
    make_images,
    read_images,
)
from multimodal_cache._demo.serving import (
    Run,
    Server,
    WrongEmbeddingError,
    largest_difference,
    plan_requests,
    serve_in_turn,
)
from multimodal_cache.trace import Trace

GENERATED_IMAGES = 12
LEFT_OUT_SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demonstration, or the command ``plan``.

    Args:
        arguments: The command line; that of the process by default.

    Returns:
        The exit status: 0, or 1 if the cache returned a wrong embedding.

    Raises:
        SystemExit: With status 2 if the arguments or the images are bad.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["plan"]:
        from multimodal_cache import _plan

        return _plan.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    left_out: list[LeftOut] = []
    try:
        device = _device(options.device)
        if options.images is None:
            images = make_images(GENERATED_IMAGES, options.seed)
        else:
            paths = find_images(options.images)
            images, left_out = read_images(_progress("reading images", paths))
        trace = None if options.trace is None else _trace(options.trace)
    except (ImageError, ValueError) as error:
        parser.error(str(error))
    for line in _left_out_lines(left_out):
        sys.stderr.write(f"{parser.prog}: {line}\n")
    try:
        cache = MultiModalStaticCache(options.max_size, trace=trace)
        figures = demonstrate(images, device, options.requests, cache, options.seed)
    except WrongEmbeddingError as error:
        sys.stderr.write(f"{parser.prog}: the cache is wrong: {error}\n")
        return 1
    finally:
        if trace is not None:
            trace.close()
    figures["trace"] = options.trace
    figures["left_out"] = [{"file": file.path.name, "reason": file.reason} for file in left_out]
    text = json.dumps(figures, indent=2) if options.json else _table(figures)
    sys.stdout.write(f"{text}\n")
    return 0


def demonstrate(
    images: list[torch.Tensor],
    device: torch.device,
    num_requests: int,
    cache: MultiModalStaticCache,
    seed: int,
) -> dict[str, Any]:
    """Serves each request without the cache and with it, and checks the embeddings.

    Raises:
        WrongEmbeddingError: A hit isn't what was encoded, or the two runs don't agree.
    """
    vision_transformer = VisionTransformer(seed).eval().to(device)
    server = Server(vision_transformer, images, device)
    requests = plan_requests(num_requests, len(images), seed)
    encoder = CachedEncoder(cache, server.encode, namespace=vision_transformer.version)
    server.encode(images[:1])  # the first call pays for torch's own set-up
    without, cached = Run(server, server.encode), Run(server, encoder)
    serve_in_turn(_progress("serving", requests), (without, cached))
    stats = cache.stats()
    return {
        "device": str(device),
        "images": len(images),
        "requests": num_requests,
        "encoder_calls_without": without.encoder_calls,
        "encoder_calls_with": cached.encoder_calls,
        "images_encoded_without": without.images_encoded,
        "images_encoded_with": cached.images_encoded,
        "encode_ratio": without.images_encoded / cached.images_encoded,
        "hits": stats.hits,
        "hit_rate": stats.hit_rate,
        "evictions": stats.evictions,
        "bytes_held": stats.current_size,
        "max_size": stats.max_size,
        "seconds_without": without.seconds,
        "seconds_with": cached.seconds,
        "speed_up": without.seconds / cached.seconds,
        "largest_difference": largest_difference(without.embeddings, cached.embeddings),
    }


def _table(figures: dict[str, Any]) -> str:
    rows = [
        ("", "without", "with the cache"),
        ("requests", f"{figures['requests']}", f"{figures['requests']}"),
        (
            "encoder calls",
            f"{figures['encoder_calls_without']}",
            f"{figures['encoder_calls_with']}",
        ),
        (
            "images encoded",
            f"{figures['images_encoded_without']}",
            f"{figures['images_encoded_with']}",
        ),
        ("hit rate", "-", f"{figures['hit_rate']:.1%}"),
        (
            "bytes held / budget",
            "-",
            f"{figures['bytes_held'] / MIB:.1f} / {figures['max_size'] / MIB:.1f} MiB",
        ),
        ("fewer encoded", "1.0x", f"{figures['encode_ratio']:.1f}x"),
        ("seconds", f"{figures['seconds_without']:.2f}", f"{figures['seconds_with']:.2f}"),
        ("speed-up", "1.0x", f"{figures['speed_up']:.1f}x"),
    ]
    difference = figures["largest_difference"]
    agreement = f"differ by at most {difference:.1g}" if difference else "are equal"
    left_out = f", {len(figures['left_out'])} left out" if figures["left_out"] else ""
    lines = [f"{name:<21}{without:>10}{cached:>18}" for name, without, cached in rows]
    return "\n".join(
        [
            f"ViT-S/16 on {figures['device']}, {figures['images']} images{left_out}",
            "",
            *lines,
            "",
            f"all {figures['hits']} hits equal what was encoded, bit for bit; "
            f"the embeddings of both runs {agreement}",
            *_next_step(figures["trace"]),
        ]
    )


def _next_step(trace: str | None) -> list[str]:
    if trace is None:
        return []
    command = f"python -m multimodal_cache plan {shlex.quote(trace)}"
    return ["", f"what was requested is in the trace; how large should the cache be? {command}"]


def _left_out_lines(left_out: list[LeftOut]) -> Iterable[str]:
    for file in left_out[:LEFT_OUT_SHOWN]:
        yield f"left out {' '.join(file.path.name.splitlines())}: {file.reason}"
    if left_out[LEFT_OUT_SHOWN:]:
        yield f"left out {len(left_out) - LEFT_OUT_SHOWN} more, which --json lists"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m multimodal_cache",
        description="Serves requests that ask several questions about the same images, from one "
        "to three each, without the cache and with it.",
        epilog="python -m multimodal_cache plan TRACE says how large the cache should be.",
    )
    version = version_of("multimodal-cache") or "(not installed)"
    parser.add_argument("--version", action="version", version=f"multimodal-cache {version}")
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="a folder of PNG, JPEG, WebP or GIF files, which are scaled to 224 x 224; "
        "those that can't be read are named and left out (default: images made from the seed)",
    )
    parser.add_argument(
        "--requests",
        type=_number_of_requests,
        default=40,
        metavar="N",
        help="how many to serve (default: 40)",
    )
    parser.add_argument(
        "--max-size",
        type=mebibytes,
        default=64 * MIB,
        metavar="MIB",
        help="the cache's budget in MiB (default: 64)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)"
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="for the weights, images and requests (default: 0)",
    )
    parser.add_argument(
        "--trace",
        metavar="PATH",
        help="record what is requested of the cache, for the command plan; "
        "an existing file is replaced",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _number_of_requests(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 999999, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not (text.isdecimal() and len(text) <= 9):
        raise argparse.ArgumentTypeError(f"expected a whole number to 999999999, got {text!r}")
    return int(text)


def _trace(path: str) -> Trace:
    try:
        return Trace(path)
    except OSError as error:
        raise ValueError(f"--trace: can't write {path}: {error.strerror}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: there is no {name} on this machine")
    return device


def _progress(what: str, items: Sequence[Any]) -> Iterable[Any]:
    """Shows a bar on a terminal, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Any] = tqdm(items, desc=what, disable=None, leave=False)
    return bar


if __name__ == "__main__":
    run(main)
