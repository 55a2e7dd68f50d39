"""A critic: values of the states before tokens, its loss and its files, against plain loops."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, small_model
from tiny import tiny_model, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_rows import (
    VOCAB,
    assert_close,
    assert_equal,
    gradients,
    make_trainer,
    model64,
    moments_of,
    random_rows,
    train,
    weights,
)
from transformers import AutoModel, LlamaForCausalLM

from paceline.algorithms.base import LossOutput
from paceline.errors import CheckpointError, ConfigError, ResumeMismatchError, TrainerError
from paceline.models import ModelConfig, load_model
from paceline.trainers.base import CriticConfig, SingleTrainerConfig
from paceline.trainers.values import ValueModel, export_value_model, load_value_model
from paceline.types import Batch


@dataclass(frozen=True)
class SquaredError:
    """Half the squared distance to the return, no nearer to the old value than 0.2."""

    learns_from_rollouts: bool = True
    needs_reference: bool = False
    needs_teacher: bool = False
    teacher_top_k: int = 0
    needs_entropy_gradient: bool = False
    learns_by_advantage_alone: bool = False

    def loss(self, inputs):
        near_N = inputs.old_values_N + (inputs.values_N - inputs.old_values_N).clamp(-0.2, 0.2)
        far_N = (inputs.values_N - inputs.returns_N).square()
        error_N = torch.maximum(far_N, (near_N - inputs.returns_N).square())
        ones_N = torch.ones_like(error_N)
        means = {"values": (inputs.values_N.detach().sum(), ones_N.sum())}
        return LossOutput((inputs.weights_N * 0.5 * error_N).sum(), means)


def critic_model(seed=0, dtype=torch.float64, head_seed=1, model=None):
    """A value model whose head is not zero, so that the body learns."""
    base = tiny_model(seed=seed, vocab=VOCAB, dtype=dtype) if model is None else model
    critic = ValueModel(base.base_model)
    generator = torch.Generator().manual_seed(head_seed)
    with torch.no_grad():
        for parameter in critic.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return critic


def critic_rows(seed=0, num=12):
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 100)
    for row in rows:
        row.values_T, row.returns_T = rng.normal(size=(2, len(row.tokens_T))) * row.mask_T
    return rows


def critic_trainer(model=None, **settings):
    return make_trainer(critic_model() if model is None else model, SquaredError(), **settings)


def naive_values(model, row):
    """One state at a time: the value at t knows tokens[:t] and nothing else. [T], float64."""
    values_T = np.zeros(len(row.tokens_T))
    weight, bias = (p.detach().double().numpy() for p in model.head.parameters())
    for t in np.flatnonzero(row.mask_T):
        ids = torch.tensor(row.tokens_T[:t])[None]
        with torch.no_grad():
            hidden_D = model.body(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        products = (h * w for h, w in zip(hidden_D.double().tolist(), weight[0], strict=True))
        values_T[t] = sum(products) + bias[0]
    return values_T


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 30}], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_values_are_those_of_the_states_before_the_tokens(layout, settings):
    rows, model = critic_rows(), critic_model()
    trainer = critic_trainer(model, layout=layout, **settings)
    found = asyncio.run(trainer.forward(rows, "values"))
    for row, found_T in zip(rows, found, strict=True):
        assert found_T.shape == row.tokens_T.shape
        np.testing.assert_allclose(found_T, naive_values(model, row), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_has_values(name):
    model, rows = critic_model(model=small_model(name)), critic_rows(num=4)
    found = asyncio.run(critic_trainer(model).forward(rows, "values"))
    expected = [naive_values(model, row) for row in rows]
    gap = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    assert gap < 1e-4 * max(float(np.abs(e).max()) for e in expected)


def test_a_fresh_head_is_zero_and_draws_nothing():
    state = torch.get_rng_state()
    model = ValueModel(model64().base_model)
    assert torch.equal(torch.get_rng_state(), state)
    trainer = make_trainer(model, SquaredError())
    assert all(not v.any() for v in asyncio.run(trainer.forward(critic_rows(), "values")))


def test_loss_and_gradients_equal_those_of_a_loop():
    rows, model = critic_rows(num=5), critic_model()
    losses = []
    for row in rows:
        hidden_TD = model.body(input_ids=torch.tensor(row.tokens_T)[None]).last_hidden_state[0]
        for t in np.flatnonzero(row.mask_T):
            value = (hidden_TD[t - 1] * model.head.weight[0]).sum() + model.head.bias[0]
            old, target = row.values_T[t], row.returns_T[t]
            near = old + (value - old).clamp(-0.2, 0.2)
            error = max((value - target) ** 2, (near - target) ** 2)
            losses.append(row.weights_T[t] * 0.5 * error)
    loss = torch.stack(losses).sum()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    metrics, found = gradients(critic_trainer(), rows)
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert_close(found, expected, 1e-10)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"max_tokens_per_micro_batch": 25, "layout": "packed"},
        {"activation_checkpointing": True, "max_tokens_per_micro_batch": 40},
    ],
    ids=str,
)
def test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_cut(settings):
    """Case 3, for a critic."""
    rows = critic_rows()
    metrics, expected = gradients(critic_trainer(), rows)
    found_metrics, found = gradients(critic_trainer(**settings), rows[::-1])
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


def test_every_metric_of_a_critic_is_filed_under_it():
    metrics, _ = gradients(critic_trainer(), critic_rows())
    assert set(metrics) == {
        "critic/loss",
        "critic/values",
        "critic/trained_tokens",
        "critic/empty_batches",
    }


def test_steps_lower_the_error():
    rows = critic_rows(num=6)
    trainer = critic_trainer(lr=1e-2)
    first, _ = gradients(trainer, rows)
    train(trainer, [rows] * 30)
    last, _ = gradients(trainer, rows)
    assert last["critic/loss"] < 0.5 * first["critic/loss"]


class _Shapes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.last_sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                self.last_sizes.add(tensor.shape[-1])
        return result


def test_no_logits_over_the_vocabulary_exist():
    model = critic_model(model=tiny_model(vocab=509))
    trainer = critic_trainer(model)
    assert "lm_head" not in "".join(weights(model))
    with _Shapes() as seen:
        trainer._core.score_rows(critic_rows(), "values")
        trainer._core.add_gradients(Batch("policy", critic_rows()))
    assert 509 not in seen.last_sizes


def test_the_head_computes_in_float32_whatever_the_body_does():
    model = ValueModel(tiny_model(vocab=VOCAB, dtype=torch.bfloat16).base_model)
    assert {p.dtype for p in model.head.parameters()} == {torch.float32}
    trainer = critic_trainer(model, autocast="bfloat16", lr=1e-2)
    train(trainer, [critic_rows(seed=seed) for seed in range(3)])
    values = np.concatenate(asyncio.run(trainer.forward(critic_rows(), "values")))
    assert values.dtype == np.float32
    # bfloat16 would round them to 8 bits.
    rounded = torch.tensor(values).to(torch.bfloat16).float().numpy()
    assert np.abs(rounded - values).max() > 0


def test_rows_without_values_or_returns_are_refused():
    rows = critic_rows()
    for row in rows:
        row.returns_T = None
    with pytest.raises(TrainerError, match="rows with values and returns"):
        gradients(critic_trainer(), rows)
    rows[0].returns_T = rows[0].values_T
    with pytest.raises(TrainerError, match="1 of 12 rows of the batch have returns_T"):
        gradients(critic_trainer(), rows)


def test_a_policy_has_no_values_and_a_critic_no_log_probs():
    with pytest.raises(TrainerError, match="no 'values'"):
        asyncio.run(make_trainer().forward(critic_rows(), "values"))
    with pytest.raises(TrainerError, match="no 'policy'"):
        asyncio.run(critic_trainer().forward(critic_rows(), "policy"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path, dtype):
    """Case 74 for the critic: 6 steps, against 3, a save, a load into other weights, and 3."""
    batches = [critic_rows(seed=seed) for seed in range(6)]
    settings = {"lr_schedule": "cosine", "lr_warmup_steps": 2}
    straight = critic_trainer(critic_model(dtype=dtype), **settings)
    expected = train(straight, batches)

    first = critic_trainer(critic_model(dtype=dtype), **settings)
    train(first, batches[:3])
    asyncio.run(first.save(tmp_path))
    second = critic_trainer(critic_model(seed=5, dtype=dtype, head_seed=6), **settings)
    asyncio.run(second.load(tmp_path))
    assert second.version == 3
    assert train(second, batches[3:]) == expected[3:]
    assert_equal(weights(second._core.model), weights(straight._core.model))
    assert_equal(moments_of(second), moments_of(straight))


@pytest.mark.parametrize("name", ["trainer.json", "model/value_head.safetensors"])
def test_a_damaged_critic_is_refused_and_nothing_changes(tmp_path, name):
    asyncio.run(critic_trainer().save(tmp_path))
    (tmp_path / name).unlink()
    trainer = critic_trainer(critic_model(seed=4))
    with pytest.raises(CheckpointError, match="can not be read"):
        asyncio.run(trainer.load(tmp_path))
    assert_equal(weights(trainer._core.model), weights(critic_model(seed=4)))


def test_a_critic_is_not_a_policy(tmp_path):
    asyncio.run(critic_trainer().save(tmp_path / "critic"))
    asyncio.run(make_trainer().save(tmp_path / "policy"))
    for trainer, other in ((make_trainer(), "critic"), (critic_trainer(), "policy")):
        with pytest.raises(ResumeMismatchError, match="holds another model"):
            asyncio.run(trainer.load(tmp_path / other))


def test_the_folder_holds_a_hugging_face_body_and_the_head(tmp_path):
    model = critic_model(dtype=torch.float32)
    trainer = critic_trainer(model)
    trainer._tokenizer = tiny_tokenizer()
    asyncio.run(trainer.save(tmp_path))
    body = AutoModel.from_pretrained(tmp_path / "model")
    assert_equal(weights(body), weights(model.body))
    config = ModelConfig(path=str(tmp_path / "model"))
    again = load_value_model(config, seed=0, key="critic.model")
    assert_equal(weights(again), weights(model))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_critic_starts_from_a_policys_model_or_from_a_saved_critic(tmp_path, is_tied):
    settings = tiny_model().config
    settings.tie_word_embeddings = is_tied
    LlamaForCausalLM(settings).save_pretrained(tmp_path / "model")
    config = ModelConfig(path=str(tmp_path / "model"))
    critic = load_value_model(config, seed=0, key="model")
    policy = load_model(config, seed=0)
    assert_equal(weights(critic.body), weights(policy.base_model))
    pointers = {p.data_ptr() for p in policy.parameters()}
    assert not pointers & {p.data_ptr() for p in critic.parameters()}
    assert not critic.head.weight.any()

    with torch.no_grad():
        critic.head.weight.fill_(0.5)
    export_value_model(critic, None, tmp_path / "critic")
    saved = ModelConfig(path=str(tmp_path / "critic"))
    assert_equal(weights(load_value_model(saved, seed=0, key="critic.model")), weights(critic))
    drawn = saved.model_copy(update={"random_init": True})
    assert not load_value_model(drawn, seed=0, key="critic.model").head.weight.any()


def test_a_body_drawn_from_the_seed_is_the_policys(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), random_init=True)
    bodies = [load_value_model(config, seed=7, key="model").body for _ in range(2)]
    for body in bodies:
        assert_equal(weights(body), weights(load_model(config, seed=7).base_model))


def test_a_head_that_can_not_be_read_is_named(tmp_path):
    export_value_model(critic_model(dtype=torch.float32), None, tmp_path)
    (tmp_path / "value_head.safetensors").write_bytes(b"damaged")
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"critic\.model\.path.*value_head\.safetensors"):
        load_value_model(config, seed=0, key="critic.model")


def test_a_body_that_lacks_weights_is_refused(tmp_path):
    tiny_model(layers=1).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 2}))
    config = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"critic\.model\.path.*tensors are missing"):
        load_value_model(config, seed=0, key="critic.model")


def test_the_critics_settings_are_its_own_and_those_of_the_actor_for_the_rest():
    actor = SingleTrainerConfig(lr=1e-6, lr_schedule="cosine", betas=(0.8, 0.9), max_grad_norm=2.0)
    found = CriticConfig(lr=3e-5, max_grad_norm=0.5, warmup_steps=4).for_trainer(actor)
    assert found == SingleTrainerConfig(
        lr=3e-5, lr_schedule="cosine", betas=(0.8, 0.9), max_grad_norm=0.5
    )
    assert all(field.description for field in CriticConfig.model_fields.values())
