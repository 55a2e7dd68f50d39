"""Loading models and tokenizers, and writing them where `from_pretrained` finds them."""

from __future__ import annotations

from typing import Literal

from paceline.types import Config


class ModelConfig(Config):
    """`[model]`: which language model, and how it is held."""

    path: str
    """A folder in Hugging Face format, or a model id that `transformers` can load."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; default: that of the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory (trainer and embedded engine)."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    random_init: bool = False
    """Take only the configuration from `path` and draw the weights from the run's seed."""
    trust_remote_code: bool = False
    """Let the model folder bring its own Python code. Only for models you trust."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
