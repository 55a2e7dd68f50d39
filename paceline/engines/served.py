"""What is known of the model that an engine's servers serve, before one of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from paceline.engines.base import Request, ServedEngineConfig
from paceline.errors import ConfigError, EngineError
from paceline.models import ModelConfig, eos_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the servers of one engine."""

    policy: str
    eos_token_ids: frozenset[int]
    max_context: int
    """Most tokens of prompt plus answer."""
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase | None
    request_timeout_s: float
    update_timeout_s: float = 600.0
    """Seconds that one part of new weights may take."""
    moves_memory: bool = False
    """Whether servers can give memory back: they run on a GPU and were started for it."""
    num_devices: int = 1
    compares: bool = False
    """Whether servers that are started here can compare their weights, on a GPU, and begin with
    those that the trainer begins with."""
    cache_bytes: int | None = None
    """Of the keys and values of one token, on all devices together; None if it is not known."""

    def check(self, tokens: Sequence[int], what: str) -> None:
        """A token that the model does not know would end some servers."""
        if not tokens:
            raise EngineError(f"the {what} is empty: a model needs one token to go on from")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.vocab_size:
            raise EngineError(
                f"the {what} has token ids from {lowest} to {highest}, and the model knows 0 to "
                f"{self.vocab_size - 1}: is the tokenizer another model's?"
            )

    def room(self, request: Request, longest_prompt: int) -> int:
        """Most new tokens; below 1 if the context has no room for one. longest_prompt: that the
        server takes."""
        prompt = len(request.tokens)
        self.check(request.tokens, "prompt")
        if prompt > self.max_context:
            raise EngineError(
                f"the prompt has {prompt} tokens, and the context holds "
                f"{self.max_context}: shorten it, filter it out, or raise "
                "`engine.max_context` as far as the model allows"
            )
        if prompt > longest_prompt:
            return 0
        room = self.max_context - prompt
        return min(request.sampling.max_tokens - request.num_sampled, room)


def served_model(
    config: ServedEngineConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    *,
    device: str,
    moves_memory: bool,
) -> Served:
    """What the model's folder tells of it, without its weights."""
    from transformers import AutoConfig, GenerationConfig

    source = resolved(model.path)
    try:
        architecture = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path = {model.path!r} can not be served: {reason}") from error
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:
        generation = None
    text = architecture.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    found = SimpleNamespace(config=text, generation_config=generation)
    limits = [limit for limit in (config.max_context, longest) if limit is not None]
    if not limits:
        raise ConfigError(
            f"model.path = {model.path!r}: its configuration does not say how many tokens the "
            "model can read: set engine.max_context"
        )
    return Served(
        policy=policy,
        eos_token_ids=eos_token_ids(found, tokenizer),
        max_context=min(limits),
        vocab_size=text.vocab_size,
        tokenizer=tokenizer,
        request_timeout_s=config.request_timeout_s,
        moves_memory=moves_memory and device == "cuda",
        num_devices=config.tensor_parallel,
        compares=device == "cuda" and not model.random_init,
        cache_bytes=_cache_bytes(text, model.dtype if config.dtype == "model" else config.dtype),
    )


def _cache_bytes(text: Any, dtype: str) -> int | None:
    heads = getattr(text, "num_attention_heads", None)
    cached = getattr(text, "num_key_value_heads", None) or heads
    layers, hidden = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
    if not (heads and cached and layers and hidden):
        return None
    width = getattr(text, "head_dim", None) or hidden // heads
    return int(2 * layers * cached * width * (4 if dtype == "float32" else 2))


def resolved(named: str) -> str:
    """A folder's whole path: the server may have another working directory. Or a model id."""
    folder = Path(named).expanduser()
    return str(folder.resolve()) if folder.is_dir() else named


def device_of(config: ServedEngineConfig) -> Literal["cpu", "cuda"]:
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
