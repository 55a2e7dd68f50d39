"""The algorithm seam: `credit` gives each trainable token its advantage, `loss` is minimised.

An algorithm is a frozen config class that is also the code: one file, one row in the table of
`paceline.algorithms`, one test. It is pure: no devices, no parallelism, no I/O.

The loss of an optimizer step is `sum_t weight_t * loss_t` over all trainable tokens. The weights
hold the reduction together with its denominator, known for the whole optimizer step before the
first micro-batch, so micro-batching, packing, padding and data parallelism can not change it.

What a trainer minimises is an `Objective`: an algorithm, or the part of it that its critic learns.
A critic is a trainer of its own, with a model that has a value head.

Legend of shape suffixes: N trainable tokens of a micro-batch, in row order; R rows; K tokens that
a teacher finds most likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.observe.metrics import Metrics
from paceline.types import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class LossInputs:
    """The trainable tokens of one micro-batch. Float columns have shape [N], if not said.

    A row is never cut: all its trained tokens are in one micro-batch, since ratios of whole
    sequences need them. Under context parallelism the trainer gathers a row's columns first.
    """

    logprobs_N: Tensor
    """Under the current weights and the sampling temperature; carries gradient. In a critic's
    loss: the behaviour log-probs, not read."""
    old_logprobs_N: Tensor
    """Under the weights before the first update of this rollout."""
    behaviour_logprobs_N: Tensor
    """As the engine reported when it sampled."""
    advantages_N: Tensor
    weights_N: Tensor
    rows_N: Tensor
    """int64: which row a token belongs to, 0..num_rows-1."""
    num_rows: int
    reference_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    """Carries gradient only if the algorithm `needs_entropy_gradient`."""
    values_N: Tensor | None = None
    """A critic's prediction under the current weights; carries gradient. Only in its loss."""
    old_values_N: Tensor | None = None
    """A critic's prediction before the first update of this rollout."""
    returns_N: Tensor | None = None
    teacher_logprobs_N: Tensor | None = None
    """A teacher's, of the sampled tokens at the sampling temperature."""
    teacher_top_logprobs_NK: Tensor | None = None
    """A teacher's, of the K tokens that it finds most likely."""
    top_logprobs_NK: Tensor | None = None
    """Of the teacher's K tokens under the current weights and the sampling temperature; carries
    gradient."""


@dataclass(slots=True)
class LossOutput:
    """A scalar to call `backward` on, and partial means to add up over micro-batches."""

    loss: Tensor
    """Shape []: this micro-batch's share of the loss of the whole optimizer step."""
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, weight), both detached, shape []. Names without an area: `clip_fraction`."""


Baselines = dict[str, tuple[float, int]]
"""Role -> (mean of its earlier rewards, how many count in it)."""


@dataclass(slots=True)
class Scores:
    """What models say of a rollout before it is learned from, for algorithms whose credit is
    made of it. Each column: per sample of the policy, in group order, one number per token."""

    old_logprobs: Sequence[Sequence[float]] | None = None
    reference_logprobs: Sequence[Sequence[float]] | None = None
    values: Sequence[Sequence[float]] | None = None
    """A critic's prediction before it saw the token."""
    final_values: Sequence[float] | None = None
    """A critic's prediction after the last token of each sample; 0.0 where it was not asked."""
    baselines: Baselines = field(default_factory=dict)
    """What `Credit.baselines` was after the rollout before this one."""


@dataclass(slots=True)
class Credit:
    """Advantages for the samples of one policy, in group order, untrainable ones included."""

    advantages: list[list[float]]
    """Per sample, one number per token (0.0 outside the mask and for untrainable samples)."""
    returns: list[list[float]] | None = None
    """What a critic should learn to predict; None without a critic."""
    baselines: Baselines | None = None
    """State to be handed to the next `credit` of the policy; None: as it was."""
    metrics: Metrics = field(default_factory=Metrics)


class Objective(Protocol):
    """What a trainer asks of what it minimises.

    Whether that is a loss of log-probs or of a critic's values follows from the trainer's model.
    """

    @property
    def learns_from_rollouts(self) -> bool:
        """False if samples come straight from the data set (supervised training)."""

    @property
    def needs_reference(self) -> bool:
        """True if the frozen reference must score the rows."""

    @property
    def needs_teacher(self) -> bool:
        """True if a teacher must score the rows."""

    @property
    def teacher_top_k(self) -> int:
        """How many of a teacher's most likely tokens the loss wants at each position; 0: none."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy is a term of the loss."""

    @property
    def learns_by_advantage_alone(self) -> bool:
        """True if rows whose advantages are all 0 add nothing to the gradient, so that a trainer
        may leave out their backward."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the loss."""


class Algorithm(Objective, Protocol):
    """What a driver asks of an algorithm."""

    @property
    def needs_reward(self) -> bool:
        """False if nothing is learned from rewards, so that episodes may go without."""

    @property
    def needs_old_logprobs(self) -> bool:
        """True if `credit` wants the trainer's own log-probs before the first update."""

    @property
    def critic(self) -> Objective | None:
        """What a critic minimises; None without one. With one, `credit` wants its values."""

    @property
    def needs_final_values(self) -> bool:
        """True if `credit` wants the critic's value after the last token of truncated samples."""

    @property
    def min_group_size(self) -> int:
        """Fewest episodes per prompt that `credit` can tell apart: 2 for a group baseline."""

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Advantages for every sample that the groups hold of this policy.

        Called once for a whole rollout, so that a mean or a whitening over it sees all of it.
        Raises TrainerError if `scores` lacks a column that the algorithm says it needs.
        """

    def token_weights(self, groups: Sequence[Group], policy: str) -> list[list[float]]:
        """Share of each token in the loss of one optimizer step made of these groups.

        Same order and shape as `Credit.advantages`.
        """
