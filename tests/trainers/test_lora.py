"""Training an adapter: what it starts as, what it learns, what others get of it."""

from __future__ import annotations

import asyncio
import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from architectures import small_model
from lora_models import logits, merged, stir
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import (
    VOCAB,
    PlainPolicyGradient,
    assert_close,
    assert_equal,
    gradients,
    make_trainer,
    moments_of,
    random_rows,
    train,
    weights,
)
from transformers import AutoModelForCausalLM

from paceline.errors import (
    ConfigError,
    MissingExtraError,
    ResumeMismatchError,
    TrainerError,
)
from paceline.models import ModelConfig, export_model, load_model
from paceline.trainers.lora import add_adapters, find_targets
from paceline.trainers.lora_settings import LoraConfig
from paceline.trainers.values import ValueModel
from paceline.types import Row
from paceline.weights.adapters import adapted_layers
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

WITH_KL = PlainPolicyGradient(kl_coef=0.3)
LORA = LoraConfig(rank=4)


def lora_trainer(seed: int = 0, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model = tiny_model(seed, vocab=VOCAB, dtype=dtype)
    return make_trainer(model, WITH_KL, **{"lora": LORA, **settings})


def scored_rows(trainer: Any, seed: int = 0) -> list[Row]:
    rows = random_rows(seed, kind=np.float32)
    for head, column in (("policy", "old_logprobs_T"), ("reference", "reference_logprobs_T")):
        for row, found_T in zip(rows, asyncio.run(trainer.forward(rows, head)), strict=True):
            setattr(row, column, found_T)
    return rows


def model_of(trainer: Any) -> Any:
    return trainer._core.model


def save(trainer: Any, path: Path) -> Path:
    path.mkdir()
    asyncio.run(trainer.save(path))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_starts_as_the_base_bit_for_bit(dtype: torch.dtype) -> None:
    base = tiny_model(vocab=VOCAB, dtype=dtype)
    trainer, rows = lora_trainer(dtype=dtype), random_rows()
    expected = asyncio.run(make_trainer(copy.deepcopy(base)).forward(rows, "policy"))
    for head in ("policy", "reference"):
        found = asyncio.run(trainer.forward(rows, head))
        for found_T, expected_T in zip(found, expected, strict=True):
            assert np.array_equal(found_T, expected_T)
    assert_equal(merged(model_of(trainer)), named_tensors(base))
    kinds = {layer.a.dtype for layer in adapted_layers(model_of(trainer)).values()}
    assert kinds == {torch.float32}


def test_a_step_changes_the_adapter_alone_and_tells_its_size() -> None:
    trainer = lora_trainer()
    base, model = tiny_model(vocab=VOCAB), model_of(trainer)
    reference = asyncio.run(trainer.forward(random_rows(), "reference"))
    sizes = [report.adapter_norm for report in train(trainer, [scored_rows(trainer)] * 2)]
    assert 0 < sizes[0] < sizes[1]
    changes = [new - named_tensors(base)[name] for name, new in merged(model).items()]
    assert sizes[1] == pytest.approx(
        math.sqrt(sum(float(change.double().square().sum()) for change in changes)), rel=1e-4
    )
    held = {n.replace(".base_layer.", "."): t for n, t in weights(model).items()}
    assert_equal({n: held[n] for n in named_tensors(base)}, named_tensors(base))
    assert {key.rpartition(".lora_")[2] for key in moments_of(trainer)} == {
        "A.default.weight",
        "B.default.weight",
    }
    again = asyncio.run(trainer.forward(random_rows(), "reference"))
    assert all(np.array_equal(x, y) for x, y in zip(again, reference, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": True, "max_tokens_per_micro_batch": 40}], ids=str
)
@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=4, alpha=3, rslora=True)], ids=["", "rs"])
def test_gradients_are_those_of_w_plus_scale_b_a(lora: LoraConfig, settings: Any) -> None:
    """By hand: with G the gradient of W, that of A is scale B^T G, that of B is scale G A^T."""
    trainer = lora_trainer(dtype=torch.float64, lora=lora, **settings)
    model = model_of(trainer)
    stir(model)
    plain = tiny_model(vocab=VOCAB, dtype=torch.float64)
    plain.load_state_dict(merged(model), strict=False)
    rows = random_rows()
    for row in rows:
        row.old_logprobs_T = row.reference_logprobs_T = row.behaviour_logprobs_T
    reference = tiny_model(vocab=VOCAB, dtype=torch.float64)
    whole = make_trainer(plain, WITH_KL, reference=reference)
    expected_metrics, full = gradients(whole, rows)
    metrics, found = gradients(trainer, rows)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-12)
    scale = lora.resolved_alpha / (2.0 if lora.rslora else 4.0)
    expected = {}
    for name, layer in adapted_layers(model).items():
        slope = full[f"{name}.weight"]
        expected[f"{name}.lora_A.default.weight"] = scale * layer.b.detach().T @ slope
        expected[f"{name}.lora_B.default.weight"] = scale * slope @ layer.a.detach().T
    assert_close(found, expected, 1e-9)


def test_the_start_depends_on_the_seed_and_the_name_alone() -> None:
    def start(seed: int, **named: Any) -> dict[str, torch.Tensor]:
        model = tiny_model(vocab=VOCAB)
        torch.manual_seed(torch.initial_seed() + 1)
        add_adapters(model, LoraConfig(rank=4, **named), seed=seed)
        return {name: layer.a.detach() for name, layer in adapted_layers(model).items()}

    all_layers, again = start(1), start(1)
    assert_equal(again, all_layers)
    some = start(1, targets=("q_proj", "model.layers.1.mlp.up_proj"))
    assert len(some) == 3
    assert_equal(some, {name: all_layers[name] for name in some})
    first = next(iter(all_layers))
    assert not torch.equal(start(2)[first], all_layers[first])
    bound = all_layers[first].shape[1] ** -0.5
    assert bound / 2 < float(all_layers[first].abs().max()) <= bound


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral"])
def test_what_is_sent_is_a_plain_model_of_the_same_logits(name: str) -> None:
    model = small_model(name)
    plain = copy.deepcopy(model)
    trainer = make_trainer(model, WITH_KL, lora=LORA)
    stir(model)
    plain.load_state_dict(merged(model), strict=False)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    sums = []
    for sender in (trainer, make_trainer(plain)):
        plan = asyncio.run(sender.send(WeightPlan("policy", 0, "handles")))
        assert plan.source is not None
        sums.append(asyncio.run(plan.source.checksums()))
        asyncio.run(sender.aclose())
    assert sums[0] == sums[1]


def test_a_save_is_a_merged_model_and_an_adapter_for_peft(tmp_path: Path) -> None:
    trainer = lora_trainer()
    train(trainer, [scored_rows(trainer)])
    stir(model_of(trainer))
    path = save(trainer, tmp_path / "saved")
    assert {file.suffix for file in path.rglob("*") if file.is_file()} <= {".json", ".safetensors"}
    expected = logits(model_of(trainer))
    adapted = peft.PeftModel.from_pretrained(tiny_model(vocab=VOCAB), str(path / "adapter"))
    assert torch.equal(logits(adapted), expected)
    plain = AutoModelForCausalLM.from_pretrained(path / "model", dtype="float32")
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-5)
    assert_equal(named_tensors(plain), merged(model_of(trainer)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_later", [False, True], ids=["at once", "later"])
def test_what_was_saved_goes_on_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, is_later: bool
) -> None:
    settings: Any = {"dtype": dtype, "lr_schedule": "cosine", "weight_decay": 0.1}
    straight = lora_trainer(**settings)
    batches = [scored_rows(straight, seed) for seed in range(4)]
    train(straight, batches[:2])
    writes: list[Any] = []
    asyncio.run(straight.save(tmp_path, writes.append if is_later else None))
    expected = train(straight, batches[2:])
    for write in writes:
        asyncio.run(write())

    resumed = lora_trainer(**settings)
    train(resumed, [scored_rows(resumed, 9)])
    asyncio.run(resumed.load(tmp_path))
    assert resumed.version == 2
    assert train(resumed, batches[2:]) == expected
    assert_equal(weights(model_of(resumed)), weights(model_of(straight)))
    assert_equal(moments_of(resumed), moments_of(straight))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = save(lora_trainer(), tmp_path / "saved")
    for other, told in (
        (lora_trainer(1), "adapter of other weights"),
        (lora_trainer(lora=LoraConfig(rank=2)), "another model"),
        (make_trainer(tiny_model(vocab=VOCAB)), "another model"),
    ):
        before = weights(model_of(other))
        with pytest.raises(ResumeMismatchError, match=told):
            asyncio.run(other.load(path))
        assert_equal(weights(model_of(other)), before)
    plain = save(make_trainer(tiny_model(vocab=VOCAB)), tmp_path / "plain")
    with pytest.raises(ResumeMismatchError, match="another model"):
        asyncio.run(lora_trainer().load(plain))


def test_targets() -> None:
    model = tiny_model(vocab=VOCAB)
    chosen = find_targets(model, LoraConfig())
    assert len(chosen) == 14
    assert "lm_head" not in chosen
    for target in ("lm_head", "embed_tokens", "proj"):
        with pytest.raises(ConfigError, match=rf"'{target}' names no linear.*down_proj, gate_proj"):
            find_targets(model, LoraConfig(targets=("q_proj", target)))
    trainer = make_trainer(model, lora=LoraConfig(targets=("q_proj", "v_proj")))
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "v_proj"}
    with pytest.raises(TrainerError, match="adapter already"):
        make_trainer(model_of(trainer), lora=LORA)


def test_the_names_of_what_is_adapted_are_told_in_peft_s_words() -> None:
    some = {"targets": ("layers.1.mlp.up_proj", "q_proj")}
    for named, expected in (
        ({}, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (
            some,
            [f"model.layers.{n}" for n in ("0.self_attn.q_proj", "1.self_attn.q_proj")]
            + ["model.layers.1.mlp.up_proj"],
        ),
    ):
        model = tiny_model(vocab=VOCAB)
        add_adapters(model, LoraConfig(**named), seed=0)
        assert sorted(model.peft_config["default"].target_modules) == sorted(expected)


def test_what_has_no_adapter_is_refused() -> None:
    critic = ValueModel(tiny_model(vocab=VOCAB).base_model)
    with pytest.raises(TrainerError, match="a critic has no adapter"):
        make_trainer(critic, lora=LORA)
    with pytest.raises(TrainerError, match="give no other one"):
        make_trainer(tiny_model(), WITH_KL, reference=tiny_model(1), lora=LORA)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"trainer.lora needs.*paceline\[lora\]"):
        lora_trainer()


# Starting from an adapter


def base_and_adapter(folder: Path) -> tuple[str, str, torch.Tensor]:
    """Folders of both, and the logits of both together."""
    base = tiny_model(vocab=VOCAB)
    export_model(base, tiny_tokenizer(), folder / "base")
    trainer = lora_trainer()
    stir(model_of(trainer))
    path = save(trainer, folder / "saved")
    return str(folder / "base"), str(path / "adapter"), logits(model_of(trainer))


def test_policy_and_reference_start_from_base_and_adapter(tmp_path: Path) -> None:
    path, adapter, expected = base_and_adapter(tmp_path)
    model = load_model(ModelConfig(path=path, adapter=adapter), seed=0)
    assert type(model) is type(tiny_model())
    assert named_tensors(model).keys() == named_tensors(tiny_model()).keys()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    trainer, rows = make_trainer(model, WITH_KL, lora=LORA), random_rows()
    policy, reference = (asyncio.run(trainer.forward(rows, h)) for h in ("policy", "reference"))
    plain = asyncio.run(make_trainer(tiny_model(vocab=VOCAB)).forward(rows, "policy"))
    for policy_T, reference_T, plain_T in zip(policy, reference, plain, strict=True):
        assert np.array_equal(policy_T, reference_T)
        assert not np.allclose(policy_T, plain_T)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, adapter, _ = base_and_adapter(tmp_path)
    with pytest.raises(ConfigError, match=r"model.adapter = .*no adapter_config.json"):
        load_model(ModelConfig(path=path, adapter=path), seed=0)
    export_model(tiny_model(vocab=VOCAB, hidden=48), tiny_tokenizer(), tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"model.adapter = .*does not fit LlamaForCausalLM"):
        load_model(ModelConfig(path=str(tmp_path / "wide"), adapter=adapter), seed=0)
    export_model(tiny_model(vocab=VOCAB, layers=3), tiny_tokenizer(), tmp_path / "deep")
    with pytest.raises(ConfigError, match=r"model.adapter = .*of another model"):
        load_model(ModelConfig(path=str(tmp_path / "deep"), adapter=adapter), seed=0)
    with pytest.raises(ValueError, match="leave out `random_init`"):
        ModelConfig(path=path, adapter=adapter, random_init=True)
