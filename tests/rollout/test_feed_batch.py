"""What a step is told of the samples that it gets from a buffer."""

from __future__ import annotations

from dataclasses import replace

from batches import make_group, make_sample

from paceline.data.tickets import Taken
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed_batch import batch_of, newest_tokens
from paceline.rollout.settings import RolloutConfig
from paceline.types import NO_VERSION, Group, Sample


def batch_with(group: Group, config: RolloutConfig) -> RolloutBatch:
    taken = Taken([group], [2], [], num_stragglers=0, num_ready=0, is_exhausted=False)
    return batch_of(
        taken,
        "policy",
        config,
        batch=1,
        can_drop_oldest=False,
        has_stragglers=False,
        max_staleness=2,
        lost_tokens=0,
    )


def spanning() -> Sample:
    """Five tokens of old weights, three of new ones; before them two of the prompt."""
    made = [False] * 2 + [True] * 8
    return replace(
        make_sample(1.0),
        tokens=list(range(3, 13)),
        mask=made,
        logprobs=[-0.5 if inside else 0.0 for inside in made],
        versions=[NO_VERSION] * 2 + [3] * 5 + [4] * 3,
    )


def test_case_45_of_a_partial_answer_the_newest_tokens_alone_may_be_trained_on() -> None:
    group = make_group([[spanning()]])
    (masked,) = batch_with(group, RolloutConfig(partial="mask")).groups
    (sample,) = masked.samples()
    assert sample.mask == [False] * 7 + [True] * 3
    assert sample.versions == [NO_VERSION] * 7 + [4] * 3
    assert sample.logprobs == [0.0] * 7 + [-0.5] * 3
    sample.validate()
    (kept,) = batch_with(group, RolloutConfig()).groups
    assert next(kept.samples()) == spanning()


def test_an_answer_of_one_version_is_left_whole() -> None:
    sample = replace(spanning(), versions=[NO_VERSION] * 2 + [4] * 8)
    assert newest_tokens(sample) == sample


def test_case_57_tokens_of_unknown_weights_are_counted_as_unknown_and_never_as_fresh() -> None:
    known, mixed, unknown, partly = (make_sample(1.0, episode=i) for i in range(4))
    known.versions = [NO_VERSION, 4, 4]
    mixed.versions = [NO_VERSION, 3, 4]
    unknown.versions = [NO_VERSION] * 3
    partly.versions = [NO_VERSION, NO_VERSION, 4]
    group = make_group([[sample] for sample in (known, mixed, unknown, partly)])
    values = batch_with(group, RolloutConfig()).metrics.values()
    assert values["rollout/unknown_versions"] == 2 / 4
    assert values["rollout/mixed_versions"] == 1 / 4
    assert values["rollout/staleness"] == 2.0
    assert values["rollout/staleness_share/0"] == 0.0
