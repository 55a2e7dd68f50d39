"""Paceline's side of `vs_trl.py`: a run like any other, held between its steps."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vs_trl import TASKS
from vs_trl_task import Clock, peak_mib, problems, tell, wait

import paceline
from paceline.build import recording
from paceline.observe.recorder import Recorder
from paceline.types import Group, Prompt

HERE = Path(__file__).parent


class Held(Recorder):
    """Waits before each step; after it, tells what it took and which tokens were learned."""

    clock = Clock()

    def begin_step(self, policy: str, step: int) -> None:
        super().begin_step(policy, step)
        self._groups: list[list[dict[str, Any]]] = []
        wait()
        self.clock.start()
        self._cpu_s: dict[str, float] = {}

    def phase(self, name: str, policy: str | None = None) -> Any:
        return _Timed(super().phase(name, policy), name, self._cpu_s if self._open_step else {})

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
            **self._cpu_s,
            tokens=tokens,
            tokens_per_s=tokens / seconds["cpu_s"],
            reward=values["rollout/reward"],
            peak_mib=peak_mib(),
            groups=self._groups,
        )
        return values


class _Timed:
    """A phase whose processor time is kept as well."""

    def __init__(self, phase: Any, name: str, seconds: dict[str, float]) -> None:
        self._phase, self._key, self._seconds = phase, f"{name}_s", seconds

    def __enter__(self) -> None:
        self._phase.__enter__()
        self._began = time.process_time()

    def __exit__(self, *error: object) -> Any:
        self._seconds[self._key] = time.process_time() - self._began
        return self._phase.__exit__(*error)


def main() -> None:
    name, path, steps, folder, threads, *keys = sys.argv[1:]
    logging.getLogger("paceline").setLevel(logging.ERROR)
    task = TASKS[name]
    torch.set_num_threads(int(threads))
    _hold()

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
        trainer={"lr": task.lr, "betas": list(task.betas)},
        engine={"max_batch": task.prompts * task.samples},
        checkpoint={"every": "never"},
    )


def _hold() -> None:
    """Let every run of this process record with `Held`."""
    recording.Recorder = Held  # type: ignore[misc]


def _value(text: str) -> Any:
    try:
        return {"true": True, "false": False}.get(text) or float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
