"""Evals of several policies that are not trained: those of a checkpoint, or of the run file."""

from __future__ import annotations

import torch

from paceline.build.joint_evals import evaluate_sets
from paceline.build.members import Member, equip, make_past, make_seats
from paceline.build.parts import Given, load_eval_sets, make_model, make_reward, make_text
from paceline.build.results import EvalReport
from paceline.build.site import Site, open_site
from paceline.checkpoint import Checkpoint
from paceline.config import RunFile
from paceline.drivers.dispose import Disposer
from paceline.errors import ConfigError
from paceline.trainers.threads import choose_threads


async def evaluate_joint(
    run_file: RunFile, checkpoint: Checkpoint | None, given: Given
) -> EvalReport:
    """Measure the eval sets of the file, each role played as in the run."""
    torch.set_num_threads(run_file.trainer.threads or choose_threads())
    async with Disposer() as disposer:
        reward = await make_reward(run_file, given, disposer)
        site = await open_site(run_file, disposer, learns=False)
        members = {name: await _open(run_file, name, checkpoint, site) for name in run_file.views}
        text = members[run_file.leader].text
        sets = await load_eval_sets(run_file, given, text, disposer, reward)
        if not sets:
            raise ConfigError("there is nothing to measure: add an [[evals.sets]] block")
        past = make_past(run_file, members, None, run_file.run_dir, disposer)
        for role, selves in past.items():
            if checkpoint is None:
                await selves.published(0)
            else:
                await selves.load(checkpoint.policy_folder(selves.policy) / "past" / role)
        seats = make_seats(run_file, members, past, disposer)
        results = await evaluate_sets(run_file, sets, members, seats, step=0, version=0)
    return EvalReport.of(
        run_file.model.path if checkpoint is None else str(checkpoint.folder), results
    )


async def _open(run_file: RunFile, name: str, checkpoint: Checkpoint | None, site: Site) -> Member:
    """A policy that only plays, with its weights of the checkpoint if it had learned."""
    view = run_file.view(name)
    folder = None
    if checkpoint is not None and name in checkpoint.state().policies:
        folder = checkpoint.policy_folder(name) / "model"
    model = make_model(view, folder)
    member = Member(name, view, model, make_text(view, model), learns=False)
    await equip(member, 0, None, site, folder)
    return member
