"""A recorded step done again in memory, and every difference from what was recorded.

    read_step --groups--> weights of the step before --> policy.learn --> compare
                    '----> rescore ---------------------------------------'

Rewards come from the run's reward and the recorded answers; advantages, losses and gradient norms
from the recorded rewards. So a reward that was changed shows as a reward that differs, and as
advantages and numbers that do not follow from the recorded rewards. Nothing on disk is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.build.compare import (
    Difference,
    Tolerance,
    compare_credit,
    compare_logprobs,
    compare_metrics,
    compare_reward,
    compare_text,
)
from paceline.build.loop import run_to_end
from paceline.build.parts import (
    Given,
    Text,
    load_prompts,
    make_critic_model,
    make_model,
    make_text,
)
from paceline.build.policies import open_policy, restore_policy
from paceline.build.recorded import (
    RecordedStep,
    check_complete,
    checkpoint_before,
    read_step,
    recorded_threads,
)
from paceline.build.rescore import rescore
from paceline.build.site import open_site
from paceline.build.teachers import open_teacher
from paceline.config import RunFile
from paceline.data.packing import make_rows
from paceline.data.stream import steps_for_epochs
from paceline.drivers.dispose import Disposer
from paceline.observe.metrics import Metrics
from paceline.observe.regroup import regroup
from paceline.policy import Policy
from paceline.rollout.summary import summarise
from paceline.types import Group, JsonValue

LEARNED = ("train/", "critic/")
SUMMARISED = (
    "rollout/reward", "rollout/zero_variance", "rollout/all_correct", "rollout/all_wrong",
)  # fmt: skip
"""Numbers of the rollouts that follow from the recorded rewards."""


@dataclass(slots=True)
class Replay:
    """What a replay found."""

    run_dir: Path
    step: int
    weights: str
    """Where the weights before the step came from."""
    tolerance: Tolerance
    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    """Part -> how many of it were compared."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> recorded and replayed number."""
    notes: list[str] = field(default_factory=list)
    """What was not compared, and why."""

    def compare(self, part: str, differences: Iterable[Difference | None]) -> None:
        """Count comparisons and keep those that differ."""
        found = list(differences)
        self.compared[part] = self.compared.get(part, 0) + len(found)
        self.differences += [difference for difference in found if difference is not None]

    def to_json(self) -> dict[str, JsonValue]:
        return {**asdict(self), "run_dir": str(self.run_dir), "agrees": not self.differences}


def replay(
    run_dir: Path,
    step: int | None = None,
    overrides: Sequence[str] = (),
    *,
    policy: str | None = None,
    tolerance: Tolerance | None = None,
) -> Replay:
    """Do a step of the run in `run_dir` again, by default the last one, and compare.

    policy: one of several, whose own steps count; default: the leader. Raises PacelineError if it
    can not be replayed, with what to do.
    """
    recorded = read_step(run_dir, step, overrides, policy=policy)
    check_complete(recorded)
    return run_to_end(lambda: _replay(recorded, tolerance or Tolerance()))


async def _replay(recorded: RecordedStep, tolerance: Tolerance) -> Replay:
    checkpoint = checkpoint_before(recorded)
    torch.set_num_threads(recorded_threads(recorded, checkpoint))
    run_file, groups = recorded.run_file, recorded.groups
    async with Disposer() as disposer:
        model = make_model(run_file)
        text = make_text(run_file, model)
        critic_model = make_critic_model(run_file, text)
        num_steps = _num_steps(run_file, text)
        teacher = await open_teacher(run_file, model, text, disposer)
        site = await open_site(run_file, disposer)
        policy = await open_policy(
            run_file, model, critic_model, text, num_steps, site, teacher, name=recorded.policy
        )
        weights = "the model of the run file"
        if checkpoint is not None:
            await restore_policy(policy, checkpoint, checkpoint.state())
            weights = f"the checkpoint of step {checkpoint.step}"
        result = Replay(recorded.run_dir, recorded.step, weights, tolerance)

        rescoring = await rescore(recorded, text, disposer)
        result.notes += rescoring.notes
        result.compare("text", map(compare_text, rescoring.answers))
        result.compare("reward", map(compare_reward, rescoring.answers))

        if policy.algorithm.learns_from_rollouts:
            old = await _old_logprobs(policy, groups)
            result.compare("log-prob", compare_logprobs(recorded, old, tolerance))
        critic_only = recorded.step <= policy.critic_only_steps
        credit, metrics = await policy.learn(groups, critic_only=critic_only)
        records = recorded.trained_records
        result.compare("advantage", compare_credit(records, credit.advantages, tolerance))
        learned = {"version": float(policy.trainer.version), **metrics.values()}
        if policy.algorithm.learns_from_rollouts:
            learned |= _summary(recorded, policy.name)
        _take_metrics(result, recorded.row, learned)
    return result


def _num_steps(run_file: RunFile, text: Text) -> int:
    """Length of the run, on which a falling learning rate depends."""
    run, trainer = run_file.run, run_file.trainer
    if run.num_steps is not None:
        return run.num_steps
    schedules = {trainer.lr_schedule, run_file.critic_settings.lr_schedule or "constant"}
    if run.num_epochs is None or schedules == {"constant"}:
        return 1
    num_prompts = sum(len(one.prompts) for one in load_prompts(run_file, Given(), text))
    return steps_for_epochs(num_prompts, run.num_epochs, run_file.rollout.prompts_per_step)


async def _old_logprobs(policy: Policy, groups: Sequence[Group]) -> list[list[float]]:
    """Of each trained sample and token, under the weights before the step."""
    scored = await policy.trainer.forward(make_rows(groups, policy.name), "policy")
    return [column_T.tolist() for column_T in scored]


def _summary(recorded: RecordedStep, policy: str) -> dict[str, float]:
    """What the run counted of its rewards, over everything that it sampled."""
    metrics: Metrics = summarise(regroup(recorded.records), policy)
    return {n: v for n, v in metrics.values().items() if n.startswith(SUMMARISED)}


def _take_metrics(result: Replay, row: Mapping[str, Any], learned: Mapping[str, float]) -> None:
    """Numbers that only one of the two has are notes: another version may count other things."""
    kept = {
        name: float(value)
        for name, value in row.items()
        if name in learned or name.startswith(LEARNED)
    }
    both = [name for name in learned if name in kept]
    result.metrics = {name: (kept[name], learned[name]) for name in both}
    result.compare("metric", compare_metrics(result.metrics, result.tolerance))
    for names, what in (
        (kept.keys() - learned.keys(), "recorded, but not replayed"),
        (learned.keys() - kept.keys(), "replayed, but not recorded"),
    ):
        if names:
            result.notes.append(f"not compared, since {what}: {', '.join(sorted(names))}")
