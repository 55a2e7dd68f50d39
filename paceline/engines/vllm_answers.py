"""What is said to a vLLM server, and what it says: POST /inference/v1/generate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.engines.answers import versions
from paceline.engines.base import Completion, Finish, Sampling
from paceline.errors import EngineError
from paceline.types import derive_seed

LOWEST_TEMPERATURE = 0.01
"""Below it, except for 0, vLLM samples at 0.01."""
BROKEN = -9999.0
"""What vLLM says in the place of a log-prob that is no number."""


def sampling_params(
    sampling: Sampling, *, limit: int, seed: int, num_sampled: int, end_ids: frozenset[int]
) -> dict[str, Any]:
    """limit: most new tokens. num_sampled: tokens of the answer that were sampled before. end_ids:
    the policy's end-of-sequence ids."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"sampling.temperature = {sampling.temperature:g}: vLLM takes "
            f"{LOWEST_TEMPERATURE:g} and more, or 0"
        )
    params: dict[str, Any] = {
        "max_tokens": limit,
        "temperature": sampling.temperature,
        # Its random numbers are counted from the start of a request.
        "seed": derive_seed(seed, "from", num_sampled) if num_sampled else seed,
        "logprobs": 0,
        "detokenize": False,
    }
    defaults = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0))
    for name, default in defaults:
        if (value := getattr(sampling, name)) != default:
            params[name] = value
    if sampling.ignore_eos:
        return params | {"ignore_eos": True}
    params["stop_token_ids"] = sorted(end_ids | set(sampling.stop_token_ids))
    if sampling.stop:
        # The answer's text is ours to make: it is compared with what the tokens say.
        params |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
    return params


def scoring_params() -> dict[str, Any]:
    """For the log-probs of a prompt; the server makes one token at least."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


def completion(answer: Any, *, version: int) -> Completion:
    """version: of tokens for which the server names none. Raises EngineError if it makes no sense.

    Example: {"choices": [{"token_ids": [7, 2], "finish_reason": "stop", "stop_reason": null,
    "logprobs": {"content": [{"token_id": 7, "logprob": -0.3}, {"token_id": 2, "logprob": -0.1}]},
    "weight_versions": [{"version": "4", "start": 0, "end": 2}]}]}
    """
    try:
        (choice,) = answer["choices"]
        tokens = [int(token) for token in choice.get("token_ids") or []]
        entries = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in entries]
        kind, named = choice["finish_reason"], choice.get("stop_reason")
        spans = choice.get("weight_versions")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_understood(error) from None
    if [entry.get("token_id") for entry in entries] != tokens:
        raise EngineError(
            f"the server answered with {len(tokens)} tokens and the log-probs of {len(logprobs)}, "
            "or of others"
        )
    if not all(value > BROKEN for value in logprobs):
        raise EngineError(
            "a log-prob of the server's answer is not a finite number: the weights are broken, "
            f"of version {version} or after it"
        )
    finish: Finish = kind if kind in ("stop", "length") else "abort"
    stop = tokens[-1] if named is None and tokens else named
    return Completion(
        tokens,
        logprobs,
        versions(spans, len(tokens), version),
        finish,
        stop=stop if finish == "stop" else None,
        cause=f"the server ended it: {kind}" if finish == "abort" else None,
        metrics=_metrics(answer),
    )


def scores(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probs of the tokens of a prompt. Raises EngineError if they are not there."""
    try:
        entries = answer["prompt_logprobs"]
        if len(entries) != len(tokens):
            raise EngineError(f"the server scored {len(entries)} tokens, asked for {len(tokens)}")
        pairs = zip(entries[1:], tokens[1:], strict=True)
        values = [float(entry[str(token)]["logprob"]) for entry, token in pairs]
    except (KeyError, TypeError, ValueError) as error:
        raise _not_understood(error) from None
    return [0.0, *(value if value > BROKEN else math.nan for value in values)]


def _metrics(answer: dict[str, Any]) -> dict[str, float]:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return {"cached_tokens": float(cached)} if isinstance(cached, int) else {}


def _not_understood(error: Exception) -> EngineError:
    return EngineError(
        f"not an answer of vLLM's POST /inference/v1/generate ({type(error).__name__}: {error})"
    )
