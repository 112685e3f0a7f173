"""Draws a `headrace bench` report as SVG: time to the first token, and tokens a second. No library."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from math import ceil, log10

from .bench_runs import Report, Row

_PANEL_WIDTH, _PANEL_HEIGHT = 400, 280
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 76, 16, 48
_COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#0f766e", "#854d0e", "#475569")


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    colour: str
    is_dashed: bool
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    x_label: str
    lines: list[_Line]


def draw(report: Report) -> str:
    """Return the report as an SVG document. Dashed lines are those with SpecPrefill."""
    panels = [
        _Panel(
            "Time to first token, s", "prompt, tokens", _lines(report.rows, "streams", lambda row: row.ttft_s)
        ),
        _Panel(
            "Tokens a second, all streams",
            "streams",
            _lines(report.rows, "prompt tokens", lambda row: row.total_tokens_per_s),
        ),
    ]
    outer_width = _LEFT + _PANEL_WIDTH + _RIGHT
    legend_rows = max(ceil(len(panel.lines) / 2) for panel in panels)
    height = _TOP + _PANEL_HEIGHT + _BOTTOM + 18 * legend_rows
    title = f"{report.server}, {report.model}, {report.max_tokens} tokens an answer"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {outer_width * len(panels)} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="14" fill="#111827">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * outer_width + _LEFT},{_TOP})">')
        parts += _draw_panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _lines(rows: list[Row], by: str, value: Callable[[Row], float | None]) -> list[_Line]:
    """Return a line for each number of streams (over prompt lengths), or the other way round."""
    is_by_streams = by == "streams"
    keys = sorted({row.streams if is_by_streams else row.prompt_tokens for row in rows})
    if not is_by_streams:
        keys = _representatives(keys)
    lines = []
    for index, key in enumerate(keys):
        for mode in (False, True):
            points = sorted(
                (float(row.prompt_tokens if is_by_streams else row.streams), y)
                for row in rows
                if row.specprefill is mode
                and (row.streams == key if is_by_streams else _is_near(row.prompt_tokens, key))
                and (y := value(row)) is not None
            )
            if points:
                label = f"{key:,} {by}" + (", SpecPrefill" if mode else "")
                lines.append(_Line(label, _COLOURS[index % len(_COLOURS)], mode, points))
    return lines


def _is_near(value: int, key: int) -> bool:
    # Random words make prompts that differ by some tokens.
    return abs(value - key) <= 0.1 * key + 2


def _representatives(keys: list[int]) -> list[int]:
    kept: list[int] = []
    for key in keys:
        if not any(_is_near(key, other) for other in kept):
            kept.append(key)
    return kept


def _draw_panel(panel: _Panel) -> list[str]:
    xs = [x for line in panel.lines for x, _ in line.points] or [1.0]
    ys = [y for line in panel.lines for _, y in line.points] or [1.0]
    x_ticks, y_ticks = _ticks(max(xs)), _ticks(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return x / x_ticks[-1] * _PANEL_WIDTH, _PANEL_HEIGHT * (1 - y / y_ticks[-1])

    parts = [f'<text x="0" y="-20" font-weight="600" fill="#111827">{escape(panel.title)}</text>']
    for tick in y_ticks:
        _, y = place(0, tick)
        parts.append(f'<line x1="0" x2="{_PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end" fill="#4b5563">{_say(tick)}</text>')
    for tick in x_ticks:
        x, _ = place(tick, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{_PANEL_HEIGHT + 18}" text-anchor="middle" fill="#4b5563">'
            f"{_say(tick)}</text>"
        )
    parts.append(
        f'<text x="{_PANEL_WIDTH / 2}" y="{_PANEL_HEIGHT + 36}" text-anchor="middle" fill="#111827">'
        f"{escape(panel.x_label)}</text>"
    )
    for index, line in enumerate(panel.lines):
        parts += _draw_line(line, [place(x, y) for x, y in line.points])
        parts += _draw_legend(line, index)
    return parts


def _draw_line(line: _Line, places: list[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    return [
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dash}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in places),
    ]


def _draw_legend(line: _Line, index: int) -> list[str]:
    x, y = (index % 2) * _PANEL_WIDTH / 2, _PANEL_HEIGHT + _BOTTOM + 6 + 18 * (index // 2)
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    return [
        f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{line.colour}" stroke-width="2"{dash}/>',
        f'<text x="{x + 30}" y="{y + 4}" fill="#111827">{escape(line.label)}</text>',
    ]


def _ticks(largest: float) -> list[float]:
    """Return round numbers from 0 to at least the largest."""
    raw = max(largest, 1e-9) / 4
    power = 10.0 ** int(log10(raw) if raw >= 1 else log10(raw) - 1)
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20, 25, 50, 100) if power * factor >= raw)
    return [step * index for index in range(ceil(largest / step - 1e-9) + 1)]


def _say(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"
