"""A picture of consecutive steps on a device: one row a step, its beginning magnified beside the whole of it. SVG."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gpu_steps import BETWEEN, Event, Step, Timeline

COLOURS = {
    "products": "#4477aa",
    "attention": "#228833",
    "inputs and sampling": "#aa3377",
    "norms and other small kernels": "#a8a8a8",
    f"copies ({BETWEEN}, memcpy, memset)": "#ccaa22",
}
PRODUCTS, ATTENTION, SAMPLING, SMALL, COPY = COLOURS
GAP = "#ee3344"
# What a kernel's name holds, in lower case.
PARTS = {
    ATTENTION: ("attention", "prefillwith", "fmha", "flash_fwd"),
    PRODUCTS: ("product", "gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk"),
    SAMPLING: (
        "choose_inputs", "argmax", "deliver", "count_values", "sum_values", "sum_chunks", "find_thresholds", "pick",
    ),
}  # fmt: skip
# Pixels.
LEFT, NEAR, WHOLE, BETWEEN_PANELS, RIGHT = 50, 400, 640, 40, 20
TOP, ROW, BAR, LANE = 96, 30, 14, 6  # a lane, for copies, lies below a row's bar
WIDTH = LEFT + NEAR + BETWEEN_PANELS + WHOLE + RIGHT
GAP_SHARE = 3  # the largest gap takes that part of the magnified panel, or less


def kind_of(event: Event) -> str:
    """Its entry in `COLOURS`."""
    if event.copy:
        return COPY
    name = event.name.lower()
    return next((kind for kind, parts in PARTS.items() if any(part in name for part in parts)), SMALL)


def runs(events: Iterable[Event], start: float, scale: float, width: int) -> list[tuple[int, int, str]]:
    """(first pixel, pixels, kind): of every pixel the kind that has most of it, if some kind has half. What is thinner
    than a pixel is so merged with its neighbours, and the picture's size has a bound.

    start: the first pixel's microsecond. scale: pixels a microsecond.
    """
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for event in events:
        left, right = (event.start - start) * scale, (event.end - start) * scale
        for pixel in range(max(0, int(left)), min(width, int(right) + 1)):
            covered = min(right, pixel + 1) - max(left, pixel)
            if covered > 0:
                share = shares[pixel]
                share[kind_of(event)] = share.get(kind_of(event), 0) + covered
    found: list[tuple[int, int, str]] = []
    for pixel, share in enumerate(shares):
        if sum(share.values()) < 0.5:
            continue
        kind = max(share, key=lambda kind: share[kind])
        if found and found[-1][2] == kind and found[-1][0] + found[-1][1] == pixel:
            found[-1] = found[-1][0], found[-1][1] + 1, kind
        else:
            found.append((pixel, 1, kind))
    return found


def picture(timeline: Timeline, title: str) -> str:
    """An SVG of its own. Every row's clock begins where the last kernel of the step before ended."""
    steps = timeline.steps
    gaps = timeline.gaps
    longest = max(step.end - _zero(step) for step in steps)
    near_us = max(30.0, max(gaps, default=0.0) * GAP_SHARE)
    lead_us = near_us / 10  # of the step before
    near, whole = NEAR / near_us, WHOLE / longest
    height = TOP + ROW * len(steps) + 84
    at_near, at_whole = LEFT, LEFT + NEAR + BETWEEN_PANELS
    heading = f"{title}: {timeline.us_a_step:.0f} µs a step of {len(steps)}"
    heading += f", largest gap {max(gaps):.1f} µs" if gaps else ""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        '<g font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(heading)}</text>',
        *_legend(46),
        f'<text x="{at_near}" y="{TOP - 26}">beginnings: 0 is the end of the last kernel of the step before; µs</text>',
        f'<text x="{at_whole}" y="{TOP - 26}">whole steps, same clock; {"ms" if longest >= 2000 else "µs"}</text>',
        *_axis(at_near, near, -lead_us, near_us - lead_us, len(steps), 1),
        *_axis(at_whole, whole, 0, longest, len(steps), 1000 if longest >= 2000 else 1),
    ]
    for number, step in enumerate(steps):
        zero, top = _zero(step), TOP + ROW * number
        out.append(f'<text x="{LEFT - 8}" y="{top + 11}" text-anchor="end">{number + 1}</text>')
        out += _magnified(timeline.events, zero - lead_us, at_near, near, near_us, top)
        for copies, y, thick in ((False, top, BAR), (True, top + BAR, LANE)):
            events = [e for e in timeline.events if e.copy == copies and e.start < step.end and e.end > zero]
            out += _paths(runs(events, zero, whole, WHOLE), at_whole, y, thick)
        if step.gap is not None and step.gap > 0:
            x, wide = at_near + lead_us * near, step.gap * near
            out.append(f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{GAP}" opacity=".8"/>')
            out.append(f'<rect x="{at_whole}" y="{top}" width="{step.gap * whole:.1f}" height="{BAR}" fill="{GAP}"/>')
            out.append(f'<text x="{x + wide / 2:.1f}" y="{top + 11}" text-anchor="middle">{step.gap:.1f}</text>')
    y = TOP + ROW * len(steps) + 40
    out.append(f'<text x="{LEFT}" y="{y}">{escape(between(timeline))}</text>')
    told = "Below a row: what copies, beside kernels or between graphs. A gap has no kernel of a step; "
    told += f"{BETWEEN} is of none."
    out.append(f'<text x="{LEFT}" y="{y + 16}">{told}</text>')
    return "\n".join([*out, "</g></svg>\n"])


def between(timeline: Timeline) -> str:
    """What lies in the gaps, in a line."""
    gaps = sum(max(gap, 0) for gap in timeline.gaps)
    found = timeline.in_gaps()
    if not gaps:
        return "There is no gap."
    told = [
        f"{name}, {len(times)} x {sum(times) / len(times):.1f} µs ({sum(times) / gaps:.0%} of the gaps)"
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    return f"In the {len(timeline.gaps)} gaps: {'; '.join(told) or 'no copy'}."


def _zero(step: Step) -> float:
    return step.start if step.before is None else step.before


def _legend(y: int) -> list[str]:
    out, x = [], float(LEFT)
    for text, colour in [*COLOURS.items(), ("gap before a step, µs", GAP)]:
        out.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y}">{escape(text)}</text>')
        x += 40 + 6.0 * len(text)
    return out


def _axis(x: int, scale: float, first: float, last: float, rows: int, unit: int) -> list[str]:
    """Lines and numbers at round places; `unit` in microseconds."""
    about = (last - first) / unit / 6
    power = 10.0 ** (len(f"{int(about)}") - 1 if about >= 1 else -1)
    step = unit * power * next(round_one for round_one in (1, 2, 5, 10) if round_one * power >= about)
    bottom, out = TOP + ROW * rows, []
    for number in range(int(first / step) - 1, int(last / step) + 1):
        if first <= number * step <= last:
            at = x + (number * step - first) * scale
            out.append(f'<path d="M{at:.1f} {TOP - 6}V{bottom}" stroke="#ddd"/>')
            label = f"{number * step / unit:g}"
            out += [f'<text x="{at:.1f}" y="{y}" text-anchor="middle">{label}</text>' for y in (TOP - 10, bottom + 12)]
    return out


def _magnified(events: Iterable[Event], start: float, x: int, scale: float, shown: float, top: int) -> list[str]:
    """Every event as it is, with its name for who points at it."""
    out = []
    for event in events:
        left, right = max(event.start, start), min(event.end, start + shown)
        if left < right:
            y, thick = (top + BAR, LANE) if event.copy else (top, BAR)
            out.append(
                f'<rect x="{x + (left - start) * scale:.1f}" y="{y}" width="{(right - left) * scale:.1f}" '
                f'height="{thick}" fill="{COLOURS[kind_of(event)]}"><title>{escape(event.name[:60])}, '
                f"{event.end - event.start:.1f} µs</title></rect>"
            )
    return out


def _paths(found: Iterable[tuple[int, int, str]], x: int, y: int, thick: int) -> list[str]:
    """One path a kind: short, where a row has hundreds of bars."""
    lines: dict[str, list[str]] = {}
    for first, pixels, kind in found:
        lines.setdefault(kind, []).append(f"M{x + first} {y}h{pixels}v{thick}h-{pixels}z")
    return [f'<path fill="{COLOURS[kind]}" d="{"".join(parts)}"/>' for kind, parts in lines.items()]
