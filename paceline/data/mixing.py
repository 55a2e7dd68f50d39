"""Which source the next prompt comes from."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Mixture:
    """Deterministic interleaving of sources that keeps to their weights at every moment.

    After any number t of draws a source of weight w out of W has been drawn floor(t w / W) or
    ceil(t w / W) times; so the shares are exact whenever t w / W is whole. The next source
    depends only on how often each has been drawn. This is the quota method of apportionment
    (Balinski and Young, American Mathematical Monthly 82, 1975): of the sources whose next draw
    stays within their quota rounded up, take the one with the greatest w / (draws + 1).

    Example: weights 2 and 1 give the sources 0, 0, 1, 0, 0, 1, ...
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # 0.1 means a tenth, not the nearest binary fraction; whole numbers keep ties exact.
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        self._weights = [int(share * scale) for share in shares]
        self._total = sum(self._weights)

    def next(self, drawn: Sequence[int]) -> int:
        """The source of the next draw, given how often each was drawn until now."""
        position = sum(drawn) + 1
        best = -1
        for i, (weight, count) in enumerate(zip(self._weights, drawn, strict=True)):
            if count * self._total >= weight * position:
                continue
            if best < 0 or weight * (drawn[best] + 1) > self._weights[best] * (count + 1):
                best = i
        return best
