"""Whole runs over combinations of drivers and real parts, by a change of keys alone.

Most of them attach to one running server; what starts servers itself is in `test_parts_run`, and in
the run on Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_real import RealServer, sglang_options
from recorded_runs import RUN_FILE, train_run

from paceline.cli.ledger import read_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
served = pytest.mark.xdist_group("sglang")

CHECKED = ("weight_check.when=always", "weight_check.reset=true")
DRIVERS = {
    "sync": (),
    "pipelined": ("schedule.max_staleness=1", "algorithm.correction.high=2.0"),
    "multi": ("schedule.max_staleness=1", "algorithm.correction.high=2.0"),
}
TRAINERS = {"single": (), "fsdp": ("trainer.kind=fsdp", "trainer.ranks=1")}
TWO = """
[policies.policy]
[policies.other]
model.path = "model"
"""
ENV = """
async def play(prompt, actors):
    return {role: float(len((await actor(prompt)).text)) for role, actor in actors.items()}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with other weights than those that runs begin with."""
    server = RealServer(tmp_path_factory.mktemp("sglang"))
    yield server.engine.addresses[0]
    server.close()


def attached(url: str, transport: str) -> tuple[str, ...]:
    return (
        "engine.kind=sglang",
        f'engine.urls=["{url}"]',
        "engine.device=cpu",
        f"engine.weights={transport}",
    )


def of_two(options: tuple[str, ...], policy: str) -> tuple[str, ...]:
    return tuple(f"policies.{policy}.{option}" for option in options)


def run(folder: Path, driver: str, *options: str, others: tuple[str, ...] = ()) -> Path:
    """options: of the policy. others: of the run and of the other policy, if there are two."""
    if driver != "multi":
        return train_run(folder, *DRIVERS[driver], *CHECKED, *options, *others)
    (folder / "env.py").write_text(ENV)
    text = RUN_FILE.replace('[reward]\nkind = "regex"\npattern = "[0-4]"\n', "") + TWO
    options = ("rollout.env=env.py:play", *of_two(options, "policy"), *others)
    return train_run(folder, *DRIVERS[driver], *CHECKED, *options, text=text)


def assert_whole(run_dir: Path, driver: str) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    names = {"policy", "other"} if driver == "multi" else {"policy"}
    assert {row["policy"] for row in rows} == names
    for name in names:
        own = [row for row in rows if row["policy"] == name]
        assert [row["step"] for row in own] == list(range(1, len(own) + 1))
        assert [row["version"] for row in own] == [row["step"] for row in own]
        assert min(row["rollout/sampled_tokens"] for row in own) > 0
    leader = [row for row in rows if row["policy"] == "policy"]
    assert len(leader) == 3
    if driver == "sync":
        # In float32 the engine and the trainer say the same of the tokens that were sampled.
        assert max(row["train/mismatch_max"] for row in leader) < 1e-4
    else:
        assert max(row["rollout/staleness_max"] for row in leader) <= 1
    for account in read_accounts(run_dir):
        assert account.violations == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_sharded_trainer_and_an_engine_in_this_process(tmp_path: Path, driver: str) -> None:
    run_dir = run(tmp_path, driver, *TRAINERS["fsdp"])
    assert_whole(run_dir, driver)


@served
@pytest.mark.parametrize(
    ("driver", "transport"),
    [("sync", "collective"), ("pipelined", "disk"), ("multi", "collective")],
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_server_that_runs_already(
    tmp_path: Path, url: str, driver: str, transport: str, trainer: str
) -> None:
    run_dir = run(tmp_path, driver, *TRAINERS[trainer], *attached(url, transport))
    assert_whole(run_dir, driver)


@served
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_server_gets_an_adapter_as_part_of_the_weights(
    tmp_path: Path, url: str, trainer: str
) -> None:
    options = ("trainer.lora.rank=4", *TRAINERS[trainer], *attached(url, "collective"))
    assert_whole(run(tmp_path, "sync", *options), "sync")


@served
def test_two_policies_on_ray(tmp_path: Path) -> None:
    """Both are sharded trainers with servers of their own, which Ray starts."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    real = (*TRAINERS["fsdp"], *sglang_options())
    run_dir = run(tmp_path, "multi", *real, others=("cluster.runtime=ray", *of_two(real, "other")))
    assert_whole(run_dir, "multi")
