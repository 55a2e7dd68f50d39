"""`[roles]`: who speaks in an environment of several roles."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.types import Config


class RoleConfig(Config):
    """`[roles.<role>]`: who plays one role of the environment: one of `policy`, `past`, `url`."""

    policy: str | None = None
    """Name of the policy that plays it; several roles may name the same one. `solver = "a"` is
    short for `solver = { policy = "a" }`."""
    past: str | None = None
    """Name of a policy whose earlier selves play it: copies of its weights, kept while the run
    goes on, one of them drawn anew for each episode. They do not learn."""
    every: Annotated[int, Field(ge=1)] = 20
    """For `past`: steps of the policy from one copy to the next; the first is made at the start."""
    keep: Annotated[int, Field(ge=1)] = 5
    """For `past`: how many copies are kept, the newest ones."""
    url: str | None = None
    """Address of an OpenAI-compatible endpoint that plays it, up to and without
    `/chat/completions`. It does not learn."""
    model: str | None = None
    """For `url`: the model to ask for."""
    api_key_env: str | None = None
    """For `url`: environment variable that holds the key."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """For `url`: seconds that one answer may take."""
    max_in_flight: Annotated[int, Field(ge=1)] = 32
    """For `url`: most requests at one time."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        named = [key for key in ("policy", "past", "url") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(
                "a role is played by one of policy, past or url: "
                f"found {' and '.join(named) or 'none of them'}"
            )
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url = {self.url!r} does not start with http:// or https://")
            if self.model is None:
                raise ValueError("a role with url needs model: the name that the endpoint knows")
        owners = {"every": "past", "keep": "past", "model": "url", "api_key_env": "url",
                  "timeout_s": "url", "max_in_flight": "url"}  # fmt: skip
        for key, owner in owners.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            if is_set and getattr(self, owner) is None:
                raise ValueError(f"{key} is only for a role with {owner}")
        return self
