"""Making the trainer that a run file names, in this process or in workers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.algorithms.base import Objective
from paceline.build.parts import Text, make_model, model_settings
from paceline.build.site import Site, critic_name, trainer_name
from paceline.cluster.trainer import GroupTrainer, trainer_spec
from paceline.config import RunFile, locate_model
from paceline.trainers.base import FSDPTrainerConfig, SingleTrainerConfig, Trainer
from paceline.trainers.fsdp_weights import NamedCritic, NamedModel
from paceline.trainers.single import SingleTrainer
from paceline.trainers.values import ValueModel
from paceline.types import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


async def open_trainer(
    run_file: RunFile, model: PreTrainedModel, text: Text, site: Site, *, policy: str, horizon: int
) -> Trainer:
    """The trainer of the policy; owned by the site. horizon: optimizer steps that it will make."""
    # With an adapter the reference is the model without it.
    needs_reference = run_file.algorithm.needs_reference and run_file.trainer.lora is None
    seed = derive_seed(run_file.run.seed, policy, "adapter")
    match run_file.trainer:
        case SingleTrainerConfig() as config:
            single = SingleTrainer(
                config,
                model,
                text.tokenizer,
                run_file.algorithm,
                horizon=horizon,
                reference=make_model(run_file) if needs_reference else None,
                seed=seed,
            )
            site.disposer.add(trainer_name(policy), single.aclose)
            return single
        case FSDPTrainerConfig() as config:
            settings = model_settings(run_file)
            source = NamedModel(settings, run_file.run.seed)
            spec = trainer_spec(
                trainer_name(policy),
                config,
                source,
                run_file.algorithm,
                horizon=horizon,
                reference=source if needs_reference else None,
                tokenizer=settings,
                seed=seed,
            )
            group = await site.workers(spec)
            site.disposer.add(trainer_name(policy), group.aclose)
            return GroupTrainer(group, run_file.algorithm)


async def open_critic(
    run_file: RunFile,
    model: ValueModel,
    text: Text,
    objective: Objective,
    site: Site,
    *,
    policy: str,
    horizon: int,
) -> Trainer:
    """The trainer of the critic; owned by the site."""
    settings = run_file.critic_settings.for_trainer(run_file.trainer)
    match settings:
        case SingleTrainerConfig() as config:
            single = SingleTrainer(config, model, text.tokenizer, objective, horizon=horizon)
            site.disposer.add(critic_name(policy), single.aclose)
            return single
        case FSDPTrainerConfig() as config:
            located = locate_model(run_file.critic_model, run_file.base)
            key = "model" if run_file.critic_settings.model is None else "critic.model"
            spec = trainer_spec(
                critic_name(policy),
                config,
                NamedCritic(located, run_file.run.seed, key),
                objective,
                horizon=horizon,
                tokenizer=model_settings(run_file),
            )
            group = await site.workers(spec)
            site.disposer.add(critic_name(policy), group.aclose)
            return GroupTrainer(group, objective, "values")
