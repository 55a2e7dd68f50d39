"""The policies of a run of several: models, trainers, engines, and who plays which role."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.build.engines import make_engine, open_engine, transport_of
from paceline.build.parts import Text, make_critic_model, make_model, make_text
from paceline.build.policies import model_identity, open_policy
from paceline.build.site import Site
from paceline.build.teachers import open_teacher
from paceline.config import RunFile
from paceline.drivers.dispose import Disposer
from paceline.engines.base import EmbeddedEngineConfig, Engine
from paceline.engines.turns import Turns
from paceline.models import model_fingerprint
from paceline.policy import Policy
from paceline.rollout.actor import Seat
from paceline.rollout.endpoint import EndpointSeat
from paceline.rollout.past import PastSelf, PastSelves
from paceline.rollout.role_settings import RoleConfig
from paceline.rollout.seats import AnySeat, SeatPool
from paceline.teachers.base import Teacher
from paceline.trainers.devices import resolve_device
from paceline.trainers.values import ValueModel
from paceline.types import JsonValue
from paceline.weights.base import Transport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Member:
    """One policy of the run."""

    name: str
    view: RunFile
    """The run file as it sees it."""
    model: PreTrainedModel
    text: Text
    learns: bool
    critic_model: ValueModel | None = None
    teacher: Teacher | None = None
    policy: Policy | None = None
    """Once it was made; None for one that does not learn."""
    engine: Engine | None = None
    """Of one that does not learn."""

    def seat(self) -> Seat:
        """What its roles are played with."""
        engine = self.engine if self.policy is None else self.policy.engine
        assert engine is not None
        sampling = self.view.rollout.sampling
        return Seat(self.name, engine, self.text.renderer, sampling, learns=self.learns)

    def fingerprint(self) -> dict[str, JsonValue]:
        """What a resumed run must share of this policy."""
        view = self.view
        found: dict[str, JsonValue] = {"model": model_identity(view.model, self.model)}
        if self.learns:
            found["algorithm"] = view.algorithm.model_dump(mode="json")  # type: ignore[attr-defined]
        if self.critic_model is not None:
            critic = {"path": view.critic_model.path, **model_fingerprint(self.critic_model)}
            found["critic"] = critic
        if self.teacher is not None:
            found["teacher"] = self.teacher.identity
        if self.learns and view.trainer.lora is not None:
            found["lora"] = view.trainer.lora.model_dump(mode="json")
        return found


async def open_member(run_file: RunFile, name: str, disposer: Disposer) -> Member:
    """Load the models of one policy."""
    view = run_file.view(name)
    model = make_model(view)
    text = make_text(view, model)
    learns = not run_file.policies or run_file.policies[name].learns
    member = Member(name, view, model, text, learns)
    if learns:
        member.critic_model = make_critic_model(view, text)
        member.teacher = await open_teacher(view, model, text, disposer)
    return member


async def equip(
    member: Member, num_steps: int, turns: Turns | None, site: Site, weights: Path | None = None
) -> None:
    """Make what it works with: trainer, critic and engine, or an engine alone.

    weights: folder of those of a policy that does not learn, if not `[model]`'s.
    """
    if member.learns:
        member.policy = await open_policy(
            member.view,
            member.model,
            member.critic_model,
            member.text,
            num_steps,
            site,
            member.teacher,
            name=member.name,
            turns=turns,
        )
        return
    if isinstance(member.view.engine, EmbeddedEngineConfig):
        member.model.to(resolve_device(member.view.trainer.device))
        transport: Transport = "shared"
    else:
        transport = transport_of(member.view)
    member.engine = await open_engine(
        member.view,
        member.model,
        member.text,
        site,
        policy=member.name,
        transport=transport,
        turns=turns,
        weights=weights,
        is_published_to=False,
    )


def make_seats(
    run_file: RunFile,
    members: dict[str, Member],
    past: dict[str, PastSelves],
    disposer: Disposer,
) -> dict[str, AnySeat]:
    """Role -> who plays it, in the order of the file. past: by role."""
    seats: dict[str, AnySeat] = {}
    for role, played_by in run_file.cast.items():
        if played_by.policy is not None:
            seats[role] = members[played_by.policy].seat()
        elif played_by.past is not None:
            seats[role] = past[role].pool
        else:
            seat = _endpoint(run_file, role, played_by)
            disposer.add(f"endpoint of {role}", seat.aclose)
            seats[role] = seat
    return seats


def _endpoint(run_file: RunFile, role: str, played_by: RoleConfig) -> EndpointSeat:
    assert played_by.url is not None
    assert played_by.model is not None
    return EndpointSeat(
        played_by.url,
        played_by.model,
        run_file.rollout.sampling,
        name=f"{role}@endpoint",
        api_key_env=played_by.api_key_env,
        timeout_s=played_by.timeout_s,
        max_in_flight=played_by.max_in_flight,
    )


def make_past(
    run_file: RunFile,
    members: dict[str, Member],
    turns: Turns | None,
    table_folder: Path,
    disposer: Disposer,
) -> dict[str, PastSelves]:
    """The pools of earlier selves, by role; owned by the disposer."""
    found = {}
    for role, played_by in run_file.cast.items():
        if played_by.past is None:
            continue
        selves = PastSelves(
            played_by.past,
            role,
            SeatPool(played_by.keep),
            every=played_by.every,
            copy=_copier(members[played_by.past], turns),
            table_path=table_folder / f"elo-{role}.json",
        )
        disposer.add(f"earlier selves of {played_by.past}", selves.aclose)
        found[role] = selves
    return found


def _copier(member: Member, turns: Turns | None) -> Callable[[str], PastSelf]:
    """Makes a copy of a policy's weights as they are, with an engine that serves it."""

    def copy_now(label: str) -> PastSelf:
        module = copy.deepcopy(member.model).requires_grad_(False).eval()
        name = f"{member.name}@{label}"
        engine = make_engine(
            member.view, module, member.text, policy=name, transport="shared", turns=turns
        )
        sampling = member.view.rollout.sampling
        seat = Seat(name, engine, member.text.renderer, sampling, learns=False, label=label)
        return PastSelf(seat, module, engine.aclose)

    return copy_now
