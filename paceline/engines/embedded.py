"""The embedded engine: any transformers causal LM in this process, with continuous batching.

Parts: `embedded_queue` lets requests in, `embedded_serving` runs the background task,
`embedded_batch` holds the slots and `embedded_columns` their numbers, `embedded_model` runs the
forwards over `embedded_cache`, `embedded_sampler` draws tokens, `embedded_weights` takes new
parameters.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.engines.base import Completion, EmbeddedEngineConfig, Part, Request
from paceline.engines.embedded_batch import Batch, Counts
from paceline.engines.embedded_model import CachedModel
from paceline.engines.embedded_queue import Generation, Intake
from paceline.engines.embedded_serving import Serving
from paceline.engines.embedded_weights import OwnWeights
from paceline.engines.turns import Turns
from paceline.errors import EngineError, WeightError
from paceline.weights.base import PauseMode, WeightPlan
from paceline.weights.receive import receive_into, receive_parcels
from paceline.weights.settings import WeightCheckConfig
from paceline.weights.tensors import checksums, named_tensors, spoil

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EmbeddedEngine:
    """Serves one policy from one module, on the device the module is on.

    With `weights = "copy"` the engine makes a copy of the module and takes weights by `receive`
    alone. Otherwise it uses the given module as it stands, which may be the trainer's own: it is
    never changed, and its mode is put back after each job; whoever trains it must keep the engine
    paused or idle meanwhile. Engines that are given the same `turns` never work at one time.

    Greedy answers (temperature 0) carry the log-probs their tokens have at temperature 1.

    Raises:
        EngineError: the model can not be served with a plain key-value cache (found by comparing
            cached with uncached log-probs of a few random tokens).
    """

    def __init__(
        self,
        config: EmbeddedEngineConfig,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        policy: str,
        eos_token_ids: frozenset[int],
        version: int = 0,
        turns: Turns | None = None,
    ) -> None:
        self.policy = policy
        self._weights: OwnWeights | None = None
        if config.weights == "copy":
            model = copy.deepcopy(model).requires_grad_(False).eval()
            if config.dtype != "model":
                model = model.to(getattr(torch, config.dtype))
            self._weights = OwnWeights(model)
        self._module = model
        self._model = CachedModel(model)
        limits = [n for n in (config.max_context, self._model.max_positions) if n is not None]
        max_context = min(limits, default=None)
        self._intake = Intake(
            vocab_size=self._model.vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            has_tokenizer=tokenizer is not None,
        )
        self._batch = Batch(
            self._model,
            max_batch=config.max_batch,
            max_positions=max_context,
            max_prefill_tokens=config.max_prefill_tokens,
            version=version,
            tokenizer=tokenizer,
            graphs=config.graphs,
        )
        self._serving = Serving(
            self._batch,
            max_prefill_tokens=config.max_prefill_tokens,
            name=f"engine-{policy}",
            turns=turns,
        )
        self._asleep: frozenset[Part] = frozenset()
        self._lacks_weights = False

    @property
    def version(self) -> int:
        """Version of the weights that the next token is made with."""
        return self._batch.version

    @property
    def counts(self) -> Counts:
        """Work done since the engine was made."""
        return self._batch.counts

    @property
    def num_running(self) -> int:
        return self._batch.num_active

    @property
    def num_waiting(self) -> int:
        return len(self._serving.waiting)

    async def generate(self, request: Request) -> Completion:
        self._refuse_if_unusable()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        generation: Generation = self._intake.generation(request, future)
        if generation.limit < 1:
            return Completion([], [], [], "length")
        return await self._serving.answer(generation)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """As the protocol says; a temperature of 0 counts as 1, as it does for greedy answers."""
        self._refuse_if_unusable()
        if temperature < 0:
            raise EngineError(f"temperature is {temperature}: give one that is not negative")
        checked = self._intake.checked(tokens, "sequence to score")
        return await self._serving.score(checked, temperature or 1.0)

    async def receive(self, plan: WeightPlan) -> None:
        self._serving.refuse_if_dead()
        if plan.policy != self.policy:
            raise WeightError(
                f"weights of policy {plan.policy!r} were sent to the engine of {self.policy!r}"
            )
        expected = "shared" if self._weights is None else "copy"
        comes_in_parcels = plan.source is not None and self._weights is not None
        if plan.transport != expected and not comes_in_parcels:
            raise WeightError(
                f"the engine of {self.policy!r} takes transport {expected!r}, and was sent "
                f"{plan.transport!r}"
            )
        if self._weights is not None and "weights" in self._asleep:
            raise WeightError("the engine's weights are asleep: wake them before a publish")
        if comes_in_parcels:
            self._lacks_weights = True  # until all have come
            await receive_parcels(self._module, plan, self._serving.call)
            await self._serving.call(self._renew, plan)
        else:
            await self._serving.call(self._take, plan)
        self._lacks_weights = False
        self._suspend()

    def _take(self, plan: WeightPlan) -> None:
        receive_into(self._module, plan)
        self._renew(plan)

    def _renew(self, plan: WeightPlan) -> None:
        self._batch.forget_prefixes()
        self._batch.version = plan.version

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens. A second pause only stops more; `resume` ends both.

        Requests that arrive meanwhile, and scores, wait until `resume`.
        """
        self._serving.refuse_if_dead()
        await self._serving.pause(mode)

    async def resume(self) -> None:
        self._serving.refuse_if_dead()
        self._serving.resume()

    async def sleep(self, parts: frozenset[Part]) -> None:
        """Free the parts. Weights are freed only if they are the engine's own copy.

        Running requests must be paused first; they are computed anew when they go on.
        """
        self._serving.refuse_if_dead()
        if not self._serving.is_at_rest:
            raise EngineError("the engine can not sleep with requests open: pause it first")
        new = parts - self._asleep
        self._asleep |= parts
        self._lacks_weights |= "weights" in new and self._weights is not None
        self._suspend()
        await self._serving.call(self._free, new)

    def _free(self, parts: frozenset[Part]) -> None:
        if "kv_cache" in parts:
            self._batch.drop_cache()
        if "graphs" in parts:
            self._batch.drop_graphs()
        if "weights" in parts and self._weights is not None:
            self._weights.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, parts: frozenset[Part]) -> None:
        self._serving.refuse_if_dead()
        if "weights" in parts & self._asleep and self._weights is not None:
            await self._serving.call(self._weights.allocate)
        self._asleep -= parts
        self._suspend()

    async def reset(self, plan: WeightPlan, check: WeightCheckConfig) -> None:
        """Make the copy's tensors worthless until new ones come. Shared ones are the trainer's."""
        if self._weights is None:
            return
        self._lacks_weights = True
        self._suspend()
        await self._serving.call(self._spoil, check)

    def _spoil(self, check: WeightCheckConfig) -> None:
        for name, tensor in named_tensors(self._module).items():
            if not check.skips(name):
                spoil(tensor)

    async def numbers(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of some of the tensors that are served, on the host."""
        self._serving.refuse_if_dead()

        def copied() -> dict[str, Tensor]:
            held = named_tensors(self._module)
            return {name: held[name].to("cpu", copy=True) for name in names}

        return await self._serving.call(copied)

    async def checksums(self) -> dict[str, str]:
        """A hash of each tensor that is served; see `paceline.weights.check`."""
        self._serving.refuse_if_dead()
        return await self._serving.call(lambda: checksums(named_tensors(self._module)))

    async def aclose(self) -> None:
        """End the background task, fail what waits, free the memory. Idempotent."""
        await self._serving.close()
        self._free(frozenset({"kv_cache", "weights", "graphs"}))

    def _suspend(self) -> None:
        self._serving.suspend(bool(self._asleep) or self._lacks_weights)

    def _refuse_if_unusable(self) -> None:
        self._serving.refuse_if_dead()
        if self._asleep:
            raise EngineError(
                f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it first"
            )
        if self._lacks_weights:
            raise EngineError(
                "the engine's weights were dropped while it slept, or reset, and none were "
                "received since: publish first"
            )
