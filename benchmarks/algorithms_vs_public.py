"""The package's losses and advantages against the public code of verl and TRL, on the same batches.

Random ragged batches in float64: masks with holes, truncated answers, a group without variance,
an answer that is masked out whole where it says so. Compared are the loss and its gradient with
respect to each log-prob (or the advantages), as the largest difference over all batches, relative
to the largest number. Where the systems differ by design the reason is shown, and the line counts
as a failure if they agree. The results are in `benchmarks/algorithms.md`.

Set up once, in a folder outside the repository (CPU only; ray is imported by verl, not started):

    python -m venv public
    public/bin/pip install . trl==1.16.0 datasets accelerate
    public/bin/pip install --no-deps verl==0.9.1
    public/bin/pip install ray omegaconf codetiming peft pandas psutil "tensordict<=0.10.0" orjson

    PYTHONPATH=. OMP_NUM_THREADS=1 public/bin/python benchmarks/algorithms_vs_public.py
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from public_cases import Tensor, make_case
from public_trl import trl_lines
from public_verl import verl_lines

SEEDS = range(20)
TOLERANCE, ROUNDED = 1e-6, 1e-5


def difference(own: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference, relative to the largest number of each tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
        for a, b in zip(own, theirs, strict=True)
    )


def main() -> None:
    print(f"verl {version('verl')}, TRL {version('trl')}, torch {torch.__version__}\n")
    print("| here | there | largest difference | |\n|---|---|---|---|")
    failures = 0
    for line in [*verl_lines(), *trl_lines()]:
        found = max(difference(*line.compute(make_case(seed, **line.case))) for seed in SEEDS)
        agrees = found < (ROUNDED if line.rounds else TOLERANCE)
        failures += agrees == bool(line.differs)
        verdict = f"differs: {line.differs or 'UNEXPECTED'}"
        if agrees:
            verdict = f"agrees: {line.rounds}" if line.rounds else "agrees"
        print(f"| {line.what} | {line.theirs} | {found:.0e} | {verdict} |")
    if failures:
        sys.exit(f"{failures} lines are not as expected")


if __name__ == "__main__":
    main()
