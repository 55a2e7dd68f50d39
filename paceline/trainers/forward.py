"""From a micro-batch to the log-probs of its trained tokens, for any transformers causal LM.

The fast way runs the decoder, takes the hidden states of predicting positions alone and puts
those through the head, a chunk at a time. That is right only if the model's logits are nothing
but `head(decoder(ids))`, perhaps scaled or soft-capped. So it is checked at construction, with
hidden states far larger than any real ones, where a cap or a scale that was overlooked shows; a
model that does more takes the slow way: whole logits, in small micro-batches.

Legend: N trained tokens, C tokens of a chunk, K tokens that a teacher finds most likely, D hidden
size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch

from paceline.algorithms.base import LossInputs
from paceline.trainers.base import Head
from paceline.trainers.inputs import policy_inputs, teacher_ids
from paceline.trainers.layout import Layout, MicroBatch, choose_layout
from paceline.trainers.logprobs import chunked_logprobs, chunked_top_logprobs
from paceline.trainers.sharing import is_close, tree_inputs, why_not_shared
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

CAPS = ("final_logit_softcapping",)
FACTORS = ("logit_scale", "lm_head_multiplier", "logits_scaling")
DIVISORS = ("logits_scaling", "logits_scale")
"""Fields of a model's configuration that change its logits; the check tells what each means."""

Transform = Callable[["Tensor"], "Tensor"]
Result = TypeVar("Result")


class Enter(Protocol):
    """Runs the path from tokens to numbers; where weights are shards, gathered for that time."""

    def __call__(self, path: Callable[[], Result]) -> Result: ...


def directly(path: Callable[[], Result]) -> Result:
    """For weights that are whole."""
    return path()


class Forward(Protocol):
    """One model, made ready to say something of each trained token of a micro-batch."""

    head: Head
    """What it says when it is the trained model."""
    model: Any
    layout: Layout
    shares_prefixes: bool
    """Rows that begin alike may be computed as a tree."""

    @property
    def max_positions(self) -> int | None:
        """Most positions of a micro-batch, below the trainer's own budget."""

    def score(self, batch: MicroBatch) -> Tensor:
        """One number a token, shape [N]."""

    def loss_inputs(
        self, rows: Sequence[Row], batch: MicroBatch, *, entropy_gradient: bool
    ) -> LossInputs:
        """The same with gradient, among the columns of the rows."""


class CausalForward:
    """Log-probs of trained tokens under one model. Holds no state of its own."""

    head: Head = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Layout | Literal["auto"] = "auto",
        chunk_tokens: int = 2048,
        share_prefix: bool = False,
        fused: bool = False,
        enter: Enter = directly,
    ) -> None:
        """chunk_tokens: most tokens whose logits exist at one time. share_prefix: if it can be.
        fused: log-probs by compiled kernels.

        enter: for the calls after this one; here the weights are whole.
        """
        self.model: Any = model
        self._enter = enter
        self._chunk_tokens, self._fused = chunk_tokens, fused
        attention = str(getattr(model.config, "_attn_implementation", "sdpa"))
        self.layout: Layout = choose_layout(attention) if layout == "auto" else layout
        self.slow_reason: str | None = None
        """Why whole logits are computed, if they are."""
        self._decoder: Any = None
        self._transform: Transform = _identity
        with torch.no_grad():
            self._find_fast_way()
        if self.layout == "packed" and not keeps_rows_apart(model, "logits"):
            self.layout = "padded"
        may_share = share_prefix and self.layout == "padded" and self.slow_reason is None
        self.shares_prefixes = may_share and can_share(self._decoder)

    @property
    def max_positions(self) -> int | None:
        return None if self.slow_reason is None else self._chunk_tokens

    def score(self, batch: MicroBatch) -> Tensor:
        """Log-probs, shape [N]."""
        return self(batch)[0]

    def loss_inputs(
        self, rows: Sequence[Row], batch: MicroBatch, *, entropy_gradient: bool
    ) -> LossInputs:
        """What a policy's loss is given; its log-probs carry gradient."""
        ids_NK = teacher_ids(rows, batch)
        logprobs, entropy_N = self(batch, ids_NK, entropy_gradient=entropy_gradient)
        if ids_NK is None:
            return policy_inputs(rows, batch, logprobs, entropy_N)
        inputs = policy_inputs(rows, batch, logprobs[:, 0], entropy_N)
        inputs.top_logprobs_NK = logprobs[:, 1:]
        return inputs

    def __call__(
        self, batch: MicroBatch, ids_NK: Tensor | None = None, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, both [N]; with other tokens of each position, ids_NK, the
        log-probs are [N, 1 + K], the position's own token first."""
        targets_N = batch.targets_N
        asked = targets_N if ids_NK is None else torch.cat([targets_N.unsqueeze(1), ids_NK], 1)
        return self._enter(
            lambda: chunked_logprobs(
                *self._states(batch),
                asked,
                batch.temperatures_N,
                chunk_tokens=self._chunk_tokens,
                entropy_gradient=entropy_gradient,
                fused=self._fused,
            )
        )

    def top(self, batch: MicroBatch, k: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [N]; the K most likely tokens below `vocab`, and their log-probs, [N, K]."""
        return chunked_top_logprobs(
            *self._states(batch),
            batch.targets_N,
            batch.temperatures_N,
            k=k,
            vocab=vocab,
            chunk_tokens=self._chunk_tokens,
        )

    def _states(self, batch: MicroBatch) -> tuple[Transform, Tensor]:
        """What makes logits, and of what, shape [N, D]; the slow way has them already."""
        if self.slow_reason is not None:
            logits = flat(as_batch(self.model, batch).logits)
            return _identity, logits.index_select(0, batch.predicting_N)
        hidden = flat(as_batch(self._decoder, batch).last_hidden_state)
        return self._logits, hidden.index_select(0, batch.predicting_N)

    def _logits(self, hidden_CD: Tensor) -> Tensor:
        return self._transform(self.model.get_output_embeddings()(hidden_CD))

    def _find_fast_way(self) -> None:
        """Find the decoder, and what happens to the head's output; or why the fast way is closed.

        The noise stands in for hidden states of any size: 30 times larger, a cap shows.
        """
        model = self.model
        head = getattr(model, "get_output_embeddings", lambda: None)()
        decoders = [d for d in (_decoder(model), model.base_model) if d is not model]
        if head is None or not decoders:
            self._fall_back("it has no separate decoder and head")
            return
        ids = probe_ids(model, 5)
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        for decoder in decoders:
            found = decoder(input_ids=ids, use_cache=False, return_dict=True)
            hidden = getattr(found, "last_hidden_state", None)
            if hidden is None:
                continue
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
            trials = [(hidden, logits)]
            trials += [(h, _logits_given(model, decoder, ids, h)) for h in (noise, 30 * noise)]
            for name, transform in _candidates(model.config):
                if all(is_close(transform(head(h)), z) for h, z in trials):
                    self._decoder, self._transform = decoder, transform
                    if name:
                        logger.info("%s: logits are changed by %s", type(model).__name__, name)
                    return
        self._fall_back("its logits are not its head's output, scaled or capped in a known way")

    def _fall_back(self, reason: str) -> None:
        self.slow_reason = reason
        logger.warning(
            "%s computes whole logits for every position (slower, more memory): %s",
            type(self.model).__name__,
            reason,
        )


def as_batch(module: Any, batch: MicroBatch) -> Any:
    """The output of a model, or of its body, for the inputs of a micro-batch."""
    positions = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    named = {**positions, **tree_inputs(batch)}
    return module(input_ids=batch.input_ids, use_cache=False, return_dict=True, **named)


def flat(tensor: Tensor) -> Tensor:
    """[B, T, D] -> [B * T, D]."""
    return tensor.flatten(0, 1)


def can_share(body: Any) -> bool:
    """True if the body of a model can compute shared prefixes once; says why if it can not."""
    reason = why_not_shared(body)
    if reason is not None:
        logger.info("%s computes every row whole: %s", type(body).__name__, reason)
    return reason is None


@torch.no_grad()
def keeps_rows_apart(module: Any, output: str) -> bool:
    """True if packed rows do not see each other; says so if they do, and must be padded.

    output: the name of what the module gives out.
    """
    first, second = probe_ids(module, 4), probe_ids(module, 7)[:, 2:]
    position_ids = torch.cat([torch.arange(4), torch.arange(5)])[None].to(first.device)
    both = torch.cat([first, second], 1)
    packed = getattr(module(input_ids=both, position_ids=position_ids, use_cache=False), output)
    alone = [getattr(module(input_ids=ids, use_cache=False), output) for ids in (first, second)]
    if is_close(packed, torch.cat(alone, 1)):
        return True
    logger.warning(
        "%s does not keep packed rows apart by their positions: rows are padded instead",
        type(module).__name__,
    )
    return False


def _identity(logits: Tensor) -> Tensor:
    return logits


def _capped(cap: float, logits: Tensor) -> Tensor:
    return torch.tanh(logits / cap) * cap


def _times(factor: float, logits: Tensor) -> Tensor:
    return logits * factor


def _over(divisor: float, logits: Tensor) -> Tensor:
    return logits / divisor


def _candidates(config: Any) -> Iterator[tuple[str, Transform]]:
    """What the model may do to its logits; what its configuration names comes first."""
    text = config.get_text_config()

    def numbers(names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
        for name in names:
            value = getattr(text, name, None)
            if isinstance(value, int | float) and value:
                yield name, float(value)

    yield from ((name, partial(_capped, cap)) for name, cap in numbers(CAPS))
    yield from ((name, partial(_times, factor)) for name, factor in numbers(FACTORS))
    yield from ((name, partial(_over, divisor)) for name, divisor in numbers(DIVISORS))
    yield "", _identity


def probe_ids(model: Any, length: int) -> Tensor:
    """Arbitrary token ids [1, length], the same in every process."""
    vocab = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab, (1, length), generator=generator).to(model.device)


def _decoder(model: Any) -> Any:
    get = getattr(model, "get_decoder", None)
    return model.base_model if get is None else get()


def _logits_given(model: Any, decoder: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """The model's logits as if its decoder had made these hidden states."""

    def replaced(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    handle = decoder.register_forward_hook(replaced)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits
    finally:
        handle.remove()
    return logits
