"""The weight check that an SGLang server has itself: POST /weights_checker.

    snapshot -> reset_tensors -> (a publish of the same weights) -> compare

It looks at every tensor in the form in which it is served, fused and quantized, but knows no other
weights than those that it held before, and compares on a GPU only.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Protocol

from paceline.engines.http import RefusedError
from paceline.errors import WeightError
from paceline.weights.settings import WeightCheckConfig

logger = logging.getLogger(__name__)

NEVER_SENT = ("normalizer", "embed_scale", "mup_vector", "position_ids", "k_scale", "v_scale")
"""Buffers that follow from the model's configuration: a reset would break them for good."""
WILDCARDS = re.compile(r"\*|\?|\[[^]]*\]")
DIFFERENT = re.compile(r"\bname=(\S+)")
UNEQUAL = "tensor equality failed"


class Ask(Protocol):
    """A request to the server; raises RefusedError."""

    async def __call__(self, path: str, body: dict[str, Any], /) -> Any: ...


class SGLangCheck:
    """Of one server."""

    def __init__(self, ask: Ask, *, named: str, compares: bool) -> None:
        """compares: whether it can, and holds at first what its trainer holds."""
        self._ask, self._named, self._compares = ask, named, compares
        self._has_snapshot = False

    async def reset(self, check: WeightCheckConfig, *, comes_back: bool) -> None:
        """Fill all tensors with other numbers. comes_back: whether the next publish brings the
        weights that are held now."""
        self._has_snapshot = False
        if comes_back and self._compares and not check.only:
            try:
                await self._do("snapshot")
                self._has_snapshot = True
            except RefusedError as error:
                logger.info("%s takes no snapshot of its weights: %s", self._named, error.text)
        try:
            await self._do("reset_tensors", skip_tensor_list=skipped(check))
        except RefusedError as error:
            raise WeightError(
                f"{self._named} does not reset its weights: {error.text}; set weight_check.reset = "
                "false"
            ) from None

    async def compare(self, check: WeightCheckConfig) -> list[str] | None:
        """The server's names of tensors that are not what they were; None if it can not tell."""
        had, self._has_snapshot = self._has_snapshot, False
        if not had:
            return None
        try:
            await self._do(
                "compare",
                skip_tensor_list=skipped(check),
                allow_quant_error=check.tolerance > 0,
            )
        except RefusedError as error:
            if UNEQUAL in error.text:
                return DIFFERENT.findall(error.text) or [error.text]
            logger.info("%s can not compare its weights: %s", self._named, error.text)
            return None
        return []

    async def _do(self, action: str, **more: Any) -> None:
        await self._ask("/weights_checker", {"action": action, "selector": "target", **more})


def skipped(check: WeightCheckConfig) -> list[str]:
    """The server skips what contains one of these: of each pattern its longest plain part."""
    plain = [max(WILDCARDS.split(pattern), key=len) for pattern in check.skip]
    return [*NEVER_SENT, *(text for text in plain if text)]
