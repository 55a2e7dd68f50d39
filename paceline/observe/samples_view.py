"""Samples of a step in the terminal: the best, the worst, the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.observe.formats import format_number, visible
from paceline.observe.samples import SampleRecord, find_samples, read_samples

MAX_CHARACTERS = 600
MAX_DETAIL = 240


def show_samples(
    console: Console,
    folder: Path,
    step: int | None = None,
    *,
    best: int = 3,
    worst: int = 3,
    first: int = 0,
    policy: str | None = None,
    role: str | None = None,
) -> None:
    """Print samples of a step (default: the last) that lie in `folder`, such as runs/x/samples.

    policy, role: only those of it. What roles said that do not learn is never among the best and
    the worst. Raises DataError, in words for the user, if the file is missing (with the nearest
    step that has one) or damaged.
    """
    step, path = find_samples(folder, step)
    records = [
        record
        for record in read_samples(path)
        if policy in (None, record.policy) and role in (None, record.role)
    ]
    console.print(summary_line(step, records))
    for title, chosen in choose(records, best=best, worst=worst, first=first).items():
        if chosen:
            console.print(samples_table(chosen, title))


def summary_line(step: int, records: Sequence[SampleRecord]) -> Text:
    """How many there are to learn from, their mean reward, and how they ended."""
    records = [record for record in records if record.learns]
    rewards = [record.reward for record in records if record.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    statuses = sorted({record.status for record in records})
    counts = [f"{sum(r.status == s for r in records)} {s}" for s in statuses]
    return Text(
        f"step {step}: {len(records)} samples ({', '.join(counts)}), "
        f"mean reward {format_number(mean)}"
    )


def choose(
    records: Sequence[SampleRecord], *, best: int, worst: int, first: int
) -> dict[str, list[SampleRecord]]:
    """By reward, of equals the earlier; samples without a reward are neither best nor worst.

    No sample is both: with few samples the best go first.
    """
    known = [r.learns and r.reward is not None and r.reward == r.reward for r in records]
    scored = [i for i, is_known in enumerate(known) if is_known]
    falling = sorted(scored, key=lambda i: (-_reward(records[i]), i))
    top = falling[:best]
    rest = sorted(falling[best:], key=lambda i: (_reward(records[i]), i))
    chosen = {"best": top, "worst": rest[:worst], "first": list(range(min(first, len(records))))}
    return {title: [records[i] for i in found] for title, found in chosen.items()}


def _reward(record: SampleRecord) -> float:
    return -math.inf if record.reward is None else record.reward


def samples_table(records: Sequence[SampleRecord], title: str) -> Table:
    """One row a sample; what models wrote is shown, never interpreted."""
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("answer", ratio=3, overflow="fold")
    table.add_column("how", width=24, overflow="fold")
    for record in records:
        table.add_row(
            Text(format_number(record.reward)),
            Text(visible(record.prompt, MAX_CHARACTERS)),
            Text(visible(record.text, MAX_CHARACTERS)),
            Text(_how(record)),
        )
    return table


def _how(record: SampleRecord) -> str:
    """Everything else that tells why the reward is what it is."""
    lines = [f"{record.prompt_id} #{record.episode}"]
    if record.role != record.policy:
        lines.append(f"role {record.role} ({record.label or record.policy})")
    if not record.learns:
        lines.append("does not learn")
    lines.append(f"tokens {record.num_tokens}")
    lines.append(record.status if record.finish == "" else f"{record.status} ({record.finish})")
    if record.cause is not None:
        lines.append(record.cause)
    if record.detail:
        lines.append(visible(record.detail, MAX_DETAIL))
    if record.dropped is not None:
        lines.append(f"not trained on: {record.dropped}")
    if isinstance(record.advantage, float):
        lines.append(f"advantage {format_number(record.advantage)}")
    lines += [f"{name} {format_number(value)}" for name, value in record.parts.items()]
    return visible("\n".join(lines))
