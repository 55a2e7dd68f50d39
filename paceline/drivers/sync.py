"""The synchronous driver: one clock; sample, learn, publish, in turn.

    start -> [collect -> learn -> save? -> publish -> evaluate? -> row] ... -> end

While the trainer learns the engine is idle, and the other way round; so they may share weights,
or take turns on one device (`MemoryPlan`). Every answer of a step is sampled with the weights that
the step before has published.
"""

from __future__ import annotations

from paceline.drivers import steps
from paceline.drivers.run import Run


async def drive(run: Run) -> None:
    """Run all steps that are left. Returns when the last save and the last eval are done."""
    async with run.saves:  # ends: with the disk, at the latest
        await steps.start(run)
        for step in run.steps():
            batch = await steps.collect(run, step)
            if not batch.groups:
                break
            await run.memory.before_learn()
            await steps.learn(run, step, batch)
            await steps.save_if_due(run, step)
            await run.memory.after_learn()
            await steps.publish(run, step)
            await run.memory.after_publish()
            await steps.evaluate_if_due(run, step)
            steps.finish_step(run, step)
            if steps.is_debug_exit(run, step):
                return
        await steps.end(run)
