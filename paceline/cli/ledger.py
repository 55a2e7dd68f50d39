"""The ledger of a run as text: what became of every prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint import CheckpointStore, RunState
from paceline.checkpoint_settings import CheckpointConfig
from paceline.cli.tables import columns
from paceline.errors import CheckpointError, ConfigError, nearest_hint
from paceline.observe.audit import Account, PromptLife, audit, data_of
from paceline.observe.ledger import read_ledger

MAX_PROMPTS = 100
"""Prompts that are listed; the file has them all."""


def read_accounts(run: Path, policy: str | None = None) -> list[Account]:
    """One for each policy, or for the one that is named, against the newest complete checkpoint.

    Raises DataError if the run has no ledger, ConfigError if there is no such policy.
    """
    entries = read_ledger(run)
    state, data = _newest(run)
    names = list(state.policies) if state else list(dict.fromkeys(e.policy for e in entries))
    if policy is not None and policy not in names:
        hint = nearest_hint(policy, names) or f"; there are {', '.join(names)}"
        raise ConfigError(f"--policy {policy}: the run has no such policy{hint}")
    found = []
    for name in names if policy is None else [policy]:
        try:
            of_policy = None if state is None else data_of(name, data)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"data.json of {run}'s newest checkpoint: {error!r}") from error
        step = 0 if state is None else state.policies[name].step
        found.append(audit(name, entries, of_policy, step=step))
    return found


def _newest(run: Path) -> tuple[RunState | None, Any]:
    root = run / "checkpoints"
    if not root.is_dir():
        return None, None
    checkpoint = CheckpointStore(root, CheckpointConfig()).newest().checkpoint
    if checkpoint is None:
        return None, None
    return checkpoint.state(), checkpoint.read_json("data.json")


def describe_account(account: Account) -> Iterator[str]:
    """Sums, then one line a prompt, then whether each draw is in one place."""
    yield f"policy {account.policy}"
    rows = [("trained on", f"{account.num_trained} draws")]
    if account.drawn is not None:
        rows = [
            ("drawn", f"{account.drawn} draws, as of the checkpoint of step {account.step}"),
            *rows,
            ("committed", f"{account.num_committed}, in steps up to {account.step}"),
            ("sampled", f"{account.num_sampled} wait to be trained on"),
            ("running", f"{account.num_running} are sampled anew after a restart"),
        ]
    if account.dropped:
        rows.append(("dropped", f"{account.dropped.total()}: {_counts(account.dropped)}"))
    yield from (f"  {line}" for line in columns(rows))
    yield ""
    yield from columns(list(_prompts(account.prompts)))
    if len(account.prompts) > MAX_PROMPTS:
        yield f"... and {len(account.prompts) - MAX_PROMPTS} more prompts, see ledger.jsonl"
    yield ""
    if not account.violations:
        yield "every draw was trained on once, or is accounted for"


def _prompts(prompts: Sequence[PromptLife]) -> Iterator[tuple[str, ...]]:
    yield "prompt", "drawn", "trained", "committed", "sampled", "running", "dropped", "versions"
    for one in prompts[:MAX_PROMPTS]:
        numbers = (one.drawn, len(one.versions), one.committed, one.sampled, one.running)
        versions = ", ".join(map(str, one.versions))
        yield one.name, *map(str, numbers), _counts(one.dropped) or "0", versions


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
