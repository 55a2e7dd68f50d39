"""Every sample of a step in one file: `samples/step-000012.jsonl.gz`, one object a line.

The answers to an eval set lie beside them, in `samples/eval-<set>/step-000012.jsonl.gz`. Where a
run has several policies, each counts its own steps, and has them in `samples/policy-<name>/`. The
bytes depend on the samples alone, so two runs that sampled the same have equal files.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.errors import DataError, PacelineError
from paceline.observe.files import (
    REAL_FILES,
    Files,
    as_number,
    clear_leftovers,
    encode_json,
    write_atomically,
)
from paceline.types import Group, JsonValue, Prompt, Sample

NAME = re.compile(r"step-(\d{6,})\.jsonl\.gz")
EVAL_PREFIX = "eval-"
POLICY_PREFIX = "policy-"


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample as it was kept.

    Example: tokens [5, 6, 7, 2] of which the last two were sampled give mask_runs [2, 2] and two
    log-probs.
    """

    prompt_id: str
    draw: int
    episode: int
    role: str
    policy: str
    status: str
    finish: str
    cause: str | None
    reward: float | None
    parts: dict[str, float]
    advantage: float | list[float] | None
    """One number if all trained tokens have the same; None if none was given."""
    versions: list[int]
    """Oldest and newest version of the weights that made its tokens; empty without any."""
    num_tokens: int
    """Tokens that the policy chose."""
    text: str
    prompt: str
    tokens: list[int]
    mask_runs: list[int]
    """Lengths of the runs of tokens outside and inside the mask in turn, outside first."""
    logprobs: list[float]
    """Of the tokens inside the mask, with the 9 digits that make a float32 exact."""
    row: int = 0
    detail: str = ""
    """More about the cause, for people to read."""
    temperature: float = 1.0
    version_runs: list[list[int]] | None = None
    """[version, number of tokens inside the mask] in turn, if there are several versions."""
    dropped: str | None = None
    """Why its group was not trained on; None if it was."""
    label: str = ""
    """Which of several players spoke, such as the earlier self that was drawn."""
    learns: bool = True
    """False for what a role said that does not learn: never trained on."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys that a later version wrote."""

    @property
    def mask(self) -> list[bool]:
        return [bool(i % 2) for i, run in enumerate(self.mask_runs) for _ in range(run)]

    @property
    def token_versions(self) -> list[int]:
        """Version of the weights that made each token inside the mask; empty if none is known."""
        if self.version_runs is not None:
            return [version for version, count in self.version_runs for _ in range(count)]
        return self.versions[:1] * self.num_tokens


class SampleWriter:
    """Writes into `folder`, such as `runs/x/samples`, at most `limit` samples a step."""

    def __init__(self, folder: Path, limit: int | None = None, files: Files = REAL_FILES) -> None:
        self._folder = folder
        self._limit = limit
        self._files = files

    @property
    def folder(self) -> Path:
        return self._folder

    def has_files(self) -> bool:
        """True if samples of a step, or answers to an eval set, are there."""
        evals = (eval_folder(self._folder, name) for name in eval_names(self._folder))
        policies = (policy_folder(self._folder, name) for name in policy_names(self._folder))
        return any(sample_files(folder) for folder in (self._folder, *evals, *policies))

    def start(self, step: int) -> None:
        """Remove the files of later steps, which are done again, and half-written ones."""
        clear_leftovers(self._folder, "step-*.jsonl.gz", self._files)
        for number, path in sample_files(self._folder).items():
            if number > step:
                self._files.remove(path)
        for name in eval_names(self._folder):
            self.of_eval(name).start(step)

    def of_eval(self, name: str) -> SampleWriter:
        """The writer of the answers to an eval set."""
        return SampleWriter(eval_folder(self._folder, name), self._limit, self._files)

    def of_policy(self, name: str) -> SampleWriter:
        """The writer of the samples of one of several policies."""
        return SampleWriter(policy_folder(self._folder, name), self._limit, self._files)

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        *,
        policy: str | None = None,
        dropped: Sequence[tuple[Group, str]] = (),
    ) -> Path:
        """Keep the samples of one step, in the order of the groups, then the dropped ones.

        The samples of an episode are followed by what roles said in it that do not learn.
        `advantages`: per sample of `groups`, one number a token, of `policy` alone if it is named.
        `policy`: leave out the samples of other policies that learn. `dropped`: groups that were
        sampled and not trained on, each with the reason. Raises PacelineError if the disk refuses.
        """
        trained = [sample for group in groups for sample in group.samples(policy)]
        given = [None] * len(trained) if advantages is None else advantages
        credit = iter([columns for _, columns in zip(trained, given, strict=True)])
        objects: list[dict[str, JsonValue]] = []
        for group, reason in [*((group, None) for group in groups), *dropped]:
            for episode in group.episodes:
                for sample in episode.samples:
                    if policy in (None, sample.policy):
                        of_sample = next(credit) if reason is None else None
                        objects.append(_as_object(group, sample, of_sample, reason))
                objects += [_of_other(group, sample, reason) for sample in episode.others]
        kept = objects[: self._limit]
        path = self._folder / f"step-{step:06d}.jsonl.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, compress(b"".join(map(encode_json, kept))), self._files)
        except OSError as error:
            raise PacelineError(f"can not write {path}: {error}") from error
        return path


def compress(data: bytes) -> bytes:
    """gzip without a time or a name in it."""
    target = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=3, fileobj=target, mtime=0) as file:
        file.write(data)
    return target.getvalue()


def _as_object(
    group: Group, sample: Sample, advantages: Sequence[float] | None, dropped: str | None
) -> dict[str, JsonValue]:
    sampled = [t for t, inside in enumerate(sample.mask) if inside]
    made_by = [sample.versions[t] for t in sampled if sample.versions[t] >= 0]
    return {
        "prompt_id": sample.prompt_id,
        "draw": group.draw,
        "episode": sample.episode,
        "row": sample.row,
        "role": sample.role,
        "policy": sample.policy,
        "status": sample.status.value,
        "finish": sample.finish,
        "cause": sample.cause,
        "detail": sample.detail,
        "temperature": sample.temperature,
        "reward": sample.reward,
        "parts": sample.reward_parts,
        "advantage": _advantage(advantages, sampled),
        "versions": [min(made_by), max(made_by)] if made_by else [],
        "version_runs": _version_runs([sample.versions[t] for t in sampled]),
        "num_tokens": len(sampled),
        "dropped": dropped,
        "text": sample.text,
        "prompt": prompt_text(group.prompt),
        "tokens": sample.tokens,
        "mask_runs": _runs(sample.mask),
        "logprobs": as_float32(sample.logprobs[t] for t in sampled),
    }


def _of_other(group: Group, sample: Sample, dropped: str | None) -> dict[str, JsonValue]:
    item = _as_object(group, sample, None, dropped)
    return item | {"label": sample.label, "learns": False}


def as_float32(values: Iterable[float]) -> list[float]:
    """The nearest float32 of each, as the short decimal number that stands for it.

    Example: 0.1 + 0.2 -> 0.300000012
    """
    return [float(f"{value:.9g}") for value in array("f", values)]


def _advantage(values: Sequence[float] | None, sampled: list[int]) -> float | list[float] | None:
    if values is None or not sampled:
        return None
    found = [values[t] for t in sampled]
    return found[0] if found.count(found[0]) == len(found) else found


def _runs(mask: Sequence[bool]) -> list[int]:
    runs = [len(list(same)) for _, same in groupby(mask)]
    return [0, *runs] if mask and mask[0] else runs


def _version_runs(versions: Sequence[int]) -> list[list[int]] | None:
    runs = [[version, len(list(same))] for version, same in groupby(versions)]
    return runs if len(runs) > 1 else None


def prompt_text(prompt: Prompt) -> str:
    """A prompt for people to read: the text, or one line a message."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def sample_files(folder: Path) -> dict[int, Path]:
    """Step -> file, in the order of the steps."""
    found = {}
    for path in folder.glob("step-*.jsonl.gz"):
        match = NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def eval_folder(folder: Path, name: str) -> Path:
    """Where the answers to an eval set lie, below the samples of a run."""
    return folder / f"{EVAL_PREFIX}{name}"


def eval_names(folder: Path) -> list[str]:
    """Eval sets whose answers were kept."""
    found = folder.glob(f"{EVAL_PREFIX}*")
    return sorted(path.name.removeprefix(EVAL_PREFIX) for path in found if path.is_dir())


def policy_folder(folder: Path, name: str) -> Path:
    """Where the samples of one of several policies lie, below the samples of a run."""
    return folder / f"{POLICY_PREFIX}{name}"


def policy_names(folder: Path) -> list[str]:
    """Policies that have a folder of their own; none where a run has one policy."""
    found = folder.glob(f"{POLICY_PREFIX}*")
    return sorted(path.name.removeprefix(POLICY_PREFIX) for path in found if path.is_dir())


def find_samples(folder: Path, step: int | None = None) -> tuple[int, Path]:
    """The file of a step, or of the last one; DataError names the nearest step that has one."""
    files = sample_files(folder)
    if not files:
        raise DataError(
            f"no samples in {folder}: the run has not finished a step, or observe.samples is 'none'"
        )
    if step is None:
        step = max(files)
    if step not in files:
        nearest = min(files, key=lambda other: (abs(other - step), other))
        raise DataError(
            f"no samples of step {step} in {folder}; the nearest step is {nearest} "
            f"(there are {len(files)}, from {min(files)} to {max(files)})"
        )
    return step, files[step]


def read_samples(path: Path) -> list[SampleRecord]:
    """All samples of a file; DataError says what is wrong with it, and where."""
    try:
        with gzip.open(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged ({error}): it was cut off or changed after it was written; the "
            "run writes it anew if it is resumed from a checkpoint before that step"
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_from_object(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}, line {number} is no sample: {error}") from error
    return records


def _from_object(item: dict[str, Any]) -> SampleRecord:
    known = {key: value for key, value in item.items() if key in SampleRecord.__slots__}
    known["reward"] = as_number(item["reward"])
    known["parts"] = {name: as_number(value) for name, value in item["parts"].items()}
    known["logprobs"] = [as_number(value) for value in item["logprobs"]]
    return SampleRecord(**known, extra={k: v for k, v in item.items() if k not in known})
