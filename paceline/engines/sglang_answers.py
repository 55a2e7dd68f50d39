"""What is said to an SGLang server, and what it says: requests and answers of POST /generate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.engines.answers import versions
from paceline.engines.base import Completion, Finish, Sampling
from paceline.errors import EngineError

MOST_REPEATED = 2.0
"""SGLang's highest repetition penalty."""


def sampling_params(
    sampling: Sampling, *, limit: int, seed: int, end_ids: frozenset[int]
) -> dict[str, Any]:
    """limit: most new tokens. end_ids: the policy's end-of-sequence ids, which the server knows in
    part only: those of the model's configuration and the tokenizer's."""
    if sampling.repetition_penalty > MOST_REPEATED:
        raise EngineError(
            f"sampling.repetition_penalty = {sampling.repetition_penalty:g}: SGLang takes up to "
            f"{MOST_REPEATED:g}"
        )
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "sampling_seed": seed,
    }
    defaults = (("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0))
    for name, default in defaults:
        if (value := getattr(sampling, name)) != default:
            params[name] = value
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.ignore_eos:
        params["ignore_eos"] = True
        return params
    params["stop_token_ids"] = sorted(end_ids | set(sampling.stop_token_ids))
    if sampling.stop:
        # The answer's text is ours to make: it is compared with what the tokens say.
        params |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return params


def completion(answer: Any, *, version: int) -> Completion:
    """version: of tokens for which the server names none. Raises EngineError if it makes no sense.

    Example: {"output_ids": [7, 2], "meta_info": {"output_token_logprobs": [[-0.3, 7, null],
    [-0.1, 2, null]], "finish_reason": {"type": "stop", "matched": 2}, "weight_version": "4"}}
    """
    try:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        tokens = [int(entry[1]) for entry in entries]
        logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
        reason = meta["finish_reason"] or {"type": "abort", "message": "no finish_reason"}
        kind = reason["type"]
        made = answer.get("output_ids")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"not an answer of SGLang's POST /generate ({type(error).__name__}: {error})"
        ) from None
    if made is not None and list(made) != tokens:
        raise EngineError(
            f"the server answered with {len(made)} tokens and the log-probs of {len(tokens)}, or "
            "of others"
        )
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            "a log-prob of the server's answer is not a finite number: the weights are broken, "
            f"of version {version} or after it"
        )
    finish: Finish = kind if kind in ("stop", "length") else "abort"
    return Completion(
        tokens,
        logprobs,
        versions(meta.get("weight_versions"), len(tokens), version),
        finish,
        stop=reason.get("matched") if finish == "stop" else None,
        cause=str(reason.get("message") or kind) if finish == "abort" else None,
        metrics=_metrics(meta),
    )


def scores(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probs of the tokens of a prompt. Raises EngineError if they are not there."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        values = [0.0, *(math.nan if e[0] is None else float(e[0]) for e in entries[1:])]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"not an answer of SGLang's POST /generate ({type(error).__name__}: {error})"
        ) from None
    if len(values) != len(tokens):
        raise EngineError(f"the server scored {len(values)} tokens, asked for {len(tokens)}")
    return values


def _metrics(meta: dict[str, Any]) -> dict[str, float]:
    names = ("cached_tokens", "num_retractions", "spec_accept_length")
    return {name: float(meta[name]) for name in names if isinstance(meta.get(name), int | float)}
