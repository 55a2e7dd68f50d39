"""The driver of several clocks: one task a policy, each at its own pace; the leader's steps count.

    leader     [collect] -> learn -> {save?} -> publish?, or {save? -> publish -> evaluate} -> row
    follower   [lead? collect] -> learn -> [] -> publish? -> row -> ...
    feeds      take a slot -> sample -> hand over -> ...

In `[ ]`, a safe region, a policy changes no weights. In `{ }` the leader holds the gate: all others
are in one. So what is saved belongs together, and nobody waits for somebody who waits for data.
"""

from __future__ import annotations

from paceline.drivers import steps
from paceline.drivers.joint import Joint
from paceline.drivers.run import Run
from paceline.drivers.supervise import supervise
from paceline.rollout.batch import RolloutBatch


async def drive(joint: Joint) -> None:
    """Run until the leader has done its steps; then everything else is stopped."""
    async with joint.leader.saves:  # ends: with the disk, at the latest
        for run in joint.runs:
            await steps.start(run)
        if joint.leader.is_last(joint.leader.step):
            return await steps.end(joint.leader)
        joint.lead.leader_trained(joint.leader.step)
        await supervise(
            _lead(joint, joint.leader),
            {name: _follow(joint, run) for name, run in joint.followers.items()},
            joint.begin_producing(),
            on_end=joint.ended.set,
        )


async def _lead(joint: Joint, run: Run) -> None:
    with joint.member(run):
        for step in run.steps():
            batch = await _collect(joint, run, step)
            if not batch.groups:
                break
            await steps.learn(run, step, batch)
            joint.lead.leader_trained(step)
            if run.is_eval_due(step):
                async with joint.alone(run):
                    await steps.save_if_due(run, step)
                    await steps.publish_if_due(run, step)
                    async with joint.quiet():
                        await steps.evaluate_if_due(run, step)
            else:
                if steps.is_save_due(run, step):
                    async with joint.alone(run):
                        await steps.save(run, step)
                await steps.publish_if_due(run, step)
            steps.finish_step(run, step)
            if steps.is_debug_exit(run, step):
                return
        async with joint.alone(run), joint.quiet():
            await steps.end(run)


async def _follow(joint: Joint, run: Run) -> None:
    with joint.member(run):
        for step in run.steps():
            batch = await _collect(joint, run, step)
            if not batch.groups or joint.ended.is_set():
                break
            await steps.learn(run, step, batch)
            async with joint.resting(run, "between steps"):
                pass
            await steps.publish_if_due(run, step)
            steps.finish_step(run, step)
    await joint.ended.wait()  # ends: with the run, of which the leader decides


async def _collect(joint: Joint, run: Run, step: int) -> RolloutBatch:
    async with joint.resting(run, "waiting for the leader"):
        await joint.lead.wait(run.policy.name, step)
        return await steps.collect(run, step)
