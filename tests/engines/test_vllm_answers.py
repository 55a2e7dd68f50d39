from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.engines.base import Sampling
from paceline.engines.vllm_answers import completion, sampling_params, scores
from paceline.errors import EngineError


def params(sampling: Sampling, num_sampled: int = 0) -> dict[str, Any]:
    return sampling_params(
        sampling, limit=9, seed=7, num_sampled=num_sampled, end_ids=frozenset({1})
    )


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [7, 2],
        "logprobs": {"content": [{"token_id": 7, "logprob": -0.3}, {"token_id": 2, "logprob": -1}]},
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": [{"version": "4", "start": 0, "end": 2}],
    }
    return {"choices": [choice | changes]}


def test_all_of_the_sampling_is_said() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2,
        stop=("ab",), stop_token_ids=(4,),
    )  # fmt: skip
    assert params(sampling) == {
        "max_tokens": 9, "temperature": 0.7, "seed": 7, "logprobs": 0, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [1, 4], "stop": ["ab"],
        "detokenize": True, "skip_special_tokens": False,
    }  # fmt: skip
    endless = params(Sampling(ignore_eos=True, stop=("ab",)))
    assert endless["ignore_eos"] is True
    assert "stop_token_ids" not in endless
    assert "stop" not in endless


def test_a_temperature_that_the_server_would_change() -> None:
    with pytest.raises(EngineError, match=r"temperature = 0\.001: vLLM takes 0\.01 and more, or 0"):
        params(Sampling(temperature=0.001))
    assert params(Sampling(temperature=0.0))["temperature"] == 0.0


def test_the_rest_of_an_answer_has_a_seed_of_its_own() -> None:
    seeds = {params(Sampling(), count)["seed"] for count in (0, 3, 4)}
    assert len(seeds) == 3
    assert params(Sampling(), 3) == params(Sampling(), 3)


@pytest.mark.parametrize(
    ("changes", "finish", "stop"),
    [
        ({}, "stop", 2),
        ({"stop_reason": "ab"}, "stop", "ab"),
        ({"stop_reason": 2}, "stop", 2),
        ({"finish_reason": "length"}, "length", None),
        ({"finish_reason": "abort"}, "abort", None),
        ({"finish_reason": "repetition"}, "abort", None),
    ],
)
def test_how_an_answer_ended(changes: dict[str, Any], finish: str, stop: Any) -> None:
    made = completion(answer(**changes), version=0)
    assert (made.tokens, made.logprobs, made.versions) == ([7, 2], [-0.3, -1.0], [4, 4])
    assert (made.finish, made.stop) == (finish, stop)


def test_an_answer_that_was_ended_before_its_first_token() -> None:
    made = completion(
        answer(token_ids=[], logprobs=None, weight_versions=None, finish_reason="abort"), version=3
    )
    assert (made.tokens, made.versions, made.finish) == ([], [], "abort")


def test_versions_that_have_no_number() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    assert completion(answer(weight_versions=spans), version=3).versions == [3, 5]
    assert completion(answer(weight_versions=None), version=3).versions == [3, 3]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"token_ids": [7, 3]}, "with 2 tokens and the log-probs of 2, or of others"),
        ({"logprobs": None}, "with 2 tokens and the log-probs of 0"),
        (
            {"token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -9999.0}]}},
            "the weights are broken, of version 3",
        ),
        ({"logprobs": 3}, "not an answer of vLLM's"),
        ({"token_ids": ["x"]}, "not an answer of vLLM's"),
    ],
)
def test_answers_that_make_no_sense(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        completion(answer(**wrong), version=3)


def test_scores() -> None:
    entries = [None, {"6": {"logprob": -1.5}}, {"9": {"logprob": -1}, "7": {"logprob": -9999.0}}]
    found = scores({"prompt_logprobs": entries}, [5, 6, 7])
    assert found[:2] == [0.0, -1.5]
    assert math.isnan(found[2])
    with pytest.raises(EngineError, match="scored 3 tokens, asked for 2"):
        scores({"prompt_logprobs": entries}, [5, 6])
    with pytest.raises(EngineError, match="not an answer"):
        scores({"prompt_logprobs": entries}, [5, 6, 8])
    with pytest.raises(EngineError, match="not an answer"):
        scores({"choices": []}, [5, 6, 8])
