"""Where a run of several policies gets its episodes: one shared feed, and each policy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.build.members import Member
from paceline.build.opening import make_stream
from paceline.build.parts import Given, make_reward
from paceline.config import SHARED, RunFile
from paceline.data.buffer import Buffer
from paceline.data.group_codec import decode_group
from paceline.data.stream import PromptStream
from paceline.drivers.dispose import Disposer
from paceline.drivers.feeding import FromFeed
from paceline.drivers.supervised import supervised_batch
from paceline.drivers.supply import Pull, Supply
from paceline.errors import CheckpointError
from paceline.rollout.batch import RolloutBatch, collect_batch
from paceline.rollout.feed import Feed
from paceline.rollout.rewards import Reward
from paceline.rollout.runner import Runner
from paceline.rollout.seats import AnySeat
from paceline.rollout.single_turn import load_env
from paceline.types import Draw, JsonValue


@dataclass(slots=True)
class OpenFeed:
    """Prompts and an environment, with the policies that learn from its episodes."""

    name: str
    """`shared`, or the policy whose own it is."""
    view: RunFile
    """Whose `[rollout]` it goes by."""
    learners: tuple[str, ...]
    stream: PromptStream
    reward: Reward | None
    feed: Feed | None = None
    """What samples ahead; None if batches are made when they are asked for."""
    pull: Pull | None = None

    def connect(
        self,
        run_file: RunFile,
        members: Mapping[str, Member],
        seats: Mapping[str, AnySeat],
        steps: Mapping[str, int],
    ) -> None:
        """Make what samples: its policies have engines now. steps: what each has trained."""
        first = members[self.learners[0]]
        if not first.view.algorithm.learns_from_rollouts:
            self.pull = Pull(self.stream, self._read(first))
            return
        own = {first.name: first.seat()} if self.name != SHARED else seats
        view = self.view
        runner = Runner(
            own,
            load_env(view.rollout.env, base=view.base, reward=self.reward),
            self.reward,
            view.rollout,
            policy=first.name,
            run_seed=view.run.seed,
        )
        schedules = {name: members[name].view.schedule for name in self.learners}
        runs_ahead = any(schedule.runs_ahead for schedule in schedules.values())
        if len(self.learners) == 1 and not runs_ahead:
            self.pull = Pull(self.stream, self._sample(runner, first))
            return
        buffers = {
            name: Buffer(
                name,
                batch=members[name].view.rollout.prompts_per_step,
                max_staleness=schedule.max_staleness,
                on_full=schedule.on_full,
                step=steps[name],
            )
            for name, schedule in schedules.items()
        }
        self.feed = Feed(
            self.stream,
            runner,
            buffers,
            wave=view.rollout.prompts_per_step,
            mode="continuous" if runs_ahead else "wave",
            max_in_flight=view.schedule.max_running,
            straggler=view.schedule.straggler,
        )

    def _sample(self, runner: Runner, member: Member) -> Any:
        async def sample(step: int) -> RolloutBatch:
            return await collect_batch(
                self.stream, runner, step=step,
                num_prompts=member.view.rollout.prompts_per_step,
            )  # fmt: skip

        return sample

    def _read(self, member: Member) -> Any:
        async def read(step: int) -> RolloutBatch:
            return supervised_batch(
                self.stream,
                member.text.renderer,
                policy=member.name,
                num_prompts=member.view.rollout.prompts_per_step,
            )

        return read

    def supply(self, policy: str) -> Supply:
        """Where a policy's batches come from."""
        if self.pull is not None:
            return self.pull
        assert self.feed is not None
        return FromFeed(self.feed, policy)

    def state(self) -> JsonValue:
        """What a checkpoint keeps of it."""
        if self.pull is not None:
            return {"stream": self.pull.state()}
        assert self.feed is not None
        return self.feed.state()

    def restore(self, data: Mapping[str, Any], steps: Mapping[str, int]) -> None:
        """Go to where a checkpoint was made. Raises CheckpointError if it has nothing of this."""
        saved = data.get("feeds", {}).get(self.name)
        is_of_sync = saved is None and "drawn" in data and len(self.learners) == 1
        if saved is None and not is_of_sync:
            raise CheckpointError(
                f"the checkpoint has no data state of the feed {self.name!r}; it has "
                f"{', '.join(data.get('feeds', {})) or 'none'}"
            )
        if self.feed is not None and saved is not None and "buffers" in saved:
            self.feed.restore(saved, {name: steps[name] for name in self.learners})
        else:
            restore_stream(self.stream, data if saved is None else saved)


def restore_stream(stream: PromptStream, saved: Mapping[str, Any]) -> None:
    """Go to where a checkpoint was made, by whatever driver, without anything sampled ahead.

    Prompts whose answers were sampled and not trained on are drawn again.
    """
    if SHARED in saved.get("feeds", {}):
        saved = saved["feeds"][SHARED]
    if "stream" not in saved:
        stream.restore(saved)
        return
    stream.restore(saved["stream"])
    ready = {
        int(ordinal): int(epoch)
        for buffer in saved.get("buffers", {}).values()
        for ordinal, epoch, _ in buffer["ready"]
    }
    groups = saved.get("groups", {})
    stream.give_back(
        [
            Draw(ordinal, epoch, decode_group(groups[str(ordinal)], f"group {ordinal}").prompt)
            for ordinal, epoch in sorted(ready.items())
        ]
    )


async def open_feeds(
    run_file: RunFile,
    given: Given,
    members: Mapping[str, Member],
    reward: Reward | None,
    disposer: Disposer,
) -> list[OpenFeed]:
    """Read the prompts of every feed. reward: of the shared one."""
    feeds = []
    learners = run_file.learners
    shared = tuple(name for name in learners if name in run_file.shared_policies)
    if shared:
        leader = run_file.leader if run_file.leader in shared else shared[0]
        ordered = (leader, *(name for name in shared if name != leader))
        stream = make_stream(members[leader].view, given, members[leader].text)
        feeds.append(OpenFeed(SHARED, run_file, ordered, stream, reward))
    for name in learners:
        if name not in shared:
            view = members[name].view
            own = await make_reward(view, Given(), disposer)
            stream = make_stream(view, Given(), members[name].text)
            feeds.append(OpenFeed(name, view, (name,), stream, own))
    return feeds
