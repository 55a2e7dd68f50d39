"""When sampling ahead of training pays: on a model of engine and trainer, and for real on a CPU.

    python benchmarks/async_pays.py virtual
    python benchmarks/async_pays.py real [--folder runs/async-pays] [--turns 2] [--steps 40]

`virtual`: the real feed and buffers in virtual time, between an engine with a fixed number of
places, each of which makes tokens at a constant speed, and a trainer that takes a constant time a
step. Ideal is max(sampling, training), sampling being all tokens of a step over the speed of all
places. Fails if staleness 2 needs more than 1.05 times that anywhere with moderate lengths.

`real`: a small model adds two-digit numbers and goes on with a long-tailed number of `+`; a judge
looks at the sum and answers after 0.2 to 1 s, without using the processor. The same run, by turns
with the sync driver and with staleness 2. Fails if the latter makes less than 1.4 times the samples
a second, or ends at another accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from paceline.data.buffer import Buffer
from paceline.data.prompts import prompts_from_rows
from paceline.data.stream import PromptStream
from paceline.rollout.feed import Feed
from paceline.rollout.settings import RolloutConfig
from paceline.types import Draw, Episode, Group, Prompt, Sample, Status

MAX_OF_IDEAL = 1.05
MIN_SPEED_UP = 1.4
MAX_GAP = 0.06
"""Between the mean accuracies of the two ways, on 512 held-out sums."""

# In virtual time

BATCH, ANSWERS, PLACES = 16, 8, 32
WARM_UP, STEPS = 10, 50
TAILS = {"equal": 0.0, "moderate": 0.5, "long": 1.0, "extreme": 1.5}
"""Sigma of the log-normal lengths: the longest answer of a step is about 1, 3.5, 8, 15 times as
long as the mean. Since the places turn over four times a step, it takes about 0.25, 0.9, 2 and 4
times as long as sampling a step should."""
RATIOS = (0.2, 0.5, 1.0, 2.0, 5.0)
HELD_TO_IT = ("equal", "moderate")
MODES: tuple[tuple[str, int], ...] = (
    ("sync", 0),
    ("staleness 1", 1),
    ("staleness 2", 2),
    ("staleness 4", 4),
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody")
        self._now += timeout
        return []


class SyntheticEngine:
    """Plays a group: each answer takes a place for as long as it is long."""

    def __init__(self, places: int, sigma: float, mean_s: float) -> None:
        self.config = RolloutConfig(prompts_per_step=BATCH, samples_per_prompt=ANSWERS)
        self.reward = None
        self._places = asyncio.Semaphore(places)
        self._sigma, self._mean_s = sigma, mean_s

    def lengths(self, draw: Draw) -> list[float]:
        rng = random.Random(draw.ordinal)
        shift = math.log(self._mean_s) - self._sigma**2 / 2
        return [math.exp(rng.gauss(shift, self._sigma)) for _ in range(ANSWERS)]

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        async def answer(length: float) -> None:
            async with self._places:
                await asyncio.sleep(length)

        await asyncio.gather(*(answer(s) for draw in draws for s in self.lengths(draw)))
        return [_group(draw) for draw in draws]


def _group(draw: Draw) -> Group:
    episodes = [
        Episode(draw.prompt.id, i, [
            Sample("policy", draw.prompt.id, i, [3, 4], [False, True], [0.0, -1.0], [-1, 0],
                   Status.COMPLETED, reward=float(i % 2)),
        ])
        for i in range(ANSWERS)
    ]  # fmt: skip
    return Group(draw.prompt, episodes, draw.ordinal)


async def step_s(staleness: int, sigma: float, sampling_s: float, training_s: float) -> float:
    """Seconds of a step, once it is under way."""
    engine = SyntheticEngine(PLACES, sigma, sampling_s * PLACES / (BATCH * ANSWERS))
    prompts = [Prompt(str(i), text="1=") for i in range(1000)]
    stream = PromptStream([prompts_from_rows(prompts, "a")], seed=0)
    buffer = Buffer("policy", batch=BATCH, max_staleness=staleness)
    mode: Any = "continuous" if staleness else "wave"
    feed = Feed(stream, engine, {"policy": buffer}, wave=BATCH, mode=mode)
    producer = asyncio.create_task(feed.run())
    ends = []
    for step in range(1, WARM_UP + STEPS + 1):
        await feed.take("policy")
        await asyncio.sleep(training_s)
        buffer.learned()
        buffer.published(step)
        ends.append(asyncio.get_running_loop().time())
    producer.cancel()
    await asyncio.wait({producer})
    return (ends[-1] - ends[WARM_UP - 1]) / STEPS


def in_virtual_time(work: Coroutine[Any, Any, float]) -> float:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def measure_virtual() -> bool:
    """Step times as multiples of the ideal; True if staleness 2 is near it."""
    is_near = True
    print("| lengths | sampling / training |", " | ".join(name for name, _ in MODES), "|")
    print("|---|---|", "---|" * len(MODES), sep="")
    for tail, sigma in TAILS.items():
        for ratio in RATIOS:
            sampling_s, training_s = 10.0, 10.0 / ratio
            ideal_s = max(sampling_s, training_s)
            found = {
                name: in_virtual_time(step_s(s, sigma, sampling_s, training_s)) / ideal_s
                for name, s in MODES
            }
            print(f"| {tail} | {ratio:g} |", " | ".join(f"{x:.2f}" for x in found.values()), "|")
            if tail in HELD_TO_IT:
                is_near = is_near and found["staleness 2"] <= MAX_OF_IDEAL
    return is_near


# For real

JUDGE = """\
import random
import time


def judge(completion, answer):
    time.sleep(random.uniform(0.2, 1.0))
    return float(completion.partition("+")[0] == answer)


def at_once(completion, answer):
    return float(completion.partition("+")[0] == answer)
"""
WORKERS = 48
PROMPTS, SAMPLES, MAX_TOKENS = 6, 8, 48


def warmed_up(folder: Path) -> str:
    """A model that adds carelessly and then writes a long-tailed number of `+`."""
    import paceline

    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import quickstart

    done = folder / "warm-up/checkpoints"
    if not done.is_dir():
        quickstart.make_model(folder / "start", 0)
        train, _ = quickstart.make_prompts(0)
        rng = random.Random(1)
        rows = []
        for row in quickstart.careless_rows(train, 0, 500 * 128):
            tail = "+" * min(MAX_TOKENS - 4, int(rng.lognormvariate(1.6, 0.9)))
            said = {"completion": row.metadata["completion"] + tail}
            rows.append(Prompt(row.id, text=row.text, metadata=said))
        paceline.sft(
            folder / "start", rows, num_steps=500, name="warm-up",
            run={"dir": str(folder), "seed": 0}, rollout={"prompts_per_step": 128},
            trainer={"lr": 2e-3, "betas": [0.9, 0.95], "lr_schedule": "cosine", "threads": 1},
            checkpoint={"every": 500}, observe={"samples": "none", "console": "off"},
        )  # fmt: skip
    return str(folder / "warm-up/checkpoints/step-000500/policies/policy/model")


def train_once(folder: Path, name: str, model: str, steps: int, staleness: int) -> dict[str, float]:
    """Samples a second, evals and the start left out, and the accuracy at the end."""
    import quickstart

    import paceline

    train, held_out = quickstart.make_prompts(0)
    shutil.rmtree(folder / name, ignore_errors=True)
    judge = (folder / "judge.py").absolute()
    judge.write_text(JUDGE)
    lines = [json.dumps({"prompt": p.text, "answer": p.answer}) + "\n" for p in held_out]
    (folder / "held.jsonl").write_text("".join(lines))
    cpu_s = time.process_time()
    ahead: dict[str, Any] = {"max_staleness": staleness, "pause": "keep"} if staleness else {}
    paceline.train(
        model, train, num_steps=steps, name=name,
        run={"dir": str(folder), "seed": 0},
        settings={"reward": {"function": f"{judge}:judge", "workers": WORKERS}},
        rollout={
            "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES,
            "sampling": {"max_tokens": MAX_TOKENS},
        },
        algorithm={"clip_high": 0.28, "correction": {"high": 2.0}},
        trainer={"lr": 5e-4, "betas": [0.9, 0.95], "lr_warmup_steps": 5, "threads": 1},
        engine={"max_batch": 256},
        evals={"every": steps, "sets": [{
            "name": "eval", "data": {"path": str((folder / "held.jsonl").absolute())},
            "reward": {"function": f"{judge}:at_once"},
        }]},
        checkpoint={"every": "never"},
        schedule=ahead,
        observe={"samples": "none", "console": "off"},
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    # The first step samples with nothing to overlap, and the last has the eval.
    timed = rows[2:-1]
    cpu_s = time.process_time() - cpu_s
    return {
        "cpu_s_a_step": cpu_s / steps,
        "samples_per_s": sum(row["rollout/samples"] for row in timed)
        / sum(row["time/step_s"] for row in timed),
        "accuracy": rows[-1]["eval/eval/reward"],
        "before": rows[0]["eval/eval/reward"],
        "tokens_max_of_mean": statistics.fmean(
            row["rollout/answer_tokens_max"] / row["rollout/answer_tokens"] for row in timed
        ),
        "learn_s": statistics.fmean(row["time/learn_s"] for row in timed),
        "wait_s": statistics.fmean(row["time/collect_s"] for row in timed),
        "staleness": statistics.fmean(row.get("rollout/staleness", 0.0) for row in timed),
        "effective_share": statistics.fmean(row["train/effective_sample_share"] for row in timed),
    }


def measure_real(folder: Path, turns: int, steps: int) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    model = warmed_up(folder)
    found: dict[str, list[dict[str, float]]] = {"sync": [], "staleness 2": []}
    for turn in range(turns):
        for name, staleness in (("sync", 0), ("staleness 2", 2)):
            slug = f"{name.replace(' ', '-')}-{turn}"
            found[name].append(train_once(folder, slug, model, steps, staleness))
            rounded = {key: round(value, 3) for key, value in found[name][-1].items()}
            print(name, json.dumps(rounded), flush=True)
    speed = {n: statistics.fmean(r["samples_per_s"] for r in runs) for n, runs in found.items()}
    accuracy = {n: statistics.fmean(r["accuracy"] for r in runs) for n, runs in found.items()}
    speed_up = speed["staleness 2"] / speed["sync"]
    gap = accuracy["staleness 2"] - accuracy["sync"]
    print(f"{speed_up:.2f} times the samples a second; accuracy {gap:+.3f}")
    return speed_up >= MIN_SPEED_UP and abs(gap) <= MAX_GAP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("virtual", "real"))
    parser.add_argument("--folder", type=Path, default=Path("runs/async-pays"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.what == "virtual":
        return 0 if measure_virtual() else 1
    return 0 if measure_real(options.folder, options.turns, options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
