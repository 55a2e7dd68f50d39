"""The numbers of one sample as text: a table of its tokens, and the sums below it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.algorithms.advantages import (
    STD_EPS,
    centred,
    has_zero_variance,
    leave_one_out,
    standardised,
)
from paceline.cli.tables import columns
from paceline.errors import ConfigError, DataError, nearest_hint
from paceline.observe.formats import visible

if TYPE_CHECKING:
    from paceline.build.numbers import SampleNumbers, TokenNumbers
    from paceline.observe.samples import SampleRecord

CLOSE = 1e-6
"""A formula is shown if it gives the number up to this, relative and absolute."""


def choose_sample(records: Sequence[SampleRecord], wanted: str | None) -> int:
    """Index of the sample that `--sample` names; by default the first one that was trained on.

    wanted: `best` or `worst` by reward, an index, or a prompt's id, alone or followed by
    `/<episode>` or `/<episode>/<row>`. Raises DataError if there is none.
    """
    trained = [i for i, r in enumerate(records) if r.dropped is None and r.num_tokens]
    if wanted in (None, "best", "worst"):
        scored = [i for i in trained if records[i].reward is not None]
        if wanted is None and trained:
            return trained[0]
        if not scored:
            raise DataError("no sample of the step was trained on: name one by its index")
        sign = -1 if wanted == "best" else 1
        return min(scored, key=lambda i: (sign * (records[i].reward or 0.0), i))
    assert wanted is not None
    found = [i for i, r in enumerate(records) if wanted in _names(r)]
    if found:
        return next((i for i in found if i in trained), found[0])
    if wanted.isdecimal():
        if int(wanted) < len(records):
            return int(wanted)
        raise ConfigError(f"--sample {wanted}: the step has {len(records)} samples, from 0")
    hint = nearest_hint(wanted, (r.prompt_id for r in records))
    raise DataError(f"--sample {wanted}: no sample of the step has this name{hint}")


def _names(record: SampleRecord) -> tuple[str, str, str]:
    episode = f"{record.prompt_id}/{record.episode}"
    return record.prompt_id, episode, f"{episode}/{record.row}"


def describe_numbers(numbers: SampleNumbers) -> Iterator[str]:
    """Everything, line by line."""
    record = numbers.record
    row = f", row {record.row}" if record.row else ""
    ended = record.status if record.finish == "" else f"{record.status} ({record.finish})"
    yield (
        f"step {numbers.step}, prompt {visible(record.prompt_id)}, episode {record.episode}{row}: "
        f"{ended}, temperature {record.temperature:g}, algorithm {numbers.kind}"
    )
    yield ""
    yield from _token_table(numbers.tokens)
    yield ""
    yield from columns(list(_sums(numbers)))
    for note in numbers.notes:
        yield from ("", f"note: {note}")


Cell = Callable[["TokenNumbers"], str]
COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("pos", lambda t: str(t.position)),
    ("id", lambda t: str(t.token)),
    ("text", lambda t: visible(json.dumps(t.text, ensure_ascii=False))),
    ("mask", lambda t: "1" if t.is_trained else "0"),
    ("version", lambda t: "" if t.version is None else str(t.version)),
    ("behaviour", lambda t: _number(t.behaviour)),
    ("old", lambda t: _number(t.old)),
    ("new", lambda t: _number(t.new)),
    ("ratio", lambda t: _number(t.ratio)),
    ("teacher", lambda t: _number(t.teacher)),
    ("clipped", lambda t: "" if t.is_clipped is None else ("yes" if t.is_clipped else "no")),
    ("advantage", lambda t: _number(t.advantage)),
    ("weight", lambda t: _number(t.weight)),
    ("loss", lambda t: _number(t.loss)),
)
ALWAYS = ("pos", "id", "text", "mask")


def _token_table(tokens: Sequence[TokenNumbers]) -> list[str]:
    """One line a token; a column that is empty for all is left out."""
    cells = {name: [cell(token) for token in tokens] for name, cell in COLUMNS}
    shown = [name for name in cells if name in ALWAYS or any(cells[name])]
    return columns([shown, *zip(*(cells[name] for name in shown), strict=True)])


def _sums(numbers: SampleNumbers) -> Iterator[tuple[str, str]]:
    yield "reward", _reward(numbers)
    rewards = [r.reward for r in numbers.rewards if r.reward is not None]
    if rewards:
        listed = " ".join(f"{r.reward:g}{'*' if r.is_own else ''}" for r in numbers.rewards)
        std = f", std {statistics.stdev(rewards):.8g} (n - 1)" if len(rewards) > 1 else ""
        yield "group", f"{listed}   mean {statistics.fmean(rewards):.8g}{std}   (* this episode)"
    trained = [token for token in numbers.trained if token.weight is not None]
    if not trained:
        return
    yield "advantage", _advantage(numbers, trained)
    yield "weight", _weight(numbers, trained)
    if numbers.loss is not None:
        yield "loss", f"{numbers.loss:.8g} = sum over {len(trained)} tokens of {_loss(trained)}"
    if numbers.recorded_loss is not None:
        yield "step's loss", f"{numbers.recorded_loss:.8g}, as recorded{_which(numbers)}"


def _reward(numbers: SampleNumbers) -> str:
    record = numbers.record
    parts = "".join(f"   {name} {value:g}" for name, value in record.parts.items())
    return ("none" if record.reward is None else f"{record.reward:.8g}") + parts


def _advantage(numbers: SampleNumbers, trained: Sequence[TokenNumbers]) -> str:
    """The number, and the formula of the group's rewards that gives it, if there is one."""
    values = [token.advantage or 0.0 for token in trained]
    if any(value != values[0] for value in values):
        return f"one for each token, from {min(values):.6g} to {max(values):.6g}"
    return f"{values[0]:.8g}{_advantage_formula(numbers, values[0])}"


def _advantage_formula(numbers: SampleNumbers, advantage: float) -> str:
    rewards = [r.reward for r in numbers.rewards if r.reward is not None]
    own = next((i for i, r in enumerate(numbers.rewards) if r.is_own), None)
    if own is None or len(rewards) != len(numbers.rewards):
        return ""
    if advantage == 0 and has_zero_variance(rewards):
        return ": the rewards of the group are equal"
    if len(rewards) < 2:
        return ""
    reward, mean, std = rewards[own], statistics.fmean(rewards), statistics.stdev(rewards)
    others = (sum(rewards) - reward) / (len(rewards) - 1)
    formulas = (
        (standardised, f" = ({reward:g} - {mean:.6g}) / ({std:.6g} + {STD_EPS:g})"),
        (centred, f" = {reward:g} - {mean:.6g}"),
        (leave_one_out, f" = {reward:g} - {others:.6g}, the mean of the others"),
    )
    return next((text for give, text in formulas if _is_close(give(rewards)[own], advantage)), "")


def _weight(numbers: SampleNumbers, trained: Sequence[TokenNumbers]) -> str:
    weight = trained[0].weight or 0.0
    if any(token.weight != weight for token in trained):
        return "one for each token"
    tokens, episodes = numbers.update_tokens, numbers.update_episodes
    formulas = (
        (1 / tokens, f" = 1 / {tokens} trained tokens of the optimizer step"),
        (
            1 / (episodes * len(trained)),
            f" = 1 / ({episodes} episodes of the optimizer step x {len(trained)} tokens)",
        ),
    )
    return f"{weight:.8g}" + next(
        (text for value, text in formulas if _is_close(value, weight)), ""
    )


def _loss(trained: Sequence[TokenNumbers]) -> str:
    """What each token adds, if it is one of two simple things."""

    def all_are(give: Callable[[TokenNumbers], float]) -> bool:
        return all(_is_close(token.loss or 0.0, give(token)) for token in trained)

    if all_are(lambda t: -(t.weight or 0.0) * (t.advantage or 0.0)):
        return "-weight x advantage (before the update every ratio is 1)"
    if all_are(lambda t: -(t.weight or 0.0) * (t.old or 0.0)):
        return "-weight x old"
    return "weight x loss of the token (see docs/algorithms.md)"


def _which(numbers: SampleNumbers) -> str:
    """What the recorded loss is a mean of."""
    if numbers.num_updates <= 1:
        return "; `paceline replay` computes it anew"
    return (
        f": the mean of {numbers.num_updates} optimizer steps, of which this sample's is "
        f"number {numbers.update} in each pass"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE * 1e-3)
