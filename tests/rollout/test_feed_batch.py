"""What a step is told of the samples that it gets from a buffer."""

from __future__ import annotations

from batches import make_group, make_sample

from paceline.data.tickets import Taken
from paceline.rollout.feed_batch import batch_of
from paceline.rollout.settings import RolloutConfig
from paceline.types import NO_VERSION


def test_case_57_tokens_of_unknown_weights_are_counted_as_unknown_and_never_as_fresh() -> None:
    known, mixed, unknown, partly = (make_sample(1.0, episode=i) for i in range(4))
    known.versions = [NO_VERSION, 4, 4]
    mixed.versions = [NO_VERSION, 3, 4]
    unknown.versions = [NO_VERSION] * 3
    partly.versions = [NO_VERSION, NO_VERSION, 4]
    group = make_group([[sample] for sample in (known, mixed, unknown, partly)])
    taken = Taken([group], [2], [], num_stragglers=0, num_ready=0, is_exhausted=False)
    batch = batch_of(
        taken,
        "policy",
        RolloutConfig(),
        batch=1,
        can_drop_oldest=False,
        has_stragglers=False,
        max_staleness=2,
        lost_tokens=0,
    )
    values = batch.metrics.values()
    assert values["rollout/unknown_versions"] == 2 / 4
    assert values["rollout/mixed_versions"] == 1 / 4
    assert values["rollout/staleness"] == 2.0
    assert values["rollout/staleness_share/0"] == 0.0
