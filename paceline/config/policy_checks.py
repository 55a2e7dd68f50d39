"""Checks of a file with several policies: each policy's view of it, then what is between them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from paceline.config.blocks import SHARED, RunFile
from paceline.config.checks import Check, Situation, reads, run_checks
from paceline.config.names import nearest
from paceline.config.policies import POLICY_BLOCKS
from paceline.config.problems import KeyPath, Problem
from paceline.rollout.role_settings import RoleConfig


def check_all(
    checks: Sequence[Check],
    run_file: RunFile,
    wrong: Collection[KeyPath],
    situation: Situation,
    written: Any,
) -> list[Problem]:
    """What is wrong across the keys of the whole file. written: the tables as they were given."""
    between = written_where(run_checks(BETWEEN, run_file, wrong, situation), written)
    policies = getattr(run_file, "policies", None)
    if not policies:
        return run_checks(checks, run_file, wrong, situation) + between
    found: list[Problem] = []
    for name, policy in policies.items():
        if ("policies", name) in wrong:
            continue
        own_wrong = [path[2:] if path[:2] == ("policies", name) else path for path in wrong]
        of = situation if policy.learns else Situation("generate", situation.given)
        problems = run_checks(checks, run_file.view(name), own_wrong, of)
        found += [_of_policy(problem, name, policy.data is not None) for problem in problems]
    return written_where(found, written) + between


def _of_policy(problem: Problem, name: str, has_own_data: bool) -> Problem:
    block = problem.path[0] if problem.path else ""
    is_own = block in POLICY_BLOCKS and (has_own_data or block not in ("data", "reward"))
    return Problem(("policies", name, *problem.path), problem.text) if is_own else problem


def written_where(problems: Iterable[Problem], written: Any) -> list[Problem]:
    """A problem of a key that a policy inherits is told where it was written: at the top."""
    found = []
    for problem in problems:
        path = problem.path
        if len(path) > 2 and path[0] == "policies" and not _is_written(written, path):
            above = path[2:]
            if _is_written(written, above) or (
                len(above) > 1
                and _is_written(written, above[:1])
                and not _is_written(written, path[:3])
            ):
                problem = Problem(above, problem.text)
        found.append(problem)
    return list(dict.fromkeys(found))


def _is_written(tables: Any, path: KeyPath) -> bool:
    node = tables
    for part in path:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


@reads("policies")
def names_of_policies(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for name in run_file.policies:
        if not re.fullmatch(NAME, name):
            yield Problem(
                ("policies", name),
                "a policy's name is a letter, then letters, digits, `_` and `-`, 64 at most; it "
                "names folders and metrics",
            )
        if name == SHARED and run_file.policies[name].data is not None:
            yield Problem(
                ("policies", name), "the shared episodes have this name: choose another one"
            )
    policies = run_file.policies.values()
    trains = situation.purpose == "train"
    if policies and trains and not any(policy.learns for policy in policies):
        yield Problem(
            ("policies",),
            "none of them learns: set learns = true for one, or measure them by `paceline eval`",
        )


@reads("policies", "trainer")
def adapters_are_trained(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for name, policy in run_file.policies.items():
        own, above = policy.trainer.lora, run_file.trainer.lora
        if own is not None and own != above and not policy.learns:
            yield Problem(
                ("policies", name, "trainer", "lora"),
                "the policy does not learn (learns = false), so nothing would train its adapter: "
                "take the block out; to serve an adapter that is there, name it in model.adapter",
            )


@reads("policies", "teacher")
def teacher_has_a_pupil(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.teacher is None or not run_file.policies or situation.purpose != "train":
        return
    if not any(p.algorithm.needs_teacher and not p.teacher for p in run_file.policies.values()):
        yield Problem(("teacher",), "no policy learns from it: take the block out")


NAME = r"[A-Za-z][A-Za-z0-9_-]{0,63}"
OWN_ROLLOUT = ("sampling", "prompts_per_step", "chat_template_options")
"""Keys of `[rollout]` that a policy may have for itself in shared episodes."""


@reads("roles")
def names_of_roles(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for role in run_file.roles:
        if not re.fullmatch(NAME, role):
            yield Problem(
                ("roles", role),
                "a role's name is a letter, then letters, digits, `_` and `-`, 64 at most; it "
                "names metrics and files",
            )


@reads("policies")
def shared_settings_are_shared(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for name, policy in run_file.policies.items():
        if policy.data is not None:
            continue
        for key, value in policy.rollout:
            if key not in OWN_ROLLOUT and value != getattr(run_file.rollout, key):
                yield Problem(
                    ("policies", name, "rollout", key),
                    f"it holds for the shared episodes as a whole: set rollout.{key}, or give the "
                    "policy data of its own",
                )
        if policy.reward is not None:
            yield Problem(
                ("policies", name, "reward"),
                "the shared episodes are scored by the environment and [reward]: take it out, or "
                "give the policy data of its own",
            )
        if policy.learns and not policy.algorithm.learns_from_rollouts:
            kind = getattr(policy.algorithm, "kind", "it")
            yield Problem(
                ("policies", name, "algorithm", "kind"),
                f"{kind} learns completions from data, not from episodes: give the policy data of "
                "its own",
            )


@reads("policies", "schedule")
def something_bounds_sampling(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    learners = [name for name in run_file.learners if name in run_file.shared_policies]
    schedules = {name: run_file.view(name).schedule for name in learners}
    if schedules and all(one.on_full == "drop_oldest" for one in schedules.values()):
        yield Problem(
            _key(run_file, learners[0], "schedule", "on_full"),
            '"drop_oldest" for every policy that learns from these episodes: nothing would bound '
            'sampling; write "wait" for one of them',
        )


@reads("run.leader")
def leader_is_one(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    leader = run_file.run.leader
    if leader is None:
        return
    known = list(run_file.policies) or ["policy"]
    if leader not in known:
        yield Problem(("run", "leader"), f"there is no policy {leader!r}{_meant(leader, known)}")
    elif run_file.policies and not run_file.policies[leader].learns:
        yield Problem(
            ("run", "leader"), f"{leader!r} does not learn (learns = false), so it takes no steps"
        )


@reads("roles", "rollout.env")
def roles_are_played(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    known = list(run_file.policies) or ["policy"]
    for role, played_by in run_file.roles.items():
        named = played_by.policy or played_by.past
        key = "policy" if played_by.policy else "past"
        if named is None:
            continue
        if named not in known:
            text = f"there is no policy {named!r}{_meant(named, known)}"
            yield Problem(("roles", role, key), text)
        elif run_file.policies and run_file.policies[named].data is not None:
            yield Problem(
                ("roles", role, key),
                f"{named!r} has data of its own and plays its episodes alone: take its data out, "
                "or the role",
            )
    if run_file.policies:
        yield from _idle_policies(run_file)
    if len(run_file.cast) > 1 and run_file.rollout.env == "single_turn":
        names = ", ".join(run_file.cast)
        yield Problem(
            ("rollout", "env"),
            f"single_turn has one role, and here are {names}: name an environment of your own, "
            'such as "game.py:play", or give the policies data of their own',
        )


def _idle_policies(run_file: RunFile) -> Iterator[Problem]:
    """Policies that nobody calls."""
    cast: dict[str, RoleConfig] = run_file.cast
    playing = {played_by.policy for played_by in cast.values()}
    for name, policy in run_file.policies.items():
        if policy.data is None and name not in playing:
            what = "learns from nothing" if policy.learns else "does nothing"
            yield Problem(
                ("policies", name),
                f"it plays no role, so it {what}: name it in [roles], or give it data of its own",
            )


@reads("policies", "schedule", "run.leader")
def followers_have_leads(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for name, view in run_file.views.items():
        if name == run_file.leader and view.schedule.max_lead is not None:
            yield Problem(
                _key(run_file, name, "schedule", "max_lead"),
                f"{name!r} is the leader: a lead is a follower's, ahead of it",
            )


@reads("policies", "run.driver", "schedule", "memory", "roles")
def driver_fits(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    run, schedule = run_file.run, run_file.schedule
    if run.driver == "sync":
        if run_file.policies or run_file.roles:
            yield Problem(("run", "driver"), '"sync" drives one policy; write "multi", or "auto"')
        elif schedule.runs_ahead or schedule.publish_every > 1:
            yield Problem(
                ("run", "driver"),
                '"sync" samples and learns in turn; with this [schedule] write "multi", or "auto"',
            )
    if run_file.is_multi and run_file.memory.order != "none":
        yield Problem(
            ("memory", "order"),
            f"{run_file.memory.order!r}: engines and trainers take turns on a device with the "
            'sync driver only; write "none", or train one policy with the default [schedule]',
        )
    if run_file.is_multi and run_file.evals.background and len(run_file.policies) > 1:
        yield Problem(
            ("evals", "background"),
            "several policies are measured together, at a point where no weights move: leave it "
            "out",
        )


@reads("policies", "run.deterministic", "schedule")
def determinism_is_possible(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if not run_file.run.deterministic:
        return
    for name, view in run_file.views.items():
        if view.schedule.runs_ahead:
            found = view.schedule
            yield Problem(
                ("run", "deterministic"),
                f"{name!r} has max_staleness = {found.max_staleness} and on_full = "
                f'"{found.on_full}": what it trains on depends on timing; set max_staleness = 0 '
                'and on_full = "wait"',
            )


@reads("policies", "engine.weights", "schedule", "run.driver")
def weights_are_copied(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if not run_file.is_multi:
        return
    for name, view in run_file.views.items():
        if view.engine.weights == "shared":
            yield Problem(
                _key(run_file, name, "engine", "weights"),
                "sampling and training overlap with the multi driver, so the engine needs a copy: "
                'write "auto" or "copy"',
            )


@reads("policies", "evals.sets", "roles")
def eval_sets_name_policies(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    known = list(run_file.policies) or ["policy"]
    for index, one in enumerate(run_file.evals.sets):
        policy = getattr(one, "policy", None)
        if policy is not None and policy not in known:
            yield Problem(
                ("evals", "sets", index, "policy"),
                f"there is no policy {policy!r}{_meant(policy, known)}",
            )


def _key(run_file: RunFile, name: str, *key: str) -> KeyPath:
    return ("policies", name, *key) if run_file.policies else key


def _meant(name: str, known: Sequence[str]) -> str:
    near = nearest(name, list(known))
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


BETWEEN: tuple[Check, ...] = (
    names_of_policies,
    names_of_roles,
    shared_settings_are_shared,
    something_bounds_sampling,
    adapters_are_trained,
    teacher_has_a_pupil,
    leader_is_one,
    roles_are_played,
    followers_have_leads,
    driver_fits,
    determinism_is_possible,
    weights_are_copied,
    eval_sets_name_policies,
)
