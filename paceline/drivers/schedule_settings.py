"""`[schedule]`: how far sampling may run ahead of training, and when weights are published."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.rollout.straggler import Straggler
from paceline.types import Config
from paceline.weights.base import PauseMode


class ScheduleConfig(Config):
    """`[schedule]`: how far sampling may run ahead of training, and when weights are published."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Most steps by which the weights that train on an answer may be ahead of those that the
    engine served when its prompt was taken. 0: every step waits for answers of its own weights. 1:
    the next step is sampled while this one trains. 2 and more: sampling rarely stops. Kept by
    admission, so nothing finished is ever thrown away for being old. Above 0 the loss should know
    of it: see `algorithm.correction`."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Steps from one publish of the weights to the next; at most `max_staleness` + 1."""
    pause: PauseMode = "finish"
    """What a publish means for answers under way. `finish`: wait for them. `keep`: go on with the
    new weights and the old KV cache. `recompute`: go on with a cache made anew. `abort`: end them
    where they are and ask for the rest at once, so that they queue again and go on from the tokens
    they have, with a cache made anew. But for `finish`, an answer may hold tokens of several
    versions (`rollout/mixed_versions`)."""
    on_full: Literal["wait", "drop_oldest"] = "wait"
    """What this policy does to episodes that it shares with faster ones. `wait`: nothing is
    sampled that it has no room for. `drop_oldest`: the others never wait for it; of its own
    samples the oldest are dropped, and counted."""
    max_lead: Annotated[int, Field(ge=1)] | None = None
    """Most steps by which a follower may be ahead of the leader; absent: no limit."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Most prompts whose answers are being sampled at one time, with `max_staleness` above 0;
    absent: as many as `max_staleness` admits."""
    straggler: Straggler = Straggler()
    """What is done about a prompt that a step waits for alone, with `max_staleness` above 0."""

    @model_validator(mode="after")
    def _publishes_in_time(self) -> Self:
        if self.publish_every > self.max_staleness + 1:
            raise ValueError(
                f"publish_every = {self.publish_every} makes answers up to "
                f"{self.publish_every - 1} steps old: set max_staleness to that or more "
                f"(found {self.max_staleness})"
            )
        if self.straggler.after_s is not None and not self.runs_ahead:
            raise ValueError(
                "straggler.after_s works where sampling runs ahead: set max_staleness above 0"
            )
        return self

    @property
    def runs_ahead(self) -> bool:
        """True if sampling and training may overlap."""
        return self.max_staleness > 0 or self.on_full == "drop_oldest"
