"""Which of a parcel's handles are those of a server's own devices."""

from __future__ import annotations

from paceline.errors import WeightError
from paceline.weights.base import Parcel


def own_handles(parcel: Parcel, first: int, count: int, named: str) -> list[str]:
    """One for each of a server's devices, which are `first ... first + count - 1` of the engine's.

    named: the server, for messages. Raises WeightError if trainer and engine do not share devices.
    """
    given = parcel.handles
    if not given:
        raise WeightError(f"{named}: a parcel of transport `handles` has none")
    if len(given) == 1:
        return list(given) * count
    if len(given) >= first + count:
        return list(given[first : first + count])
    raise WeightError(
        f"{named} stands on devices {first} to {first + count - 1}, and the trainer on "
        f'{len(given)}: they do not share devices; set engine.weights = "collective"'
    )
