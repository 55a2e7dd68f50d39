"""Where the parts of a run stand that are not in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.base import Cluster, WorkerGroup, WorkerSpec
from paceline.cluster.open import open_cluster
from paceline.cluster.placement import Need
from paceline.config import RunFile
from paceline.drivers.dispose import Disposer
from paceline.engines.base import ServedEngineConfig
from paceline.engines.server import Launcher
from paceline.trainers.base import FSDPTrainerConfig
from paceline.trainers.devices import resolve_device
from paceline.trainers.threads import available_cores

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Site:
    """The cluster of a run, if it has one, and who owns what is opened."""

    disposer: Disposer
    logs: Path
    """What workers and servers write."""
    cluster: Cluster | None

    async def workers(self, spec: WorkerSpec) -> WorkerGroup:
        """Start workers on the devices that were set aside under the name of the spec."""
        assert self.cluster is not None
        return await self.cluster.start(spec, self.cluster.devices(spec.name))

    def launcher(self, policy: str) -> Launcher | None:
        """Starts the servers of a policy's engine; None if they run already."""
        name = engine_name(policy)
        if self.cluster is None:
            return None
        return self.cluster.launcher(self.cluster.devices(name))


def engine_name(policy: str) -> str:
    """What the engine of a policy is called in messages and placements."""
    return f"engine of {policy}"


def trainer_name(policy: str) -> str:
    return f"trainer of {policy}"


def critic_name(policy: str) -> str:
    return f"critic of {policy}"


async def open_site(run_file: RunFile, disposer: Disposer, *, learns: bool = True) -> Site:
    """Set aside all devices that the run needs, before anything starts.

    learns: whether there will be trainers. Raises ConfigError if there are not enough devices.
    """
    logs = run_file.run_dir / "logs"
    needs = list(_needs(run_file, learns=learns))
    if not needs:
        return Site(disposer, logs, None)
    _warn_of_few_cores(run_file, needs)
    logs.mkdir(parents=True, exist_ok=True)
    cluster = await open_cluster(run_file.cluster, needs, logs)
    disposer.add("cluster", cluster.aclose)
    return Site(disposer, logs, cluster)


def _warn_of_few_cores(run_file: RunFile, needs: Sequence[Need]) -> None:
    on_cpu = sum(need.size for need in needs if not need.on_gpu)
    # Trainer and engine take turns, so two a core are no burden.
    if run_file.cluster.runtime == "local" and on_cpu > 2 * (cores := available_cores()):
        logger.warning(
            "%d worker processes share %d CPU cores, and wait for each other: lower trainer.ranks, "
            "engine.replicas or engine.tensor_parallel",
            on_cpu,
            cores,
        )


def _needs(run_file: RunFile, *, learns: bool) -> Iterator[Need]:
    for name, view in run_file.views.items():
        trainer, engine = view.trainer, view.engine
        # A critic always stands where its policy's trainer does: they take turns, or fit together.
        learning = name if run_file.cluster.colocate else trainer_name(name)
        if learns and name in run_file.learners and isinstance(trainer, FSDPTrainerConfig):
            on_gpu = resolve_device(trainer.device).type == "cuda"
            yield Need(trainer_name(name), trainer.ranks, share=learning, on_gpu=on_gpu)
            if view.algorithm.critic is not None:
                yield Need(critic_name(name), trainer.ranks, share=learning, on_gpu=on_gpu)
        if isinstance(engine, ServedEngineConfig) and not engine.urls:
            size = engine.tensor_parallel
            yield Need(
                engine_name(name),
                engine.replicas * size,
                group=size,
                share=name if run_file.cluster.colocate else engine_name(name),
                on_gpu=resolve_device(engine.device).type == "cuda",
            )
