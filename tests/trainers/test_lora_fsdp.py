"""An adapter over shards: what one process makes, with whichever number of ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_hosts import Hosts
from fsdp_models import GivenModel
from lora_models import merged
from tiny import tiny_model
from trainer_rows import VOCAB, PlainPolicyGradient, make_trainer, random_rows, train

from paceline.trainers.lora_settings import LoraConfig
from paceline.types import Batch
from paceline.weights.base import WeightPlan
from paceline.weights.receive import receive_parcels
from paceline.weights.tensors import named_tensors

WITH_KL = PlainPolicyGradient(kl_coef=0.3)
LORA = LoraConfig(rank=3)


def sharded(ranks: Hosts, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    source = GivenModel(tiny_model, {"vocab": VOCAB, "dtype": dtype})
    return ranks.make(source, WITH_KL, lora=LORA, **settings)


def single(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    return make_trainer(tiny_model(vocab=VOCAB, dtype=dtype), WITH_KL, lora=LORA, **settings)


def rows_of(seed: int = 0) -> Any:
    rows = random_rows(seed)
    for row in rows:
        row.old_logprobs_T = row.reference_logprobs_T = row.behaviour_logprobs_T
    return rows


def learn(ranks: Hosts, trainer: Any, *seeds: int) -> list[Any]:
    reports = []
    for seed in seeds:
        ranks.run(trainer.forward_backward(Batch("policy", rows_of(seed))))
        reports.append(ranks.run(trainer.optim_step()))
    return reports


def sent(ranks: Hosts, trainer: Any) -> dict[str, torch.Tensor]:
    engine = tiny_model(9, vocab=VOCAB, dtype=torch.float64)
    plan = ranks.run(trainer.send(WeightPlan("policy", trainer.version, "handles")))
    ranks.run(receive_parcels(engine, plan))
    return named_tensors(engine)


def test_steps_and_log_probs_are_those_of_one_process(ranks: Hosts) -> None:
    one, many = single(), sharded(ranks)
    for _ in range(2):
        for head in ("policy", "reference"):
            expected = asyncio.run(one.forward(rows_of(), head))
            found = ranks.run(many.forward(rows_of(), head))
            for found_T, expected_T in zip(found, expected, strict=True):
                np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=1e-9)
        expected = train(one, [rows_of(seed) for seed in (0, 1)])
        found = learn(ranks, many, 0, 1)
        for report, its in zip(found, expected, strict=True):
            assert report.grad_norm == pytest.approx(its.grad_norm, rel=1e-9)
            assert report.adapter_norm == pytest.approx(its.adapter_norm, rel=1e-9)
    weights = sent(ranks, many)
    for name, tensor in merged(one._core.model).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_was_saved_goes_on_bit_for_bit_here_and_in_one_process(
    ranks: Hosts, tmp_path: Path, dtype: torch.dtype
) -> None:
    straight = sharded(ranks, dtype)
    learn(ranks, straight, 0, 1)
    ranks.run(straight.save(tmp_path))
    expected = learn(ranks, straight, 2, 3)
    resumed = sharded(ranks, dtype)
    learn(ranks, resumed, 7)
    ranks.run(resumed.load(tmp_path))
    assert resumed.version == 2
    assert learn(ranks, resumed, 2, 3) == expected
    one = single(dtype)
    asyncio.run(one.load(tmp_path))
    found = train(one, [rows_of(2)])[0]
    assert found.grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-2)


def test_what_one_process_saved_goes_on_over_shards(ranks: Hosts, tmp_path: Path) -> None:
    one = single()
    train(one, [rows_of(0)])
    asyncio.run(one.save(tmp_path))
    many = sharded(ranks, autocast="off")
    ranks.run(many.load(tmp_path))
    expected, found = train(one, [rows_of(1)])[0], learn(ranks, many, 1)[0]
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-9)
    assert found.adapter_norm == pytest.approx(expected.adapter_norm, rel=1e-9)
