"""The prompts, the answers and the reward that both systems of `vs_trl.py` are given."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from typing import Any

import torch

SMOLLM2_PROMPTS = (
    "Write one sentence about {a} and {b}.",
    "Which is larger, {a} or {b}? Explain your answer briefly.",
    "Tell a short story in which the numbers {a} and {b} appear.",
    "What is {a} plus {b}? Think step by step.",
)


def problems(task: str) -> list[tuple[str, str]]:
    """Prompts and answers: two-digit sums, or short instructions of uneven length."""
    rng = random.Random(0)
    if task == "quickstart":
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        rng.shuffle(pairs)
        return [(f"{a}+{b}=", str(a + b)[::-1]) for a, b in pairs]
    texts = [rng.choice(SMOLLM2_PROMPTS).format(a=i, b=rng.randrange(100)) for i in range(512)]
    return [(f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n", "e") for t in texts]


def reward_of(task: str, completion: str, answer: str) -> float:
    """1 for the exact sum; or the share of a letter in the answer."""
    return float(completion.strip() == answer) if task == "quickstart" else letter_share(completion)


def letter_share(completion: str) -> float:
    """How much of the answer is the letter e."""
    return completion.count("e") / max(1, len(completion))


def wait() -> str:
    """Until the other system has done its step; returns the line that ended the wait."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    return line


def tell(**numbers: Any) -> None:
    print("@" + json.dumps(numbers), flush=True)


class Clock:
    """Seconds since the last `start`, of processor time and on the wall; waits for the device."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def start(self) -> None:
        self._wait_for_device()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    @property
    def seconds(self) -> dict[str, float]:
        self._wait_for_device()
        return {
            "cpu_s": time.process_time() - self._cpu,
            "wall_s": time.perf_counter() - self._wall,
        }

    def _wait_for_device(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


def peak_mib(device: str = "cpu") -> float:
    """Of the process, or what it has taken of the GPU."""
    if device != "cpu":
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
