"""`[evals]`: on which prompts, how often and how the policy is measured.

[evals]
every = 20

[[evals.sets]]
name = "heldout"
data = { path = "heldout.jsonl" }
samples_per_prompt = 4
pass_at = [1, 4]
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.data.sources import SourceConfig
from paceline.engines.base import Sampling
from paceline.rollout.settings import RewardConfig
from paceline.types import Config


class EvalSet(Config):
    """`[[evals.sets]]`: one set of prompts with its own sampling and reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Its name in metrics: `eval/<name>/reward`. Letters, digits, `_`, `.` and `-`."""
    data: SourceConfig
    """Where its prompts come from; the keys of one `[[data.sources]]` block. Template, system
    message, length limit and `on_bad_row` are those of `[data]`; a prompt over the limit is a bad
    row, so that a set never gets smaller unsaid."""
    sampling: Sampling | None = None
    """How answers are drawn; keys that are left out are as in `rollout.sampling`. Any setting is
    allowed, also temperature 0 and `top_p` below 1."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt."""
    pass_at: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Each k adds `eval/<name>/pass_at_<k>`: the chance that at least one of k answers passes,
    estimated without bias from all answers (arXiv 2107.03374). Not above `samples_per_prompt`."""
    pass_threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """An answer passes with at least this reward."""
    reward: RewardConfig | None = None
    """What an answer is worth; default: `[reward]`."""
    env: str | None = None
    """What an episode is; default: `rollout.env`."""
    policy: str | None = None
    """In a run with several policies, whose rewards the numbers are made of; default: the
    leader's. Each role has its mean reward besides."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Take only this many prompts, the first ones; default: all."""

    @model_validator(mode="after")
    def _pass_at_fits(self) -> Self:
        wrong = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise ValueError(
                f"pass_at = {wrong[0]} can not be estimated from samples_per_prompt = "
                f"{self.samples_per_prompt}: raise samples_per_prompt, or take k from 1 to it"
            )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"pass_at names a number twice: {list(self.pass_at)}")
        return self

    @model_validator(mode="after")
    def _greedy_answers_once(self) -> Self:
        is_greedy = self.sampling is not None and self.sampling.temperature == 0
        if is_greedy and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} with sampling.temperature = 0 "
                "gives the same answer each time: set samples_per_prompt = 1, or a temperature"
            )
        return self


class EvalsConfig(Config):
    """`[evals]`: when the policy is measured, and what a slow or failing eval does to the run.

    An eval that fails or takes too long is a point left out, with its reason; it never ends the
    run.
    """

    every: Annotated[int, Field(ge=1)] | None = None
    """Measure after every k-th step, after the last one and, with `run.num_epochs`, at the end of
    each epoch; absent:
    only when asked for by `paceline eval`."""
    before_training: bool = True
    """Measure also before the first step of a run or of a resumed part. Needs `every`."""
    sets: Annotated[tuple[EvalSet, ...], Field(strict=False)] = ()
    """The sets of prompts, measured in this order."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that one set may take at one step; after that, its point is left out."""
    background: bool = False
    """Measure a copy of the weights in an engine of its own, while training goes on: costs the
    memory of the copy. Its points arrive later; `eval/<set>/step` says which step they are of. Of
    two that arrive together the older one is in `events.jsonl` alone."""
    max_in_flight: Annotated[int, Field(ge=1)] = 2
    """With `background`: most steps that are being measured at one time."""
    on_busy: Literal["wait", "skip"] = "wait"
    """With `background`, when `max_in_flight` is reached: hold training until one ends, or leave
    the point out. The last step is always measured."""

    @model_validator(mode="after")
    def _sets_are_distinct(self) -> Self:
        twice = [name for name, count in Counter(s.name for s in self.sets).items() if count > 1]
        if twice:
            raise ValueError(f"two eval sets are named {twice[0]!r}: give each its own name")
        return self
