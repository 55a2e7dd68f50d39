"""A teacher whose model is held here: one process, one device, no gradient, no optimizer.

Legend: N trained tokens of a micro-batch, T tokens of a row, K tokens that it finds most likely.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.errors import ConfigError, TrainerError
from paceline.models import ModelConfig, load_model, load_tokenizer, model_fingerprint
from paceline.teachers.vocabulary import check_vocabulary
from paceline.trainers.background import WorkThread
from paceline.trainers.base import Place, SingleTrainerConfig
from paceline.trainers.devices import resolve_device
from paceline.trainers.forward import CausalForward
from paceline.trainers.layout import MicroBatch, micro_batches
from paceline.types import JsonValue, Row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LoadedTeacher:
    """Implements `paceline.teachers.base.Teacher`."""

    def __init__(
        self,
        config: SingleTrainerConfig,
        model: PreTrainedModel,
        path: str,
        *,
        top_k: int,
        vocab: int,
        where: Place = "device",
    ) -> None:
        """config: device, precision and budgets, those of the policy's trainer. path: its name.

        top_k: most likely tokens to name; vocab: tokens that the policy's model knows, which they
        are chosen from. Raises ConfigError if that is fewer.
        """
        self._num_embeddings = model.get_input_embeddings().num_embeddings
        known = min(vocab, self._num_embeddings)
        if top_k > known:
            raise ConfigError(
                f"algorithm.top_k = {top_k}, but teacher and policy share {known} tokens: write "
                f"{known} or less"
            )
        self._device = resolve_device(config.device)
        self._config = config
        self._identity = {"path": path, **model_fingerprint(model)}
        self._top_k, self._vocab = top_k, vocab
        frozen = model.to(self._device).eval().requires_grad_(False)
        self._forward = CausalForward(
            frozen,
            layout=config.layout,
            chunk_tokens=config.logprob_chunk_tokens,
            share_prefix=config.share_prefix,
        )
        self._where: Place = "device"
        if where == "host":
            self._move(where)
        self._thread = WorkThread("teacher")

    @property
    def identity(self) -> dict[str, JsonValue]:
        return self._identity

    async def grade(self, rows: list[Row]) -> None:
        """Write the teacher's columns into the rows. Raises TrainerError while on the host."""
        await self._thread.run(lambda: self._grade(rows))

    async def place(self, where: Place) -> None:
        """Move the weights. Nothing moves on a CPU."""
        if where != self._where:
            await self._thread.run(lambda: self._move(where))

    async def aclose(self) -> None:
        """End the teacher's thread. Idempotent."""
        self._thread.close()

    def _move(self, where: Place) -> None:
        if self._device.type != "cpu":
            self._forward.model.to(self._device if where == "device" else "cpu")
            if where == "host":
                torch.cuda.empty_cache()
        self._where = where

    @torch.no_grad()
    def _grade(self, rows: list[Row]) -> None:
        if self._where == "host" and self._device.type != "cpu":
            raise TrainerError('the teacher is on the host: call place("device") first')
        highest = max((int(row.tokens_T.max()) for row in rows), default=0)
        if highest >= self._num_embeddings:
            raise TrainerError(
                f"an answer holds the token {highest}, and the teacher knows {self._num_embeddings}"
            )
        graded = [_EmptyColumns(row, self._top_k, self._kind) for row in rows]
        budget, is_plain = self._config.max_tokens_per_micro_batch, self._config.autocast == "off"
        for micro in micro_batches(rows, self._forward, budget, self._device):
            self._thread.check()
            with nullcontext() if is_plain else torch.autocast(self._device.type, torch.bfloat16):
                columns = self._columns(micro)
            _spread([graded[i] for i in micro.rows], columns)
        for row, columns_T in zip(rows, graded, strict=True):
            columns_T.write(row)

    def _columns(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        if self._top_k:
            return self._forward.top(micro, self._top_k, self._vocab)
        return (self._forward.score(micro),)

    @property
    def _kind(self) -> type[np.floating]:
        return np.float64 if self._forward.model.dtype == torch.float64 else np.float32


class _EmptyColumns:
    """What a teacher writes into one row, 0 where nothing is trained."""

    def __init__(self, row: Row, top_k: int, kind: type[np.floating]) -> None:
        length = len(row.tokens_T)
        self.mask_T = row.mask_T
        self.columns = [np.zeros(length, kind)]
        if top_k:
            self.columns.append(np.zeros((length, top_k), np.int32))
            self.columns.append(np.zeros((length, top_k), kind))

    def write(self, row: Row) -> None:
        row.teacher_logprobs_T = self.columns[0]
        if len(self.columns) > 1:
            row.teacher_ids_TK, row.teacher_top_logprobs_TK = self.columns[1:]


def _spread(graded: list[_EmptyColumns], columns: tuple[Tensor, ...]) -> None:
    """Columns of a micro-batch's trained tokens, back to their rows."""
    ends = np.cumsum([int(one.mask_T.sum()) for one in graded])[:-1]
    for number, column_N in enumerate(columns):
        for one, part in zip(graded, np.split(column_N.cpu().numpy(), ends), strict=True):
            one.columns[number][one.mask_T] = part


def load_teacher_model(
    config: ModelConfig, policy_tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """The teacher's model, on the CPU.

    Raises ConfigError if it can not be loaded, or if it means another thing by some token.
    """
    key = "teacher.model"
    named = f"{key}.path = {config.path!r}"
    check_vocabulary(policy_tokenizer, load_tokenizer(config, key=key), named)
    model = load_model(config, seed=seed, key=key)
    rows, tokens = model.get_input_embeddings().num_embeddings, len(policy_tokenizer)
    if rows < tokens:
        raise ConfigError(
            f"{named}: it knows {rows} tokens, the policy's tokenizer has "
            f"{tokens}; a teacher must share the policy's vocabulary"
        )
    return model
