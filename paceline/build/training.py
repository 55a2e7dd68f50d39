"""Assembling a training run, restoring it, driving it, and closing everything on every way out."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from paceline.build.engines import make_engine
from paceline.build.feeds import restore_stream
from paceline.build.joint import open_joint
from paceline.build.loop import run_to_end
from paceline.build.opening import (
    make_cadence,
    make_stream,
    open_store,
    save_request_path,
    set_threads,
    settle,
)
from paceline.build.parts import (
    Given,
    LoadedEvalSet,
    Rows,
    Text,
    load_eval_sets,
    make_critic_model,
    make_model,
    make_reward,
    make_runner,
    make_text,
)
from paceline.build.policies import fingerprint, open_policy, restore_policy
from paceline.build.recording import make_recorder
from paceline.build.results import RunResult
from paceline.build.site import open_site
from paceline.build.snapshots import EngineSnapshots
from paceline.build.teachers import open_teacher
from paceline.checkpoint import check_compatible, step_name
from paceline.config import POLICY, RunFile, write_run_file
from paceline.data.stream import PromptStream
from paceline.drivers import multi, sync
from paceline.drivers.board import Board
from paceline.drivers.dispose import Disposer
from paceline.drivers.memory import make_memory_plan
from paceline.drivers.run import Run
from paceline.drivers.saving import Saves
from paceline.drivers.schedule import SaveRequest
from paceline.drivers.supervised import supervised_batch
from paceline.drivers.supply import Pull
from paceline.engines.embedded import EmbeddedEngine
from paceline.evals import EvalDispatcher, EvalResult, run_evals
from paceline.observe.environment import describe_environment, write_environment
from paceline.policy import Policy
from paceline.rollout.batch import RolloutBatch, collect_batch
from paceline.rollout.rewards import Reward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def train(
    run_file: RunFile,
    *,
    prompts: Rows | None = None,
    reward: Callable[..., Any] | None = None,
    eval_prompts: Rows | None = None,
) -> RunResult:
    """Run the file to its end, from its newest checkpoint if there is one."""
    given = Given(prompts, reward, eval_prompts)
    return run_to_end(lambda: _train(run_file, given))


async def _train(run_file: RunFile, given: Given) -> RunResult:
    async with Disposer() as disposer:
        if run_file.is_multi:
            joint = await open_joint(run_file, given, disposer)
            settle(disposer)
            await multi.drive(joint)
            return _result(run_file, joint.leader)
        run = await open_run(run_file, given, disposer)
        settle(disposer)
        await sync.drive(run)
        return _result(run_file, run)


async def open_run(run_file: RunFile, given: Given, disposer: Disposer) -> Run:
    """Build every part and restore it; prompts are read as soon as there is a model to fit them."""
    store, checkpoint = open_store(run_file, disposer)
    state = checkpoint.state() if checkpoint else None
    threads = set_threads(run_file, state)

    reward = await make_reward(run_file, given, disposer)
    model = make_model(run_file)
    text = make_text(run_file, model)
    critic_model = make_critic_model(run_file, text)
    stream = make_stream(run_file, given, text)
    eval_sets = await load_eval_sets(run_file, given, text, disposer, reward)
    teacher = await open_teacher(run_file, model, text, disposer)
    needed = fingerprint(run_file, model, critic_model, stream, teacher)
    if state is not None:
        check_compatible(state, needed, str(store.root / step_name(state.step)))

    cadence = make_cadence(run_file, stream, has_evals=bool(eval_sets))
    site = await open_site(run_file, disposer)
    policy = await open_policy(
        run_file, model, critic_model, text, cadence.num_steps, site, teacher
    )
    if checkpoint is not None and state is not None:
        await restore_policy(policy, checkpoint, state)
        restore_stream(stream, checkpoint.read_json("data.json"))

    evals = _make_evals(run_file, eval_sets, policy, text, model)
    disposer.add("evals", evals.aclose)
    write_run_file(run_file, run_file.run_dir / "run.toml")
    environment = describe_environment(threads=threads)
    write_environment(run_file.run_dir, environment)
    recorder = make_recorder(run_file, cadence.num_steps)
    disposer.add("recorder", recorder.close)
    recorder.start({POLICY: state.step} if state else {}, state.metrics if state else None)
    return Run(
        policy=policy,
        supply=Pull(stream, _collector(run_file, policy, stream, text, reward)),
        board=Board([POLICY], POLICY),
        memory=make_memory_plan(run_file.memory, policy.engine, policy),
        recorder=recorder,
        store=store,
        save_request=SaveRequest(save_request_path(run_file)),
        evals=evals,
        cadence=cadence,
        seed=run_file.run.seed,
        fingerprint=needed,
        data_state=stream.state,
        saves=Saves(in_background=run_file.checkpoint.background),
        environment=environment,
        threads=threads,
        step=state.step if state else 0,
        saved_step=state.step if state else None,
        epoch_ended=state.epoch_ended if state else False,
    )


def _collector(
    run_file: RunFile,
    policy: Policy,
    stream: PromptStream,
    text: Text,
    reward: Reward | None,
) -> Callable[[int], Awaitable[RolloutBatch]]:
    """Rollouts, or rows straight from the data."""
    num_prompts = run_file.rollout.prompts_per_step
    if not policy.algorithm.learns_from_rollouts:

        async def read(step: int) -> RolloutBatch:
            return supervised_batch(
                stream, text.renderer, policy=policy.name, num_prompts=num_prompts
            )

        return read
    runner = make_runner(run_file, policy.engine, text, reward, policy=policy.name)

    async def sample(step: int) -> RolloutBatch:
        return await collect_batch(stream, runner, step=step)

    return sample


def _make_evals(
    run_file: RunFile,
    eval_sets: list[LoadedEvalSet],
    policy: Policy,
    text: Text,
    model: PreTrainedModel,
) -> EvalDispatcher[EmbeddedEngine]:
    async def evaluate(
        step: int, version: int, snapshot: EmbeddedEngine | None
    ) -> list[EvalResult]:
        engine = snapshot or policy.engine
        prepared = [one.prepare(run_file, engine, text, policy.name) for one in eval_sets]
        return await run_evals(
            prepared,
            policy=policy.name,
            step=step,
            version=version,
            timeout_s=run_file.evals.timeout_s,
        )

    snapshots = None
    if run_file.evals.background:
        snapshots = EngineSnapshots(
            lambda: make_engine(
                run_file,
                model,
                text,
                policy=policy.name,
                transport="copy",
                version=policy.trainer.version,
            )
        )
    return EvalDispatcher(run_file.evals, evaluate, snapshots)


def _result(run_file: RunFile, run: Run) -> RunResult:
    steps = run.store.steps()
    folder = run.store.root / step_name(steps[-1]) if steps else None
    names = [run.policy.name, *(other.policy.name for other in run.others)]
    models = {n: folder / "policies" / n / "model" for n in names} if folder else {}
    return RunResult(
        run_dir=run_file.run_dir,
        step=run.step,
        version=run.policy.trainer.version,
        first_evals=run.first_evals,
        evals=run.last_evals,
        model_path=models.get(run.policy.name),
        model_paths=models,
        samples=run.last_samples,
    )
