"""`[rollout]` and `[reward]`: how answers are collected and what they are worth."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.engines.base import Sampling
from paceline.types import Config
from paceline.user_code import split_location

OnFailure = Literal["fail", "drop_sample", "drop_group", "zero"]
ScorerKind = Literal["exact", "numeric", "choice", "regex", "math_verify", "reasoning_gym"]


class RolloutConfig(Config):
    """`[rollout]`: how many answers a step collects, and which of them it keeps."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompts (groups) of one step. Times `samples_per_prompt`: episodes of one step."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Episodes of one prompt, compared with each other. A group baseline needs at least 2."""
    sampling: Sampling = Sampling()
    """How answers are drawn. In training on them, only the temperature may differ from the model's
    own distribution, since the trainer computes the log-probs of the same distribution."""
    env: str = "single_turn"
    """What an episode is. `single_turn` asks once and scores the answer with `[reward]`; or a
    function of your own, as `module:name` or `file.py:name` (relative to the run file)."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers cut off at `sampling.max_tokens`: `keep` trains on them as they are; `mask` lets
    their reward count in the baseline of their group and gives them no gradient."""
    partial: Literal["keep", "mask"] = "keep"
    """Answers during which new weights were published, where sampling runs ahead (`[schedule]`):
    `keep` trains on all of their tokens; `mask` only on those of the newest weights in the
    answer."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal (they have no gradient) and draw new prompts in
    their place, in waves (DAPO, arXiv 2503.14476). Rewards are compared after overlong shaping.
    Dropped prompts count as used."""
    max_refills: Annotated[int, Field(ge=0)] = 10
    """Most waves that replace dropped groups in one step. After that, the step trains on the
    groups that it has; with none at all it is an error that names the counts."""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """The first wave draws this factor more prompts than a step needs, so that fewer refills
    follow. Surplus groups are discarded and their prompts come first in the next step."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the reward of an answer of `sampling.max_tokens` tokens; falls linearly to
    0 for answers that are `overlong_window` tokens shorter (DAPO). Logged as part `overlong`."""
    overlong_window: Annotated[int, Field(ge=0)] = 0
    """Tokens before `sampling.max_tokens` over which the overlong penalty rises."""
    episode_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds one episode may take, with all its turns and its reward; default: no limit. One
    that takes longer counts as failed, see `reward.on_failure`."""
    episode_retries: Annotated[int, Field(ge=0)] = 1
    """How often an episode is played again if the engine could not serve it. Its siblings are
    kept. One that fails for good is dropped whatever `reward.on_failure` says."""
    chat_template_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking = false`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dynamic_sampling and self.samples_per_prompt < 2:
            raise ValueError(
                "rollout.dynamic_sampling compares the answers of one prompt: "
                "set rollout.samples_per_prompt to 2 or more"
            )
        if bool(self.overlong_penalty) != bool(self.overlong_window):
            raise ValueError(
                "rollout.overlong_penalty and rollout.overlong_window work only together: "
                f"found {self.overlong_penalty} and {self.overlong_window}"
            )
        if self.overlong_window > self.sampling.max_tokens:
            raise ValueError(
                f"rollout.overlong_window is {self.overlong_window} tokens, more than "
                f"rollout.sampling.max_tokens = {self.sampling.max_tokens}"
            )
        return self


class ScorerConfig(Config):
    """One scorer: a function of your own or a built-in kind."""

    function: str | None = None
    """Your function, as `file.py:name` (relative to the run file) or `module:name`. It declares
    what it wants among completion, prompt, answer, metadata, messages, finish, num_tokens, and
    returns a number, a dict of named numbers, or None for an answer that can not be scored."""
    kind: ScorerKind | None = None
    """A built-in scorer instead of a function; each gives 1 or 0. `exact`: the stripped answer
    text. `numeric`: the number in the answer. `choice`: the letter chosen. `regex`: see
    `pattern`. `math_verify`: mathematical equality (extra `math`). `reasoning_gym`: the scorer
    of the task that made the prompt (extra `reasoning-gym`; may give parts of 1)."""
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    """For `numeric`: largest difference, times max(1, |answer|)."""
    pattern: str = ""
    """For `regex`: searched in the answer text. With a group, the last match's first group (or
    the one named `answer`) must equal the prompt's answer; without, a match is enough."""
    ignore_case: bool = False
    """For `exact` and `regex`: upper and lower case are the same."""
    letters: Annotated[str, Field(min_length=2)] = "ABCD"
    """For `choice`: the possible letters, in order; an integer answer counts from 0."""
    weights: dict[str, float] = Field(default_factory=dict)
    """For a function that returns named parts: the weight of each. Parts that are not named are
    only logged. Default: the sum of all parts."""

    @model_validator(mode="after")
    def _check_scorer(self) -> Self:
        if self.function is not None and self.kind is not None:
            raise ValueError(
                f"a reward is a function or a kind, not both: "
                f"found function = {self.function!r} and kind = {self.kind!r}"
            )
        if self.function is not None:
            split_location(self.function)
        users: dict[str, tuple[str, ...]] = {
            "tolerance": ("numeric",),
            "pattern": ("regex",),
            "ignore_case": ("exact", "regex"),
            "letters": ("choice",),
        }
        for key, kinds in users.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and self.kind not in kinds:
                raise ValueError(f"{key} is only for kind = {' or '.join(kinds)}")
        if self.weights and self.function is None and self.kind is not None:
            raise ValueError("weights is only for a function that returns named parts")
        if self.kind == "regex":
            _check_pattern(self.pattern)
        return self

    @property
    def is_set(self) -> bool:
        return self.function is not None or self.kind is not None


class RewardPart(ScorerConfig):
    """`[[reward.parts]]`: one of several weighted parts of the reward."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Its name in metrics and sample files."""
    weight: float = 1.0
    """Factor in the sum; 0 only logs it."""

    @model_validator(mode="after")
    def _check_part(self) -> Self:
        if not self.is_set:
            raise ValueError(f"reward part {self.name!r} needs a function or a kind")
        return self


class RewardConfig(ScorerConfig):
    """`[reward]`: what an answer is worth: one function, one kind, or `[[reward.parts]]`."""

    parts: Annotated[tuple[RewardPart, ...], Field(strict=False)] = ()
    """Several scorers; the reward is their weighted sum. Each part is logged unweighted."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds one call may take. A hung call is ended with its process and counts as failed."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Processes that run your functions, `regex`, `math_verify` and `reasoning_gym`; also the
    number of calls at the same time. The other kinds are cheap and run in this process."""
    on_failure: OnFailure = "drop_sample"
    """What a reward or environment that raises, hangs, crashes or returns no number means.
    `fail`: the run ends with the cause. `drop_sample`: the sample is left out, its siblings are
    kept. `drop_group`: its whole group is replaced. `zero`: the reward is 0. All are counted by
    cause in `rollout/failures/`."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.parts and self.is_set:
            raise ValueError("reward.parts can not be joined with reward.function or reward.kind")
        counts = Counter(part.name for part in self.parts)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(f"reward.parts has the name {repeated[0]!r} more than once")
        return self

    @property
    def scorers(self) -> tuple[ScorerConfig, ...]:
        """The parts, or the one scorer; empty if the environment gives rewards of its own."""
        if self.parts:
            return self.parts
        return (self,) if self.is_set else ()


def _check_pattern(pattern: str) -> None:
    if not pattern:
        raise ValueError("kind = 'regex' needs a pattern")
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ValueError(f"pattern = {pattern!r} is not a regular expression: {exc}") from exc
