"""One row under a model of the run: its columns for the loss, and what each token adds to it.

Legend: N trained tokens of the row.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from paceline.algorithms.base import Algorithm, LossInputs
from paceline.build.parts import make_model
from paceline.config import RunFile
from paceline.errors import TrainerError
from paceline.trainers.devices import resolve_device
from paceline.trainers.forward import CausalForward
from paceline.trainers.layout import input_lengths, make_micro_batch
from paceline.types import Row

CLIP = "clip_fraction"


class RowScorer:
    """A model of the run: that of the run file, or one from a folder."""

    def __init__(self, run_file: RunFile, folder: Path | None) -> None:
        config = run_file.trainer
        self._device = resolve_device(config.device)
        model = make_model(run_file, folder).to(self._device)
        self._autocast = config.autocast
        self._forward = CausalForward(
            model, layout=config.layout, chunk_tokens=config.logprob_chunk_tokens
        )

    @torch.no_grad()
    def inputs(self, row: Row) -> LossInputs:
        """What the loss is given for the row, in float64 and on the CPU."""
        layout = self._forward.layout
        micro = make_micro_batch([row], [0], input_lengths([row]), layout, self._device)
        with self._precision():
            inputs = self._forward.loss_inputs([row], micro, entropy_gradient=False)
        changed: dict[str, Any] = {}
        for name in (entry.name for entry in fields(inputs)):
            value = getattr(inputs, name)
            if isinstance(value, torch.Tensor):
                changed[name] = value.double().cpu() if value.is_floating_point() else value.cpu()
        return replace(inputs, **changed)

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)


def token_losses(algorithm: Algorithm, inputs: LossInputs) -> list[float]:
    """weight times loss of each token, shape [N].

    The loss is linear in the weights, so its derivative by a weight is the token's own loss.
    """
    weights_N = inputs.weights_N.clone().requires_grad_()
    output = algorithm.loss(replace(inputs, weights_N=weights_N))
    (losses_N,) = torch.autograd.grad(output.loss, weights_N)
    losses: list[float] = (inputs.weights_N * losses_N).tolist()
    if not math.isclose(math.fsum(losses), float(output.loss.detach()), rel_tol=1e-6, abs_tol=1e-9):
        raise TrainerError("the loss of this algorithm is no weighted sum over tokens")
    return losses


@torch.no_grad()
def clipped_tokens(algorithm: Algorithm, inputs: LossInputs) -> list[bool] | None:
    """What the algorithm counts in `clip_fraction`, token by token; None if it counts nothing.

    A token alone tells for algorithms with a ratio for each token. Where that does not add up to
    the count of the whole answer, the answer has one ratio, and is clipped as a whole or not.
    """
    count = _clip_count(algorithm, inputs)
    if count is None:
        return None
    num_tokens = len(inputs.logprobs_N)
    alone = [bool(_clip_count(algorithm, _one_token(inputs, t))) for t in range(num_tokens)]
    if sum(alone) == round(count):
        return alone
    return [count > 0] * num_tokens if round(count) in (0, num_tokens) else None


def _clip_count(algorithm: Algorithm, inputs: LossInputs) -> float | None:
    found = algorithm.loss(inputs).means.get(CLIP)
    return None if found is None else float(found[0])


def _one_token(inputs: LossInputs, t: int) -> LossInputs:
    changed = {
        entry.name: value[t : t + 1]
        for entry in fields(inputs)
        if isinstance(value := getattr(inputs, entry.name), torch.Tensor)
    }
    return replace(inputs, **changed, num_rows=1)
