"""The verbs that drivers order. Each one is complete in itself and says what it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from paceline.checkpoint import PolicyProgress, RunState, Staged
from paceline.drivers.run import Run
from paceline.errors import DataError, RolloutError
from paceline.evals import EvalResult
from paceline.observe.files import encode_json
from paceline.observe.ledger import Entry
from paceline.observe.metrics import Metrics
from paceline.rollout.batch import RolloutBatch
from paceline.trainers.base import Write

logger = logging.getLogger(__name__)

COLLECTING = "waiting for data"
"""A phase as the board tells it."""


@contextmanager
def _phase(run: Run, name: str, doing: str) -> Iterator[None]:
    """A phase of the policy's step, timed by the recorder and told by the board."""
    with run.recorder.phase(name, run.policy.name), run.board.during(run.policy.name, doing):
        yield


def is_waiting(run: Run) -> bool:
    """True while the policy waits for data, between two steps."""
    return run.board[run.policy.name].phase == COLLECTING


async def start(run: Run) -> None:
    """Publish before anything is sampled, then measure what training starts from.

    A resumed run finishes the row of the step it was restored at, if that was not written: its
    eval, if one was due, was lost with the process.
    """
    run.first_step = run.step + 1
    run.board.restored(run.policy.name, run.step)
    name, version = run.policy.name, run.policy.trainer.version
    run.recorder.event(
        "start", policy=name, after_step=run.step, version=version,
        lost_tokens=run.supply.lost_tokens,
    )  # fmt: skip
    await publish(run, run.step)
    if run.step == 0:
        if run.cadence.eval_first:
            run.recorder.begin_step(run.policy.name, 0)
            await _evaluate(run, 0)
            run.recorder.end_step(run.policy.name, run.policy.version)
    elif run.recorder.is_open(run.policy.name):
        await evaluate_if_due(run, run.step)
        run.recorder.end_step(run.policy.name, run.policy.version)
    else:
        run.evaluated_step = run.step


async def collect(run: Run, step: int) -> RolloutBatch:
    """Wait for the groups of a step; none if the data has come to its end."""
    run.recorder.begin_step(run.policy.name, step)
    epoch = run.supply.epoch
    with _phase(run, "collect", COLLECTING):
        batch = await run.supply.collect(step)
    run.epoch_ended = run.cadence.counts_epochs and run.supply.epoch > epoch
    run.recorder.log(run.policy.name, batch.metrics)
    if not batch.groups:
        _account(run, run.step, batch)  # there will be no step to tell of what was dropped
    return batch


async def learn(run: Run, step: int, batch: RolloutBatch) -> None:
    """Wait for every optimizer step of this rollout; the rollout is dumped, then dropped.

    The critic learns before the actor, and alone in its warm-up.
    """
    critic_only = step <= run.policy.critic_only_steps
    with _phase(run, "learn", "learning"):
        credit, metrics = await run.policy.learn(batch.groups, critic_only=critic_only)
    for past in run.past:
        metrics.merge(past.learned(batch.groups))
    run.supply.learned()
    run.board.trained(run.policy.name, step)
    _account(run, step, batch)
    run.recorder.log(run.policy.name, metrics)
    unused = [*batch.dropped, *((group, "surplus") for group in batch.discarded)]
    run.recorder.samples(step, run.policy.name, batch.groups, credit.advantages, unused)
    own = run.policy.name
    run.last_samples = [sample for group in batch.groups for sample in group.samples(own)]
    run.trained_tokens += sum(sample.num_trained_tokens for sample in run.last_samples)
    batch.groups.clear()


def _account(run: Run, step: int, batch: RolloutBatch) -> None:
    """Write down what became of the prompts that the step has used."""
    entry = Entry(run.policy.name, step, run.policy.trainer.version)
    entry.trains(batch.groups)
    for group, reason in batch.dropped:
        entry.drops(group, reason)
    for draw, prompt, reason in batch.lost:
        entry.loses(draw, prompt, reason)
    entry.returns(batch.discarded)
    run.recorder.account(entry)


async def save_if_due(run: Run, step: int) -> None:
    """Save by schedule, or because somebody asked by touching the request file."""
    if is_save_due(run, step):
        await save(run, step)


def is_save_due(run: Run, step: int) -> bool:
    """By schedule, or asked for; a request that was claimed once stays due until it is saved."""
    return run.save_request.claim() or run.is_save_due(step)


async def publish(run: Run, step: int) -> None:
    """Wait until every engine serves the trainer's weights."""
    with _phase(run, "publish", "publishing"):
        await run.policy.publish()
        for past in run.past:
            await past.published(step)
    run.board.published(run.policy.name, step)
    if not run.is_last(step):
        # The last one gives no slots back: nothing that is sampled now would be trained on.
        run.supply.published(step)


async def publish_if_due(run: Run, step: int) -> None:
    if run.is_publish_due(step):
        await publish(run, step)


async def evaluate_if_due(run: Run, step: int) -> None:
    """Measure, or start measuring, the weights that the engines serve now."""
    if run.is_eval_due(step):
        await _evaluate(run, step)


def finish_step(run: Run, step: int) -> None:
    """The step is done: write its row. Raises the error of a save that failed meanwhile."""
    run.saves.check()
    run.recorder.end_step(run.policy.name, run.policy.version)
    run.step = step


def is_debug_exit(run: Run, step: int) -> bool:
    limit = run.cadence.debug_exit_after
    return limit is not None and step - run.first_step + 1 >= limit


async def end(run: Run) -> None:
    """Force what the last step owes; refuse to call a run without an update a success."""
    if run.step == 0 and run.cadence.num_steps > 0:
        raise DataError(
            "the run ended without a single update: the prompts gave no group to train on"
        )
    _warn_of_idle(run)
    await settle_save(run)
    if run.is_save_due(run.step) and (run.saved_step != run.step or _has_moved(run)):
        await save(run, run.step)
    if run.is_eval_due(run.step) and run.evaluated_step != run.step:
        if run.board[run.policy.name].published < run.step:
            await publish(run, run.step)  # that it was the last one shows only now
        await _evaluate(run, run.step)
    if run.recorder.is_open(run.policy.name):
        # The data ended in a step that left nothing to learn from: its counts are worth a row.
        run.recorder.end_step(run.policy.name, run.policy.version)
    run.recorder.event("end", step=run.step, version=run.policy.trainer.version)
    if run.step >= run.first_step and run.trained_tokens == 0:
        raise RolloutError(
            f"steps {run.first_step} to {run.step} had no token to train on, so nothing was "
            "learned: every answer was cut off and masked (see rollout.truncated), "
            "or the environment never asked the policy"
        )


def _has_moved(run: Run) -> bool:
    """True if a follower has trained, or something became of a draw, since the last save."""
    if run.saved is None:
        return False
    return run.saved != (run.board.trained_steps(), run.data_state())


def _warn_of_idle(run: Run) -> None:
    """A policy that was to learn and did not is worth a word."""
    for other in run.others:
        name = other.policy.name
        if other.board[name].trained == 0 and run.step > 0:
            logger.warning(
                "policy %r has not made a single step: the environment gave it too few samples "
                "that it could be trained on, or never asked its roles", name,
            )  # fmt: skip
            run.recorder.event("idle", policy=name)


async def settle_save(run: Run) -> None:
    """Wait for the save in the background, if there is one; it counts as a phase of the step."""
    if not run.saves.is_idle:
        with _phase(run, "save", "waiting for the save before"):
            await run.saves.settle()
    await run.saves.settle()


async def save(run: Run, step: int) -> None:
    """Models, then the data cursor, then the run state; the store's rename is the commit.

    With several policies no weights may change meanwhile: the caller holds the gate. Waits for the
    save before. Unless it is the last one, a save in the background waits for copies alone.
    """
    await settle_save(run)
    run.save_request.serve()
    goes_on = run.saves.in_background and not run.is_last(step)
    waits_for_eval = step > run.step and run.is_eval_due(step)
    writes: list[Write] = []
    with _phase(run, "save", "saving"), ExitStack() as stack:
        staged = stack.enter_context(run.store.staging(step))
        await _save_policies(run, staged, writes if goes_on else None)
        data = run.data_state()
        files = {"data.json": encode_json(data, indent=1), "state.json": _state(run, step).encode()}
        if waits_for_eval:
            run.store.await_score(step)
        run.saved_step, run.saved = step, (run.board.trained_steps(), data)
        if goes_on:
            run.saves.begin(_write(run, staged, writes, files, stack.pop_all()))
        else:
            await _commit(run, staged, files)


async def _save_policies(run: Run, staged: Staged, writes: list[Write] | None) -> None:
    """writes: gets what is to be written later, of copies that are made now."""
    later = None if writes is None else writes.append
    for member in (run, *run.others):
        name, critic = member.policy.name, member.policy.critic
        folder = staged.policy_folder(name)
        await member.policy.trainer.save(folder, later)
        if critic is not None:
            await critic.save(staged.critic_folder(name), later)
        for past in member.past:
            await past.save(folder / "past" / past.role, later)


async def _write(
    run: Run, staged: Staged, writes: list[Write], files: Mapping[str, bytes], stack: ExitStack
) -> None:
    """The rest of a save, in the background. stack: owns the staged folder."""
    began_s = time.monotonic()
    with stack:
        for write in writes:
            await write()
        await _commit(run, staged, files)
    metrics = Metrics()
    metrics.sum("time/save_background_s", time.monotonic() - began_s)
    run.recorder.log(run.policy.name, metrics)


async def _commit(run: Run, staged: Staged, files: Mapping[str, bytes]) -> None:
    def commit() -> None:
        for name, data in files.items():
            staged.write(name, data)
        run.store.commit(staged)

    await run.saves.call(commit)
    run.save_request.acknowledge()
    run.recorder.event("saved", step=staged.step)


def _state(run: Run, step: int) -> RunState:
    return RunState(
        step=step,
        leader=run.policy.name,
        policies={member.policy.name: _progress(member) for member in (run, *run.others)},
        seed=run.seed,
        epoch_ended=run.epoch_ended,
        fingerprint=run.fingerprint,
        metrics=run.recorder.pending(),
        threads=run.threads,
        environment=run.environment,
    )


def _progress(run: Run) -> PolicyProgress:
    critic = run.policy.critic
    return PolicyProgress(
        run.board[run.policy.name].trained,
        run.policy.trainer.version,
        None if critic is None else critic.version,
        {role: [mean, count] for role, (mean, count) in run.policy.baselines.items()},
    )


async def _evaluate(run: Run, step: int) -> None:
    is_last = run.is_last(step)
    with _phase(run, "eval", "measuring"):
        results = await run.evals.dispatch(step, run.policy.version, force=is_last)
        if is_last:
            results += await run.evals.drain()  # ends: by the time that a point may take
    run.evaluated_step = step
    if results:
        await settle_save(run)  # a score belongs to a checkpoint that is there
    newest = {result.name: result.step for result in sorted(results, key=lambda r: r.step)}
    for at in sorted({result.step for result in results}):
        of_step = [result for result in results if result.step == at]
        _take_results(run, at, of_step, in_row={n for n, last in newest.items() if last == at})


def _take_results(run: Run, step: int, results: list[EvalResult], *, in_row: set[str]) -> None:
    """Keep one step's results; they may come in while a later step is under way.

    in_row: sets whose numbers go into the open row. A row has room for one point of a set; with
    evals in the background an older one may come in with it, and is told in `events.jsonl` alone.
    """
    values: dict[str, float] = {}
    for result in results:
        run.recorder.eval_samples(result.step, result.name, result.groups)
        metrics = result.metrics()
        metrics.max(f"eval/{result.name}/step", result.step)
        values |= metrics.values()
        if result.name in in_row:
            run.recorder.log(run.policy.name, metrics)
        else:
            run.recorder.event("eval", step=step, set=result.name, values=metrics.values())
        if result.skipped is not None:
            logger.warning("eval %r at step %d was left out: %s", result.name, step, result.skipped)
            run.recorder.event("eval_skipped", step=step, set=result.name, reason=result.skipped)
    run.first_evals = run.first_evals or values
    run.last_evals = values
    run.store.record(step, values)
    run.store.forgo(step)
