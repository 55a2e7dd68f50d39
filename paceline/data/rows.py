"""From a row of a table to a `Prompt`, or to the reason why it can not be one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.data.sources import DataConfig, Table
from paceline.data.values import RowError, describe, plain, plain_keys
from paceline.errors import nearest_hint
from paceline.types import Message, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")

_CANONICAL = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))
_FINITE = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as a reader found it."""

    where: str
    """`file:line`, or `name[index]` with the index counted from 0."""
    value: Any = None
    problem: str | None = None
    """Why the row could not be read at all."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can not be used.

    Example: str(BadRow("prompts.jsonl:2", "prompt is empty")) == "prompts.jsonl:2: prompt is empty"
    """

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class RowReader:
    """Makes prompts of rows by the columns of a source and the rules of `[data]`."""

    def __init__(self, columns: Table, rules: DataConfig, *, name: str, supervised: bool) -> None:
        self._columns = columns
        self._rules = rules
        self._name = name
        self._supervised = supervised

    def read(self, row: Any) -> tuple[Prompt, bytes]:
        """The prompt of a row, with its content as canonical JSON. Its id is "" if it has none.

        Raises:
            RowError: if the row is bad.
        """
        match row:
            case str():
                prompt = Prompt(id="", text=_checked_text(row, "prompt"), source=self._name)
            case Prompt():
                prompt = replace(_checked_prompt(row), source=self._name)
            case Mapping():
                prompt = self._from_columns(row)
            case _:
                raise RowError(f"is {describe(row)}, not an object with columns")
        prompt, content = _with_content(prompt)
        prompt = self._in_shape(prompt)
        if self._supervised:
            split_completion(prompt)
        elif prompt.messages and prompt.messages[-1]["role"] == "assistant":
            raise RowError(
                "the last message is the assistant's, so there is nothing to answer; such rows are "
                "for supervised training"
            )
        return prompt, content

    def _from_columns(self, row: Mapping[str, Any]) -> Prompt:
        columns = self._columns
        prompt_key = columns.prompt_key or ("messages" if "prompt" not in row else "prompt")
        if prompt_key not in row:
            wanted = columns.prompt_key or "prompt"
            raise RowError(
                f"no column {wanted!r} for the prompt{nearest_hint(wanted, map(str, row))}"
            )
        text, messages = _text_or_messages(row[prompt_key], prompt_key)
        answer = _column(row, columns.answer_key, "answer", "the answer")
        completion = _column(row, columns.completion_key, "completion", "the completion")
        used = {
            prompt_key,
            columns.answer_key or "answer",
            columns.completion_key or "completion",
            columns.id_key,
        }
        kept = row if columns.metadata_keys is None else columns.metadata_keys
        metadata = {k: row[k] for k in kept if k not in used and k in row}
        if completion is not None:
            metadata["completion"] = completion
        key = "" if columns.id_key is None else _row_id(row, columns.id_key)
        return Prompt(key, text, messages, answer, metadata, self._name)

    def _in_shape(self, prompt: Prompt) -> Prompt:
        """The prompt as text or as messages, as `template` and `system` want it."""
        template, system = self._rules.template, self._rules.system
        messages = prompt.messages
        if messages is None:
            if template != "chat":
                if system is not None:
                    raise RowError(
                        '`system` is set but the prompt is a text: set template = "chat" to make '
                        "it a message"
                    )
                return prompt
            messages = (Message(role="user", content=prompt.text or ""),)
        elif template == "plain":
            raise RowError('the prompt is chat messages, but template = "plain" takes only texts')
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = (Message(role="system", content=system), *messages)
        return replace(prompt, text=None, messages=messages)


def split_completion(prompt: Prompt) -> tuple[Prompt, str]:
    """What a supervised row gives as context, and the text to learn.

    Raises:
        RowError: if there is no completion, or if there are two.
    """
    completion = prompt.metadata.get("completion")
    messages = prompt.messages
    if messages is not None and messages[-1]["role"] == "assistant":
        if completion is not None:
            raise RowError("has a completion, but its messages end with the assistant's already")
        if all(m["role"] in ("system", "developer") for m in messages[:-1]):
            raise RowError("the message of the assistant answers nothing: no message before it")
        return replace(prompt, messages=messages[:-1]), messages[-1]["content"]
    if isinstance(completion, list | tuple) and len(completion) == 1:
        message = _checked_messages(completion, "completion")[0]
        if message["role"] != "assistant":
            raise RowError(f"completion[0] has the role {message['role']!r}, not 'assistant'")
        completion = message["content"]
    if completion is None:
        raise RowError(
            "no completion to learn from: neither a column 'completion' (see completion_key) nor "
            "messages that end with the assistant's"
        )
    if not isinstance(completion, str):
        raise RowError(f"completion is {describe(completion)}, not a text")
    return prompt, _checked_text(completion, "completion")


def _column(row: Mapping[str, Any], key: str | None, default: str, role: str) -> Any:
    """The value of an optional column; one that was asked for by name must be there."""
    if key is not None and key not in row:
        raise RowError(f"no column {key!r} for {role}{nearest_hint(key, map(str, row))}")
    return row.get(default if key is None else key)


def _row_id(row: Mapping[str, Any], key: str) -> str:
    value = _column(row, key, key, "the id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"id {key!r} is {describe(value)}, not a text or a whole number")
    text = str(value)
    if not text.strip():
        raise RowError(f"id {key!r} is empty")
    return _checked_text(text, key)


def _text_or_messages(value: Any, column: str) -> tuple[str | None, tuple[Message, ...] | None]:
    if isinstance(value, str):
        return _checked_text(value, column), None
    if isinstance(value, list | tuple):
        return None, _checked_messages(value, column)
    raise RowError(f"{column} is {describe(value)}, not a text or a list of messages")


def _checked_text(text: str, column: str) -> str:
    if not text or text.isspace():
        raise RowError(f"{column} is empty")
    return text


def _checked_prompt(prompt: Prompt) -> Prompt:
    if (prompt.text is None) == (prompt.messages is None):
        raise RowError("a Prompt has either `text` or `messages`")
    value = prompt.messages if prompt.text is None else prompt.text
    text, messages = _text_or_messages(value, "prompt")
    if not isinstance(prompt.id, str):
        raise RowError(f"the id of a Prompt is {describe(prompt.id)}, not a text")
    return replace(prompt, text=text, messages=messages)


def _checked_messages(value: Sequence[Any], column: str) -> tuple[Message, ...]:
    if not value:
        raise RowError(f"{column} is empty")
    for i, message in enumerate(value):
        place = f"{column}[{i}]"
        if not isinstance(message, Mapping):
            raise RowError(f"{place} is {describe(message)}, not a message (role, content)")
        if not {"role", "content"} <= message.keys():
            keys = ", ".join(repr(k) for k in message)
            raise RowError(f"{place} has the keys {keys}; a message has 'role' and 'content'")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            found = repr(role) if isinstance(role, str) else describe(role)
            raise RowError(f"{place} has the role {found}{nearest_hint(str(role), ROLES)}")
        if not isinstance(content, str):
            raise RowError(f"the content of {place} is {describe(content)}, not a text")
        if not content.strip() and (role == "user" or i == len(value) - 1):
            raise RowError(f"the content of {place} is empty")
    return tuple(value)


def _with_content(prompt: Prompt) -> tuple[Prompt, bytes]:
    """The prompt made of JSON values only, with its content as canonical JSON."""
    try:
        content = _encoded(prompt)
    except (TypeError, ValueError, RecursionError):
        # Rare: something to convert, or to complain about by name. The fast path above is C.
        prompt = _plain_prompt(prompt)
        content = _encoded(prompt)
    answer = prompt.answer
    if not (answer is None or isinstance(answer, str | int)):
        try:
            _FINITE.encode(answer)
        except ValueError as error:
            raise RowError("the answer is not a finite number (NaN or infinity)") from error
    return prompt, content


def _encoded(prompt: Prompt) -> bytes:
    content = [prompt.id, prompt.text, prompt.messages, prompt.answer, prompt.metadata]
    return _CANONICAL.encode(content).encode("utf-8")


def _plain_prompt(prompt: Prompt) -> Prompt:
    try:
        plain(prompt.id, "id")
        plain(prompt.text, "prompt")
        messages = plain(prompt.messages, "messages")
        return replace(
            prompt,
            messages=None if messages is None else tuple(messages),
            answer=plain(prompt.answer, "answer"),
            metadata={k: plain(v, k) for k, v in plain_keys(prompt.metadata, "the row").items()},
        )
    except RecursionError as error:
        raise RowError("is nested too deeply") from error
