"""Every number of one recorded sample, token by token, so that a step can be checked by hand.

What the samples file lacks is computed anew: weights and advantages by the algorithm from the
recorded samples, log-probs and losses by the models before and after the step.

Legend: N trained tokens of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.build.loop import run_to_end
from paceline.build.parts import make_model, make_text
from paceline.build.recorded import (
    RecordedStep,
    checkpoint_after,
    checkpoint_before,
    recorded_threads,
)
from paceline.build.scoring import RowScorer, clipped_tokens, token_losses
from paceline.build.teachers import open_teacher
from paceline.config import RunFile
from paceline.data.packing import make_rows, samples_of, split_updates
from paceline.drivers.dispose import Disposer
from paceline.errors import ConfigError, DataError, EngineError, TrainerError
from paceline.models import load_tokenizer
from paceline.observe.regroup import regroup, to_sample
from paceline.observe.samples import SampleRecord
from paceline.types import Episode, Group, Prompt, Row

if TYPE_CHECKING:
    from torch import Tensor

CLIP = "clip_fraction"


@dataclass(slots=True)
class TokenNumbers:
    """One token. What is not known, or does not exist outside the mask, is None."""

    position: int
    token: int
    text: str
    is_trained: bool
    version: int | None = None
    behaviour: float | None = None
    """Log-prob that the engine reported."""
    old: float | None = None
    """Log-prob under the weights before the step."""
    new: float | None = None
    """Log-prob under the weights after the step."""
    ratio: float | None = None
    """exp(new - old)."""
    teacher: float | None = None
    """Log-prob that a teacher gives the token."""
    is_clipped: bool | None = None
    """Whether the algorithm counts the token as clipped at that ratio."""
    advantage: float | None = None
    weight: float | None = None
    """Share of the token in the loss of its optimizer step."""
    loss: float | None = None
    """What the token adds to that loss before anything is learned: weight times its own loss."""


@dataclass(frozen=True, slots=True)
class GroupReward:
    """One episode that the sample is compared with, or the sample's own."""

    episode: int
    reward: float | None
    is_own: bool


@dataclass(slots=True)
class SampleNumbers:
    """A sample with everything that its part in the step follows from."""

    step: int
    record: SampleRecord
    tokens: list[TokenNumbers]
    kind: str
    """Of the algorithm."""
    rewards: list[GroupReward] = field(default_factory=list)
    """Of the episodes of the group that count in its baseline."""
    update: int = 0
    """Which optimizer step of a pass over the rollout the sample belongs to, counted from 1."""
    num_updates: int = 1
    update_tokens: int = 0
    """Trained tokens of that optimizer step."""
    update_episodes: int = 0
    """Its episodes with a trained token."""
    recorded_loss: float | None = None
    """`train/loss` of the step's row: the mean over its optimizer steps."""
    notes: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[TokenNumbers]:
        return [token for token in self.tokens if token.is_trained]

    @property
    def loss(self) -> float | None:
        """The sample's share of the loss of its optimizer step."""
        losses = [token.loss for token in self.trained if token.loss is not None]
        return math.fsum(losses) if losses and len(losses) == len(self.trained) else None


def sample_numbers(recorded: RecordedStep, index: int) -> SampleNumbers:
    """The numbers of one of `recorded.records`. Reads models, changes nothing.

    Raises PacelineError if the model of the run file or a checkpoint can not be read.
    """
    record = recorded.records[index]
    numbers = SampleNumbers(
        recorded.step,
        record,
        _recorded_tokens(recorded.run_file, record),
        kind=str(getattr(recorded.run_file.algorithm, "kind", "")),
        recorded_loss=recorded.row.get("train/loss"),
    )
    siblings = regroup([found for found in recorded.records if found.draw == record.draw])
    numbers.rewards = _group_rewards(siblings[0], record)
    if record.dropped is not None:
        numbers.notes.append(f"its group was not trained on: {record.dropped}")
        return numbers
    place = next(i for i, found in enumerate(recorded.trained_records) if found is record)
    weights = _add_credit(recorded, numbers, place)
    if not any(weights):
        numbers.notes.append(f"it was not trained on: {record.cause or record.status}")
        return numbers
    if recorded.step <= _critic_only_steps(recorded.run_file):
        numbers.notes.append("the critic learned alone in this step (critic.warmup_steps)")
    _add_models(recorded, numbers, _row(numbers, weights))
    return numbers


def _critic_only_steps(run_file: RunFile) -> int:
    return 0 if run_file.algorithm.critic is None else run_file.critic_settings.warmup_steps


def _recorded_tokens(run_file: RunFile, record: SampleRecord) -> list[TokenNumbers]:
    tokenizer = load_tokenizer(run_file.located_model)
    mask, versions = record.mask, iter(record.token_versions)
    logprobs = iter(record.logprobs)
    is_sampled = run_file.algorithm.learns_from_rollouts
    found = []
    for position, (token, inside) in enumerate(zip(record.tokens, mask, strict=True)):
        numbers = TokenNumbers(position, token, str(tokenizer.decode([token])), inside)
        if inside:
            behaviour = next(logprobs)
            numbers.behaviour = behaviour if is_sampled else None
            numbers.version = next(versions, None)
        found.append(numbers)
    return found


def _add_credit(recorded: RecordedStep, numbers: SampleNumbers, place: int) -> list[float]:
    """Advantages and weights; returns the weights. place: among the samples of the groups."""
    algorithm, trainer = recorded.run_file.algorithm, recorded.run_file.trainer
    groups, record = recorded.groups, numbers.record
    try:
        advantages = algorithm.credit(groups, recorded.policy).advantages[place]
    except TrainerError:
        numbers.notes.append(
            "advantages are those that were recorded: the algorithm makes them of what models say"
        )
        advantages = _spread(record)
    start = 0
    weights = [0.0] * len(record.tokens)
    parts = split_updates(groups, trainer.updates_per_step)
    numbers.num_updates = len(parts) * trainer.epochs_per_step
    for number, part in enumerate(parts, start=1):
        size = sum(1 for _ in samples_of(part, recorded.policy))
        if start <= place < start + size:
            weights = algorithm.token_weights(part, recorded.policy)[place - start]
            numbers.update = number
            episodes = [e for group in part for e in group.episodes if e.is_trainable]
            counts = [sum(s.num_trained_tokens for s in e.samples) for e in episodes]
            numbers.update_tokens = sum(counts)
            numbers.update_episodes = sum(count > 0 for count in counts)
        start += size
    for token, advantage, weight in zip(numbers.tokens, advantages, weights, strict=True):
        if token.is_trained:
            token.advantage, token.weight = advantage, weight
    return weights


def _spread(record: SampleRecord) -> list[float]:
    """The recorded advantages, one number a token."""
    kept, mask = record.advantage, record.mask
    inside = iter(kept if isinstance(kept, list) else [kept or 0.0] * sum(mask))
    return [next(inside) if trained else 0.0 for trained in mask]


def _group_rewards(group: Group, record: SampleRecord) -> list[GroupReward]:
    """One for each trainable episode in which the sample's role has a reward."""
    found = []
    for episode in group.episodes:
        own = [s for s in episode.samples if s.role == record.role and s.reward is not None]
        if episode.is_trainable and own:
            found.append(GroupReward(episode.index, own[0].reward, episode.index == record.episode))
    return found


def _row(numbers: SampleNumbers, weights: Sequence[float]) -> Row:
    """The sample alone, as its optimizer step sees it."""
    sample = to_sample(numbers.record)
    group = Group(Prompt(sample.prompt_id), [Episode(sample.prompt_id, sample.episode, [sample])])
    (row,) = make_rows([group], sample.policy, weights=[weights])
    row.advantages_T[:] = [token.advantage or 0.0 for token in numbers.tokens]
    return row


def _add_models(recorded: RecordedStep, numbers: SampleNumbers, row: Row) -> None:
    """Log-probs before and after the step, and the loss before it."""
    run_file, step = recorded.run_file, recorded.step
    try:
        before = checkpoint_before(recorded)
    except DataError as error:
        numbers.notes.append(f"old log-probs, ratios and losses are left out: {error}")
        return
    torch.set_num_threads(recorded_threads(recorded, before))
    if run_file.algorithm.needs_reference:
        inputs = RowScorer(run_file, None).inputs(row)
        row.reference_logprobs_T = _column(row, inputs.logprobs_N)
    if run_file.algorithm.needs_teacher:
        _add_teacher(run_file, numbers, row)
    folder = None if before is None else before.policy_folder(recorded.policy) / "model"
    inputs = RowScorer(run_file, folder).inputs(row)
    trained = numbers.trained
    for token, old in zip(trained, inputs.logprobs_N.tolist(), strict=True):
        token.old = old
    try:
        for token, loss in zip(trained, token_losses(run_file.algorithm, inputs), strict=True):
            token.loss = loss
    except TrainerError as error:
        numbers.notes.append(f"losses are left out: {error}")
    after = checkpoint_after(recorded)
    if after is None:
        numbers.notes.append(
            f"new log-probs and ratios are left out: there is no checkpoint of step {step}"
        )
        return
    row.old_logprobs_T = _column(row, inputs.logprobs_N)
    inputs = RowScorer(run_file, after.policy_folder(recorded.policy) / "model").inputs(row)
    try:
        clipped = clipped_tokens(run_file.algorithm, inputs)
    except TrainerError:
        clipped = None
    for i, (token, new) in enumerate(zip(trained, inputs.logprobs_N.tolist(), strict=True)):
        token.new = new
        token.ratio = math.exp(min(new - (token.old or 0.0), 700.0))
        token.is_clipped = None if clipped is None else clipped[i]


def _add_teacher(run_file: RunFile, numbers: SampleNumbers, row: Row) -> None:
    """What the teacher says; a server that is gone leaves it out."""

    async def grade() -> None:
        async with Disposer() as disposer:
            model = make_model(run_file)
            text = make_text(run_file, model)
            teacher = await open_teacher(run_file, model, text, disposer)
            if teacher is not None:
                await teacher.place("device")
                await teacher.grade([row])

    try:
        run_to_end(grade)
    except (ConfigError, EngineError) as error:
        numbers.notes.append(f"the teacher's log-probs are left out: {error}")
        return
    assert row.teacher_logprobs_T is not None
    found = row.teacher_logprobs_T[row.mask_T].tolist()
    for token, logprob in zip(numbers.trained, found, strict=True):
        token.teacher = logprob


def _column(row: Row, values_N: Tensor) -> Any:
    """Numbers of the trained tokens as a column of the row, in its type."""
    column_T = row.weights_T * 0
    column_T[row.mask_T] = values_N.numpy()
    return column_T
