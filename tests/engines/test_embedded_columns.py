from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from paceline.engines.base import Request, Sampling
from paceline.engines.embedded_columns import PLAIN_DRAW, Columns
from paceline.engines.embedded_queue import Generation, Intake

INTAKE = Intake(64, 128, frozenset({1}), has_tokenizer=True)
_LOOP: Any = type("Loop", (), {"get_debug": lambda self: False})()


def generation(prompt: list[int], seed: int = 0, **request: Any) -> Generation:
    sampling = Sampling(**request.pop("sampling", {}))
    return INTAKE.generation(
        Request(prompt, sampling, seed=seed, **request), asyncio.Future(loop=_LOOP)
    )


def kinds(columns: Columns, tokens: list[int]) -> list[int] | None:
    """Draw tokens for the rows 0..N-1; which kind each row is of after that."""
    columns.advance(list(range(len(tokens))), np.array(tokens))
    found = columns.distinct(len(tokens))
    if found is None:
        return None
    first, kind = found
    assert [kind[row] for row in first] == list(range(len(first)))
    assert all(row == kind.tolist().index(kind[row]) for row in first)
    return [kind.tolist().index(k) for k in kind]


def test_what_new_sequences_bring() -> None:
    columns = Columns(4)
    hot = {"temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5}
    columns.fill([2, 0], [generation([5, 6, 7], sampling=hot), generation([5], num_sampled=1)])
    assert columns.position_B.tolist() == [0, 0, 2, 0]
    assert columns.count_B.tolist() == [1, 0, 0, 0]
    assert columns.sampling_5B[:, 2].tolist() == list(hot.values())
    columns.advance([2], np.array([9]))
    assert (columns.token_B[2], columns.position_B[2], columns.count_B[2]) == (9, 3, 1)
    columns.clear(2)
    assert columns.sampling_5B[:, 2].tolist() == PLAIN_DRAW.tolist()
    assert (columns.token_B[2], columns.position_B[2]) == (0, 0)


def test_rows_of_one_prompt_are_equal_until_their_draws_differ_and_then_for_good() -> None:
    columns = Columns(5)
    columns.fill([0, 1, 2, 3, 4], [generation([p]) for p in (5, 5, 5, 6, 6)])
    assert kinds(columns, [9, 9, 9, 9, 9]) == [0, 0, 0, 3, 3]
    assert kinds(columns, [7, 8, 7, 8, 8]) == [0, 1, 0, 3, 3]
    assert kinds(columns, [2, 2, 2, 2, 3]) == [0, 1, 0, 3, 4]
    assert kinds(columns, [2, 2, 3, 2, 3]) is None
    assert kinds(columns, [2, 2, 2, 2, 2]) is None


def test_rows_that_come_later_are_equal_to_each_other_alone() -> None:
    columns = Columns(4)
    columns.fill([0, 1], [generation([5]), generation([5])])
    assert kinds(columns, [9, 9]) == [0, 0]
    columns.fill([2, 3], [generation([5]), generation([5])])
    assert kinds(columns, [9, 9, 9, 9]) == [0, 0, 2, 2]


def test_a_row_that_moves_takes_everything_along() -> None:
    columns = Columns(3)
    columns.fill([0, 1, 2], [generation([5]), generation([6]), generation([6, 7], seed=3)])
    columns.fill([2], [generation([8, 9], seed=4)])
    columns.advance([0, 1, 2], np.array([7, 7, 7]))
    stream = columns.stream_B[2]
    columns.move([2], [0])
    assert (columns.position_B[0], columns.token_B[0], columns.stream_B[0]) == (2, 7, stream)
    # It is equal to where it came from, and to nobody else.
    first, kind = columns.distinct(3) or ((), ())
    assert len(first) == 2
    assert kind[0] == kind[2] != kind[1]
