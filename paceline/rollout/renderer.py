"""Text to token ids and back, on the way in and out only.

Between the turns of an episode nothing is encoded twice: the ids that the policy sampled stay,
and only what was appended is encoded (`extend`). That needs a chat template which renders an old
turn as it rendered it when it was new. Some do not (they drop the reasoning of former turns);
this is found out when the renderer is made, and such an episode becomes one row a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from paceline.errors import ConfigError, DataError
from paceline.types import Message, Prompt

_MARK = "zqxjk0"
"""Content of the dummy messages around which templates are compared."""
KEPT_TEXTS = 64
"""Newest distinct answers whose text is kept: an answer is decoded for its reward and again for its
sample, and the short answers of one prompt are often equal."""
_DUMMY = (Message(role="user", content=_MARK), Message(role="assistant", content=_MARK))


class Renderer:
    """A tokenizer with its chat template.

    tokenizer: of `transformers`. end_ids: tokens that end an answer; they are left out of decoded
    text (default: the tokenizer's end token). template_options: variables for the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: frozenset[int] = frozenset(),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.end_ids = end_ids or frozenset(() if eos is None else (eos,))
        self._options = dict(template_options or {})
        self.can_extend = self.has_template and self._keeps_prefix()
        """True if a template is there and renders old turns unchanged."""
        self._last: tuple[Prompt | None, list[int]] = (None, [])
        self._text = lru_cache(KEPT_TEXTS)(self._decode)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids that the policy is to go on from. Raises DataError for a prompt of no tokens."""
        # Episodes of one group ask for the same prompt in turn.
        if self._last[0] is not prompt:
            if prompt.messages is not None:
                ids = self.encode_messages(prompt.messages)
            else:
                ids = self.encode_text(prompt.text or "")
            if not ids:
                raise DataError(f"prompt {prompt.id!r} has no tokens")
            self._last = (prompt, ids)
        return list(self._last[1])

    def encode_text(self, text: str) -> list[int]:
        """Plain text, with the tokenizer's start token but no end token."""
        ids = self._ids(self.tokenizer(text, add_special_tokens=True))
        if ids and ids[-1] in self.end_ids:
            # It may stand in the text itself, and then it stays.
            plain = self._plain_ids(text)
            while ids and ids[-1] in self.end_ids and ids[len(ids) - len(plain) :] != plain:
                ids.pop()
        return self._one_start(ids)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """A conversation that the policy is to answer."""
        if not self.has_template:
            raise ConfigError(
                "a prompt is a list of chat messages, but the tokenizer has no chat template: "
                "set model.chat_template, use an instruct model, or give plain text prompts"
            )
        ids = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **self._options,
        )
        return self._one_start(self._ids(ids))

    def encode_completion(self, prompt: Prompt, completion: str) -> list[int]:
        """Ids of a given answer to the prompt, with the end token that the policy is to learn."""
        ids = self._plain_ids(completion)
        if prompt.messages is None:
            eos = self.tokenizer.eos_token_id
            return ids if eos is None else [*ids, eos]
        tail = self._plain_ids(self._render(_DUMMY, False).split(_MARK, 2)[2])
        ends = [k for k, token in enumerate(tail, start=1) if token in self.end_ids]
        return ids + tail[: ends[0] if ends else len(tail)]

    def extend(
        self, ids: Sequence[int], new: Sequence[Message], has_ended: bool
    ) -> list[int] | None:
        """What to append to `ids`, which end with an answer, so that `new` messages follow.

        has_ended: the answer ended by itself, so its last ids may be the first of what the
        template writes after an answer. None if the template can not do it.
        """
        if not self.can_extend:
            return None
        try:
            text = self._render([*_DUMMY, *new], True)
        except Exception:
            # Templates refuse what they do not expect after a plain answer, such as a tool's.
            return None
        tail = self._plain_ids(text.split(_MARK, 2)[2])
        longest = min(len(tail), len(ids)) if has_ended else 0
        overlaps = (k for k in range(longest, 0, -1) if list(ids[-k:]) == tail[:k])
        return tail[next(overlaps, 0) :]

    def extend_text(self, text: str) -> list[int]:
        """Ids of text that is appended to a plain text."""
        return self._plain_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without the end tokens, and without special tokens."""
        stop = len(ids)
        while stop and ids[stop - 1] in self.end_ids:
            stop -= 1
        return self._text(tuple(ids[:stop]))

    def _decode(self, ids: tuple[int, ...]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _keeps_prefix(self) -> bool:
        """Render a conversation turn by turn and see whether old turns stay as they were."""
        question = Message(role="user", content=f"{_MARK}1")
        answer = Message(role="assistant", content=f"<think>\n{_MARK}2\n</think>\n\n{_MARK}3")
        more = Message(role="user", content=f"{_MARK}4")
        try:
            asked = self._render([question], True)
            answered = self._render([question, answer], False)
            went_on = self._render([question, answer, more], True)
            dummy = self._render([*_DUMMY, more], True)
        except Exception:
            # A template that refuses a plain conversation can not be trusted to go on with one.
            return False
        start = asked + answer["content"]
        return (
            answered.startswith(start)
            and went_on.startswith(answered.rstrip())
            and dummy.count(_MARK) == 3
        )

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        )

    def _plain_ids(self, text: str) -> list[int]:
        return self._ids(self.tokenizer(text, add_special_tokens=False)) if text else []

    def _ids(self, encoded: Any) -> list[int]:
        """transformers gives a list or a mapping, as it pleases its version."""
        return list(encoded["input_ids"] if hasattr(encoded, "keys") else encoded)

    def _one_start(self, ids: list[int]) -> list[int]:
        """A template or a text may bring a start token of its own."""
        start = self.tokenizer.bos_token_id
        if start is not None and ids[:2] == [start, start]:
            return ids[1:]
        return ids
