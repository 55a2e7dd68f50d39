"""Prompt sets: all usable prompts of one source, in order, with what was left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from paceline.data.rows import BadRow, RawRow, RowReader, split_completion
from paceline.data.sources import DataConfig, Table, parse_slice
from paceline.data.values import RowError
from paceline.errors import DataError, PacelineError
from paceline.types import Prompt

Length = Callable[[Prompt], int]
"""Number of tokens of a prompt as the model will see it, chat template included."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Looks at the tokens of each prompt when it is loaded, not when it is drawn.

    Example: Fit(length, context=128) makes a prompt of 128 tokens a bad row.
    """

    length: Length
    context: int | None = None
    """Most tokens of prompt plus answer; None: no limit is known."""
    keeps_all: bool = False
    """A prompt of more than `max_prompt_tokens` is a bad row instead of being filtered."""
    completion_length: Callable[[Prompt, str], int] | None = None
    """Number of tokens of the completion of a supervised row."""

    def accepts(self, prompt: Prompt, limit: int | None, completion: str | None = None) -> bool:
        """False if the prompt is to be filtered. Raises RowError if it can not be used.

        completion: what follows the prompt in a supervised row.
        """
        num_more = 0
        try:
            length = self.length(prompt)
            if completion is not None and self.completion_length is not None:
                num_more = self.completion_length(prompt, completion)
        except PacelineError as error:
            raise RowError(str(error)) from error
        # Chat templates refuse conversations by exceptions of their own.
        except Exception as error:
            raise RowError(f"can not be tokenized: {type(error).__name__}: {error}") from error
        if limit is not None and length > limit:
            if self.keeps_all:
                raise RowError(
                    f"has {length} tokens, more than data.max_prompt_tokens = {limit}: an eval "
                    "set is not filtered, so shorten the prompt or raise the limit"
                )
            return False
        if self.context is not None and length >= self.context:
            raise RowError(
                f"has {length} tokens, and the context of {self.context} leaves no room for an "
                "answer: shorten it, or raise engine.max_context as far as the model allows; "
                "data.max_prompt_tokens leaves long training prompts out"
            )
        if self.context is not None and length + num_more > self.context:
            raise RowError(
                f"has {length} tokens and {num_more} in its completion, more than the context of "
                f"{self.context}: shorten it, or take a model with a longer context"
            )
        return True


_LISTED = 10


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one source.

    Example: PromptSet("easy", (Prompt(id="a", text="1+1="),), fingerprint="9f86d081884c7d65")
    """

    name: str
    prompts: tuple[Prompt, ...]
    bad_rows: tuple[BadRow, ...] = ()
    """Rows that were left out because they can not be used."""
    num_filtered: int = 0
    """Good rows that were left out because they have more than `max_prompt_tokens`."""
    fingerprint: str = ""
    """Hash over ids, contents and order."""
    weight: float | None = None
    """Share of the draws; None: by number of prompts."""

    def __len__(self) -> int:
        return len(self.prompts)


def prompts_from_rows(
    rows: Iterable[str | Mapping[str, Any] | Prompt],
    name: str = "prompts",
    *,
    fit: Fit | None = None,
    rules: DataConfig | None = None,
    columns: Table | None = None,
    supervised: bool = False,
    weight: float | None = None,
) -> PromptSet:
    """A prompt set of rows in memory: texts, dictionaries or Prompts.

    Raises:
        DataError: as `gather` does.
    """
    raw = (RawRow(f"{name}[{i}]", row) for i, row in enumerate(rows))
    return gather(
        raw,
        name=name,
        origin=name,
        columns=columns or Table(),
        rules=rules or DataConfig(),
        fit=fit,
        supervised=supervised,
        weight=weight,
    )


def gather(
    raw: Iterable[RawRow],
    *,
    name: str,
    origin: str,
    columns: Table,
    rules: DataConfig,
    fit: Fit | None,
    supervised: bool,
    weight: float | None,
) -> PromptSet:
    """Read rows to the end and make a prompt set of them.

    `fit` is asked about each prompt; without it nothing is filtered. `supervised` wants rows with
    a completion (see `supervised_pair`) and lets messages end with the assistant's.

    Raises:
        DataError: if there is a bad row and `rules.on_bad_row` is "fail" (the first ten are
            listed), or if no prompt is left.
    """
    reader = RowReader(columns, rules, name=name, supervised=supervised)
    prompts: list[Prompt] = []
    bad: list[BadRow] = []
    seen: dict[str, str] = {}
    digest = blake2b(json.dumps([rules.template, rules.system]).encode(), digest_size=16)
    num_rows = num_filtered = 0
    for row in _cut(raw, columns.slice):
        num_rows += 1
        try:
            prompt, content = _read(reader, row)
            _check_new(prompt.id, row.where, seen)
            context, completion = split_completion(prompt) if supervised else (prompt, None)
            fits = fit is None or fit.accepts(context, rules.max_prompt_tokens, completion)
        except RowError as error:
            bad.append(BadRow(row.where, str(error)))
            continue
        if not fits:
            num_filtered += 1
            continue
        digest.update(f"{len(prompt.id)}:{prompt.id}".encode() + content + b"\n")
        prompts.append(prompt)
    if bad and rules.on_bad_row == "fail":
        raise DataError(_bad_rows_message(origin, bad, num_rows))
    if not prompts:
        raise DataError(_nothing_message(origin, columns, rules, bad, num_rows))
    return PromptSet(name, tuple(prompts), tuple(bad), num_filtered, digest.hexdigest(), weight)


def supervised_pair(prompt: Prompt) -> tuple[Prompt, str]:
    """The context of a supervised row, and the completion to learn.

    The completion is `metadata["completion"]` (a text, or a list of one message of the
    assistant); of chat messages that end with the assistant's it is the content of that last
    message, and the context is the messages before it. Earlier turns of the assistant are
    context.

    Example: a Prompt of text "1+1=" with metadata {"completion": "2"} gives (that Prompt, "2").

    Raises:
        DataError: if the prompt has no completion, or two.
    """
    try:
        return split_completion(prompt)
    except RowError as error:
        place = f"prompt {prompt.id!r}" + (f" of {prompt.source!r}" if prompt.source else "")
        raise DataError(f"{place}: {error}") from error


def _cut(rows: Iterable[RawRow], text: str | None) -> Iterable[RawRow]:
    if text is None:
        return rows
    part = parse_slice(text)
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        return list(rows)[part]
    return islice(rows, part.start, part.stop)


def _read(reader: RowReader, row: RawRow) -> tuple[Prompt, bytes]:
    if row.problem is not None:
        raise RowError(row.problem)
    prompt, content = reader.read(row.value)
    if not prompt.id:
        prompt = replace(prompt, id=blake2b(content, digest_size=8).hexdigest())
    return prompt, content


def _check_new(prompt_id: str, where: str, seen: dict[str, str]) -> None:
    first = seen.setdefault(prompt_id, where)
    if first is not where:
        raise RowError(
            f"duplicate id {prompt_id!r}, first at {first} (a row without an id of its own repeats "
            "another one if all its columns are equal)"
        )


def _bad_rows_message(origin: str, bad: list[BadRow], num_rows: int) -> str:
    lines = [f"{origin}: {len(bad)} of {num_rows} rows can not be used:"]
    lines += [f"  {row}" for row in bad[:_LISTED]]
    if len(bad) > _LISTED:
        lines.append(f"  ... and {len(bad) - _LISTED} more")
    lines.append('Correct them, or leave them out with data.on_bad_row = "skip".')
    return "\n".join(lines)


def _nothing_message(
    origin: str, columns: Table, rules: DataConfig, bad: list[BadRow], num_rows: int
) -> str:
    if not num_rows and columns.slice is not None:
        return f"{origin}: slice {columns.slice!r} leaves no row"
    if not num_rows:
        return f"{origin}: holds no rows"
    reasons = []
    if bad:
        reasons.append(f"{len(bad)} are bad, the first is {bad[0]}")
    if num_rows > len(bad):
        reasons.append(
            f"{num_rows - len(bad)} have more tokens than data.max_prompt_tokens = "
            f"{rules.max_prompt_tokens}"
        )
    return f"{origin}: none of {num_rows} rows is left: {'; '.join(reasons)}"
