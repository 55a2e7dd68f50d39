"""What every number means: one line for each name that a run may write.

A name may hold placeholders: `eval/<set>/reward` describes `eval/heldout/reward`; a placeholder
stands for any text without a slash. `python -m paceline.observe.catalogue` writes docs/metrics.md.
"""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Meaning(NamedTuple):
    """What a number says."""

    text: str
    unit: str
    over: str
    """What the mean, sum or extreme is taken over."""


# Alphabetical. name: meaning, unit, over what.
CATALOGUE: dict[str, Meaning] = {
    "critic/empty_batches": Meaning(
        "Optimizer steps without a trained token: loss 0", "updates", "sum over the step"
    ),
    "critic/explained_variance": Meaning(
        "Share of the returns' variance that the critic predicted; below 0: worse than a constant",
        "",
        "trained tokens of the step",
    ),
    "critic/grad_norm": Meaning(
        "L2 norm of the gradient before clipping", "", "mean over optimizer steps"
    ),
    "critic/loss": Meaning(
        "Loss, reduced with its one global denominator", "", "mean over optimizer steps"
    ),
    "critic/lr": Meaning("Learning rate", "", "mean over optimizer steps"),
    "critic/nonfinite_values": Meaning(
        "NaN or infinite predictions", "share", "mean over trained tokens"
    ),
    "critic/return": Meaning("What should be predicted", "", "mean over trained tokens"),
    "critic/skipped_updates": Meaning(
        "Optimizer steps skipped for a non-finite loss or gradient", "updates", "sum over the step"
    ),
    "critic/trained_tokens": Meaning(
        "Trained tokens, once for each pass over them", "tokens", "sum over the step"
    ),
    "critic/value": Meaning("Prediction", "", "mean over trained tokens"),
    "critic/value_clip_fraction": Meaning(
        "Tokens whose prediction moved further than value_clip", "share", "mean over trained tokens"
    ),
    "critic/value_error": Meaning(
        "Distance of the prediction from the return", "", "mean over trained tokens"
    ),
    "eval/<set>/failed_samples": Meaning(
        "Answers that could not be scored", "answers", "sum over the set"
    ),
    "eval/<set>/num_tokens": Meaning("Tokens per answer", "tokens", "mean over scored answers"),
    "eval/<set>/pass_at_<k>": Meaning(
        "Chance that one of k answers passes, without bias",
        "",
        "mean over prompts with k scored answers",
    ),
    "eval/<set>/pass_at_<k>/high": Meaning(
        "Upper end of its 95 % interval, by prompt", "", "the set"
    ),
    "eval/<set>/pass_at_<k>/low": Meaning(
        "Lower end of its 95 % interval, by prompt", "", "the set"
    ),
    "eval/<set>/prompts": Meaning("Prompts with a scored answer", "prompts", "sum over the set"),
    "eval/<set>/reward": Meaning(
        "Reward", "", "mean over prompts of the mean over a prompt's scored answers"
    ),
    "eval/<set>/reward/high": Meaning("Upper end of its 95 % interval, by prompt", "", "the set"),
    "eval/<set>/reward/low": Meaning("Lower end of its 95 % interval, by prompt", "", "the set"),
    "eval/<set>/role/<role>/reward": Meaning(
        "Reward of one role, where the environment has several",
        "",
        "mean over prompts of the mean over a prompt's scored episodes",
    ),
    "eval/<set>/samples": Meaning("Scored answers", "answers", "sum over the set"),
    "eval/<set>/skipped": Meaning("1 if the eval failed and has no numbers, else 0", "", "the set"),
    "eval/<set>/step": Meaning(
        "Step whose weights were measured; with `evals.background` it lies before the row's",
        "steps",
        "the set",
    ),
    "eval/<set>/truncated": Meaning(
        "Answers that ended at the token limit", "share", "mean over scored answers"
    ),
    "perf/<area>_peak_device_mib": Meaning(
        "Most memory of a GPU that the trainer's tensors have taken so far", "MiB", "max over ranks"
    ),
    "perf/<area>_peak_host_mib": Meaning(
        "Most memory that a rank's process has held so far", "MiB", "max over ranks"
    ),
    "perf/peak_memory_mib": Meaning(
        "Most memory that the process has held so far", "MiB", "max over the process"
    ),
    "perf/tokens_per_s": Meaning(
        "Sampled tokens, by the whole time of the step", "tokens/s", "the step"
    ),
    "rollout/all_correct": Meaning(
        "Groups whose rewards are all equal and above 0", "share", "mean over scored groups"
    ),
    "rollout/all_wrong": Meaning(
        "Groups whose rewards are all equal and not above 0", "share", "mean over scored groups"
    ),
    "rollout/answer_tokens": Meaning(
        "Tokens of an answer, end token included", "tokens", "mean over answers"
    ),
    "rollout/answer_tokens_max": Meaning("Tokens of the longest answer", "tokens", "max"),
    "rollout/answer_tokens_min": Meaning("Tokens of the shortest answer", "tokens", "min"),
    "rollout/buffer_groups": Meaning(
        "Finished groups left in the buffer once a step has taken its own", "groups", "the step"
    ),
    "rollout/discarded_groups": Meaning(
        "Surplus of over-sampling, given back to the data", "groups", "sum over the step"
    ),
    "rollout/dropped_groups/<reason>": Meaning(
        "Groups used but not trained on: zero_variance (dynamic sampling), failed, absent (the "
        "policy had no part), oldest (its buffer was full) or straggler",
        "groups",
        "sum over the step",
    ),
    "rollout/elo": Meaning(
        "Rating of the policy against its earlier selves, 1000 at the start; see elo-<role>.json",
        "Elo points",
        "after the step",
    ),
    "rollout/env/<name>": Meaning("A number of the environment", "", "mean over episodes"),
    "rollout/failed": Meaning(
        "Samples that reward, environment or engine failed", "share", "mean over samples"
    ),
    "rollout/failures/<origin>/<cause>": Meaning(
        "Samples that reward, env or engine failed, by cause", "samples", "sum over the step"
    ),
    "rollout/groups": Meaning("Groups to train on", "groups", "sum over the step"),
    "rollout/interruptions": Meaning(
        "Times a publish ended an answer early, which went on after it", "times", "sum over groups"
    ),
    "rollout/lost_tokens": Meaning(
        "Tokens sampled before a restart for prompts that began anew", "tokens", "sum over the step"
    ),
    "rollout/missing_groups": Meaning(
        "Groups short of rollout.prompts_per_step", "groups", "sum over the step"
    ),
    "rollout/mixed_versions": Meaning(
        "Samples with tokens of several versions of the weights", "share", "mean over samples"
    ),
    "rollout/prompt_tokens": Meaning(
        "Tokens before the first answer", "tokens", "mean over samples"
    ),
    "rollout/refill_waves": Meaning(
        "Waves after the first, to replace dropped groups", "waves", "sum over the step"
    ),
    "rollout/reward": Meaning(
        "Reward, shaping included, also of groups that are not trained on",
        "",
        "mean over scored episodes",
    ),
    "rollout/reward_group_std": Meaning(
        "Standard deviation (divided by n) of the rewards of one group", "", "mean over groups"
    ),
    "rollout/reward_max": Meaning("Highest reward", "", "max over scored episodes"),
    "rollout/reward_min": Meaning("Lowest reward", "", "min over scored episodes"),
    "rollout/reward_part/<name>": Meaning(
        "A named part of the reward, unweighted", "", "mean over scored samples"
    ),
    "rollout/reward_std": Meaning(
        "Standard deviation (divided by n) of all rewards of the step", "", "scored episodes"
    ),
    "rollout/role/<role>/answer_tokens": Meaning(
        "Tokens of an answer of the role, in runs with several roles", "tokens", "mean over answers"
    ),
    "rollout/role/<role>/episodes": Meaning(
        "Scored episodes in which the role spoke", "episodes", "sum over the step"
    ),
    "rollout/role/<role>/reward": Meaning(
        "Reward of the role, shaping included",
        "",
        "mean over scored episodes in which the role spoke",
    ),
    "rollout/role/<role>/turns": Meaning(
        "Answers of the role", "answers", "mean over scored episodes in which the role spoke"
    ),
    "rollout/sampled_tokens": Meaning(
        "Tokens of the answers that could be scored", "tokens", "sum over the step"
    ),
    "rollout/samples": Meaning(
        "Samples made, failed ones included", "samples", "sum over the step"
    ),
    "rollout/staleness": Meaning(
        "Steps between the weights served when a group began and those it is trained from",
        "steps",
        "mean over groups",
    ),
    "rollout/staleness_max": Meaning("The most of them", "steps", "max over groups"),
    "rollout/staleness_share/<steps>": Meaning(
        "Groups that are so many steps old, see rollout/staleness", "share", "mean over groups"
    ),
    "rollout/stragglers": Meaning(
        "Groups that kept the step waiting for too long", "groups", "sum over the step"
    ),
    "rollout/truncated": Meaning(
        "Answers that ended at the token limit", "share", "mean over scored samples"
    ),
    "rollout/unknown_versions": Meaning(
        "Samples with tokens of which nobody knows the version", "share", "mean over samples"
    ),
    "rollout/zero_variance": Meaning(
        "Groups whose rewards are all equal", "share", "mean over scored groups"
    ),
    "time/<phase>_s": Meaning(
        "Wall time in a phase: collect, learn, save, publish, eval", "s", "sum over the step"
    ),
    "time/eval/<set>": Meaning("Wall time of the eval", "s", "the set"),
    "time/gate_wait_s": Meaning(
        "With several policies: the leader's wait until the others rest, to save or measure",
        "s",
        "sum over the step",
    ),
    "time/held_s": Meaning(
        "With several policies: how long a policy was kept while the leader saved or measured",
        "s",
        "sum over the step",
    ),
    "time/save_background_s": Meaning(
        "From the copies to the durable checkpoint, while the run went on; in the row that was "
        "open then",
        "s",
        "sum over the saves that ended",
    ),
    "time/step_s": Meaning("Wall time since the row before this one", "s", "the step"),
    "train/adapter_norm": Meaning(
        "Frobenius norm of what an adapter (trainer.lora) adds to the weights, after the optimizer "
        "step",
        "",
        "mean over optimizer steps",
    ),
    "train/advantage_abs": Meaning(
        "Size of the advantage",
        "",
        "mean over trainable episodes; over trained tokens where each has its own",
    ),
    "train/approx_kl": Meaning(
        "k3 of KL(old||current): how far the updates moved the policy",
        "nats",
        "mean over trained tokens",
    ),
    "train/baseline/<role>": Meaning(
        "Running baseline that the role's rewards are compared with", "", "the step"
    ),
    "train/clip_fraction": Meaning(
        "Tokens whose ratio is clipped", "share", "mean over trained tokens"
    ),
    "train/clip_fraction_high": Meaning(
        "Tokens clipped above 1 + clip_high, advantage > 0 (cispo: any)",
        "share",
        "mean over trained tokens",
    ),
    "train/clip_fraction_low": Meaning(
        "Tokens clipped below 1 - clip_low, advantage < 0 (cispo: any)",
        "share",
        "mean over trained tokens",
    ),
    "train/correction_bounded": Meaning(
        "Correction weights changed by their bounds", "share", "mean over weights"
    ),
    "train/correction_vetoed": Meaning(
        "Rows taken out of the loss by correction.veto", "share", "mean over rows"
    ),
    "train/correction_weight": Meaning(
        "Correction weight, after its bounds", "", "mean over weights"
    ),
    "train/dual_clip_fraction": Meaning(
        "Tokens held by dual_clip", "share", "mean over trained tokens"
    ),
    "train/effective_sample_share": Meaning(
        "1 / mean of the squared correction weights, before their bounds; without a correction, of "
        "each token's ratio of the trainer's to the engine's probability",
        "share",
        "all weights",
    ),
    "train/empty_batches": Meaning(
        "Optimizer steps without a trained token: loss 0", "updates", "sum over the step"
    ),
    "train/entropy": Meaning(
        "Entropy of the next-token distribution", "nats", "mean over trained tokens"
    ),
    "train/grad_norm": Meaning(
        "L2 norm of the gradient before clipping", "", "mean over optimizer steps"
    ),
    "train/kl_reference": Meaning(
        "KL to the frozen reference, by kl_estimator", "nats", "mean over trained tokens"
    ),
    "train/kl_reward": Meaning(
        "KL to the frozen reference, taken off the reward", "nats", "mean over trained tokens"
    ),
    "train/kl_teacher": Meaning(
        "KL to the teacher: from the sampled token, or over its top k",
        "nats",
        "mean over trained tokens",
    ),
    "train/loss": Meaning(
        "Loss, reduced with its one global denominator", "", "mean over optimizer steps"
    ),
    "train/lr": Meaning("Learning rate", "", "mean over optimizer steps"),
    "train/masked_episodes": Meaning(
        "Trainable episodes without a trained token", "episodes", "sum over the step"
    ),
    "train/mismatch_abs": Meaning(
        "Distance of the trainer's from the engine's log-prob", "nats", "mean over trained tokens"
    ),
    "train/mismatch_far": Meaning(
        "Tokens that the trainer finds less than half or more than twice as likely as the engine",
        "share",
        "mean over trained tokens",
    ),
    "train/mismatch_kl": Meaning(
        "k3 of KL(engine||trainer) on the sampled tokens", "nats", "mean over trained tokens"
    ),
    "train/mismatch_max": Meaning(
        "Largest distance of the trainer's from the engine's log-prob", "nats", "max over the step"
    ),
    "train/mismatch_ratio": Meaning(
        "Ratio of the trainer's to the engine's probability; 1 if they agree",
        "",
        "mean over trained tokens",
    ),
    "train/nll": Meaning(
        "Negative log-likelihood of given tokens", "nats", "mean over trained tokens"
    ),
    "train/nonfinite_kl_rewards": Meaning(
        "NaN or infinite log-ratios to the reference in the reward", "tokens", "sum over the step"
    ),
    "train/nonfinite_log_ratio": Meaning(
        "NaN or infinite log-ratios to the old policy", "share", "mean over trained tokens"
    ),
    "train/nonfinite_mismatch": Meaning(
        "NaN or infinite differences to the engine's log-probs", "share", "mean over trained tokens"
    ),
    "train/nonfinite_reference_log_ratio": Meaning(
        "NaN or infinite log-ratios to the reference", "share", "mean over trained tokens"
    ),
    "train/nonfinite_teacher": Meaning(
        "NaN or infinite log-ratios to the teacher", "share", "mean over trained tokens"
    ),
    "train/policy_loss": Meaning(
        "Loss without KL and entropy terms", "", "mean over trained tokens, weighted as in the loss"
    ),
    "train/ratio": Meaning(
        "Probability now, by that before the first update", "", "mean over trained tokens"
    ),
    "train/return": Meaning(
        "Reward that follows a token, discounted, KL included", "", "mean over trained tokens"
    ),
    "train/skipped_updates": Meaning(
        "Optimizer steps skipped for a non-finite loss or gradient", "updates", "sum over the step"
    ),
    "train/small_groups": Meaning(
        "Groups with fewer than two trainable episodes: advantage 0", "groups", "sum over the step"
    ),
    "train/trained_tokens": Meaning(
        "Trained tokens, once for each pass over them", "tokens", "sum over the step"
    ),
    "train/untrainable_episodes": Meaning(
        "Episodes that failed, were aborted or not scored", "episodes", "sum over the step"
    ),
    "train/zero_variance_groups": Meaning(
        "Groups whose rewards are all equal: advantage 0", "groups", "sum over the step"
    ),
    "train/zero_variance_rollouts": Meaning(
        "Rollouts whose returns are all equal: advantage 0", "rollouts", "sum over the step"
    ),
}

AREAS = {
    "rollout": "Answers as they were sampled, before anything is masked",
    "train": "Credit, loss and optimizer",
    "critic": "A critic's loss and optimizer",
    "eval": "Evals, by set",
    "time": "Wall time; differs from run to run",
    "perf": "Rates and memory; differ from run to run",
}


@cache
def _patterns() -> list[tuple[re.Pattern[str], Meaning]]:
    """Names with fewer placeholders first, so that a literal name wins."""
    names = sorted(CATALOGUE, key=lambda name: (name.count("<"), name))
    return [(_compile(name), CATALOGUE[name]) for name in names]


def _compile(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(re.escape(part) for part in parts))


def describe(name: str) -> Meaning | None:
    """The meaning of a metric; None if the catalogue does not know the name.

    Example: describe("time/collect_s").unit == "s"
    """
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)


def nearest(name: str) -> list[str]:
    """Names of the catalogue that look like this one, best first."""
    return get_close_matches(name, CATALOGUE, n=3, cutoff=0.5)


def render_markdown() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Each row of `metrics.jsonl` is one step of one policy. The console, TensorBoard and "
        "Weights & Biases show the same numbers. `<...>` stands for a name from the run.",
        "",
        "Everything outside `time/` and `perf/` is bit for bit the same in a run that was killed "
        "and resumed as in one that was not.",
    ]
    for area, title in AREAS.items():
        lines += ["", f"## {area}/", "", f"{title}.", ""]
        lines += ["| name | meaning | unit | over |", "|---|---|---|---|"]
        for name in sorted(CATALOGUE):
            if name.startswith(f"{area}/"):
                lines.append("| " + " | ".join([f"`{name}`", *map(_cell, CATALOGUE[name])]) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/metrics.md")
    target.write_text(render_markdown(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main()
