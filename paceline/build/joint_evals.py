"""Evals of a run of several policies: with all roles of an environment, or of one policy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.build.engines import make_engine
from paceline.build.members import Member
from paceline.build.parts import LoadedEvalSet
from paceline.build.snapshots import EngineSnapshots
from paceline.config import RunFile
from paceline.engines.base import Engine, Sampling
from paceline.engines.turns import Turns
from paceline.evals import EvalDispatcher, EvalResult, PreparedSet, run_eval
from paceline.rollout.actor import Seat
from paceline.rollout.runner import Runner
from paceline.rollout.seats import AnySeat
from paceline.rollout.single_turn import SINGLE_TURN, load_env


def make_joint_evals(
    run_file: RunFile,
    eval_sets: Sequence[LoadedEvalSet],
    members: Mapping[str, Member],
    seats: Mapping[str, AnySeat],
    turns: Turns | None,
) -> EvalDispatcher[Any]:
    """Measures at a point where no weights move; in the background only a policy by itself."""

    async def evaluate(step: int, version: int, snapshot: Engine | None) -> list[EvalResult]:
        return await evaluate_sets(
            run_file, eval_sets, members, seats, step=step, version=version, snapshot=snapshot
        )

    snapshots = None
    if run_file.evals.background:
        leader = members[run_file.leader]
        snapshots = EngineSnapshots(
            lambda: make_engine(
                leader.view,
                leader.model,
                leader.text,
                policy=leader.name,
                transport="copy",
                turns=turns,
                version=0 if leader.policy is None else leader.policy.trainer.version,
            )
        )
    return EvalDispatcher(run_file.evals, evaluate, snapshots)


async def evaluate_sets(
    run_file: RunFile,
    eval_sets: Sequence[LoadedEvalSet],
    members: Mapping[str, Member],
    seats: Mapping[str, AnySeat],
    *,
    step: int,
    version: int,
    snapshot: Engine | None = None,
) -> list[EvalResult]:
    """Measure the sets one after the other. version, snapshot: of the leader."""
    results = []
    for one in eval_sets:
        name = one.settings.policy or run_file.leader
        prepared = _prepare(run_file, one, name, members, seats, snapshot)
        results.append(
            await run_eval(
                prepared,
                policy=name,
                step=step,
                version=version if name == run_file.leader else _version(members[name]),
                timeout_s=run_file.evals.timeout_s,
            )
        )
    return results


def _version(member: Member) -> int:
    return 0 if member.policy is None else member.policy.version


def _prepare(
    run_file: RunFile,
    one: LoadedEvalSet,
    name: str,
    members: Mapping[str, Member],
    seats: Mapping[str, AnySeat],
    snapshot: Engine | None,
) -> PreparedSet:
    env = one.settings.env or members[name].view.rollout.env
    taking_part: Mapping[str, AnySeat] = seats
    if env == SINGLE_TURN or members[name].view.data is not run_file.data:
        taking_part = {name: members[name].seat()}
    runner = Runner(
        {
            role: _eval_seat(seat, name, one.settings.sampling, snapshot)
            for role, seat in taking_part.items()
        },
        load_env(env, base=run_file.base, reward=one.reward),
        one.reward,
        run_file.rollout,
        policy=name,
        run_seed=run_file.run.seed,
        samples_per_prompt=one.settings.samples_per_prompt,
        purpose=f"eval:{one.settings.name}",
    )
    on_failure = "drop_sample" if one.reward is None else one.reward.on_failure
    return PreparedSet(one.settings, one.prompts, runner, on_failure)


def _eval_seat(
    seat: AnySeat, measured: str, sampling: Sampling | None, snapshot: Engine | None
) -> AnySeat:
    """The measured policy's answers count, whether it learns or not; the others' are kept apart."""
    if not isinstance(seat, Seat):
        return seat
    is_measured = seat.policy == measured
    return replace(
        seat,
        learns=is_measured,
        sampling=sampling or seat.sampling,
        engine=snapshot if snapshot is not None and is_measured else seat.engine,
    )
