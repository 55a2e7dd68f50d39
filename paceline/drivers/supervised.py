"""Samples straight from the data: prompt and completion, trained on the completion."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.data.prompts import supervised_pair
from paceline.errors import DataError
from paceline.observe.metrics import Metrics
from paceline.rollout.batch import DrawSource, RolloutBatch
from paceline.rollout.renderer import Renderer
from paceline.types import NO_VERSION, Draw, Episode, Group, Sample, Status


def supervised_batch(
    stream: DrawSource, renderer: Renderer, *, policy: str, num_prompts: int
) -> RolloutBatch:
    """The next `num_prompts` rows as groups of one episode each; fewer when exhausted."""
    draws = stream.take(num_prompts)
    groups = [_group(draw, renderer, policy) for draw in draws]
    return RolloutBatch(groups, _summary(groups), is_exhausted=len(draws) < num_prompts)


def _group(draw: Draw, renderer: Renderer, policy: str) -> Group:
    context, completion = supervised_pair(draw.prompt)
    prompt_ids = renderer.encode(context)
    answer_ids = renderer.encode_completion(context, completion)
    if not answer_ids:
        raise DataError(f"prompt {draw.prompt.id!r}: the completion has no tokens")
    num_tokens = len(prompt_ids) + len(answer_ids)
    sample = Sample(
        policy=policy,
        prompt_id=draw.prompt.id,
        episode=0,
        tokens=prompt_ids + answer_ids,
        mask=[False] * len(prompt_ids) + [True] * len(answer_ids),
        logprobs=[0.0] * num_tokens,
        versions=[NO_VERSION] * num_tokens,
        status=Status.COMPLETED,
        role=policy,
        text=completion,
        finish="stop",
    )
    sample.validate()
    return Group(draw.prompt, [Episode(draw.prompt.id, 0, [sample])], draw.ordinal)


def _summary(groups: Sequence[Group]) -> Metrics:
    metrics = Metrics()
    for group in groups:
        for sample in group.samples():
            trained = sample.num_trained_tokens
            metrics.sum("rollout/samples", 1)
            metrics.mean("rollout/prompt_tokens", len(sample.tokens) - trained)
            metrics.mean("rollout/answer_tokens", trained)
            metrics.max("rollout/answer_tokens_max", trained)
            metrics.min("rollout/answer_tokens_min", trained)
    return metrics
