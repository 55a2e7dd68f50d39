"""How numbers, times and texts look in the terminal: one rendering for all that is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def format_number(value: float | None) -> str:
    """Four significant digits, short; `-` for nothing.

    Example: 0.41237 -> "0.4124", 1523.4 -> "1523", 3e-06 -> "3e-06", 12.0 -> "12"
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}" if abs(value) < 1e3 or abs(value) >= 1e6 else f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """Example: 5.2 -> "5s", 100 -> "1m40s", 7300 -> "2h01m"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The last `width` values as bars from their least to their greatest; blank where not finite.

    Example: [0.0, 0.5, 1.0] -> "▁▅█"
    """
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), max(finite) - min(finite)
    last = len(BARS) - 1

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        share = (value - low) / span if span > 0 else 0.5
        return BARS[min(last, math.floor(share * last + 0.5))]

    return "".join(bar(value) for value in shown)


def visible(text: str, limit: int | None = None) -> str:
    """Text from a model or a file, safe for a terminal: control characters become pictures."""
    safe = "".join(_picture(character) for character in text)
    return safe if limit is None or len(safe) <= limit else safe[: max(0, limit - 1)] + "…"


def _picture(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    # C1 controls, and marks that reorder text, could make a terminal show something else.
    is_hidden = code == 0x7F or 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000
    is_hidden |= code in range(0x202A, 0x202F) or code in range(0x2066, 0x206A)
    return "�" if is_hidden else character
