"""How many CPU threads torch should use: measured, since small models are slower with more.

Results differ in their last bits between thread counts, so the choice is made once in a run,
recorded by the caller and kept on resume.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

MIN_GAIN = 1.15
"""More threads must be this much faster, or one is taken: the rest is left to other work."""
BUDGET_S = 0.2
"""The whole measurement ends by then."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_threads(*, hidden: int = 128, tokens: int = 1024) -> int:
    """1, or all cores if a small training step is clearly faster with them. Takes under 0.3 s.

    hidden, tokens: size of the layer that is timed; give those of the model and micro-batch.
    `OMP_NUM_THREADS` in the environment is taken as it is. The thread setting is left as found.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = available_cores()
    if cores == 1:
        return 1
    before = torch.get_num_threads()
    try:
        times_s = {n: _time_step_s(n, min(hidden, 512), min(tokens, 2048)) for n in (1, cores)}
    finally:
        torch.set_num_threads(before)
    return cores if times_s[1] > MIN_GAIN * times_s[cores] else 1


def _time_step_s(threads: int, hidden: int, tokens: int) -> float:
    """Median time of a forward and backward of one feed-forward block."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    up = torch.randn(hidden, 4 * hidden, generator=generator, requires_grad=True)
    down = torch.randn(4 * hidden, hidden, generator=generator, requires_grad=True)
    taken_s: list[float] = []
    end_s = time.perf_counter() + BUDGET_S / 2
    while len(taken_s) < 2 or (time.perf_counter() < end_s and len(taken_s) < 20):
        start_s = time.perf_counter()
        loss = (torch.nn.functional.silu(x @ up) @ down).square().mean()
        torch.autograd.grad(loss, (up, down))
        taken_s.append(time.perf_counter() - start_s)
    return statistics.median(taken_s[1:])
