from __future__ import annotations

import copy
from typing import Any

import pytest
from tiny import tiny_tokenizer

from paceline.engines.answers import end_at_stop_text
from paceline.engines.base import Completion, Sampling
from paceline.engines.sglang_answers import completion, sampling_params, scores
from paceline.errors import EngineError

TOKENIZER = tiny_tokenizer()
ANSWER = {
    "output_ids": [7, 9, 1],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 1},
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None], [-0.125, 1, None]],
        "weight_version": "4",
    },
}


def answer(**meta: Any) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(ANSWER)
    changed["meta_info"] |= meta
    return changed


def test_reading_an_answer() -> None:
    made = completion(ANSWER, version=4)
    assert (made.tokens, made.logprobs) == ([7, 9, 1], [-0.5, -0.25, -0.125])
    assert (made.finish, made.stop, made.versions) == ("stop", 1, [4, 4, 4])


def test_an_aborted_answer_without_a_token() -> None:
    found = answer(finish_reason={"type": "abort", "message": "gone"}, output_token_logprobs=[]) | {
        "output_ids": []
    }
    made = completion(found, version=4)
    assert (made.tokens, made.finish, made.cause, made.stop) == ([], "abort", "gone", None)


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([("4", 0, 3)], [4, 4, 4]),
        ([("3", 0, 1), ("4", 1, 3)], [3, 4, 4]),
        ([("3", 0, 1), ("4", 1, 9)], [3, 4, 4]),
        ([("3", 0, 1), ("4", 1, 2)], [3, 4, 4]),
        ([("default", 0, 3)], [8, 8, 8]),
    ],
)
def test_spans_of_versions(spans: list[tuple[str, int, int]], versions: list[int]) -> None:
    told = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    assert completion(answer(weight_versions=told), version=8).versions == versions


@pytest.mark.parametrize(
    "broken",
    [
        {},
        "Internal error",
        {"meta_info": {}},
        {"output_ids": [7, 9], "meta_info": ANSWER["meta_info"]},
        answer(output_token_logprobs=[[None, 7, None], [-0.25, 9, None], [-0.125, 1, None]]),
        answer(output_token_logprobs=[[-0.5], [-0.25], [-0.125]]),
    ],
)
def test_answers_that_make_no_sense(broken: Any) -> None:
    with pytest.raises(EngineError) as caught:
        completion(broken, version=0)
    assert caught.value.__cause__ is None


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def made_of(text: str) -> Completion:
    tokens = ids(text)
    return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "length")


@pytest.mark.parametrize(
    ("before", "text", "stop", "kept", "matched"),
    [
        ("", "12ab34", ("ab",), "12ab", "ab"),
        ("", "12ab34", ("34", "b3"), "12ab3", "b3"),
        ("", "12ab", ("ab",), "12ab", "ab"),
        ("xa", "b34", ("ab",), "b", "ab"),
        ("xa", "c34", ("ab",), "c34", None),
        ("123", "ab", ("zz",), "ab", None),
        ("", "", ("ab",), "", None),
    ],
)
def test_stop_texts_end_an_answer_across_requests(
    before: str, text: str, stop: tuple[str, ...], kept: str, matched: str | None
) -> None:
    made = made_of(text)
    end_at_stop_text(made, stop, TOKENIZER, ids(before))
    assert made.tokens == ids(kept)
    assert len(made.logprobs) == len(made.versions) == len(made.tokens)
    assert made.stop == matched
    assert made.finish == ("length" if matched is None else "stop")


def test_scores_of_a_prompt() -> None:
    entries = [[None, 5, None], [-1.5, 6, None]]
    found = {"meta_info": {"input_token_logprobs": entries}}
    assert scores(found, [5, 6]) == [0.0, -1.5]
    with pytest.raises(EngineError, match="scored 2 tokens, asked for 3"):
        scores(found, [5, 6, 7])
    with pytest.raises(EngineError, match="not an answer of SGLang"):
        scores({}, [5])


def test_what_sglang_can_not_sample() -> None:
    with pytest.raises(EngineError, match="SGLang takes up to 2"):
        sampling_params(Sampling(repetition_penalty=2.5), limit=3, seed=0, end_ids=frozenset({1}))
