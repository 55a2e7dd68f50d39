"""Making a policy with all that trains it, and bringing it back from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.build.engines import open_engine, route_of, transport_of
from paceline.build.parts import Text
from paceline.build.site import Site
from paceline.build.trainers import open_critic, open_trainer
from paceline.checkpoint import Checkpoint, PolicyProgress, RunState
from paceline.config import POLICY, RunFile
from paceline.data.stream import PromptStream
from paceline.engines.turns import Turns
from paceline.errors import CheckpointError
from paceline.models import ModelConfig, model_fingerprint
from paceline.policy import Policy
from paceline.teachers.base import Teacher
from paceline.trainers.values import ValueModel
from paceline.types import JsonValue

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fingerprint(
    run_file: RunFile,
    model: PreTrainedModel,
    critic: ValueModel | None,
    stream: PromptStream,
    teacher: Teacher | None = None,
) -> dict[str, JsonValue]:
    """What a resumed run must share. Learning rate, cadence and length of the run may change."""
    found: dict[str, JsonValue] = {
        "seed": run_file.run.seed,
        "model": model_identity(run_file.model, model),
        "data": stream.identity,
        "algorithm": run_file.algorithm.model_dump(mode="json"),  # type: ignore[attr-defined]
    }
    if critic is not None:
        found["critic"] = {"path": run_file.critic_model.path, **model_fingerprint(critic)}
    if teacher is not None:
        found["teacher"] = teacher.identity
    if run_file.trainer.lora is not None:
        found["lora"] = run_file.trainer.lora.model_dump(mode="json")
    return found


def model_identity(config: ModelConfig, model: PreTrainedModel) -> dict[str, JsonValue]:
    """What a resumed run must share of the model that a policy starts from."""
    found = {"path": config.path, **model_fingerprint(model)}
    return found if config.adapter is None else {**found, "adapter": config.adapter}


async def open_policy(
    run_file: RunFile,
    model: PreTrainedModel,
    critic_model: ValueModel | None,
    text: Text,
    num_steps: int,
    site: Site,
    teacher: Teacher | None = None,
    *,
    name: str = POLICY,
    turns: Turns | None = None,
) -> Policy:
    """Trainer, critic and engine; each is owned by the site as soon as it exists.

    run_file: as the policy sees it.
    """
    algorithm, config = run_file.algorithm, run_file.trainer
    objective = algorithm.critic
    critic_only = run_file.critic_settings.warmup_steps if objective is not None else 0
    updates = config.updates_per_step * config.epochs_per_step
    critic = None
    if objective is not None and critic_model is not None:
        horizon = max(1, num_steps * updates)
        critic = await open_critic(
            run_file, critic_model, text, objective, site, policy=name, horizon=horizon
        )
    horizon = max(1, (num_steps - critic_only) * updates)
    trainer = await open_trainer(run_file, model, text, site, policy=name, horizon=horizon)
    transport = transport_of(run_file)
    engine = await open_engine(
        run_file, model, text, site, policy=name, transport=transport, turns=turns
    )
    route = route_of(run_file, name)
    return Policy(
        name,
        algorithm,
        engine,
        trainer,
        transport,
        updates_per_step=config.updates_per_step,
        epochs_per_step=config.epochs_per_step,
        critic=critic,
        critic_only_steps=critic_only,
        teacher=teacher,
        bucket_bytes=route.bucket_bytes,
        weight_folder=route.folder,
        weight_dtype=route.dtype,
        pause=run_file.schedule.pause,
        check=run_file.weight_check,
        takes_turns=run_file.memory.order != "none",
    )


async def restore_policy(policy: Policy, checkpoint: Checkpoint, state: RunState) -> None:
    """Load the trainer, and the critic if there is one; both must stand where the state says.

    Raises CheckpointError if the checkpoint lacks one of them, or holds it at another version.
    """
    await policy.trainer.load(checkpoint.policy_folder(policy.name))
    if policy.critic is not None:
        await policy.critic.load(checkpoint.critic_folder(policy.name))
    saved = state.policies[policy.name]
    critic_version = None if policy.critic is None else policy.critic.version
    found = PolicyProgress(saved.step, policy.trainer.version, critic_version, saved.baselines)
    if found != saved:
        raise CheckpointError(
            f"{checkpoint.folder} contradicts itself: its state says {saved}, its trainers are at "
            f"{found}; resume from an older checkpoint"
        )
    policy.baselines = {role: (mean, int(num)) for role, (mean, num) in saved.baselines.items()}
