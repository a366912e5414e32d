"""Draws time and bus bandwidth by size as one SVG, with no help from outside the standard library.

It must not know how the samples were taken: it is given times and roles.
"""

from html import escape
from math import ceil, floor, log2, log10
from statistics import median

import table

WIDTH, PANEL_HEIGHT = 900, 380
LEFT, RIGHT, TOP, GAP = 76, 190, 56, 66
# Told apart also by people who do not see all colours (Okabe and Ito's set, plus grey tones).
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5a2b", "#666666", "#b8a800", "#00b3a4", "#7f3fbf"]
DASHES = {"towline": "", "peer": "", "reference": "2 4"}


class Panel:
    """One set of axes: maps (size, value) to the drawing."""

    def __init__(self, top, sizes, low, high, logarithmic):
        self.top, self.low, self.high, self.logarithmic = top, low, high, logarithmic
        self.first, self.last = log2(sizes[0]), max(log2(sizes[-1]), log2(sizes[0]) + 1)

    def x(self, size):
        """The place of a size."""
        return LEFT + (log2(size) - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        """The place of a value."""
        place = log10(value) if self.logarithmic else value
        return self.top + PANEL_HEIGHT - (place - self.low) / (self.high - self.low) * PANEL_HEIGHT


def draw(collective, by_size, roles, ranks):
    """The plot for one collective: `by_size[size][contender][block]` are microseconds."""
    sizes = sorted(by_size)
    medians = {
        name: [(size, median(by_size[size][name].values())) for size in sizes if by_size[size].get(name)] for name in roles
    }
    medians = {name: points for name, points in medians.items() if points}
    height = TOP + 2 * PANEL_HEIGHT + GAP + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="17" font-weight="bold">{escape(collective)}, {ranks} GPUs: median by size</text>',
    ]
    times = [time for points in medians.values() for _, time in points]
    low, high = floor(log10(min(times))), ceil(log10(max(times)) + 1e-9)
    panel = Panel(TOP, sizes, low, max(high, low + 1), True)
    ticks = [(10.0**power, _microseconds(10.0**power)) for power in range(panel.low, panel.high + 1)]
    parts += _axes(panel, sizes, ticks, "time (lower is better)")
    parts += _curves(panel, medians, roles)
    widths = {
        name: [(size, table.bus_bandwidth(collective, size, time, ranks)) for size, time in points]
        for name, points in medians.items()
    }
    # A reference that is far faster than every network would flatten the others: it may leave the panel.
    judged = [value for name, points in widths.items() if roles[name] != "reference" for _, value in points]
    step, top = _linear(max(judged or [value for points in widths.values() for _, value in points]))
    panel = Panel(TOP + PANEL_HEIGHT + GAP, sizes, 0, top, False)
    ticks = [(step * count, f"{step * count:g}") for count in range(round(top / step) + 1)]
    parts += _axes(panel, sizes, ticks, "bus bandwidth, GB/s (higher is better)")
    inside = {name: [(size, value) for size, value in points if value <= top] for name, points in widths.items()}
    parts += _curves(panel, {name: points for name, points in inside.items() if points}, roles)
    parts += _legend(list(medians), roles)
    return "\n".join(parts) + "\n</svg>\n"


def _microseconds(value):
    if value >= 1e6:
        return f"{value / 1e6:g} s"
    return f"{value / 1e3:g} ms" if value >= 1e3 else f"{value:g} µs"


def _linear(highest):
    """A round step and a round end for an axis from zero."""
    rough = highest / 6 or 1.0
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, step * max(1, ceil(highest / step))


def _axes(panel, sizes, ticks, title):
    right, bottom = WIDTH - RIGHT, panel.top + PANEL_HEIGHT
    yield f'<text x="{LEFT}" y="{panel.top - 10}" fill="#333">{escape(title)}</text>'
    for value, label in ticks:
        y = panel.y(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    shown = -1e9
    for size in sizes:
        x = panel.x(size)
        yield f'<line x1="{x:.1f}" y1="{panel.top}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>'
        # Neighbouring labels must not touch.
        if x - shown >= 34:
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{table.show_size(size)}</text>'
            shown = x
    yield f'<rect x="{LEFT}" y="{panel.top}" width="{right - LEFT}" height="{PANEL_HEIGHT}" fill="none" stroke="#888"/>'


def _style(names, name, roles):
    """Colour and line of a contender: Towline's are heavy, references dotted."""
    colour = COLOURS[names.index(name) % len(COLOURS)]
    role = roles[name]
    width = 3 if name == "towline" else 1.6
    dash = "7 4" if role == "towline" and name != "towline" else DASHES[role]
    return colour, f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _curves(panel, curves, roles):
    names = list(roles)
    # Towline is drawn last, on top.
    for name in sorted(curves, key=lambda name: name == "towline"):
        colour, stroke = _style(names, name, roles)
        points = [(panel.x(size), panel.y(value)) for size, value in curves[name]]
        yield f'<polyline fill="none" {stroke} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.2 if name == "towline" else 2.2}" fill="{colour}"/>'


def _legend(shown, roles):
    x = WIDTH - RIGHT + 16
    for place, name in enumerate(shown):
        y = TOP + 12 + 22 * place
        _, stroke = _style(list(roles), name, roles)
        yield f'<line x1="{x}" y1="{y}" x2="{x + 30}" y2="{y}" {stroke}/>'
        yield f'<text x="{x + 38}" y="{y + 4}">{escape(name)}</text>'
