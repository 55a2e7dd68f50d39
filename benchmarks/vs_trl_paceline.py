"""Paceline's side of `vs_trl.py`: a run like any other, held between its steps."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vs_trl import TASKS, Task
from vs_trl_task import Clock, peak_mib, problems, tell, wait

import paceline
from paceline.build import recording
from paceline.observe.recorder import Recorder
from paceline.types import Group, Prompt

HERE = Path(__file__).parent
ON_GPU = {"autocast": "bfloat16", "max_tokens_per_micro_batch": 32768, "logprob_chunk_tokens": 8192}
ENGINE_ON_GPU = {"dtype": "bfloat16"}


class Held(Recorder):
    """Waits before each step; after it, tells what it took and which tokens were learned."""

    task: Task
    clock: Clock

    def begin_step(self, policy: str, step: int) -> None:
        super().begin_step(policy, step)
        self._groups: list[list[dict[str, Any]]] = []
        wait()
        self.clock.start()
        self._seconds: dict[str, float] = {}

    def phase(self, name: str, policy: str | None = None) -> Any:
        seconds = self._seconds if self._open_step else {}
        now = time.process_time if self.task.device == "cpu" else time.perf_counter
        return _Timed(super().phase(name, policy), name, seconds, now)

    def samples(self, step: int, policy: str, groups: Sequence[Group], *rest: Any) -> None:
        super().samples(step, policy, groups, *rest)
        self._groups = [
            [
                {"tokens": list(s.tokens), "trained": sum(s.mask)}
                for episode in group.episodes
                for s in episode.samples
            ]
            for group in groups
        ]

    def end_step(self, policy: str, version: int) -> dict[str, float]:
        values = super().end_step(policy, version)
        seconds = self.clock.seconds
        tokens = values["rollout/sampled_tokens"]
        tell(
            **seconds,
            **self._seconds,
            tokens=tokens,
            tokens_per_s=tokens / seconds[self.task.measure],
            reward=values["rollout/reward"],
            peak_mib=peak_mib(self.task.device),
            groups=self._groups,
        )
        return values


class _Timed:
    """A phase whose seconds are kept as well, of the clock that counts."""

    def __init__(
        self, phase: Any, name: str, seconds: dict[str, float], now: Callable[[], float]
    ) -> None:
        self._phase, self._key, self._seconds, self._now = phase, f"{name}_s", seconds, now

    def __enter__(self) -> None:
        self._phase.__enter__()
        self._began = self._now()

    def __exit__(self, *error: object) -> Any:
        self._seconds[self._key] = self._now() - self._began
        return self._phase.__exit__(*error)


def main() -> None:
    name, path, steps, folder, threads, *keys = sys.argv[1:]
    logging.getLogger("paceline").setLevel(logging.ERROR)
    task = TASKS[name]
    torch.set_num_threads(int(threads))
    _hold(task)

    on_cpu = task.device == "cpu"
    rows = [
        Prompt(str(i), text=text, answer=answer) for i, (text, answer) in enumerate(problems(name))
    ]
    settings = dict(key.split("=", 1) for key in keys)
    paceline.train(
        path,
        rows,
        "exact" if name == "quickstart" else f"{HERE / 'vs_trl_task.py'}:letter_share",
        num_steps=int(steps),
        name="paceline",
        settings={key: _value(text) for key, text in settings.items()},
        run={"dir": folder, "seed": 0},
        rollout={
            "prompts_per_step": task.prompts,
            "samples_per_prompt": task.samples,
            "sampling": {"max_tokens": task.max_tokens},
        },
        algorithm={"clip_high": task.clip_high},
        trainer={"lr": task.lr, "betas": list(task.betas), **({} if on_cpu else ON_GPU)},
        engine={"max_batch": task.prompts * task.samples, **({} if on_cpu else ENGINE_ON_GPU)},
        checkpoint={"every": "never"},
    )


def _hold(task: Task) -> None:
    """Let every run of this process record with `Held`."""
    Held.task, Held.clock = task, Clock(task.device)
    recording.Recorder = Held  # type: ignore[misc]


def _value(text: str) -> Any:
    try:
        return {"true": True, "false": False}.get(text) or float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
