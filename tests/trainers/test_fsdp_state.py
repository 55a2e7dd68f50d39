"""Checkpoints and first weights of sharded trainers: files and numbers as of a single one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from fsdp_hosts import hosts
from fsdp_models import GivenModel, critic_of
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import (
    VOCAB,
    assert_equal,
    make_trainer,
    moments_of,
    random_rows,
    train,
    weights,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.grpo import Grpo
from paceline.errors import CheckpointError, PacelineError, ResumeMismatchError, TrainerError
from paceline.models import ModelConfig, load_model
from paceline.trainers.fsdp_weights import NamedCritic, NamedModel, find_spots
from paceline.trainers.values import ValueModel, export_value_model, load_value_model
from paceline.types import Batch


def _source(seed: int = 0, dtype: torch.dtype = torch.float32) -> GivenModel:
    return GivenModel(tiny_model, {"seed": seed, "vocab": VOCAB, "dtype": dtype})


def _learn(ranks, trainer, seed: int) -> None:
    ranks.run(trainer.forward_backward(Batch("policy", random_rows(seed))))
    ranks.run(trainer.optim_step())


def _single(seed: int = 0):
    return make_trainer(tiny_model(seed=seed, vocab=VOCAB), Grpo(), weight_decay=0.1)


def _make(ranks, seed: int = 0, **settings):
    return ranks.make(_source(seed), Grpo(), weight_decay=0.1, **settings)


def _save(ranks, trainer, path: Path) -> Path:
    path.mkdir()
    ranks.run(trainer.save(path))
    return path


def test_what_ranks_saved_any_trainer_loads_bit_for_bit(ranks, tmp_path):
    trainer = _make(ranks)
    _learn(ranks, trainer, 0)
    _learn(ranks, trainer, 1)
    path = _save(ranks, trainer, tmp_path / "saved")
    held, moments = ranks.ask("weights"), ranks.ask("moments")
    single = _single(seed=5)
    asyncio.run(single.load(path))
    assert single.version == 2
    assert_equal(weights(single._core.model), held)
    assert_equal(moments_of(single), moments)
    other = _make(ranks, seed=6)
    ranks.run(other.load(path))
    assert other.version == 2
    assert_equal(ranks.ask("weights"), held)
    assert_equal(ranks.ask("moments"), moments)
    if ranks.size == 1:
        return
    with hosts(1, tmp_path) as alone:
        lone = _make(alone, seed=7)
        alone.run(lone.load(path))
        assert_equal(alone.ask("weights"), held)
        assert_equal(alone.ask("moments"), moments)


def test_what_a_single_trainer_saved_ranks_load_and_go_on_with(ranks, tmp_path):
    single = _single()
    train(single, [random_rows(0), random_rows(1)])
    path = tmp_path / "saved"
    path.mkdir()
    asyncio.run(single.save(path))
    trainer = _make(ranks, seed=5)
    _learn(ranks, trainer, 7)  # what it learned before is gone
    ranks.run(trainer.load(path))
    assert trainer.version == 2
    assert_equal(ranks.ask("weights"), weights(single._core.model))
    assert_equal(ranks.ask("moments"), moments_of(single))
    back = _save(ranks, trainer, tmp_path / "back")
    assert load_file(back / "model" / "model.safetensors").keys() == (
        load_file(path / "model" / "model.safetensors").keys()
    )
    again = _single(seed=9)
    asyncio.run(again.load(back))
    assert_equal(weights(again._core.model), weights(single._core.model))
    assert_equal(moments_of(again), moments_of(single))


def test_a_save_before_the_first_step_has_no_moments(ranks, tmp_path):
    path = _save(ranks, _make(ranks), tmp_path / "saved")
    single = _single(seed=4)
    asyncio.run(single.load(path))
    assert moments_of(single) == {}
    assert_equal(weights(single._core.model), weights(tiny_model(vocab=VOCAB)))
    other = _make(ranks, seed=4)
    ranks.run(other.load(path))
    assert ranks.ask("moments") == {}


def test_each_rank_writes_a_share_of_whole_moments(ranks, tmp_path):
    trainer = _make(ranks)
    _learn(ranks, trainer, 0)
    path = _save(ranks, trainer, tmp_path / "saved")
    files = sorted(path.glob("optimizer*.safetensors"))
    assert len(files) == ranks.size
    sizes = [sum(t.numel() for t in load_file(file).values()) for file in files]
    assert max(sizes) <= 1.2 * sum(sizes) / ranks.size
    assert not list(path.rglob("*.bin")) + list(path.rglob("*.pt"))


def test_the_model_is_a_hugging_face_folder_with_the_tokenizer(ranks, tmp_path):
    folder = tmp_path / "model"
    tiny_model(vocab=VOCAB).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = ModelConfig(path=str(folder))
    trainer = ranks.make(NamedModel(config, seed=0), Grpo(), tokenizer=config)
    path = _save(ranks, trainer, tmp_path / "saved") / "model"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert_equal(weights(model), weights(tiny_model(vocab=VOCAB)))
    assert (path / "tokenizer.json").is_file()
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_training_goes_on_while_a_checkpoint_is_written(ranks, tmp_path):
    trainer = _make(ranks)
    _learn(ranks, trainer, 0)
    held = ranks.ask("weights")
    path = tmp_path / "saved"
    path.mkdir()
    ranks.run(trainer.begin_save(path))
    _learn(ranks, trainer, 1)
    assert not (path / "trainer.json").exists()
    ranks.run(trainer.finish_save())
    single = _single(seed=4)
    asyncio.run(single.load(path))
    assert single.version == 1
    assert_equal(weights(single._core.model), held)


def test_an_error_of_writing_comes_when_it_is_finished_and_the_trainer_goes_on(ranks, tmp_path):
    trainer = _make(ranks)
    path = tmp_path / "saved"
    path.write_text("a file is in the way")
    ranks.run(trainer.begin_save(path))
    with pytest.raises((PacelineError, OSError)):
        ranks.run(trainer.finish_save())
    _learn(ranks, trainer, 0)
    _save(ranks, trainer, tmp_path / "other")


def test_another_model_or_damage_is_refused_on_all_and_nothing_changes(ranks, tmp_path):
    trainer = _make(ranks)
    _learn(ranks, trainer, 0)
    path = _save(ranks, trainer, tmp_path / "saved")
    wider = GivenModel(tiny_model, {"vocab": VOCAB, "hidden": 48})
    other = ranks.make(wider, Grpo())
    before = ranks.ask("weights")
    with pytest.raises(ResumeMismatchError, match="another model"):
        ranks.run(other.load(path))
    assert_equal(ranks.ask("weights"), before)
    assert other.version == 0
    other = _make(ranks, seed=4)
    before = ranks.ask("weights")
    last = sorted(path.glob("optimizer*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="older checkpoint"):
        ranks.run(other.load(path))
    last.unlink()
    with pytest.raises(CheckpointError, match="older checkpoint"):
        ranks.run(other.load(path))
    assert_equal(ranks.ask("weights"), before)
    _learn(ranks, other, 0)


def test_a_critic_is_saved_and_loaded_as_by_a_single_trainer(ranks, tmp_path):
    objective = ALGORITHMS["ppo"]().critic
    named = {"vocab": VOCAB}
    trainer = ranks.make(GivenModel(critic_of, named), objective, head="values")
    path = _save(ranks, trainer, tmp_path / "saved")
    single = make_trainer(critic_of(seed=3, **named), objective)
    with torch.no_grad():
        single._core.model.head.weight.zero_()
    asyncio.run(single.load(path))
    assert_equal(weights(single._core.model), weights(critic_of(**named)))
    back = tmp_path / "back"
    back.mkdir()
    asyncio.run(single.save(back))
    other = ranks.make(GivenModel(critic_of, {"seed": 4, **named}), objective, head="values")
    ranks.run(other.load(back))
    assert_equal(ranks.ask("weights"), weights(critic_of(**named)))


def _untied() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["tied", "untied", "in several files", "bfloat16", "drawn"])
def test_first_weights_are_those_of_load_model(ranks, tmp_path, kind):
    model = _untied() if kind == "untied" else tiny_model(seed=2, vocab=VOCAB)
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if kind == "in several files" else "1GB")
    config = ModelConfig(path=str(tmp_path), random_init=kind == "drawn")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (kind == "in several files")
    expected = load_model(config, seed=11)
    source = NamedModel(config, seed=11)
    assert (find_spots(source.blank(), source.folder) is None) == (kind == "drawn")
    ranks.make(source, Grpo())
    assert_equal(ranks.ask("weights"), weights(expected))


@pytest.mark.parametrize("kind", ["a policy", "a critic", "drawn"])
def test_first_weights_of_a_critic_are_those_of_load_value_model(ranks, tmp_path, kind):
    if kind == "a critic":
        export_value_model(critic_of(seed=2, vocab=VOCAB), None, tmp_path)
    else:
        tiny_model(seed=2, vocab=VOCAB).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), random_init=kind == "drawn")
    expected = load_value_model(config, seed=11, key="critic.model")
    assert isinstance(expected, ValueModel)
    assert bool(expected.head.weight.any()) == (kind == "a critic")
    source = NamedCritic(config, seed=11)
    assert (find_spots(source.blank(), source.folder) is None) == (kind == "drawn")
    ranks.make(source, ALGORITHMS["ppo"]().critic, head="values")
    assert_equal(ranks.ask("weights"), weights(expected))


def test_files_that_lack_a_tensor_are_refused_as_by_load_model(ranks, tmp_path):
    model = tiny_model(vocab=VOCAB)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert "model.norm.weight" not in set(opened.keys())
    with pytest.raises(PacelineError, match=r"1 tensors are missing.*model.norm.weight"):
        ranks.make(NamedModel(ModelConfig(path=str(tmp_path)), seed=0), Grpo())


def test_a_reference_that_the_algorithm_needs_must_be_given(ranks):
    with pytest.raises(TrainerError, match="needs a reference"):
        ranks.make(_source(), Grpo(kl_coef=0.1))
