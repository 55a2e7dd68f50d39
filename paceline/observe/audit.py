"""Checks a ledger against what a checkpoint keeps: every draw is in exactly one place.

    drawn = trained + dropped (ledger) + sampled, not trained (buffer) + to be drawn again

Only steps up to the checkpoint count, since those after it are done again by a resumed run. In an
epoch without weights each prompt is drawn once; so, if every draw is trained at most once and none
is lost, each prompt is trained exactly as often as there were epochs, but for those dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.observe.ledger import Entry
from paceline.types import Prompt

MAX_NAMED = 5
"""Draws that a message names."""


@dataclass(slots=True)
class Data:
    """What a checkpoint keeps of the data of one policy."""

    drawn: int
    """Draws that were taken from the data, those given back included."""
    returned: dict[int, str]
    """Draws to be drawn again, such as those that were being sampled; with their prompt's name."""
    ready: dict[int, str] = field(default_factory=dict)
    """Draws that are sampled and not trained on."""
    dropped: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Draw -> its prompt's name and the reason, where no step has told of it."""
    num_prompts: int | None = None
    """Draws of an epoch; None if an epoch may hold a prompt more than once."""


@dataclass(slots=True)
class PromptLife:
    """What became of one prompt, over all its draws."""

    name: str
    drawn: int = 0
    versions: list[int] = field(default_factory=list)
    """Of the weights that trained on it, in order."""
    committed: int = 0
    """How often it was trained on up to the checkpoint."""
    dropped: Counter[str] = field(default_factory=Counter)
    sampled: int = 0
    """Sampled and not trained on."""
    running: int = 0
    """Being sampled, or given back."""


@dataclass(slots=True)
class Account:
    """The whole run, for one policy."""

    policy: str
    step: int
    """Of the checkpoint; 0 without one."""
    drawn: int | None
    """None without a checkpoint."""
    num_trained: int
    num_committed: int
    dropped: Counter[str]
    num_sampled: int
    num_running: int
    prompts: list[PromptLife]
    violations: list[str]


def audit(policy: str, entries: Sequence[Entry], data: Data | None, *, step: int) -> Account:
    """entries: of all policies. data, step: of the policy in the newest checkpoint."""
    own = [entry for entry in entries if entry.policy == policy]
    committed = [entry for entry in own if entry.step <= step]
    trained = Counter(draw for entry in own for draw in entry.trained)
    reasons = _reasons(own, trained)
    names = {draw: name for entry in own for draw, name in entry.prompts.items()}
    if data is not None:
        reasons |= {draw: reason for draw, (_, reason) in data.dropped.items()}
        untold = {draw: name for draw, (name, _) in data.dropped.items()}
        data = replace(data, returned={d: n for d, n in data.returned.items() if d not in reasons})
        names = data.returned | data.ready | untold | names
    return Account(
        policy=policy,
        step=step,
        drawn=None if data is None else data.drawn,
        num_trained=trained.total(),
        num_committed=sum(len(entry.trained) for entry in committed),
        dropped=Counter(reasons.values()),
        num_sampled=0 if data is None else len(data.ready),
        num_running=0 if data is None else len(data.returned),
        prompts=_lives(own, reasons, names, data, step),
        violations=[
            *_doubles(own, trained, reasons, names),
            *(_misplaced(committed, reasons, data) if data is not None else ()),
            *(_epochs(names, data.num_prompts) if data is not None and data.num_prompts else ()),
        ],
    )


def _reasons(own: Sequence[Entry], trained: Mapping[int, int]) -> dict[int, str]:
    """Draw -> why it was dropped. What the end of the data tells, in a line that trains on nothing,
    is found out anew if the run is resumed, and may then come out otherwise."""
    return {
        draw: reason
        for entry in own
        for reason, draws in entry.dropped.items()
        for draw in draws
        if entry.trained or draw not in trained
    }


def _lives(
    own: Sequence[Entry],
    reasons: Mapping[int, str],
    names: Mapping[int, str],
    data: Data | None,
    step: int,
) -> list[PromptLife]:
    lives = {name: PromptLife(name) for name in sorted(set(names.values()))}
    for name in names.values():
        lives[name].drawn += 1
    for entry in own:
        for draw in entry.trained:
            life = lives[names[draw]]
            life.versions.append(entry.version)
            life.committed += entry.step <= step
    for draw, reason in reasons.items():
        lives[names[draw]].dropped[reason] += 1
    if data is not None:
        for draw in data.ready:
            lives[names[draw]].sampled += 1
        for draw in data.returned:
            lives[names[draw]].running += 1
    return list(lives.values())


def _doubles(
    own: Sequence[Entry],
    trained: Mapping[int, int],
    reasons: Mapping[int, str],
    names: Mapping[int, str],
) -> Iterator[str]:
    steps: dict[int, list[int]] = {}
    for entry in own:
        for draw in entry.trained:
            steps.setdefault(draw, []).append(entry.step)
    for draw in [draw for draw, count in trained.items() if count > 1][:MAX_NAMED]:
        yield f"draw {draw} ({names[draw]!r}) was trained on in steps {steps[draw]}, not once"
    for draw in [draw for draw in trained if draw in reasons][:MAX_NAMED]:
        yield (
            f"draw {draw} ({names[draw]!r}) was trained on in step {steps[draw][0]} and dropped "
            f"({reasons[draw]})"
        )
    numbers = [entry.step for entry in own if entry.trained]
    if len(set(numbers)) < len(numbers) or numbers != sorted(numbers):
        yield f"the steps are {numbers}: each must be there once, in order"


def _misplaced(committed: Sequence[Entry], reasons: Mapping[int, str], data: Data) -> Iterator[str]:
    """Draws that the checkpoint has in no place, or in two."""
    trained = {draw for entry in committed for draw in entry.trained}
    again = sorted(trained & (data.returned.keys() | data.ready.keys()))
    if again:
        yield f"{_named(again)}: trained on, and the checkpoint would train on them again"
    beyond = sorted(draw for draw in trained if draw >= data.drawn)
    if beyond:
        yield f"{_named(beyond)}: trained on, and the checkpoint has drawn {data.drawn} only"
    known = trained | reasons.keys() | data.ready.keys() | data.returned.keys()
    lost = [draw for draw in range(data.drawn) if draw not in known]
    if lost:
        yield f"{_named(lost)}: drawn, and neither trained on, dropped, sampled nor given back"


def _epochs(names: Mapping[int, str], num_prompts: int) -> Iterator[str]:
    seen: dict[tuple[int, str], int] = {}
    for draw, name in sorted(names.items()):
        first = seen.setdefault((draw // num_prompts, name), draw)
        if first != draw:
            yield f"prompt {name!r} was drawn twice in epoch {draw // num_prompts}: {first}, {draw}"


def _named(draws: Sequence[int]) -> str:
    more = f" and {len(draws) - MAX_NAMED} more" if len(draws) > MAX_NAMED else ""
    return f"draws {', '.join(map(str, draws[:MAX_NAMED]))}{more}"


def data_of(policy: str, state: Mapping[str, Any]) -> Data:
    """What a checkpoint's `data.json` says of one policy. Raises KeyError if it is damaged."""
    if "feeds" not in state:
        return _data(state, None, {})
    feeds: Mapping[str, Any] = state["feeds"]
    for feed in feeds.values():
        if policy in feed.get("buffers", {}):
            return _data(feed["stream"], feed["buffers"][policy], feed["groups"])
    return _data(feeds[policy if policy in feeds else "shared"]["stream"], None, {})


def _data(
    stream: Mapping[str, Any], buffer: Mapping[str, Any] | None, groups: Mapping[str, Any]
) -> Data:
    sources = stream["identity"]["sources"]
    is_weighted = any(source["weight"] is not None for source in sources)
    data = Data(
        drawn=sum(stream["drawn"]),
        returned={d: f"{sources[s]['name']}, row {i}" for d, s, i in stream["returned"]},
        num_prompts=None if is_weighted else sum(source["prompts"] for source in sources),
    )
    if buffer is None:
        return data
    for draw, _, _ in buffer["ready"]:
        prompt = groups[str(draw)]["prompt"]
        data.ready[draw] = Prompt(prompt["id"], source=prompt["source"]).name
    data.dropped = {draw: (name, reason) for draw, name, reason, _ in buffer["dropped"]}
    return data
