from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.rollout.settings import RewardConfig, RolloutConfig


def test_defaults_are_a_valid_rollout() -> None:
    config = RolloutConfig()
    assert (config.prompts_per_step, config.samples_per_prompt) == (16, 8)
    assert config.env == "single_turn"
    assert RewardConfig().scorers == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic_sampling": True, "samples_per_prompt": 1}, "2 or more"),
        ({"overlong_penalty": 1.0}, "only together"),
        ({"overlong_window": 10}, "only together"),
        ({"overlong_penalty": 1.0, "overlong_window": 300}, "more than"),
        ({"over_sampling": 0.5}, "greater than or equal to 1"),
        ({"dynamic_sampling": "false"}, "boolean"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": "a.py:f", "kind": "exact"}, "not both"),
        ({"function": "rewards"}, "file.py:name"),
        ({"kind": "exact", "tolerance": 0.1}, "only for kind = numeric"),
        ({"kind": "numeric", "pattern": "x"}, "only for kind = regex"),
        ({"kind": "regex"}, "needs a pattern"),
        ({"kind": "regex", "pattern": "("}, "not a regular expression"),
        ({"kind": "exact", "weights": {"a": 1.0}}, "named parts"),
        ({"kind": "exact", "parts": [{"name": "a", "kind": "exact"}]}, "can not be joined"),
        ({"parts": [{"name": "a", "kind": "exact"}] * 2}, "more than once"),
        ({"parts": [{"name": "a"}]}, "needs a function or a kind"),
        ({"parts": [{"name": "a/b", "kind": "exact"}]}, "pattern"),
        ({"kind": "fuzzy"}, "exact"),
    ],
)
def test_reward_contradictions_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(fields)


def test_a_reward_may_be_read_back_from_its_resolved_form() -> None:
    config = RewardConfig.model_validate(
        {
            "parts": [
                {"name": "right", "kind": "numeric", "tolerance": 0.1},
                {"name": "short", "function": "rewards.py:short", "weight": 0.5},
            ],
            "workers": 1,
        }
    )
    assert RewardConfig.model_validate(config.model_dump(exclude_none=True)) == config
    assert [part.weight for part in config.parts] == [1.0, 0.5]


def test_every_field_is_documented() -> None:
    for config in (RolloutConfig, RewardConfig):
        for name, field in config.model_fields.items():
            assert field.description, f"{config.__name__}.{name}"
