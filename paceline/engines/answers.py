"""What the answers of all servers have in common: versions, texts that end them, how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.engines.base import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAUSED = "the engine was paused in mode abort"


def versions(spans: Any, count: int, version: int) -> list[int]:
    """One for each new token. spans: [{"version", "start", "end"}, ...]. SGLang before 0.5.20 names
    one version for all, that at the end: `version`, known at the start, is then what the oldest
    token has."""
    if not spans:
        return [version] * count
    found = [version] * count
    for span in spans:
        named = number_of(span["version"])
        if named is not None:
            start, end = int(span["start"]), min(int(span["end"]), count)
            found[start:end] = [named] * (end - start)
            if span is spans[-1]:
                found[end:] = [named] * (count - end)
    return found


def number_of(version: Any) -> int | None:
    """Paceline's versions are numbers; a server that got none from us has a word instead."""
    try:
        return int(version)
    except (TypeError, ValueError):
        return None


def settle(
    made: Completion,
    request: Request,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    is_ended: bool,
) -> None:
    """Say how an answer came to its end, in place, and count its tokens.

    is_ended: a pause ended it. One that was cut is an answer of that length.
    """
    if is_ended and made.finish == "abort":
        made.can_go_on, made.cause = True, PAUSED
    if request.cut is not None and request.cut.is_set and made.finish == "abort":
        made.finish, made.cause, made.can_go_on = "length", None, False
    sampling = request.sampling
    if sampling.stop and not sampling.ignore_eos and tokenizer is not None:
        first = len(request.tokens) - request.num_sampled
        before = request.tokens[max(first, 0) :] if request.num_sampled else ()
        end_at_stop_text(made, sampling.stop, tokenizer, before)
    if request.progress is not None:
        request.progress.num_tokens += len(made.tokens)


def end_at_stop_text(
    made: Completion,
    stop: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int] = (),
) -> None:
    """End the answer with the token that completes the first stop text.

    before: tokens of the answer that were sampled earlier. The server looks at new tokens alone,
    and at no more of them than the stop text has when it is encoded by itself.
    """
    window = max(len(text.encode()) for text in stop) + 4
    start = list(before)[-window:]

    def found(count: int) -> str | None:
        # Any stop text within the first `count` tokens: it can not end in `before`.
        text = tokenizer.decode(start + made.tokens[:count], skip_special_tokens=False)
        places = [(place, s) for s in stop if (place := text.find(s)) >= 0]
        return min(places)[1] if places else None

    if found(len(made.tokens)) is None:
        return
    low, high = 1, len(made.tokens)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) is not None else (middle + 1, high)
    del made.tokens[low:], made.logprobs[low:], made.versions[low:]
    made.finish, made.stop, made.cause = "stop", found(low), None
