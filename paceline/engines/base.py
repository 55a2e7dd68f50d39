"""The engine seam: token ids in; token ids, log-probs and versions out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field

from paceline.types import Config
from paceline.weights.base import PauseMode, WeightPlan

Part = Literal["weights", "kv_cache", "graphs"]
Finish = Literal["stop", "length", "abort"]


class Sampling(Config):
    """How answers are drawn. Log-probs are those of the distribution made by these settings."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens below this share of the most likely one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides positive and multiplies negative logits of tokens seen before; 1 is off."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Most tokens of one answer; the model's context may end it sooner."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Texts that end an answer. The tokens that make them stay in the sample."""
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Token ids that end an answer, besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever is sampled (for measurements)."""

    @property
    def is_pure_temperature(self) -> bool:
        """True if a trainer that divides logits by the temperature sees the same distribution."""
        return (
            self.temperature > 0
            and self.top_p == 1.0
            and self.top_k == 0
            and self.min_p == 0.0
            and self.repetition_penalty == 1.0
        )


class CutSignal:
    """Asks whoever makes answers that carry it to end them where they are.

    An answer that is cut keeps its tokens so far and finishes as `length`. Belongs to one event
    loop.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._listeners: dict[object, Callable[[], object]] = {}

    def set(self) -> None:
        """Cut all answers that carry it, now and later. Idempotent."""
        if not self.is_set:
            self.is_set = True
            for listener in list(self._listeners.values()):
                listener()

    @contextmanager
    def listening(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call the listener when the signal is set: at once if it is, never after the block."""
        key = object()
        self._listeners[key] = listener
        try:
            if self.is_set:
                listener()
            yield
        finally:
            del self._listeners[key]


@dataclass(slots=True)
class Progress:
    """How far answers have come that nobody has got yet. An engine may leave it alone."""

    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be sampled, or the rest of one."""

    tokens: Sequence[int]
    sampling: Sampling
    seed: int
    """Randomness of this answer; equal seeds and weights give equal answers."""
    group: str = ""
    """Requests of one group share a prompt: a hint for prefix reuse and routing."""
    cut: CutSignal | None = None
    """Ends the answer early; an engine that does not know how may leave it alone."""
    num_sampled: int = 0
    """So many of the last `tokens` are the answer's own, sampled before: they count for
    `max_tokens` and for stop texts, and its randomness goes on after them."""
    progress: Progress | None = None
    """Counts the tokens as they are made."""


@dataclass(slots=True)
class Completion:
    """What the engine made. The three columns have one entry per new token."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    """stop: an end token or stop text; length: max_tokens or the context; abort: ended early."""
    stop: str | int | None = None
    """The stop text or end token that matched."""
    cause: str | None = None
    """Why it was aborted."""
    can_go_on: bool = False
    """Of an aborted one: the rest may be asked for, with these tokens at the request's end."""
    metrics: dict[str, float] = field(default_factory=dict)


class EmbeddedEngineConfig(Config):
    """`[engine]`: in this process, on the CPU or one GPU; no server."""

    kind: Literal["embedded"] = "embedded"
    """Which engine: `embedded` runs any transformers causal LM in this process."""
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Answers decoded at the same time (slots of the KV cache)."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of prompt plus answer; default: what the run can need, at most the model's."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Most prompt tokens, padding included, computed at one time."""
    graphs: bool = True
    """On a GPU: capture decode steps as CUDA graphs, which small models gain several times the
    speed from. Costs some memory, and a moment for each new size of a step."""
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Type of a copy's weights and KV cache; `model`: that of `model.dtype`. On a GPU, `bfloat16`
    beside a trainer in float32 with `trainer.autocast` samples about twice as fast."""
    weights: Literal["auto", "shared", "copy"] = "auto"
    """`shared`: the trainer's own parameters, publishing is free. `copy`: parameters of its own,
    so that sampling may overlap training. `auto`: shared where nothing overlaps."""


class ServedEngineConfig(Config):
    """What engines of servers of their own have in common."""

    kind: str
    """Which engine."""
    urls: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Attach to these running servers, one replica each, instead of starting any."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Servers to start; requests are spread over them."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices that one replica is split over."""
    python: str | None = None
    """Interpreter of the environment that the server is installed in; default: this one."""
    extra_arguments: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further command-line arguments of the server, such as `"--quantization", "fp8"`. One that
    Paceline sets itself is refused."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the server."""
    host: str = "127.0.0.1"
    """Address that started servers listen on; another than loopback opens them to the network."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: GPUs if torch sees one."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Answers that one replica makes at the same time."""
    memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of a GPU's memory for weights and KV cache together."""
    kv_cache_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that the KV cache of a replica holds; default on a GPU: what `memory_share` leaves
    room for; on a CPU: 65536."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of prompt plus answer; default: the model's."""
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Type that the server computes in, and that weights are sent in; `model`: that of
    `model.dtype`. On a GPU usually `bfloat16`, also where the trainer holds float32."""
    weights: Literal["auto", "handles", "collective", "disk"] = "auto"
    """How new weights come: `handles`: memory that both can map (CUDA IPC on a shared GPU, shared
    memory on one CPU host); `collective`: broadcast over NCCL or gloo; `disk`: files in a folder
    that both can read. `auto`: `handles` where trainer and engine share devices, else
    `collective`."""
    bucket_mb: Annotated[int, Field(ge=1)] = 512
    """MiB of weights that are on their way at one time: what a publish needs of extra memory."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds that a server may take to become healthy."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one answer may take; then another replica is asked."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further replicas, or attempts, before a request has failed."""


class SGLangEngineConfig(ServedEngineConfig):
    """`[engine]`: SGLang servers, started here or attached to."""

    kind: Literal["sglang"] = "sglang"
    """Which engine: `sglang` runs SGLang servers."""
    router: Literal["paceline", "sglang"] = "paceline"
    """Who chooses the replica that answers a request. `paceline`: the one with the least to do,
    groups together. `sglang`: a process of the package `sglang-router`, started beside the servers
    with the interpreter of `python`, also where `urls` are given."""
    router_arguments: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further command-line arguments of SGLang's router, such as `"--policy", "power_of_two"`. One
    that Paceline sets itself is refused."""


class VLLMEngineConfig(ServedEngineConfig):
    """`[engine]`: vLLM servers, started here or attached to."""

    kind: Literal["vllm"] = "vllm"
    """Which engine: `vllm` runs vLLM servers."""


AnyEngineConfig = Annotated[
    EmbeddedEngineConfig | SGLangEngineConfig | VLLMEngineConfig, Field(discriminator="kind")
]


class Engine(Protocol):
    """Makes tokens with the weights of one policy."""

    async def generate(self, request: Request) -> Completion:
        """Sample one answer. Cancelling the call frees its slot.

        Raises EngineError if this request can not be served. One that was raised from another
        exception says that the engine is broken and serves nobody any more.
        """

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-prob of each token given those before it; 0.0 for the first. Length len(tokens)."""

    async def receive(self, plan: WeightPlan) -> None:
        """Take new weights; they serve under `plan.version` from the next token on."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens; returns when nothing changes any more."""

    async def resume(self) -> None:
        """Go on. Idempotent."""

    async def sleep(self, parts: frozenset[Part]) -> None:
        """Free the memory of the parts. Idempotent. Generating while asleep is refused."""

    async def wake(self, parts: frozenset[Part]) -> None:
        """Take the memory of the parts again. Dropped weights must be received anew. Idempotent."""
