"""Line, step and bar plots as small SVG files: enough for figures in the docs, and the same bytes on every machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 130, 28, 40
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#7f7f7f")


class Series(NamedTuple):
    """``kind``: line, steps (a value holds until the next), dots, bars."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "line"


def plot(path: Path, title: str, x: str, y: str, series: Sequence[Series]) -> None:
    """Write the figure; axes begin at 0."""
    x_max = max((point[0] for each in series for point in each.points), default=1.0) or 1.0
    y_max = _round_up(max((point[1] for each in series for point in each.points), default=1.0) * 1.02)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return round(_LEFT + point[0] / x_max * wide, 1), round(_TOP + high - point[1] / y_max * high, 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        f' font-size="11"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{_text(title)}</text>',
    ]
    for index in range(5):
        value_y, value_x = y_max * index / 4, x_max * index / 4
        row = at((0, value_y))[1]
        column = at((value_x, 0))[0]
        out.append(f'<path d="M{_LEFT} {row}H{_LEFT + wide}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{row + 4}" text-anchor="end">{value_y:.4g}</text>')
        out.append(f'<text x="{column}" y="{_TOP + high + 15}" text-anchor="middle">{value_x:.3g}</text>')
    out.append(f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{_text(x)}</text>')
    out.append(f'<text x="12" y="{_TOP + high / 2}" text-anchor="middle" transform="rotate(-90 12 {_TOP + high / 2})">')
    out.append(f"{_text(y)}</text>")
    for index, each in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [at(point) for point in each.points]
        if each.kind == "dots":
            out += [f'<circle cx="{a}" cy="{b}" r="1.5" fill="{colour}"/>' for a, b in places]
        elif each.kind == "bars":
            base = _TOP + high
            out.append(
                f'<path d="{"".join(f"M{a} {base}V{b}" for a, b in places)}" stroke="{colour}" stroke-width="3"/>'
            )
        elif places:
            path_of = f"M{places[0][0]} {places[0][1]}"
            for a, b in places[1:]:
                path_of += f"H{a}V{b}" if each.kind == "steps" else f"L{a} {b}"
            out.append(f'<path d="{path_of}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        out.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{_TOP + 12 + 16 * index}" fill="{colour}">{_text(each.name)}</text>'
        )
    out.append("</svg>\n")
    path.write_text("\n".join(out), encoding="utf-8")


def _round_up(value: float) -> float:
    """The next value that four equal parts divide into round ones."""
    if value <= 0:
        return 1.0
    step = 10.0 ** len(str(int(value))) / 10
    for factor in (1, 2, 4, 8, 10):
        if value <= factor * step:
            return factor * step
    return 20 * step


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
