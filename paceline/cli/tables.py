"""What a run or an eval has to say at its end, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.build import EvalReport, RunResult

END_OF_INTERVAL = ("/low", "/high")


def describe_result(result: RunResult) -> str:
    """Where everything is, what the evals say, and what to do next."""
    lines = [f"step {result.step} (version {result.version}), files in {result.run_dir}"]
    scores = [name for name in result.evals if is_score(name)]
    if scores:
        rows = [
            (name, number(result.first_evals.get(name)), number(result.evals[name]))
            for name in scores
        ]
        lines += ["", *columns([("", "first", "last"), *rows])]
    if result.model_path is not None:
        lines += ["", f"model    {result.model_path}"]
    lines.append(f"answers  paceline inspect {result.run_dir}")
    return "\n".join(lines)


def describe_report(report: EvalReport) -> str:
    """One line a number; scores with their 95 % interval."""
    rows = []
    for name, value in report.values.items():
        if name.startswith("eval/") and not name.endswith(END_OF_INTERVAL):
            low, high = (report.values.get(f"{name}{end}") for end in END_OF_INTERVAL)
            interval = "" if low is None else f"95 %: {number(low)} to {number(high)}"
            rows.append((name, number(value), interval))
    return "\n".join([f"measured {report.weights}", "", *columns(rows)])


def is_score(name: str) -> bool:
    """True for `eval/<set>/reward` and `eval/<set>/pass_at_<k>`."""
    last = name.rpartition("/")[2]
    return name.startswith("eval/") and (last == "reward" or last.startswith("pass_at_"))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows with their cells one below the other."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in cells)
    return [line.rstrip() for line in lines]
