"""The teacher seam: a model that does not learn says what it thinks of each token of an answer."""

from __future__ import annotations

from typing import Annotated, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from paceline.models import ModelConfig
from paceline.trainers.base import Place
from paceline.types import Config, JsonValue, Row


class TeacherConfig(Config):
    """`[teacher]`: the model that a policy learns from, loaded here or attached to as a server."""

    model: ModelConfig | None = None
    """A model that is loaded beside the trainer, on its device and with its `autocast`, `layout`
    and token budgets. It never trains, so it may be held in any `dtype`. Its vocabulary must hold
    that of the policy. Set this or `url`."""
    url: str | None = None
    """A running server that speaks SGLang's native HTTP API, such as `http://127.0.0.1:30000`. It
    is attached to, not started nor stopped. It scores at temperature 1 only, so
    `rollout.sampling.temperature` must be 1. Set this or `model`."""
    max_in_flight: Annotated[int, Field(ge=1)] = 32
    """With `url`: most requests at one time; an answer is one request."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    """With `url`: how long one request may take, waiting in the server's queue included."""
    retries: Annotated[int, Field(ge=0)] = 3
    """With `url`: how often a request is made again that found no connection, ran into `timeout_s`,
    or was answered by an error of the server (5xx); each time after a longer pause."""

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            is_complete = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_complete = False
        if not is_complete or parts.scheme not in ("http", "https") or parts.query:
            raise ValueError(
                f"found {url!r}, allowed: http:// or https:// with a host, perhaps a port and a "
                'path, such as "http://127.0.0.1:30000"'
            )
        return url.rstrip("/")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.model is None) == (self.url is None):
            found = "neither is set" if self.model is None else "both are set"
            raise ValueError(
                "a teacher is loaded (teacher.model.path) or served (teacher.url), and "
                f"{found}: write one of them"
            )
        return self


class Teacher(Protocol):
    """Grades rows; it never learns."""

    @property
    def identity(self) -> dict[str, JsonValue]:
        """What tells it from another teacher, for a resumed run to compare."""

    async def grade(self, rows: list[Row]) -> None:
        """Write into each row the teacher's log-probs of its trained tokens, at its temperature.

        If it was made to, also the K tokens that it finds most likely at each position, and their
        log-probs; all are 0 outside the mask.
        """

    async def place(self, where: Place) -> None:
        """Move to the device or to the host. Idempotent."""

    async def aclose(self) -> None:
        """Let go of what it holds. Idempotent."""
