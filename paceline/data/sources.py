"""`[data]`: where prompts come from. Only configuration; the readers are in the files beside it.

The simple case is one key:      Several sources, mixed by weight:

    [data]                           [[data.sources]]
    path = "prompts.jsonl"           path = "easy.jsonl"
                                     weight = 1

                                     [[data.sources]]
                                     kind = "reasoning_gym"
                                     task = "chain_sum"
                                     weight = 3
"""

from __future__ import annotations

import re
from math import inf
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from paceline.types import Config
from paceline.user_code import split_location

_SLICE = re.compile(r"\[?\s*(-?\d+)?\s*:\s*(-?\d+)?\s*\]?")

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ColumnNames = Annotated[tuple[str, ...], Field(strict=False)]


def parse_slice(text: str) -> slice:
    """The slice that "a:b" or "[a:b]" means; either end may be left out or negative.

    Raises:
        ValueError: if the text has another form.
    """
    match = _SLICE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'{text!r} is not a slice: write "first:end", such as "0:1000" or "-50:"')
    first, end = (None if part is None else int(part) for part in match.groups())
    return slice(first, end)


class ReasoningGymSource(Config):
    """`kind = "reasoning_gym"`: a procedurally generated task (extra `reasoning-gym`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(min_length=1)
    """Name of the task, such as "chain_sum"."""
    size: int = Field(500, gt=0)
    """Number of prompts to generate."""
    seed: int = Field(0, ge=0)
    """Seed of the generator. Independent of `run.seed`, so that runs share their prompts; give an
    eval set another seed than the training set."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task, such as `{ min_terms = 2, max_terms = 4 }`."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that generating may take. It runs in a process of its own."""
    weight: Weight | None = None
    """Share of the draws, relative to the other sources; default: by number of prompts."""
    name: str | None = Field(None, min_length=1)
    """Name in logs and checkpoints; default: the task."""

    @property
    def label(self) -> str:
        return self.name or self.task


class Table(Config):
    """What all sources with rows and columns share."""

    prompt_key: str | None = None
    """Column with the prompt: a text, or a list of chat messages (`role`, `content`). Default:
    "prompt", or "messages" in rows without it."""
    answer_key: str | None = None
    """Column with what the reward compares with; every row must have it. Default: "answer",
    which may be absent."""
    completion_key: str | None = None
    """Column with the completion, for supervised training; every row must have it. Default:
    "completion", which chat messages that end with the assistant's do not need."""
    id_key: str | None = None
    """Column with a unique id, a text or a whole number; default: a hash of the row's content."""
    metadata_keys: ColumnNames | None = None
    """Other columns to keep for the reward; default: all."""
    slice: str | None = None
    """Rows to take, as "first:end" counted from 0 over all rows, bad ones included."""
    weight: Weight | None = None
    """Share of the draws, relative to the other sources; default: by number of prompts."""
    name: str | None = Field(None, min_length=1)
    """Name in logs and checkpoints; default: made of the path."""

    @field_validator("slice")
    @classmethod
    def _check_slice(cls, text: str | None) -> str | None:
        if text is not None:
            parse_slice(text)
        return text


class FileSource(Table):
    """`kind = "file"` (the default): one file with rows."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """The file, relative to the run file."""
    format: Literal["auto", "jsonl", "json", "csv", "parquet"] = "auto"
    """Auto goes by the suffix: .jsonl or .ndjson, .json, .csv, .parquet."""

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).stem


class HuggingFaceSource(Table):
    """`kind = "huggingface"`: a data set of the `datasets` library (extra `datasets`)."""

    kind: Literal["huggingface"] = "huggingface"
    path: str = Field(min_length=1)
    """A folder written by `save_to_disk` or holding data files, or an id on the Hugging Face
    Hub."""
    config: str | None = None
    """Name of the configuration ("subset") of the data set."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or tag of a data set on the Hub; set it to keep the data from changing."""

    @property
    def label(self) -> str:
        return self.name or PurePath(self.path).name


class PythonSource(Table):
    """`kind = "python"`: rows made by your own code."""

    kind: Literal["python"] = "python"
    function: str = Field(min_length=1)
    """"module:name" or "file.py:name" (relative to the run file). The name is an iterable, or a
    function without parameters that returns one, of texts, dictionaries or Prompts. It is read to
    its end before the run starts, so it must have one."""

    @field_validator("function")
    @classmethod
    def _check_function(cls, text: str) -> str:
        split_location(text)
        return text

    @property
    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2]


def source_kind(block: Any) -> Any:
    """The `kind` of a source; a block without one is a file."""
    if isinstance(block, dict):
        return block.get("kind", "file")
    return getattr(block, "kind", "file")


SourceConfig = Annotated[
    Annotated[FileSource, Tag("file")]
    | Annotated[HuggingFaceSource, Tag("huggingface")]
    | Annotated[ReasoningGymSource, Tag("reasoning_gym")]
    | Annotated[PythonSource, Tag("python")],
    Discriminator(source_kind),
]


class DataConfig(Config):
    """`[data]`: the prompts of a run, and how they are brought into shape."""

    path: str | None = Field(None, min_length=1)
    """A file of prompts, relative to the run file: short for one `[[data.sources]]`."""
    prompt_key: str | None = None
    """Column with the prompt in `path`; default "prompt", or "messages"."""
    answer_key: str | None = None
    """Column with the answer in `path`; default "answer", which may be absent."""
    sources: Annotated[tuple[SourceConfig, ...], Field(strict=False)] = ()
    """Several sources, or one of another kind than a file."""
    shuffle: bool = True
    """Draw each source in a new order on each pass over it; the order comes from `run.seed`."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """Use of the model's chat template. "auto": chat messages get it, texts stay as they are;
    "chat": a text becomes one message of the user; "plain": no template, texts only."""
    system: str | None = Field(None, min_length=1)
    """System message put before chat messages that do not bring their own."""
    max_prompt_tokens: int | None = Field(None, gt=0)
    """Training prompts with more tokens than this, chat template included, are left out and
    counted; in an eval set they are bad rows. So is, with or without this limit, every prompt that
    leaves no room for an answer in the context of the model and of `engine.max_context`."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What to do about rows that can not be used: end with a list of them, or leave them out,
    counted and listed."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        problems = []
        if self.path is not None and self.sources:
            problems.append("`path` and `sources` are both set: keep one of them")
        problems += [
            f"`{key}` belongs to `path`, which is not set: put it into the block of its source"
            for key in ("prompt_key", "answer_key")
            if self.path is None and getattr(self, key) is not None
        ]
        if self.system is not None and self.template == "plain":
            problems.append('`system` needs chat messages: set template = "chat" or "auto"')
        problems += mixture_problems([(source.label, source.weight) for source in self.sources])
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """`sources`, or the one that `path` stands for; empty if the run file names none."""
        if self.path is None:
            return self.sources
        return (FileSource(path=self.path, prompt_key=self.prompt_key, answer_key=self.answer_key),)


def mixture_problems(parts: list[tuple[str, float | None]]) -> list[str]:
    """Why sources of these names and weights can not be mixed; empty if they can."""
    problems = []
    names = [name for name, _ in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        problems.append(f"two sources are named {twice[0]!r}: give each a `name` of its own")
    unset = [name for name, weight in parts if weight is None]
    if unset and len(unset) < len(parts):
        problems.append(
            f"source {unset[0]!r} has no weight but others have: set the weight of all sources, "
            "or of none (then each counts by its number of prompts)"
        )
    problems += [
        f"source {name!r} has the weight {weight}: a finite number above 0 is needed"
        for name, weight in parts
        if weight is not None and not 0 < weight < inf
    ]
    return problems
