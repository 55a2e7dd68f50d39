"""A loaded teacher: its log-probs, its most likely tokens, what it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import VOCAB, model64, random_rows

from paceline.errors import ConfigError, TrainerError
from paceline.models import ModelConfig
from paceline.teachers.loaded import LoadedTeacher, load_teacher_model
from paceline.trainers.base import SingleTrainerConfig
from paceline.types import Row


def grade(model: Any, rows: list[Row], top_k: int = 0, vocab: int = VOCAB, **settings: Any) -> None:
    config = SingleTrainerConfig(**{"device": "cpu", **settings})
    teacher = LoadedTeacher(config, model, "teacher", top_k=top_k, vocab=vocab)

    async def run() -> None:
        await teacher.grade(rows)
        await teacher.aclose()

    asyncio.run(run())


def full_forward(model: Any, row: Row) -> torch.Tensor:
    """log softmax at the row's temperature, [T, V]; entry t is of what follows tokens[:t]."""
    with torch.no_grad():
        logits = model(torch.tensor(row.tokens_T)[None]).logits[0] / row.temperature
    return torch.cat([torch.zeros_like(logits[:1]), logits.log_softmax(-1)[:-1]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layout": "packed", "max_tokens_per_micro_batch": 60},
        {"max_tokens_per_micro_batch": 1, "logprob_chunk_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("top_k", [0, 5])
def test_its_numbers_are_those_of_a_plain_full_forward(top_k: int, settings: Any) -> None:
    model, rows = model64(seed=7), random_rows()
    assert {row.temperature for row in rows} == {1.0, 0.7, 1.3}
    grade(model, rows, top_k, **settings)
    for row in rows:
        expected_TV = full_forward(model, row)
        found_T = row.teacher_logprobs_T
        assert found_T is not None
        assert found_T.dtype == np.float64
        tokens_T1 = torch.tensor(row.tokens_T)[:, None]
        expected_T = expected_TV.gather(1, tokens_T1)[:, 0].numpy() * row.mask_T
        np.testing.assert_allclose(found_T, expected_T, rtol=1e-9, atol=1e-12)
        if not top_k:
            assert row.teacher_ids_TK is row.teacher_top_logprobs_TK is None
            continue
        top = expected_TV.topk(top_k)
        assert row.teacher_ids_TK is not None
        assert row.teacher_top_logprobs_TK is not None
        mask_T1 = row.mask_T[:, None]
        assert np.array_equal(row.teacher_ids_TK, top.indices.numpy() * mask_T1)
        np.testing.assert_allclose(
            row.teacher_top_logprobs_TK, top.values.numpy() * mask_T1, rtol=1e-9, atol=1e-12
        )


def test_likely_tokens_are_those_that_the_policy_knows_too() -> None:
    """The teacher's vocabulary is padded to 80; probabilities stay those over all of it."""
    model = tiny_model(seed=3, vocab=80, dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[70:] *= 50  # tied to the head: very likely
    rows = random_rows()
    grade(model, rows, top_k=VOCAB)
    for row in rows:
        ids_NK = row.teacher_ids_TK[row.mask_T]  # type: ignore[index]
        assert ids_NK.max() < VOCAB
        assert all(sorted(ids) == list(range(VOCAB)) for ids in ids_NK)
        sums_N = np.exp(row.teacher_top_logprobs_TK[row.mask_T]).sum(-1)  # type: ignore[index]
        assert (sums_N < 0.999).any()


def test_it_holds_no_gradient_and_a_model_in_half_precision_gives_single_precision() -> None:
    model, rows = tiny_model(seed=7, dtype=torch.float16), random_rows(kind=np.float32)
    grade(model, rows, top_k=2)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert rows[0].teacher_logprobs_T is not None
    assert rows[0].teacher_logprobs_T.dtype == np.float32
    assert rows[0].teacher_logprobs_T.any()


def test_no_rows_are_no_work() -> None:
    grade(model64(), [])


def test_more_likely_tokens_than_both_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k = 65, but teacher and policy share 64 tokens"):
        grade(model64(), [], top_k=65, vocab=100)


def test_a_token_that_it_does_not_know_is_named() -> None:
    rows = random_rows()
    rows[3].tokens_T[0] = 70
    with pytest.raises(TrainerError, match="holds the token 70, and the teacher knows 64"):
        grade(model64(), rows)


def test_its_identity_tells_models_apart() -> None:
    config = SingleTrainerConfig(device="cpu")
    small = LoadedTeacher(config, tiny_model(), "a", top_k=0, vocab=64)
    large = LoadedTeacher(config, tiny_model(layers=3), "a", top_k=0, vocab=64)
    assert small.identity["path"] == "a"
    assert small.identity != large.identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_teacher_may_know_more_tokens_than_the_policy(folder: Path) -> None:
    more = tiny_tokenizer()
    more.add_tokens(["zz"])
    more.save_pretrained(folder)
    model = load_teacher_model(ModelConfig(path=str(folder)), tiny_tokenizer(), seed=0)
    assert model.get_input_embeddings().num_embeddings == 64


def test_a_teacher_of_another_vocabulary_is_refused(folder: Path) -> None:
    own = tiny_tokenizer()
    own.add_tokens(["zz"])
    with pytest.raises(
        ConfigError,
        match=r"teacher\.model\.path = .*of 49 tokens 1 differ: 'zz' is 48 .* absent in the",
    ):
        load_teacher_model(ModelConfig(path=str(folder)), own, seed=0)


def test_a_teacher_with_fewer_rows_than_tokens_is_refused(folder: Path) -> None:
    tiny_model(vocab=40).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"teacher\.model\.path = .*knows 40 tokens.* has 48"):
        load_teacher_model(ModelConfig(path=str(folder)), tiny_tokenizer(), seed=0)


def test_a_folder_that_is_not_there_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"teacher\.model\.path = '/no/such'"):
        load_teacher_model(ModelConfig(path="/no/such"), tiny_tokenizer(), seed=0)
