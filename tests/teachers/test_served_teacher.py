"""A served teacher against a server in a thread: the same numbers as a loaded one, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from teacher_server import TeacherServer, serving
from tiny import tiny_tokenizer
from trainer_rows import VOCAB, model64, random_rows
from transformers import PreTrainedTokenizerBase

from paceline.errors import ConfigError, EngineError, TrainerError
from paceline.teachers.loaded import LoadedTeacher
from paceline.teachers.served import ServedTeacher
from paceline.trainers.base import SingleTrainerConfig
from paceline.types import Row


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    with serving(model64(seed=7)) as found:
        yield found


def plain_rows(num: int = 12) -> list[Row]:
    rows = random_rows(num=num)
    for row in rows:
        row.temperature = 1.0
    return rows


def teacher_at(url: str, top_k: int = 0, **settings: object) -> ServedTeacher:
    known = {"timeout_s": 20.0, "retries": 2, "first_pause_s": 0.0, **settings}
    return ServedTeacher(url, top_k=top_k, vocab=VOCAB, **known)  # type: ignore[arg-type]


def closing(teacher: ServedTeacher, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of the teacher, and close it."""

    async def run() -> None:
        try:
            await work
        finally:
            await teacher.aclose()

    asyncio.run(run())


def grade(teacher: ServedTeacher, rows: list[Row]) -> list[Row]:
    closing(teacher, teacher.grade(rows))
    return rows


def open_(teacher: ServedTeacher, tokenizer: PreTrainedTokenizerBase) -> ServedTeacher:
    closing(teacher, teacher.open(tokenizer))
    return teacher


@pytest.mark.parametrize("top_k", [0, 4])
def test_its_numbers_are_those_of_the_same_model_loaded(server: TeacherServer, top_k: int) -> None:
    config = SingleTrainerConfig(device="cpu")
    loaded = LoadedTeacher(config, model64(seed=7), "x", top_k=top_k, vocab=VOCAB)
    expected = plain_rows()
    asyncio.run(loaded.grade(expected))
    for found, row in zip(
        grade(teacher_at(server.url, top_k), plain_rows()), expected, strict=True
    ):
        for name in ("teacher_logprobs_T", "teacher_ids_TK", "teacher_top_logprobs_TK"):
            own, other = getattr(found, name), getattr(row, name)
            assert (own is None) == (other is None) == (top_k == 0 and name != "teacher_logprobs_T")
            if own is not None:
                np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)
                assert not own[~found.mask_T].any()
    asyncio.run(loaded.aclose())


def test_it_asks_up_to_the_last_trained_token_and_for_no_new_one(server: TeacherServer) -> None:
    row = plain_rows(1)[0]
    row.mask_T[:] = False
    row.mask_T[2] = True
    grade(teacher_at(server.url, 3), [row])
    assert server.questions == [
        {
            "input_ids": row.tokens_T[:3].tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 3,
        }
    ]


def test_requests_overlap_up_to_the_limit(server: TeacherServer) -> None:
    server.faults = ["hang"] * 3
    teacher = teacher_at(server.url, max_in_flight=3, retries=0)

    async def run() -> None:
        task = asyncio.ensure_future(teacher.grade(plain_rows(9)))
        await asyncio.to_thread(server.wait_for, 3)
        assert len(server.questions) == 3
        server.released.set()
        with pytest.raises(EngineError, match="can not be reached"):
            await task

    closing(teacher, run())
    server.faults, server.most_at_once = [], 0
    grade(teacher_at(server.url, max_in_flight=2), plain_rows(9))
    assert 1 <= server.most_at_once <= 2


@pytest.mark.parametrize("fault", ["500", "503", "dead", "cut"])
def test_a_failure_that_passes_is_survived(server: TeacherServer, fault: str) -> None:
    server.faults = [fault, fault]
    rows = grade(teacher_at(server.url, retries=2), plain_rows(1))
    assert len(server.questions) == 3
    assert rows[0].teacher_logprobs_T is not None


def test_an_answer_in_chunks_is_read(server: TeacherServer) -> None:
    server.faults = ["chunked"]
    whole = plain_rows(1)
    assert np.array_equal(
        grade(teacher_at(server.url, retries=0), plain_rows(1))[0].teacher_logprobs_T,
        grade(teacher_at(server.url), whole)[0].teacher_logprobs_T,
    )


@pytest.mark.parametrize(
    ("fault", "pattern", "num_asked"),
    [
        ("500", r"answered /generate with status 500: .*fault 500.*3 times", 3),
        ("dead", r"can not be reached \(RemoteProtocolError: .*\), 3 times in a row", 3),
        ("cut", r"can not be reached \(RemoteProtocolError: .*\), 3 times", 3),
        ("400", r"answered /generate with status 400: .*fault 400", 1),
        ("text", r"answered /generate with no JSON", 1),
        ("short", r"entries in input_token_logprobs to \d+ tokens", 1),
        ("other token", r"scored token \d+ at position 2, where the answer has \d+", 1),
        ("no log-probs", r"without meta_info\.input_token_logprobs.*SGLang", 1),
        ("few", r"named 2 likely tokens at position \d+, asked for 3 \(algorithm\.top_k\)", 1),
        ("unknown token", r"finds token 10000 likely .* of 64 tokens, does not know", 1),
    ],
)
def test_a_failure_that_stays_ends_in_one_error_that_names_the_url(
    server: TeacherServer, fault: str, pattern: str, num_asked: int
) -> None:
    server.faults = [fault] * 9
    rows = plain_rows(1)
    with pytest.raises(EngineError, match=pattern) as found:
        grade(teacher_at(server.url, 3), rows)
    assert f"teacher.url = '{server.url}'" in str(found.value)
    assert len(server.questions) == num_asked
    assert rows[0].teacher_logprobs_T is None


def test_an_answer_that_never_comes_ends_at_the_time_limit(server: TeacherServer) -> None:
    server.faults = ["hang"] * 4
    teacher = teacher_at(server.url, timeout_s=0.1, retries=1)
    with pytest.raises(
        EngineError, match=r"not answer /generate within 0\.1 s \(teacher\.timeout_s\), 2 times"
    ):
        grade(teacher, plain_rows(2))


def test_a_server_that_is_not_there_is_named() -> None:
    with serving(model64()) as server:
        url = server.url
    with pytest.raises(
        EngineError, match=rf"teacher\.url = '{url}' can not be reached.*correct the url$"
    ):
        open_(teacher_at(url), tiny_tokenizer())


def test_a_logprob_that_is_no_number_becomes_nan_and_is_not_hidden(server: TeacherServer) -> None:
    server.faults = ["null"]
    (row,) = grade(teacher_at(server.url), plain_rows(1))
    assert row.teacher_logprobs_T is not None
    assert np.isnan(row.teacher_logprobs_T[row.mask_T]).sum() == 1


def test_a_row_of_another_temperature_is_refused(server: TeacherServer) -> None:
    rows = plain_rows(2)
    rows[1].temperature = 0.7
    with pytest.raises(TrainerError, match=r"temperature 1 only, and a row was sampled at 0\.7"):
        grade(teacher_at(server.url), rows)
    assert server.questions == []


def test_opening_learns_what_model_it_is(server: TeacherServer) -> None:
    teacher = teacher_at(server.url)
    open_(teacher, tiny_tokenizer())
    assert teacher.identity == {"model": "models/teacher"}
    server.information = "/get_model_info"  # of older servers
    assert open_(teacher_at(server.url), tiny_tokenizer()).identity == teacher.identity
    server.name = None
    unnamed = teacher_at(server.url)
    open_(unnamed, tiny_tokenizer())
    assert unnamed.identity == {"url": server.url}


def test_a_server_with_another_tokenizer_is_refused(server: TeacherServer) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["zz"])
    server.tokenizer = other  # the same tokens, and one more
    open_(teacher_at(server.url), tiny_tokenizer())
    server.tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match=r"its tokenizer is not the policy's.*48 is 'zz'"):
        open_(teacher_at(server.url), other)


def test_a_server_with_fewer_tokens_is_refused_and_lives(server: TeacherServer) -> None:
    """It would not outlive the question what a token is worth that its model does not have."""
    more = tiny_tokenizer()
    more.add_tokens([f"w{i}" for i in range(40)])
    with pytest.raises(ConfigError, match=r"its tokenizer is not .* 48 is 'w0' .* and '' in"):
        open_(teacher_at(server.url), more)
    assert not server.is_dead
    assert server.questions == []


def test_a_server_that_shows_no_texts_is_used_with_a_warning(
    server: TeacherServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.shows_text = False
    open_(teacher_at(server.url), tiny_tokenizer())
    assert "vocabularies are not compared" in caplog.text


def test_opening_asks_whether_it_scores(server: TeacherServer) -> None:
    server.faults = ["400", "few", "no log-probs"]
    with pytest.raises(ConfigError, match=r"fault 400.*must give log-probs of its input"):
        open_(teacher_at(server.url, 3), tiny_tokenizer())
    with pytest.raises(EngineError, match="asked for 3"):
        open_(teacher_at(server.url, 3), tiny_tokenizer())
    with pytest.raises(EngineError, match="SGLang"):
        open_(teacher_at(server.url, 3), tiny_tokenizer())


def test_a_token_beyond_the_tokenizer_is_not_sent(server: TeacherServer) -> None:
    teacher = open_(teacher_at(server.url), tiny_tokenizer())
    rows = plain_rows(2)
    for row in rows:
        row.tokens_T[:] = 47
    rows[1].tokens_T[0] = 48
    num_asked = len(server.questions)
    with pytest.raises(TrainerError, match="the token 48, and the tokenizer has 48"):
        grade(teacher, rows)
    assert len(server.questions) == num_asked


def test_more_likely_tokens_than_the_policy_knows_are_refused(server: TeacherServer) -> None:
    with pytest.raises(ConfigError, match=r"top_k = 65, but the policy knows 64"):
        open_(teacher_at(server.url, 65), tiny_tokenizer())


def test_cancelling_ends_all_requests(server: TeacherServer) -> None:
    server.faults = ["hang"] * 2
    teacher = teacher_at(server.url)

    async def run() -> None:
        task = asyncio.ensure_future(teacher.grade(plain_rows(2)))
        await asyncio.to_thread(server.wait_for, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    closing(teacher, run())


def test_the_server_model_is_the_one_that_was_asked(server: TeacherServer) -> None:
    """The fake itself: its log-probs are a full forward's."""
    ids = [5, 9, 3, 30]
    found = server.answer({"input_ids": ids})["meta_info"]["input_token_logprobs"]
    logits = model64(seed=7)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found[2][0] == pytest.approx(logits[1, 3].item())
