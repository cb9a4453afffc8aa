"""The picture of ``python -m multimodal_cache plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multimodal_cache._command import size_text
from multimodal_cache.planner import HitCurve

MARKED = {90: "o", 95: "s", 99: "D"}
"""Of the ceiling, in per cent: the sizes that get a mark."""

BLACK, GREY = "0.0", "0.4"


def draw(curve: HitCurve, path: Path, *, today: int | None = None) -> None:
    """Draws the hit rate over the size, and the sizes to choose among.

    Raises:
        ImportError: matplotlib isn't installed.
        OSError: The file can't be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'multimodal-cache[plan]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _draw_curve(axes, curve)
    _mark_sizes(axes, curve)
    if today is not None:
        _mark_today(axes, curve, today)
    _label(axes, curve)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_curve(axes: Any, curve: HitCurve) -> None:
    points = [curve.at(size) for size in curve.grid(per_doubling=16)]
    points.append(curve.at(2 * curve.footprint))  # where it is flat
    sizes = [max(point.size, 1) for point in points]
    axes.set_xscale("log", base=2)
    rates = [100 * point.hit_rate for point in points]
    axes.plot(sizes, rates, color="tab:blue", linewidth=2.5, label="requests answered (hit rate)")
    rates = [100 * point.byte_hit_rate for point in points]
    axes.plot(sizes, rates, color="tab:orange", linestyle="--", label="bytes saved")
    axes.axhline(100 * curve.ceiling, color=GREY, linestyle=":")
    axes.annotate(
        f"ceiling {curve.ceiling:.1%}: the first request for an item is a miss",
        (0.01, 100 * curve.ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=GREY,
        bbox={"color": "white", "pad": 1},
    )


def _mark_sizes(axes: Any, curve: HitCurve) -> None:
    for percent, marker in MARKED.items():
        point = curve.at(curve.size_reaching(percent))
        axes.plot(
            max(point.size, 1),
            100 * point.hit_rate,
            marker,
            color=BLACK,
            markerfacecolor="white",
            markersize=8,
            label=f"{percent}% of the ceiling: {size_text(point.size)}",
        )


def _mark_today(axes: Any, curve: HitCurve, today: int) -> None:
    point = curve.at(today)
    axes.axvline(max(today, 1), color=BLACK, linewidth=1)
    axes.plot(
        max(today, 1),
        100 * point.hit_rate,
        "*",
        color=BLACK,
        markersize=14,
        label=f"today, {size_text(today)}: hit rate {point.hit_rate:.1%}",
    )


def _label(axes: Any, curve: HitCurve) -> None:
    axes.set_title(
        "Choose the smallest size from which on the curve is flat:\n"
        f"{size_text(curve.size_reaching(95))} gets 95% of all the hits there are to get",
        loc="left",
        fontweight="bold",
    )
    axes.set_xlabel("size of the cache (logarithmic)")
    axes.set_ylabel(f"% of {curve.requests:,} requests, or of their bytes")
    axes.set_ylim(0, 108)  # room for the ceiling's label
    axes.set_yticks(range(0, 101, 20))
    axes.xaxis.set_major_formatter(lambda size, _: size_text(size))
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="best", framealpha=1.0, edgecolor="0.8")
