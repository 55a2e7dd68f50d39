"""Assembling a run whose policies have clocks of their own, restoring it, and driving it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.build.feeds import OpenFeed, open_feeds
from paceline.build.joint_evals import make_joint_evals
from paceline.build.members import Member, equip, make_past, make_seats, open_member
from paceline.build.opening import make_cadence, open_store, save_request_path, set_threads
from paceline.build.parts import Given, load_eval_sets, make_reward
from paceline.build.policies import restore_policy
from paceline.build.recording import make_recorder
from paceline.build.site import open_site
from paceline.checkpoint import Checkpoint, CheckpointStore, RunState, check_compatible, step_name
from paceline.config import RunFile, write_run_file
from paceline.drivers.board import Board
from paceline.drivers.dispose import Disposer
from paceline.drivers.gate import Gate
from paceline.drivers.joint import Joint, Lead
from paceline.drivers.memory import KeepBoth
from paceline.drivers.run import Cadence, Run
from paceline.drivers.saving import Saves
from paceline.drivers.schedule import SaveRequest
from paceline.engines.turns import Turns
from paceline.errors import GateError, ResumeMismatchError
from paceline.evals import EvalDispatcher
from paceline.evals_settings import EvalsConfig
from paceline.observe.environment import describe_environment, write_environment
from paceline.observe.recorder import Recorder
from paceline.rollout.past import PastSelves
from paceline.types import JsonValue

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Parts:
    """What the clocks of a run are made of."""

    run_file: RunFile
    store: CheckpointStore
    state: RunState | None
    threads: int
    members: dict[str, Member]
    feeds: list[OpenFeed]
    past: dict[str, PastSelves]
    cadence: Cadence
    recorder: Recorder
    board: Board
    evals: EvalDispatcher[Any]
    fingerprint: dict[str, JsonValue]
    environment: dict[str, JsonValue] = field(default_factory=dict)

    def step(self, name: str) -> int:
        return self.state.policies[name].step if self.state else 0


async def open_joint(run_file: RunFile, given: Given, disposer: Disposer) -> Joint:
    """Build every part, restore all of them from one checkpoint, and hand over the clocks."""
    store, checkpoint = open_store(run_file, disposer)
    state = checkpoint.state() if checkpoint else None
    if state is not None:
        _check_policies(run_file, state, str(store.root / step_name(state.step)))
    threads = set_threads(run_file, state)
    turns = Turns() if run_file.run.deterministic else None

    reward = await make_reward(run_file, given, disposer)
    members = {name: await open_member(run_file, name, disposer) for name in run_file.views}
    leader = members[run_file.leader]
    feeds = await open_feeds(run_file, given, members, reward, disposer)
    eval_sets = await load_eval_sets(run_file, given, leader.text, disposer, reward)
    if turns is not None:
        for scored in (reward, *(f.reward for f in feeds), *(s.reward for s in eval_sets)):
            if scored is not None:
                scored.outside = turns.outside
    needed = _fingerprint(run_file, members, feeds)
    if state is not None:
        check_compatible(state, needed, str(store.root / step_name(state.step)))

    _warn_of_old_samples(run_file)
    own = next(feed for feed in feeds if leader.name in feed.learners)
    cadence = make_cadence(leader.view, own.stream, has_evals=bool(eval_sets))
    site = await open_site(run_file, disposer)
    for member in members.values():
        batch = member.view.rollout.prompts_per_step
        takes_part = {member.name, leader.name} <= set(own.learners)
        num_steps = steps_of_follower(
            cadence.num_steps,
            leader_batch=leader.view.rollout.prompts_per_step,
            batch=batch if takes_part else None,
        )
        await equip(member, num_steps, turns, site)
    past = make_past(run_file, members, turns, run_file.run_dir, disposer)
    seats = make_seats(run_file, members, past, disposer)
    for feed in feeds:
        feed.connect(run_file, members, seats, {n: _step(state, n) for n in run_file.learners})
    evals = make_joint_evals(run_file, eval_sets, members, seats, turns)
    disposer.add("evals", evals.aclose)
    if checkpoint is not None and state is not None:
        await _restore(checkpoint, state, members, feeds, past)

    write_run_file(run_file, run_file.run_dir / "run.toml")
    environment = describe_environment(threads=threads)
    write_environment(run_file.run_dir, environment)
    recorder = make_recorder(run_file, cadence.num_steps)
    disposer.add("recorder", recorder.close)
    steps = {name: progress.step for name, progress in state.policies.items()} if state else {}
    recorder.start(steps, state.metrics if state else None)
    parts = _Parts(
        run_file, store, state, threads, members, feeds, past, cadence, recorder,
        Board(run_file.learners, leader.name), evals, needed, environment,
    )  # fmt: skip
    return _joint(parts, turns)


def steps_of_follower(num_steps: int, *, leader_batch: int, batch: int | None) -> int:
    """Steps that a policy makes in so many of the leader: the length of its schedules.

    batch: its groups a step, if it learns from the leader's episodes; None: it has its own, and
    its pace is not known.
    """
    return num_steps if batch is None else -(-num_steps * leader_batch // batch)


def _step(state: RunState | None, name: str) -> int:
    return state.policies[name].step if state else 0


def _warn_of_old_samples(run_file: RunFile) -> None:
    """Sampling that runs ahead makes samples of older weights; the loss should know of it."""
    for name in run_file.learners:
        view = run_file.view(name)
        algorithm, schedule = view.algorithm, view.schedule
        is_corrected = getattr(algorithm, "correction", None) is not None
        # A distribution over a teacher's top k has no weight of a sampled token.
        takes_none = not hasattr(algorithm, "correction") or bool(getattr(algorithm, "top_k", 0))
        if schedule.max_staleness > 0 and not is_corrected and not takes_none:
            logger.warning(
                "policy %r trains on answers of weights up to %d steps old, as if its own weights "
                "had made them: set algorithm.correction, for instance "
                "algorithm.correction.high = 2.0 (weights each token by the ratio of the trainer's "
                "to the engine's probability), or leave it if train/effective_sample_share stays "
                "near 1", name, schedule.max_staleness,
            )  # fmt: skip


def _check_policies(run_file: RunFile, state: RunState, where: str) -> None:
    """Refuse a checkpoint of other policies before anything is loaded."""
    found, wanted = set(state.policies), set(run_file.learners)
    if found != wanted:
        extra = ", ".join(sorted(found - wanted)) or "none"
        missing = ", ".join(sorted(wanted - found)) or "none"
        raise ResumeMismatchError(
            f"{where} holds the policies {', '.join(sorted(found))}; the run file trains "
            f"{', '.join(sorted(wanted))} (only in the checkpoint: {extra}; missing there: "
            f"{missing}). Go back to the saved policies, or start a run of another name (run.name)"
        )
    if state.leader != run_file.leader:
        raise ResumeMismatchError(
            f"{where} was led by {state.leader!r}, the run file's leader is {run_file.leader!r}: "
            f'write run.leader = "{state.leader}", or start a run of another name (run.name)'
        )


def _fingerprint(
    run_file: RunFile, members: Mapping[str, Member], feeds: list[OpenFeed]
) -> dict[str, JsonValue]:
    if not run_file.policies and not run_file.roles:
        # As the sync driver has it: a run may go on with another [schedule].
        (member,), (feed,) = members.values(), feeds
        own = member.fingerprint()
        return {"seed": run_file.run.seed, **own, "data": feed.stream.identity}
    # Where an endpoint stands may change, and how patiently it is asked.
    moves = {"url", "api_key_env", "timeout_s", "max_in_flight"}
    roles = {
        role: played_by.model_dump(mode="json", exclude_none=True, exclude=moves)
        for role, played_by in run_file.cast.items()
    }
    return {
        "seed": run_file.run.seed,
        "policies": {name: member.fingerprint() for name, member in members.items()},
        "roles": roles,
        "data": {feed.name: feed.stream.identity for feed in feeds},
    }


async def _restore(
    checkpoint: Checkpoint,
    state: RunState,
    members: Mapping[str, Member],
    feeds: list[OpenFeed],
    past: Mapping[str, PastSelves],
) -> None:
    """Each policy at the step that the state names for it, then what was sampled and not used."""
    for member in members.values():
        if member.policy is not None:
            await restore_policy(member.policy, checkpoint, state)
    for role, selves in past.items():
        await selves.load(checkpoint.policy_folder(selves.policy) / "past" / role)
    data = checkpoint.read_json("data.json")
    for feed in feeds:
        feed.restore(data, {name: progress.step for name, progress in state.policies.items()})


def _joint(parts: _Parts, turns: Turns | None) -> Joint:
    """The clocks, and what stands between them."""
    run_file, leader = parts.run_file, parts.run_file.leader
    runs = {name: _run(parts, name) for name in run_file.learners}
    runs[leader].others = [run for name, run in runs.items() if name != leader]
    leads = {name: run_file.view(name).schedule.max_lead for name in runs}
    if turns is not None:
        shared = run_file.shared_policies if leader in run_file.shared_policies else ()
        alone = [name for name in runs if name != leader and name not in shared]
        leads |= {name: leads[name] or 0 for name in alone}
    return Joint(
        leader=runs[leader],
        board=parts.board,
        gate=Gate(list(runs), deadline_s=run_file.run.gate_timeout_s, report=parts.board.report),
        producers=_producers(parts.feeds),
        is_deterministic=turns is not None,
        quiet=_quiet(parts.feeds, run_file.run.gate_timeout_s if turns is not None else None),
        lead=Lead({name: limit for name, limit in leads.items() if limit is not None}),
    )


def _run(parts: _Parts, name: str) -> Run:
    run_file, policy = parts.run_file, parts.members[name].policy
    assert policy is not None
    is_leader, state = name == run_file.leader, parts.state
    cadence, evals = parts.cadence, parts.evals
    if not is_leader:
        cadence = Cadence(
            num_steps=sys.maxsize,
            save_every="never",
            eval_every=None,
            eval_first=False,
            publish_every=run_file.view(name).schedule.publish_every,
        )
        evals = EvalDispatcher(EvalsConfig(), _measures_nothing)
    step = parts.step(name)
    return Run(
        policy=policy,
        supply=next(feed for feed in parts.feeds if name in feed.learners).supply(name),
        memory=KeepBoth(),
        board=parts.board,
        recorder=parts.recorder,
        store=parts.store,
        save_request=SaveRequest(save_request_path(run_file) if is_leader else None),
        evals=evals,
        cadence=cadence,
        seed=run_file.run.seed,
        fingerprint=parts.fingerprint,
        data_state=lambda: {"feeds": {feed.name: feed.state() for feed in parts.feeds}},
        saves=Saves(in_background=is_leader and run_file.checkpoint.background),
        past=[selves for selves in parts.past.values() if selves.policy == name],
        environment=parts.environment,
        threads=parts.threads,
        step=step,
        saved_step=step if state else None,
        epoch_ended=state.epoch_ended if state and is_leader else False,
    )


async def _measures_nothing(step: int, version: int, snapshot: Any) -> list[Any]:
    return []


def _producers(feeds: list[OpenFeed]) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    return {f"feed {feed.name}": feed.feed.run for feed in feeds if feed.feed is not None}


def _quiet(feeds: list[OpenFeed], limit_s: float | None) -> Any:
    """Held while the leader measures; without a limit nothing has to come to rest for that."""

    @asynccontextmanager
    async def held() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(limit_s):
                    for feed in feeds:
                        if limit_s is not None and feed.feed is not None:
                            await stack.enter_async_context(feed.feed.held())
            except TimeoutError as error:
                raise GateError(
                    f"waited {limit_s:g} s for what is being sampled to come to its end; if that "
                    "takes so long, allow more time (run.gate_timeout_s)"
                ) from error
            yield

    return held
