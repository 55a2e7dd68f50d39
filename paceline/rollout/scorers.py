"""Built-in scorers: `(completion, answer, metadata) -> number`.

`exact`, `numeric` and `choice` take microseconds and run in place. `regex`, `math_verify` and
`reasoning_gym` can hang on hostile answers and run in worker processes. Standard library only,
until a scorer that needs more is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Scorer = Callable[[str, Any, Mapping[str, Any]], float]

INLINE_KINDS = ("exact", "numeric", "choice")

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+(?:\.\d+)?)?")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class ScorerOptions:
    """The options of `settings.ScorerConfig`, for the kinds that take them."""

    tolerance: float = 1e-6
    pattern: str = ""
    ignore_case: bool = False
    letters: str = "ABCD"
    timeout_s: float = 10.0
    """The limit of one call; a scorer with a limit of its own stays below it."""


def make_scorer(kind: str, options: ScorerOptions) -> Scorer:
    """The built-in scorer of a kind. Scorers raise ValueError for an answer they can not use."""
    match kind:
        case "exact":
            return lambda completion, answer, metadata: score_exact(
                completion, answer, options.ignore_case
            )
        case "numeric":
            return lambda completion, answer, metadata: score_numeric(
                completion, answer, options.tolerance
            )
        case "choice":
            return lambda completion, answer, metadata: score_choice(
                completion, answer, options.letters
            )
        case "regex":
            pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
            return lambda completion, answer, metadata: score_regex(completion, answer, pattern)
        case "math_verify":
            return _math_verify_scorer(options.timeout_s / 2)
        case "reasoning_gym":
            return _reasoning_gym_scorer()
    raise ValueError(f"there is no built-in scorer {kind!r}")


def score_exact(completion: str, answer: Any, ignore_case: bool = False) -> float:
    """1 if completion and answer are the same text, blanks at both ends aside."""
    found, wanted = completion.strip(), answer_text(answer).strip()
    if ignore_case:
        found, wanted = found.casefold(), wanted.casefold()
    return float(found == wanted)


def score_numeric(completion: str, answer: Any, tolerance: float = 1e-6) -> float:
    r"""1 if |number - answer| <= tolerance * max(1, |answer|).

    The number is the one in the last `\boxed{}`, else the one after `####`, else the last one of
    the text. Thousands separators, percent signs, units and fractions such as 3/4 are understood.
    """
    wanted = read_number(answer_text(answer))
    if wanted is None:
        raise ValueError(f"the prompt's answer {answer!r} is not a number")
    found = read_number(completion)
    return float(found is not None and abs(found - wanted) <= tolerance * max(1.0, abs(wanted)))


def score_choice(completion: str, answer: Any, letters: str = "ABCD") -> float:
    """1 if the letter chosen is the answer (a letter, or an index counted from 0)."""
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        wanted: str | None = letters[answer]
    else:
        wanted = read_choice(answer_text(answer), letters)
    if wanted is None:
        raise ValueError(f"the prompt's answer {answer!r} is none of {', '.join(letters)}")
    return float(read_choice(completion, letters) == wanted)


def score_regex(completion: str, answer: Any, pattern: re.Pattern[str]) -> float:
    """Without a group: 1 if the pattern is found. With one: 1 if the last match has the answer."""
    if not pattern.groups:
        return float(pattern.search(completion) is not None)
    matches = list(pattern.finditer(completion))
    if not matches:
        return 0.0
    text = matches[-1]["answer" if "answer" in pattern.groupindex else 1]
    ignore_case = bool(pattern.flags & re.IGNORECASE)
    return score_exact(text or "", answer, ignore_case)


def read_number(text: str) -> float | None:
    """The number that a text ends up with, or None."""
    if boxed := _BOXED.findall(text):
        text = boxed[-1]
    elif "####" in text:
        text = text.rpartition("####")[2]
        return _to_float(found[0]) if (found := _NUMBER.findall(text)) else None
    return _to_float(found[-1]) if (found := _NUMBER.findall(text)) else None


def read_choice(text: str, letters: str = "ABCD") -> str | None:
    r"""The letter that a text chooses, or None.

    In this order: the last `\boxed{B}`, the last "answer is B" or "Answer: (B)", the last "(B)",
    a text that is or begins with "B", "B." or "B)", the last letter that stands alone.
    """
    one = f"[{re.escape(letters)}]"
    text = text.strip()
    patterns = (
        rf"\\boxed\s*\{{\s*\(?({one})\)?[^{{}}]*\}}",
        rf"(?i:answer|choice|option)(?:\s+(?i:is))?\s*[:=]?\s*[*_]*\(?({one})\b",
        rf"\(({one})\)",
        rf"^[*_]*({one})(?:[.):*_]|\s*$)",
        rf"(?<![\w'])({one})(?![\w'])(?!\s+[a-z])",
    )
    for pattern in patterns:
        if found := re.findall(pattern, text):
            return str(found[-1])
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    return None


def answer_text(answer: Any) -> str:
    """A prompt's answer as text. Raises ValueError if there is none."""
    if answer is None:
        raise ValueError("the prompt has no answer to compare with")
    if isinstance(answer, str):
        return answer
    return json.dumps(answer, ensure_ascii=False) if not isinstance(answer, bool) else str(answer)


def _to_float(text: str) -> float | None:
    numerator, _, denominator = text.replace(",", "").partition("/")
    divisor = float(denominator) if denominator.strip() else 1.0
    return float(numerator) / divisor if divisor else None


def _math_verify_scorer(limit_s: float) -> Scorer:
    """Mathematical equality by `math-verify`.

    Its own limits end expressions that sympy can not finish: the answer then counts as wrong and
    the process lives on.
    """
    from math_verify import parse, verify

    limit = max(1, int(limit_s / 2))

    def read_answer(answer: Any) -> list[Any]:
        text = answer_text(answer)
        is_marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        for candidate in (text, f"${text}$") if is_marked else (f"${text}$", text):
            if found := parse(candidate, parsing_timeout=limit):
                return list(found)
        raise ValueError(f"the prompt's answer {answer!r} is not an expression math-verify reads")

    def score(completion: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        wanted = read_answer(answer)
        found = parse(completion, parsing_timeout=limit)
        return float(verify(wanted, found, timeout_seconds=limit))

    return score


def _reasoning_gym_scorer() -> Scorer:
    """The scorer of the task that made the prompt; see `data.gym` for what a prompt carries.

    Scored is what stands in the last `<answer>` tag, else the whole text.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer

    tasks: dict[str, Any] = {}

    def score(completion: str, answer: Any, metadata: Mapping[str, Any]) -> float:
        made = metadata.get("reasoning_gym")
        if not isinstance(made, Mapping):
            raise ValueError("the prompt was not made by reasoning-gym")
        order = {"seed": made["seed"], "size": made["size"], **made["params"]}
        key = json.dumps([made["task"], order], sort_keys=True, default=str)
        if key not in tasks:
            tasks[key] = create_dataset(made["task"], **order)
        found = extract_answer(completion)
        text = completion.strip() if found is None else found
        return float(tasks[key].score_answer(text, dict(made["entry"])))

    return score
