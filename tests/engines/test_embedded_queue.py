from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.engines.base import Request, Sampling
from paceline.engines.embedded_queue import Generation, Intake, WaitingQueue
from paceline.errors import EngineError

INTAKE = Intake(vocab_size=10, max_context=8, eos_token_ids=frozenset({1}), has_tokenizer=True)


def generation(tokens: Sequence[int], intake: Intake = INTAKE, **sampling: Any) -> Generation:
    future = asyncio.Future(loop=_LOOP)
    return intake.generation(Request(tokens, Sampling(**sampling), seed=3), future)


_LOOP: Any = type("Loop", (), {"get_debug": lambda self: False})()


def test_first_come_first_served_and_leaving_early() -> None:
    queue = WaitingQueue()
    a, b, c = (generation([i]) for i in (2, 3, 4))
    for g in (a, b, c):
        queue.push(g)
    queue.remove(b)
    assert b not in queue
    assert [queue.pop(), queue.pop()] == [a, c]
    assert len(queue) == 0


def test_distinct_prompts_in_order_of_arrival_within_a_budget() -> None:
    queue = WaitingQueue()
    first, second = generation([2, 3]), generation([2, 3])
    for g in (first, second, generation([4]), generation([2, 3, 4])):
        queue.push(g)
    assert [p.tolist() for p in queue.prompts(3).values()] == [[2, 3], [4]]
    assert [p.tolist() for p in queue.prompts(99).values()] == [[2, 3], [4], [2, 3, 4]]
    queue.pop()
    assert queue.wants(second.prompt_key)
    queue.remove(second)
    assert not queue.wants(second.prompt_key)
    assert len(list(queue.drain())) == 2
    assert queue.prompts(99) == {}


def test_the_limit_is_what_the_context_leaves() -> None:
    assert generation([2, 3], max_tokens=4).limit == 4
    assert generation([2, 3], max_tokens=40).limit == 6
    assert generation([2] * 8).limit == 0
    unlimited = Intake(10, None, frozenset(), has_tokenizer=False)
    assert generation([2] * 8, unlimited, max_tokens=40).limit == 40


def test_what_ends_an_answer() -> None:
    plain = generation([2], stop=("ab",), stop_token_ids=(5,))
    assert (plain.end_ids, plain.stop) == (frozenset({1, 5}), ("ab",))
    forced = generation([2], stop=("ab",), stop_token_ids=(5,), ignore_eos=True)
    assert (forced.end_ids, forced.stop) == (frozenset(), ())


def test_equal_prompts_in_turn_are_one_array_whatever_becomes_of_the_list() -> None:
    tokens = [2, 3]
    first, second = generation(tokens), generation([2, 3])
    assert first.prompt is second.prompt
    tokens.append(4)
    assert generation(tokens).prompt.tolist() == [2, 3, 4]
    assert second.prompt.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([2] * 9, {}, "has 9 tokens, and the context holds 8"),
        ([2, 10], {}, "token ids from 2 to 10, and the model knows 0 to 9"),
        ([-1], {}, "token ids from -1 to -1"),
        ([2.5], {}, "not a flat list of token ids"),
        ([[2], [3]], {}, "not a flat list of token ids"),
    ],
)
def test_refusals_say_what_is_wrong(tokens: Any, sampling: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        generation(tokens, **sampling)


def test_stop_texts_need_a_tokenizer() -> None:
    blind = Intake(10, None, frozenset(), has_tokenizer=False)
    with pytest.raises(EngineError, match="need a tokenizer"):
        generation([2], blind, stop=("x",))
