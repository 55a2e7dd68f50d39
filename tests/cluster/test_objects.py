"""Values that travel once and are read by several calls."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from cluster_groups import Starter, until
from cluster_workers import Probe

from paceline.cluster.base import WorkerSpec
from paceline.cluster.objects import Kept, kept_by
from paceline.errors import WorkerError

SPEC = WorkerSpec("w", Probe, size=2)


@pytest.mark.parametrize("size", [10, 2**21])
def test_a_kept_value_is_read_by_many_calls_at_any_depth(starter: Starter, size: int) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            group = await starter.start(stack, SPEC)
            values = np.arange(size, dtype=np.float32)
            async with kept_by(starter.keep, {"values": values}) as kept:
                for _ in range(2):  # what a reader changes is its own
                    for result in await group.call("add_one_to", kept):
                        np.testing.assert_array_equal(result, values + 1)
                nested = await group.scatter("echo", [([kept, 1],), (2,)])
            np.testing.assert_array_equal(nested[0][0]["values"], values)
            assert (nested[0][1], nested[1]) == (1, 2)

    asyncio.run(run())


def test_it_lives_until_the_last_call_has_settled_and_no_longer(
    starter: Starter, tmp_path: Path
) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            group = await starter.start(stack, SPEC)
            async with kept_by(starter.keep, np.ones(2**21)) as kept:
                with pytest.raises(WorkerError, match="has no method"):
                    await group.call("nothing", kept)
                with pytest.raises(WorkerError, match="can not be sent"):
                    await group.call("echo", (kept, lambda: 0))
                call = asyncio.ensure_future(group.call("wait_for", str(tmp_path / "go"), kept))
                await until(lambda: len(list(tmp_path.iterdir())) == 2)
            (tmp_path / "go").touch()
            assert await call == ["seen", "seen"]
            await starter.until_all_is_freed()
            with pytest.raises(WorkerError, match="after its owner let go of it"):
                await group.call("echo", kept)
            async with kept_by(starter.keep, np.ones(2**21)) as kept:
                with pytest.raises(WorkerError, match="rank 0"):
                    await group.call("die", 0, "kill", kept)
            await starter.until_all_is_freed()

    asyncio.run(run())


def test_a_kept_value_travels_to_workers_alone() -> None:
    with pytest.raises(TypeError, match="only be sent as an argument of a worker's call"):
        pickle.dumps(Kept(None))
