from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.engines.embedded_sampler import (
    RowSettings,
    row_settings,
    sample,
    stream_keys,
    uniforms,
)

CPU = torch.device("cpu")


def settings_of(*rows: dict[str, float]) -> RowSettings:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
    columns = [[(plain | row)[name] for row in rows] for name in plain]
    return row_settings(np.array(columns, np.float64), CPU)


def even_uniforms(n: int) -> torch.Tensor:
    return torch.from_numpy((np.arange(n) + 0.5) / n)


def test_uniforms_are_those_of_splitmix64() -> None:
    # First outputs of the reference implementation for seed 0.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    drawn = uniforms(np.zeros(3, np.uint64), np.arange(3))
    assert drawn.tolist() == [(w >> 11) * 2.0**-53 for w in words]


def test_streams_of_neighbouring_seeds_do_not_overlap() -> None:
    keys = stream_keys(range(64))
    drawn = uniforms(np.repeat(keys, 64), np.tile(np.arange(64), 64))
    assert len(set(drawn.tolist())) == 64 * 64
    assert abs(drawn.mean() - 0.5) < 0.02
    far, near = stream_keys([2**63 + 5, 5])
    assert far != near
    assert stream_keys([-1, 2**64 - 1]).tolist() == [int(stream_keys([-1])[0])] * 2


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"temperature": 0.8, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 1.2, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution_whose_logprobs_are_reported(row: dict[str, float]) -> None:
    n, vocab = 20_000, 12
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=vocab) * 2).float()
    keys = stream_keys([7] * n)
    uniform = torch.from_numpy(uniforms(keys, np.arange(n)))
    token_N, logprob_N = sample(logits.expand(n, -1), settings_of(*[row] * n), uniform)

    logprob_V = torch.full((vocab,), -math.inf, dtype=torch.float64)
    logprob_V[token_N] = logprob_N
    expected_V = logprob_V.exp()
    assert expected_V.sum().item() == pytest.approx(1.0, abs=1e-6)
    counts_V = torch.bincount(token_N, minlength=vocab).double()
    held = expected_V > 0
    chi_square = ((counts_V - n * expected_V)[held].square() / (n * expected_V[held])).sum()
    # The 99.9 % quantile of chi-square with 11 degrees of freedom; fewer need less.
    assert chi_square < 31.3


def test_temperature_divides_the_logits() -> None:
    # Case 21: logits [2, 0] at temperature 0.5.
    _, logprob_N = sample(
        torch.tensor([[2.0, 0.0]]),
        settings_of({"temperature": 0.5}),
        torch.tensor([0.1], dtype=torch.float64),
    )
    assert logprob_N.item() == pytest.approx(-0.018150, abs=1e-6)


def test_truncation_equals_that_of_transformers() -> None:
    rng = np.random.default_rng(0)
    logits_NV = torch.from_numpy(rng.normal(size=(40, 30)) * 3).float()
    uniform_N = torch.from_numpy(rng.random(40))
    for row in (
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ):
        token_N, logprob_N = sample(logits_NV, settings_of(*[row] * 40), uniform_N)
        warped_NV = logits_NV.clone()
        if "top_k" in row:
            warped_NV = TopKLogitsWarper(row["top_k"])(None, warped_NV)
        if "top_p" in row:
            warped_NV = TopPLogitsWarper(row["top_p"])(None, warped_NV)
        if "min_p" in row:
            warped_NV = MinPLogitsWarper(row["min_p"])(None, warped_NV)
        wanted_N = warped_NV.log_softmax(-1).gather(-1, token_N[:, None])[:, 0]
        torch.testing.assert_close(logprob_N.float(), wanted_N, atol=1e-5, rtol=0)


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits_NV = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 10))).float()
    seen_ids = torch.tensor([[1, 3, 3]] * 6)
    seen = [torch.zeros(10, dtype=torch.bool).index_fill_(0, row, True) for row in seen_ids]
    token_N, logprob_N = sample(
        logits_NV, settings_of(*[{"penalty": 1.8}] * 6), even_uniforms(6), seen
    )
    wanted_NV = RepetitionPenaltyLogitsProcessor(1.8)(seen_ids, logits_NV.clone())
    wanted_N = wanted_NV.log_softmax(-1).gather(-1, token_N[:, None])[:, 0]
    torch.testing.assert_close(logprob_N.float(), wanted_N, atol=1e-5, rtol=0)


def test_greedy_rows_report_the_logprob_at_temperature_1() -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    for rows in ([{"temperature": 0}] * 2, [{"temperature": 0}, {"temperature": 0.5}]):
        token_N, logprob_N = sample(logits_NV, settings_of(*rows), even_uniforms(2))
        assert token_N[0] == 1
        wanted = logits_NV[0].log_softmax(-1)[1].item()
        assert logprob_N[0].item() == pytest.approx(wanted, abs=1e-6)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [
        {"temperature": 0.9},
        {"temperature": 0},
        {"top_p": 0.5},
        {"temperature": 1.4, "top_k": 3},
        {"penalty": 2.0},
    ]
    rng = np.random.default_rng(3)
    logits_NV = torch.from_numpy(rng.normal(size=(5, 50))).float()
    uniform_N = torch.from_numpy(rng.random(5))
    seen = [torch.from_numpy(rng.random(50) < 0.3)]
    together = sample(logits_NV, settings_of(*rows), uniform_N, seen)
    for i, row in enumerate(rows):
        alone = sample(
            logits_NV[i : i + 1], settings_of(row), uniform_N[i : i + 1], seen if i == 4 else ()
        )
        assert alone[0].item() == together[0][i].item()
        assert alone[1].item() == pytest.approx(together[1][i].item(), abs=1e-12)


def test_impossible_tokens_are_never_drawn() -> None:
    logits_V = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    token_N, logprob_N = sample(logits_V.expand(3, -1), settings_of(*[{}] * 3), edges)
    assert token_N.tolist() == [1, 3, 3]
    assert logprob_N.exp().tolist() == pytest.approx([0.5] * 3)


def test_broken_logits_give_a_broken_logprob_and_no_crash() -> None:
    logits_NV = torch.full((1, 4), math.nan)
    token_N, logprob_N = sample(logits_NV, settings_of({}), even_uniforms(1))
    assert 0 <= token_N.item() < 4
    assert math.isnan(logprob_N.item())
