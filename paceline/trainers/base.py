"""The trainer seam. A trainer owns a model, its optimizer and its schedule; it sees only rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar

from pydantic import Field, model_validator

from paceline.models import ModelConfig
from paceline.observe.metrics import Metrics
from paceline.trainers.lora_settings import LoraConfig
from paceline.types import Batch, Config, Row, StepReport
from paceline.weights.base import WeightPlan

if TYPE_CHECKING:
    from paceline.types import FloatArray

Place = Literal["device", "host"]
Settings = TypeVar("Settings", bound="TrainerConfig")
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Head = Literal["policy", "reference", "values"]
"""What a model says of a token: its log-prob, that of the frozen reference, or a critic's value."""

Write = Callable[[], Awaitable[None]]
"""Writes what was copied before; all is durable when it has been awaited."""
Later = Callable[[Write], None]
"""Takes what is to be awaited while the trainer goes on."""

AREAS: dict[Head, str] = {"policy": "train", "values": "critic"}
"""Area of a trainer's metrics, by the head that it trains: `train/loss`, `critic/loss`."""


class TrainerConfig(Config):
    """What all trainers have in common."""

    kind: str
    """Which trainer."""
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Peak learning rate of AdamW; 0 measures without learning."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up, over the optimizer steps of the whole run: stay, or fall to
    `min_lr_ratio` times `lr` along a line or a half cosine."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises: the k-th of n uses k/n of `lr`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Learning rate that a falling schedule reaches at the end of the run, as a share of `lr`."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """AdamW's decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """AdamW's decoupled weight decay; never applied to norms and biases (one dimension)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip the gradient to this L2 norm; `inf` measures it without clipping."""
    updates_per_step: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps made of one rollout in one pass: its groups are split evenly."""
    epochs_per_step: Annotated[int, Field(ge=1)] = 1
    """Passes over each rollout."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 8192
    """Token budget of one forward and backward, padding included; a longer sample gets one of its
    own. Changes memory and speed, not results."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """How rows of a micro-batch lie: `padded` sorts them by length and fills up on the right;
    `packed` concatenates them. `auto`: packed with flash attention, else padded, which is faster
    there. Changes speed, not results."""
    share_prefix: bool = True
    """Compute what rows of a micro-batch have in common from their first token on (a group's
    prompt, equal answers) once, where the layout is `padded` and the model allows it: full
    attention by `sdpa` in every layer, else rows are computed whole. Of no use, and left alone,
    where less than about a seventh of the tokens is shared. Changes speed and memory, and the last
    bit of results."""
    autocast: Literal["off", "bfloat16"] = "off"
    """Compute type of the forward; weights and moments keep the type of `model.dtype`, and
    log-probs are computed in float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more time."""
    compile: bool = False
    """On a GPU: compile the decoder layers and the log-probs (`torch.compile`). A model of 0.1 B
    parameters learned 2.2 times as fast, one of 1.5 B 1.5 times; the first step takes about half
    a minute longer. Changes the last bit of results."""
    logprob_chunk_tokens: Annotated[int, Field(ge=1)] = 2048
    """Trainable tokens whose logits over the vocabulary exist at one time. If a micro-batch has
    more, the backward computes them anew. Changes memory and speed, not results."""
    deterministic: bool = False
    """On a GPU: use only kernels that add in a fixed order, so that a resumed run is bit-identical.
    Not where sampling overlaps training in one process. On a CPU every run is bit-identical."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of torch; chosen at start when absent, recorded, and kept on resume."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter in the place of the weights: gradients and moments are small, and
    the reference needs no second model. A learning rate about ten times as large is usual."""


class SingleTrainerConfig(TrainerConfig):
    """`[trainer]`: one process, one device."""

    kind: Literal["single"] = "single"
    """Which trainer: `single` is one process on the CPU or one GPU."""


class FSDPTrainerConfig(TrainerConfig):
    """`[trainer]`: FSDP2 over processes of its own, one a device."""

    kind: Literal["fsdp"] = "fsdp"
    """Which trainer: `fsdp` shards the model over several processes (FSDP2)."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Processes, each with a device of its own (on a CPU: with `threads` threads)."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Copies of the model: parameters are sharded over `ranks / replicas` processes and
    replicated over `replicas`."""
    cpu_offload: bool = False
    """Keep parameters and moments on the host; each layer comes to the device when it is used."""
    keep_gathered: bool = False
    """Keep a layer's full parameters from its forward to its backward: faster, more memory."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that a rank may wait for the others before the run ends."""

    @model_validator(mode="after")
    def _replicas_fit(self) -> FSDPTrainerConfig:
        if self.ranks % self.replicas:
            raise ValueError(
                f"ranks = {self.ranks} can not be split into replicas = {self.replicas} copies of "
                "the model: make `ranks` a multiple of `replicas`"
            )
        return self


AnyTrainerConfig = Annotated[SingleTrainerConfig | FSDPTrainerConfig, Field(discriminator="kind")]


class CriticConfig(Config):
    """`[critic]`: a second model that predicts the return, for algorithms that need one."""

    model: ModelConfig | None = None
    """Whose body the critic starts from, with a head of zeros, or the critic that a checkpoint
    holds (`policies/<name>/critic/model`); its vocabulary must be the policy's. Absent: a copy of
    `[model]`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the run, in which the critic learns alone and the policy stays as it is: a
    critic that knows nothing yet would lead it astray."""
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5
    """Peak learning rate of the critic's AdamW; usually several times `trainer.lr`."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """Shape after the rise of the learning rate; absent: `trainer.lr_schedule`."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps over which the critic's learning rate rises; absent:
    `trainer.lr_warmup_steps`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Learning rate at the end of a falling schedule, as a share of `lr`; absent:
    `trainer.min_lr_ratio`."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """AdamW's decoupled weight decay; absent: `trainer.weight_decay`."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the critic's gradient to this L2 norm; absent: `trainer.max_grad_norm`."""

    def for_trainer(self, actor: Settings) -> Settings:
        """The settings of the critic's trainer: its own, and those of the actor's for the rest.

        A critic has no adapter: it learns with all its weights.
        """
        own = self.model_dump(exclude={"model", "warmup_steps"}, exclude_none=True)
        return actor.model_copy(update={**own, "lora": None})


class Trainer(Protocol):
    """Changes the weights of one model: of a policy, or of its critic."""

    @property
    def version(self) -> int:
        """Optimizer steps done over all restarts, skipped ones included: it always rises."""

    async def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        """Per row and token: log-probs of the policy or the reference, or a critic's values.

        The value at `t` is that of the state in which `tokens[t]` was chosen: it knows
        `tokens[:t]`. No gradient. Shape [T] per row, 0.0 outside the mask.
        """

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Gradients of all micro-batches of one optimizer step."""

    async def optim_step(self) -> StepReport:
        """Clip, step, advance the schedule, raise the version.

        A non-finite loss or gradient raises the version alone: weights, moments and schedule stay.
        """

    async def send(self, plan: WeightPlan) -> WeightPlan:
        """Hand the weights over along the plan; returns it with what receivers need."""

    async def save(self, path: Path, later: Later | None = None) -> None:
        """Write everything that `load` needs into the empty folder `path`; durable on return.

        later: given, this returns as soon as all is copied to the host, and `later` gets what
        writes it, to be awaited once, while the trainer does other things. One at a time.

        The model goes to `path/model` in Hugging Face format with its tokenizer; of a critic its
        body, with the head in `value_head.safetensors` beside it. An adapter goes to `path/adapter`
        in PEFT's format, and is in the weights of `path/model` too.
        """

    async def load(self, path: Path) -> None:
        """Restore bit for bit what `save` wrote."""

    async def place(self, where: Place) -> None:
        """Move weights, gradients and moments to the device or to the host. Idempotent."""
