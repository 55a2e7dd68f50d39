"""Whole runs whose sampling runs ahead of training, with the embedded engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recorded_runs import train_run

from paceline.cli.ledger import read_accounts
from paceline.data.buffer import Buffer
from paceline.engines.embedded import EmbeddedEngine
from paceline.observe.samples import read_samples
from paceline.policy import Policy
from paceline.rollout.feed import Feed

AHEAD = ("schedule.max_staleness=2", "algorithm.correction.high=2.0")
LONG = ("rollout.sampling.max_tokens=60",)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def plain_rows(run_dir: Path) -> list[dict[str, Any]]:
    kept = ("time/", "perf/")
    return [{k: v for k, v in row.items() if not k.startswith(kept)} for row in rows(run_dir)]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / f"checkpoints/step-{step:06d}/policies/policy"
    return safetensors.torch.load_file(folder / "model/model.safetensors")


def samples(run_dir: Path) -> Iterator[Any]:
    for path in sorted((run_dir / "samples").glob("step-*")):
        yield from read_samples(path)


def check_ledger(run_dir: Path) -> Any:
    (account,) = read_accounts(run_dir)
    assert account.violations == []
    return account


# Modes


@pytest.mark.parametrize("options", [(), ("algorithm.kind=reinforce_pp",)], ids=["grpo", "global"])
def test_without_staleness_every_batch_loss_and_weight_is_the_sync_drivers(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Bit for bit, whichever driver is asked for."""
    found = [
        train_run(tmp_path, *options, f"run.name={driver}", f"run.driver={driver}", *more)
        for driver, more in (("sync", ()), ("multi", ("schedule.max_staleness=0",)))
    ]
    own = ("time/", "perf/")
    one, two = ([{k: v for k, v in row.items() if not k.startswith(own)} for row in rows(run)]
                for run in found)  # fmt: skip
    assert one == two
    assert len(one) == 3
    for step in (1, 2, 3):
        left, right = (weights(run, step) for run in found)
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert [repr(sample) for sample in samples(found[0])] == [
        repr(sample) for sample in samples(found[1])
    ]
    ledgers = [(run / "ledger.jsonl").read_text() for run in found]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(("staleness", "every"), [(1, 1), (1, 2), (3, 2)])
def test_the_bound_holds_at_every_moment_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, every: int
) -> None:
    most: list[int] = []
    notify = Buffer._notify

    def checked(buffer: Buffer) -> None:
        notify(buffer)
        used = buffer.trained_step * buffer.batch + buffer.num_taken + len(buffer._tickets)
        assert used <= (buffer.max_staleness + buffer.published_step + 1) * buffer.batch
        most.append(used - buffer.trained_step * buffer.batch)

    monkeypatch.setattr(Buffer, "_notify", checked)
    schedule = (f"schedule.max_staleness={staleness}", f"schedule.publish_every={every}")
    run_dir = train_run(tmp_path, *schedule, "run.num_steps=4")
    train_run(tmp_path, *schedule, "run.num_steps=9")
    # All slots were in use, and a resume at step 4 did not give 4 batches more.
    assert max(most) == (staleness + 1) * 3
    found = rows(run_dir)
    assert [row["step"] for row in found] == list(range(1, 10))
    assert max(row["rollout/staleness_max"] for row in found) == staleness
    shares = [f"rollout/staleness_share/{k}" for k in range(staleness + 1)]
    assert all(sum(row[name] for name in shares) == pytest.approx(1) for row in found)
    # What is served is at most `every` - 1 steps behind, and each token carries its version.
    assert all(row["step"] - row["version"] < every for row in found)
    for sample in samples(run_dir):
        versions = [v for v in sample.versions if v >= 0]
        assert versions == sorted(versions)
        assert set(versions) <= {step for step in range(10) if step % every == 0 or step in (4, 9)}
    assert check_ledger(run_dir).num_committed == 27


# Publishing while answers are made


@pytest.mark.parametrize("pause", ["finish", "keep", "recompute", "abort"])
def test_publishing_in_the_middle_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: str
) -> None:
    log: list[str] = []
    num_open: list[int] = []

    def watch(name: str) -> None:
        real = getattr(EmbeddedEngine, name)

        async def watched(engine: EmbeddedEngine, *given: Any) -> None:
            if name == "pause":
                num_open.append(engine.num_running + engine.num_waiting)
            await real(engine, *given)
            log.append(name)

        monkeypatch.setattr(EmbeddedEngine, name, watched)

    for name in ("pause", "receive", "resume"):
        watch(name)
    forget = EmbeddedEngine._take

    def taken(engine: EmbeddedEngine, plan: Any) -> None:
        assert engine._serving.is_at_rest
        before = engine.version
        forget(engine, plan)
        assert not engine._batch._prefixes
        log.append(f"flush, version {before} -> {engine.version}")

    monkeypatch.setattr(EmbeddedEngine, "_take", taken)
    run_dir = train_run(
        tmp_path, *AHEAD, *LONG, f"schedule.pause={pause}", "run.num_steps=8",
        "schedule.max_running=4", "engine.max_batch=8",
    )  # fmt: skip
    versions = [0, *range(9)]
    assert log == [
        event
        for before, after in pairwise(versions)
        for event in ("pause", f"flush, version {before} -> {after}", "receive", "resume")
    ]
    assert sum(num > 0 for num in num_open) >= 3, "no publish came in the middle of an answer"

    found = list(samples(run_dir))
    trained = [sample for sample in found if sample.num_tokens]
    mixed = [s for s in trained if len({v for v in s.versions if v >= 0}) > 1]
    assert all(sample.status in ("completed", "truncated") for sample in found), "one was lost"
    assert bool(mixed) == (pause != "finish")
    numbers = rows(run_dir)
    shares = [row["rollout/mixed_versions"] for row in numbers]
    assert sum(shares) * 12 == pytest.approx(len(mixed))
    interruptions = sum(row["rollout/interruptions"] for row in numbers)
    assert (interruptions > 0) == (pause == "abort")
    assert not any(row["rollout/unknown_versions"] for row in numbers)
    check_ledger(run_dir)


def test_an_engine_that_can_not_take_weights_serves_none_of_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[EmbeddedEngine] = []
    take = EmbeddedEngine._take

    def broken(engine: EmbeddedEngine, plan: Any) -> None:
        engines.append(engine)
        if plan.version == 2:
            raise ConnectionError("the wire is cut")
        take(engine, plan)

    monkeypatch.setattr(EmbeddedEngine, "_take", broken)
    began = time.monotonic()
    with pytest.raises(Exception, match="the wire is cut") as caught:
        train_run(tmp_path, *AHEAD, *LONG, "schedule.pause=keep", "run.num_steps=8")
    assert "publish of version 2" in str(caught.value)
    assert "No engine serves the new version" in "".join(caught.value.__notes__)
    assert engines[-1].version == 1
    assert time.monotonic() - began < 60


# Correction


def test_a_run_whose_samples_grow_old_without_correction_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        old = train_run(tmp_path, "schedule.max_staleness=2")
        assert "algorithm.correction.high" in caplog.text
        assert "up to 2 steps old" in caplog.text
        caplog.clear()
        train_run(tmp_path, "run.name=corrected", *AHEAD)
        train_run(tmp_path, "run.name=sync")
        assert "algorithm.correction" not in caplog.text
    assert {"train/effective_sample_share", "train/mismatch_ratio", "train/mismatch_far"} <= set(
        rows(old)[-1]
    )


def test_a_decoupled_loss_has_its_proximal_policy_at_the_start_of_the_step(tmp_path: Path) -> None:
    """Old samples, several updates: the clip is around the step's own first weights, not around
    those that sampled, whose distance is the correction's."""
    run_dir = train_run(
        tmp_path, *AHEAD, "trainer.updates_per_step=3", "run.num_steps=5", "trainer.lr=0.02"
    )
    last = rows(run_dir)[-1]
    assert last["rollout/staleness_max"] > 0
    assert last["train/mismatch_abs"] > 5 * abs(last["train/ratio"] - 1)
    assert last["train/correction_weight"] != 1
    assert 0 < last["train/effective_sample_share"] < 1


# Stragglers, evals, failures


def test_a_straggler_is_cut_short_and_counted(tmp_path: Path) -> None:
    run_dir = train_run(
        tmp_path, *AHEAD, "rollout.sampling.max_tokens=100", "rollout.sampling.ignore_eos=true",
        "schedule.straggler.after_s=0.02", "schedule.straggler.action=truncate",
        "schedule.max_running=3", "run.num_steps=4",
    )  # fmt: skip
    cut = [s for s in samples(run_dir) if s.status == "truncated" and s.num_tokens < 100]
    assert cut
    assert all(sample.finish == "length" for sample in cut)
    assert sum(row["rollout/stragglers"] for row in rows(run_dir)) > 0
    check_ledger(run_dir)


def held_out(folder: Path) -> tuple[str, ...]:
    lines = [f'{{"prompt": "{i}+1=", "answer": "0"}}\n' for i in range(3)]
    (folder / "held.jsonl").write_text("".join(lines))
    return ('evals.sets=[{name="held", data={path="held.jsonl"}, samples_per_prompt=4}]',)


@pytest.mark.parametrize("background", ["true", "false"])
def test_evals_stop_no_sampling_and_are_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    """Beside an eval, groups are started or in flight; its answers are all of its step."""
    beside: list[int] = []
    measured: list[set[int]] = []
    from paceline.evals import run as evals_run

    real = evals_run.run_eval

    async def watched(prepared: Any, **given: Any) -> Any:
        result = await real(prepared, **given)
        beside.append(sum(len(feed.in_flight) for feed in feeds))
        found = {v for g in result.groups for s in g.samples() for v in s.versions if v >= 0}
        measured.append({*found, given["step"]})
        return result

    feeds: list[Feed] = []
    run_feed = Feed.run

    async def running(feed: Feed) -> None:
        feeds.append(feed)
        await run_feed(feed)

    monkeypatch.setattr(Feed, "run", running)
    monkeypatch.setattr("paceline.build.joint_evals.run_eval", watched)
    run_dir = train_run(
        tmp_path, *AHEAD, *held_out(tmp_path), "evals.every=2", f"evals.background={background}",
        "run.num_steps=7", "rollout.sampling.max_tokens=100", "schedule.max_running=2",
    )  # fmt: skip
    assert all(len(versions) == 1 for versions in measured), measured
    assert sorted(step for (step,) in measured) == [0, 2, 4, 6, 7]
    assert sum(num > 0 for num in beside) >= 2, "sampling stood still beside every eval"
    points = [row["eval/held/step"] for row in rows(run_dir) if "eval/held/step" in row]
    assert points[-1] == 7


def test_an_eval_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    async def hang(prepared: Any, **given: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("paceline.build.joint_evals.run_eval", hang)
    began = time.monotonic()
    run_dir = train_run(
        tmp_path, *AHEAD, *held_out(tmp_path), "evals.every=1", "evals.background=true",
        "evals.timeout_s=1", "evals.before_training=false",
    )  # fmt: skip
    assert time.monotonic() - began < 40
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {e["step"] for e in events if e["kind"] == "eval_skipped"} == {1, 2, 3}
    assert rows(run_dir)[-1]["step"] == 3


def test_a_dead_engine_ends_the_run_with_its_own_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.engines.embedded_batch import Batch

    step, count = Batch._step, Counter[str]()

    def dies(batch: Batch) -> Any:
        count["steps"] += 1
        if count["steps"] == 60:
            raise ZeroDivisionError("out of memory, says the device")
        return step(batch)

    monkeypatch.setattr(Batch, "_step", dies)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="says the device"):
        train_run(tmp_path, *AHEAD, *LONG, "run.num_steps=20")
    assert time.monotonic() - began < 40


def test_a_failing_trainer_ends_the_run_with_its_own_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = Policy.learn

    async def fails(policy: Policy, *given: Any, **options: Any) -> Any:
        if policy.trainer.version == 2:
            raise FloatingPointError("of the trainer")
        return await learn(policy, *given, **options)

    monkeypatch.setattr(Policy, "learn", fails)
    with pytest.raises(FloatingPointError, match="of the trainer"):
        train_run(tmp_path, *AHEAD, "run.num_steps=9")
    # What was saved before goes on, and nothing is missing or double.
    monkeypatch.setattr(Policy, "learn", learn)
    account = check_ledger(train_run(tmp_path, *AHEAD, "run.num_steps=9"))
    assert (account.step, account.num_committed) == (9, 27)


def test_reward_workers_that_die_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, pathlib\n"
        "def score(completion, num_tokens):\n"
        "    mark = pathlib.Path(__file__).with_name('died')\n"
        "    if num_tokens == 6 and not mark.exists():\n"
        "        mark.touch()\n"
        "        os._exit(3)\n"
        "    return float(len(set(completion)))\n"
    )
    run_dir = train_run(
        tmp_path, *AHEAD, "reward.kind=", "reward.pattern=", "reward.function=deadly.py:score",
        "reward.workers=2", "run.num_steps=6",
    )  # fmt: skip
    assert (tmp_path / "died").exists()
    assert rows(run_dir)[-1]["step"] == 6
    check_ledger(run_dir)


# Several policies

GAME = """
from paceline.rollout.env import Outcome

async def play(prompt, actors):
    reply = await actors["solver"](prompt)
    right = float(any(c in "01234" for c in reply.text))
    verdict = await actors["verifier"](prompt.text + reply.text + "?")
    said_yes = float(any(c in "56789" for c in verdict.text))
    return {"solver": right, "verifier": float(said_yes == right)}
"""


def test_policies_of_one_game_sample_ahead_each_by_its_own_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: dict[str, int] = {}
    notify = Buffer._notify

    def checked(buffer: Buffer) -> None:
        notify(buffer)
        used = buffer.num_taken + len(buffer._tickets)
        ahead = buffer.published_step - buffer.trained_step
        assert used <= (buffer.max_staleness + ahead + 1) * buffer.batch
        most[buffer.policy] = max(used, most.get(buffer.policy, 0))

    monkeypatch.setattr(Buffer, "_notify", checked)
    (tmp_path / "env.py").write_text(GAME)
    options = (
        "reward.kind=", "reward.pattern=", "rollout.env=env.py:play", "schedule.pause=abort",
        "algorithm.correction.high=2.0", "trainer.lr=0.01", "checkpoint.every=2",
        "policies.solver.schedule.max_staleness=2", "policies.verifier.schedule.max_staleness=1",
        "policies.verifier.rollout.prompts_per_step=2", "run.num_epochs=2", "run.num_steps=",
    )  # fmt: skip
    train_run(tmp_path, *options, "run.debug_exit_after=3")
    run_dir = train_run(tmp_path, *options)
    solver, verifier = read_accounts(run_dir)
    assert (solver.policy, solver.step, solver.num_committed) == ("solver", 6, 18)
    assert solver.violations == verifier.violations == []
    assert all(len(life.versions) == 2 for life in solver.prompts)
    # Slots of both are needed for a prompt, so the smaller bound holds both back.
    assert most["verifier"] == 2 * 2
    assert most["solver"] <= 3 * 3
    found = rows(run_dir)
    for name, staleness in (("solver", 2), ("verifier", 1)):
        own = [row for row in found if row["policy"] == name]
        assert [row["step"] for row in own] == list(range(1, len(own) + 1))
        assert max(row["rollout/staleness_max"] for row in own) <= staleness
    assert verifier.num_trained in (16, 18)


def test_a_run_goes_on_with_another_schedule_and_trains_on_each_prompt_as_often(
    tmp_path: Path,
) -> None:
    """Sync, then ahead, then sync again: what was sampled ahead is sampled anew."""
    common = ("run.num_steps=", "run.num_epochs=2", "checkpoint.every=1")
    for schedule, steps in ((), 2), (AHEAD, 2), ((), 100):
        folder = train_run(
            tmp_path, *LONG, *common, *schedule, f"run.debug_exit_after={steps}",
            "algorithm.correction.high=2.0",
        )  # fmt: skip
    account = check_ledger(folder)
    assert account.violations == []
    trained = Counter(
        ordinal
        for line in (folder / "ledger.jsonl").read_text().splitlines()
        for ordinal in json.loads(line)["trained"]
    )
    assert trained
    assert set(trained.values()) == {1}
    assert sorted(trained) == list(range(len(trained)))
