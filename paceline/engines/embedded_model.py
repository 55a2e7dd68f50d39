"""Runs a transformers causal LM for the embedded engine: prefill, decode, score.

The module may be the trainer's own: nothing here changes its parameters, its buffers or, for
longer than a call, its mode.

Shape legend: N active rows, R rows computed, S positions read, U prompts of a prefill, L padded
length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.engines.embedded_attention import grouped
from paceline.engines.embedded_cache import Blocks, Copies, PrefillCache, SlotCache, row_index
from paceline.engines.embedded_sampler import IntArray
from paceline.errors import EngineError

MAX_SCORE_LOGITS = 1 << 27
"""Logits of one scoring forward (512 MiB in float32), unless a single sequence has more."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Root mean square error of cached logits that the self-check accepts, relative to their spread."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What one padded prefill made."""

    blocks: Blocks
    logits_UV: Tensor
    """At each prompt's last token."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Which earlier positions a kind of attention layer sees."""

    window: int | None = None
    chunk: int | None = None

    def visible(self, column_S: Tensor, position_N1: Tensor) -> Tensor:
        seen_NS = column_S <= position_N1
        if self.window is not None:
            seen_NS &= column_S > position_N1 - self.window
        if self.chunk is not None:
            seen_NS &= column_S // self.chunk == position_N1 // self.chunk
        return seen_NS


class CachedModel:
    """A causal LM with its calling conventions found out once.

    Raises:
        EngineError: the model can not be served; the message says why.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        config = getattr(module, "config", None)
        if config is None or not hasattr(module, "get_input_embeddings"):
            raise EngineError(
                f"{type(module).__name__} is not a transformers causal LM: the embedded engine "
                "needs what AutoModelForCausalLM gives"
            )
        self.config = config.get_text_config()
        _refuse_by_config(module, config, self.config)
        devices = {p.device for p in module.parameters()}
        if len(devices) != 1 or next(iter(devices)).type == "meta":
            raise EngineError(
                f"the model's parameters are on {sorted(map(str, devices))}: the embedded engine "
                "needs all of them on one device, and real memory"
            )
        self.device = next(iter(devices))
        self.dtype: torch.dtype = module.dtype  # type: ignore[assignment]
        self.vocab_size = int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self.num_logits = self.vocab_size
        """Width of the output layer, which may be padded or cut."""
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        parameters = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._head: nn.Module | None = module.get_output_embeddings()  # type: ignore[operator]
        self._patterns = _patterns(self.config)
        self._modules = list(module.modules())
        self._column = torch.arange(0, device=self.device)
        with self.evaluating():
            self._check()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradient and evaluation mode; the modes are put back as they were."""
        training = [m for m in self._modules if m.training]
        for m in training:
            m.training = False
        try:
            # Not inference_mode: a buffer that a forward replaces would stay an inference tensor
            # in a module shared with the trainer.
            with torch.no_grad():
                yield
        finally:
            for m in training:
                m.training = True

    def prefill(self, prompts: Sequence[IntArray]) -> Prefill:
        """Compute prompts from position 0 on, padded to the longest."""
        cache = PrefillCache()
        ids_UL, last_U = self._padded(prompts)
        position_UL = torch.arange(ids_UL.shape[1], device=self.device).expand_as(ids_UL)
        with self._head_at(last_U) as pick:
            logits_UKV = self._forward(ids_UL, position_UL, None, cache)
        return Prefill(cache.blocks, pick(logits_UKV))

    def decode(
        self,
        cache: SlotCache,
        token_N: IntArray,
        position_N: IntArray,
        longest: int,
        copies: Copies | None = None,
    ) -> Tensor:
        """Feed one token to each of the rows 0..N-1; return logits [N, V]."""
        inputs_3N = step_inputs(token_N, position_N, cache.capacity)
        return self.step(cache, torch.from_numpy(inputs_3N).to(self.device), longest, copies)

    def step(
        self, cache: SlotCache, inputs_3N: Tensor, longest: int, copies: Copies | None = None
    ) -> Tensor:
        """One decode step of static shapes, given N and `longest`; transfers nothing.

        inputs_3N: token, position and place in the cache of each row; see `step_inputs`.
        """
        cache.select(inputs_3N[2], longest, copies)
        fed_3R = inputs_3N if copies is None else inputs_3N[:, copies.first_R]
        position_R1 = fed_3R[1][:, None]
        with grouped(self.config):
            logits_R1V = self._forward(
                fed_3R[0][:, None], position_R1, self._masks(position_R1, longest), cache
            )
        logits_RV = logits_R1V[:, -1]
        return logits_RV if copies is None else logits_RV[copies.of_N]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the weights are; they move when they are dropped, or brought to the host."""
        return tuple(parameter.data_ptr() for parameter in self.module.parameters())

    def score(
        self, rows: Sequence[IntArray], temperatures: Sequence[float], max_tokens: int
    ) -> list[list[float]]:
        """Log-prob of each token given those before it; 0.0 for the first."""
        scores: list[list[float]] = [[] for _ in rows]
        budget = min(max_tokens, max(1, MAX_SCORE_LOGITS // self.vocab_size))
        for part in plan_batches([len(row) for row in rows], budget):
            ids_UL, _ = self._padded([rows[i] for i in part])
            logits_ULV = self.module(input_ids=ids_UL, use_cache=False, return_dict=True).logits
            for u, i in enumerate(part):
                length = len(rows[i])
                logits_LV = logits_ULV[u, : length - 1].float() / (temperatures[i] or 1.0)
                target_L1 = ids_UL[u, 1:length, None]
                chosen_L = logits_LV.gather(-1, target_L1)[:, 0] - logits_LV.logsumexp(-1)
                scores[i] = [0.0, *chosen_L.tolist()]
        return scores

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Any, cache: PrefillCache | SlotCache
    ) -> Tensor:
        output = self.module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **{self._cache_name: cache},
        )
        logits: Tensor = output.logits
        return logits

    def _padded(self, rows: Sequence[IntArray]) -> tuple[Tensor, Tensor]:
        # Padding stands to the right, where causal attention hides it; a row's own last token,
        # because transformers warns about its pad token.
        length = max(len(row) for row in rows)
        padded = np.empty((len(rows), length), np.int64)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
            target[len(row) :] = row[-1]
        last = row_index([len(row) - 1 for row in rows], self.device)
        return torch.from_numpy(padded).to(self.device), last

    @contextmanager
    def _head_at(self, last_U: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
        """Let the output layer see each row's last token only; yields what picks [U, V] after."""
        row_U = torch.arange(len(last_U), device=self.device)
        if self._head is None:
            yield lambda logits: logits[row_U, last_U]
            return

        def narrow(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return inputs[0][row_U, last_U][:, None], *inputs[1:]

        hook = self._head.register_forward_pre_hook(narrow)
        try:
            yield lambda logits: logits[:, -1]
        finally:
            hook.remove()

    def _masks(self, position_N1: Tensor, longest: int) -> Any:
        """Additive masks [N, 1, 1, longest]; one for each kind of layer if there are several."""
        if len(self._column) < longest:
            self._column = torch.arange(2 * longest, device=self.device)
        column_S = self._column[:longest]
        lowest = torch.finfo(self.dtype).min
        masks = {}
        for name, pattern in self._patterns.items():
            hidden_NS = ~pattern.visible(column_S, position_N1)
            mask_NS = torch.zeros(hidden_NS.shape, dtype=self.dtype, device=self.device)
            masks[name] = mask_NS.masked_fill_(hidden_NS, lowest)[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _check(self) -> None:
        """Compare cached decoding of two rows of unequal length with an uncached forward."""
        rng = np.random.default_rng(0)
        tokens_2T = rng.integers(0, self.vocab_size, (2, min(7, self.max_positions or 7)))
        starts = [max(1, tokens_2T.shape[1] - 3), 1]
        try:
            ids = torch.from_numpy(tokens_2T).to(self.device)
            full = self.module(input_ids=ids, use_cache=False, return_dict=True).logits
            cache = SlotCache(2)
            prefill = self.prefill([row[:n] for row, n in zip(tokens_2T, starts, strict=True)])
            cache.reserve(tokens_2T.shape[1])
            both = row_index([0, 1], self.device)
            cache.place(prefill.blocks, both, both)
            wanted = [full[both, row_index([n - 1 for n in starts], self.device)]]
            found = [prefill.logits_UV]
            for step in range(tokens_2T.shape[1] - starts[0]):
                position_N = np.array(starts) + step
                token_N = tokens_2T[[0, 1], position_N]
                found.append(self.decode(cache, token_N, position_N, int(position_N.max()) + 1))
                wanted.append(full[both, torch.from_numpy(position_N).to(self.device)])
        except Exception as error:
            raise EngineError(
                f"the embedded engine can not serve {type(self.module).__name__}: its forward "
                "does not work with a plain key-value cache and explicit positions "
                f"({type(error).__name__}: {error}). Serve it with another engine"
            ) from error
        self.num_logits = full.shape[-1]
        self._compare(torch.cat(found).double(), torch.cat(wanted).double())

    def _compare(self, found: Tensor, wanted: Tensor) -> None:
        error = (found.log_softmax(-1) - wanted.log_softmax(-1)).square().mean().sqrt()
        spread = wanted.std(-1).mean()
        tolerance = _TOLERANCE.get(self.dtype, 0.15)
        if not torch.isfinite(wanted).all():
            return  # broken weights are not the cache's fault; sampling reports them
        if not error <= tolerance * spread:
            raise EngineError(
                f"the embedded engine can not serve {type(self.module).__name__}: its log-probs "
                f"with a key-value cache differ from those without by {float(error):.2g} (root "
                f"mean square over a few random tokens; at most {tolerance * float(spread):.2g} "
                "is accepted), so it keeps state that this engine does not know. Serve it with "
                "another engine"
            )


def step_inputs(token_N: IntArray, position_N: IntArray, capacity: int) -> IntArray:
    """Token, position and place in the cache of the rows 0..N-1, [3, N]."""
    slot_N = np.arange(len(token_N)) * capacity + position_N
    return np.stack((token_N, position_N, slot_N))


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split into batches of similar length whose padded size stays within `max_tokens`.

    Longest first; ties keep their order. An item over the budget gets a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = batches and (len(batches[-1]) + 1) * longest <= max_tokens
        if not fits or 2 * lengths[i] < longest:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def _refuse_by_config(module: nn.Module, config: Any, text_config: Any) -> None:
    name = type(module).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise EngineError(
            f"{name} is an encoder-decoder model: the embedded engine serves causal LMs only"
        )
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    unknown = set(getattr(text_config, "layer_types", None) or ()) - known
    if unknown or getattr(module, "_is_stateful", False):
        kinds = f" ({', '.join(sorted(unknown))} layers)" if unknown else ""
        raise EngineError(
            f"{name} keeps state other than keys and values{kinds}: the embedded engine serves "
            "models with attention layers only. Serve it with another engine"
        )
    if "local" in (getattr(text_config, "attention_layers", None) or ()):
        raise EngineError(
            f"{name} has local attention that can not be masked from outside: serve it with "
            "another engine"
        )
    attention = getattr(text_config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        raise EngineError(
            f"{name} uses the attention implementation {attention!r}: the embedded engine needs "
            "'sdpa' or 'eager' (key `model.attention`)"
        )


def _patterns(config: Any) -> dict[str, _Pattern]:
    """Attention patterns by layer type, read as transformers' own mask builder reads them."""
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    by_type = {
        "full_attention": _Pattern(),
        "sliding_attention": _Pattern(window=window),
        "chunked_attention": _Pattern(chunk=chunk),
    }
    types = getattr(config, "layer_types", None)
    if types:
        return {name: by_type[name] for name in sorted(set(types))}
    return {"all": _Pattern(window=window, chunk=None if window else chunk)}
