"""Whether policy and teacher mean the same by a token: without it, log-probs compare nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_PROBES = 256
"""Tokens that a server is asked the text of."""
MAX_SHOWN = 3


def check_vocabulary(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str
) -> None:
    """Raise ConfigError unless each token of the policy's tokenizer has the same id in the other.

    The teacher may have more. teacher: its key and value in the run file.
    """
    theirs = other.get_vocab()
    wrong = [
        f"{token!r} is {index} in the policy's and {theirs.get(token, 'absent')} in the teacher's"
        for token, index in sorted(own.get_vocab().items(), key=lambda item: item[1])
        if theirs.get(token) != index
    ]
    _refuse(wrong, len(own), teacher)


def probe_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids spread over the whole vocabulary, the last one among them."""
    last = len(tokenizer) - 1
    return sorted({last * i // (NUM_PROBES - 1) for i in range(NUM_PROBES)})


def check_texts(
    own: PreTrainedTokenizerBase, tokens: Sequence[int], texts: Sequence[str], teacher: str
) -> None:
    """The same for a teacher of whom only the texts of some tokens are known."""
    wrong = [
        f"token {token} is {mine!r} in the policy's and {text!r} in the teacher's"
        for token, text in zip(tokens, texts, strict=True)
        if (mine := str(own.decode([token])).strip()) != text.strip()
    ]
    _refuse(wrong, len(tokens), teacher)


def _refuse(wrong: Sequence[str], num_tokens: int, teacher: str) -> None:
    if wrong:
        more = f" and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise ConfigError(
            f"{teacher}: its tokenizer is not the policy's: of {num_tokens} tokens {len(wrong)} "
            f"differ: {'; '.join(wrong[:MAX_SHOWN])}{more}. A teacher must share the policy's "
            "vocabulary: take one of the same family"
        )
