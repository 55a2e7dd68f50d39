"""A critic's model: the body of any transformers causal LM, and a linear head to one number.

The value at `t` is that of the state in which `tokens[t]` was chosen, so it is made of the hidden
state after `tokens[:t]`: one position with the log-prob of `tokens[t]`. No logits exist.

A fresh head is zero: it predicts 0 everywhere, whatever the body holds.

Legend: N trained tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import safetensors.torch
import torch
from torch import nn

from paceline.algorithms.base import LossInputs
from paceline.errors import ConfigError
from paceline.models import ModelConfig, export_model, load_body, restore_model
from paceline.trainers.base import Head
from paceline.trainers.forward import (
    Enter,
    as_batch,
    can_share,
    directly,
    flat,
    keeps_rows_apart,
    probe_ids,
)
from paceline.trainers.inputs import value_inputs
from paceline.trainers.layout import Layout, MicroBatch, choose_layout
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """Body and head. The head computes in float32, or in float64 if the body does."""

    def __init__(self, body: PreTrainedModel, width: int | None = None) -> None:
        """width: of the hidden states; measured if it is not given, which takes a body with
        weights."""
        super().__init__()
        self.body = body
        kind = torch.float64 if body.dtype == torch.float64 else torch.float32
        width = width or _hidden_size(body)
        head = nn.Linear(width, 1, dtype=kind, device="meta")  # draws nothing
        self.head = head.to_empty(device=body.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def config(self) -> Any:
        """That of the body."""
        return self.body.config

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Values [N] of the states with these hidden states."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            values_N1: Tensor = self.head(hidden_ND.to(self.head.weight.dtype))
        return values_N1.squeeze(1)


class ValueForward:
    """Values of the states in which trained tokens were chosen. Holds no state of its own."""

    head: Head = "values"
    max_positions: int | None = None

    def __init__(
        self,
        model: ValueModel,
        *,
        layout: Layout | Literal["auto"] = "auto",
        share_prefix: bool = False,
        enter: Enter = directly,
    ) -> None:
        self.model = model
        self._enter = enter
        attention = str(getattr(model.config, "_attn_implementation", "sdpa"))
        self.layout: Layout = choose_layout(attention) if layout == "auto" else layout
        if self.layout == "packed" and not keeps_rows_apart(model.body, "last_hidden_state"):
            self.layout = "padded"
        may_share = share_prefix and self.layout == "padded"
        self.shares_prefixes = may_share and can_share(model.body)

    def score(self, batch: MicroBatch) -> Tensor:
        """Values, shape [N]."""
        return self._enter(lambda: self._values(batch))

    def _values(self, batch: MicroBatch) -> Tensor:
        hidden = flat(as_batch(self.model.body, batch).last_hidden_state)
        values_N: Tensor = self.model(hidden.index_select(0, batch.predicting_N))
        return values_N

    def loss_inputs(
        self, rows: Sequence[Row], batch: MicroBatch, *, entropy_gradient: bool
    ) -> LossInputs:
        """What a critic's loss is given; its values carry gradient."""
        return value_inputs(rows, batch, self.score(batch))


def load_value_model(config: ModelConfig, *, seed: int, key: str) -> ValueModel:
    """The body of the model that `config` names; with its head, if a critic was saved there.

    key: the block of the run file that `config` stands in, for errors. Raises ConfigError.
    """
    model = ValueModel(load_body(config, seed=seed, key=key))
    file = Path(config.path).expanduser() / HEAD_FILE
    if file.is_file() and not config.random_init:
        try:
            _load_head(model, file)
        except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
            raise ConfigError(
                f"{key}.path = {config.path!r}: its {HEAD_FILE} can not be read: {error}"
            ) from error
    return model


def export_value_model(
    model: ValueModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the body in Hugging Face format, and the head beside it, into the folder `path`.

    tensors: those of the model by name, where it holds only shards of them.
    """
    held: Mapping[str, Tensor] = model.state_dict() if tensors is None else tensors
    export_model(model.body, tokenizer, path, None if tensors is None else _below("body", held))
    head = {name: tensor.detach().cpu() for name, tensor in _below("head", held).items()}
    safetensors.torch.save_file(head, path / HEAD_FILE)


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a part of the model, by their names there."""
    prefix = f"{part}."
    return {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}


def restore_value_model(like: ValueModel, path: Path) -> ValueModel:
    """What `export_value_model` wrote, of the class and type of `like`, on the CPU."""
    model = ValueModel(restore_model(like.body, path))
    _load_head(model, path / HEAD_FILE)
    return model


def _load_head(model: ValueModel, file: Path) -> None:
    model.head.load_state_dict(safetensors.torch.load_file(file))


@torch.no_grad()
def _hidden_size(body: Any) -> int:
    """Measured: what a configuration calls its hidden size is not always what comes out."""
    found = body(input_ids=probe_ids(body, 3), use_cache=False, return_dict=True)
    hidden = getattr(found, "last_hidden_state", None)
    if hidden is None:
        raise ConfigError(
            f"{type(body).__name__} gives no hidden states to put a critic's head on: choose "
            "another critic.model"
        )
    return int(hidden.shape[-1])
