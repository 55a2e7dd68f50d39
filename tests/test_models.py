"""Models and tokenizers: loaded from a folder, drawn from a seed, written and read bit-equal."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
import transformers
from tiny import tiny_model, tiny_tokenizer

from paceline.errors import ConfigError
from paceline.models import (
    ModelConfig,
    _progress_bars,
    eos_token_ids,
    export_model,
    fingerprint_differences,
    load_model,
    load_tokenizer,
    model_fingerprint,
)
from paceline.weights.tensors import checksums, named_tensors


@pytest.fixture
def folder(tmp_path):
    export_model(tiny_model(), tiny_tokenizer("{{ messages }}"), tmp_path)
    return tmp_path


def test_configuration_needs_neither_torch_nor_transformers():
    code = (
        "import sys, paceline.models\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_loads_bit_equal(tmp_path, dtype, tied):
    model = tiny_model(dtype=dtype)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    export_model(model, tiny_tokenizer(), tmp_path)
    kind = str(dtype).removeprefix("torch.")
    for loaded in (
        load_model(ModelConfig(path=str(tmp_path), dtype=kind), seed=0),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert checksums(named_tensors(loaded)) == checksums(named_tensors(model))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert not loaded.training
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("1+2=") == tiny_tokenizer().encode("1+2=")


def test_weights_are_held_in_the_configured_type(folder):
    model = load_model(ModelConfig(path=str(folder), dtype="bfloat16"), seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"
    eager = load_model(ModelConfig(path=str(folder), attention="eager"), seed=0)
    assert eager.config._attn_implementation == "eager"


def test_random_weights_depend_on_the_seed_alone(folder):
    config = ModelConfig(path=str(folder), random_init=True)
    first = checksums(named_tensors(load_model(config, seed=1)))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = checksums(named_tensors(load_model(config, seed=1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == second
    assert first != checksums(named_tensors(load_model(config, seed=2)))
    assert first != checksums(named_tensors(load_model(ModelConfig(path=str(folder)), seed=1)))


def test_a_missing_folder_and_one_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path = '/no/such'.*no such folder"):
        load_model(ModelConfig(path="/no/such"), seed=0)
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(ModelConfig(path="./elsewhere"), seed=0)
    with pytest.raises(ConfigError, match=r"has no config\.json.*Hugging Face format"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)


def test_a_model_id_that_can_not_be_reached(monkeypatch):
    def refuse(*_, **__):
        raise OSError("We couldn't connect to the server\nand more lines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r"model\.path.*couldn't connect.*check its spelling"):
        load_model(ModelConfig(path="someone/some-model"), seed=0)
    with pytest.raises(ConfigError, match=r"model\.tokenizer = 'x/y'.*tokenizer can not be loaded"):
        load_tokenizer(ModelConfig(path="someone/some-model", tokenizer="x/y"))


def test_an_attention_that_a_model_does_not_have(folder, monkeypatch):
    def refuse(*_, **__):
        raise ValueError('load your model with `attn_implementation="eager"` meanwhile')

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match=r'set model\.attention = "eager"'):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_damaged_and_incomplete_weights_are_refused(folder):
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing .*layers\.1\.mlp\.up_proj"):
        load_model(ModelConfig(path=str(folder)), seed=0)
    assert removed.numel()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"can not be loaded.*damaged"):
        load_model(ModelConfig(path=str(folder)), seed=0)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can not be loaded"):
        load_model(ModelConfig(path=str(folder)), seed=0)


def test_pad_becomes_the_end_token_only_where_it_is_missing(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "own")
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "own"))).pad_token_id == 0
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "none")
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "none"))).pad_token_id == 1
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "neither")
    with pytest.raises(ConfigError, match="neither a pad token nor an end token"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "neither")))


def test_a_folder_without_tokenizer_says_which_key_to_set(tmp_path):
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"holds no tokenizer .*set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "bare")))


def test_a_tokenizer_of_another_folder_and_a_chat_template_from_a_file(folder, tmp_path):
    tiny_tokenizer("other").save_pretrained(tmp_path / "other")
    config = ModelConfig(path=str(folder), tokenizer=str(tmp_path / "other"))
    assert load_tokenizer(config).chat_template == "other"
    assert load_tokenizer(ModelConfig(path=str(folder))).chat_template == "{{ messages }}"
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    config = ModelConfig(path=str(folder), chat_template=str(template))
    assert load_tokenizer(config).chat_template == "{{ messages[0].content }}"
    config = ModelConfig(path=str(folder), chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match=r"model\.chat_template.*can not be read"):
        load_tokenizer(config)


def test_all_end_tokens_of_model_generation_config_and_tokenizer():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    assert eos_token_ids(model, tokenizer) == {1}
    model.generation_config.eos_token_id = [5, 7]
    model.config.eos_token_id = 9
    assert eos_token_ids(model, tokenizer) == {1, 5, 7, 9}
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = -1
    assert eos_token_ids(model, tokenizer) == {1}


def test_a_contradictory_generation_config_does_not_stop_a_save(tmp_path):
    model = tiny_model()
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.6
    model.generation_config.eos_token_id = [1, 5]
    live = model.generation_config
    export_model(model, None, tmp_path)
    assert model.generation_config is live
    saved = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert saved.eos_token_id == [1, 5]


def test_fingerprints_tell_what_differs():
    own = model_fingerprint(tiny_model())
    assert fingerprint_differences(own, model_fingerprint(tiny_model(seed=5))) == []
    wide = fingerprint_differences(own, model_fingerprint(tiny_model(hidden=16)))
    assert len(wide) == len(own["parameters"])
    assert any("model.norm.weight has shape [32] in the checkpoint and [16]" in w for w in wide)
    other = fingerprint_differences(own, {**own, "architecture": "X", "model_type": "qwen2"})
    assert other[0] == "architecture is 'LlamaForCausalLM' in the checkpoint and 'X' in the run"
    assert other[1] == "model_type is 'llama' in the checkpoint and 'qwen2' in the run"


def test_progress_bars_stay_off_until_nobody_saves(tmp_path, capfd):
    """Of two saves at the same time the first to end must not switch them on for the other."""
    bars = transformers.utils.logging
    was_on = bars.is_progress_bar_enabled()
    bars.enable_progress_bar()
    try:
        with _progress_bars.off():
            with _progress_bars.off():
                pass
            assert not bars.is_progress_bar_enabled()
            export_model(tiny_model(), None, tmp_path / "inner")
            assert not bars.is_progress_bar_enabled()
        assert bars.is_progress_bar_enabled()
        models = [tiny_model(seed=seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for seed, model in enumerate(models):
                pool.submit(export_model, model, None, tmp_path / str(seed))
        assert bars.is_progress_bar_enabled()
    finally:
        if not was_on:
            bars.disable_progress_bar()
    assert "model shards" not in capfd.readouterr().err
