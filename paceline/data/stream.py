"""The order in which prompts are drawn, with a cursor that restores exactly.

    sets -> PromptStream.take(n) -> draws -> rollouts
                  ^---- give_back(draws that were not used) ----'

Inside a source, no prompt is drawn for the (k+1)-th time before every one was drawn k times: the
source is passed over again and again, each pass in an order of its own. `Mixture` says which
source comes next. An *epoch* is as many draws as there are prompts in all sources. Without
weights each prompt is drawn exactly once an epoch; with weights a source that has more than its
share by size comes around more than once an epoch, and one that has less comes around less.
"""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from paceline.data.mixing import Mixture
from paceline.data.prompts import PromptSet
from paceline.data.sources import mixture_problems
from paceline.errors import CheckpointError, ConfigError, DataError, ResumeMismatchError
from paceline.types import Draw, derive_seed

STATE_VERSION = 1


def steps_for_epochs(num_prompts: int, num_epochs: int, prompts_per_step: int) -> int:
    """Number of steps that use every prompt `num_epochs` times; the last may be a smaller one."""
    return -(-num_prompts * num_epochs // prompts_per_step)


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """Where a draw came from."""

    ordinal: int
    source: int
    index: int
    """Of the prompt in its source."""


class PromptStream:
    """Draws prompts from weighted sources, epoch after epoch.

    What comes next depends on the seed, the sources and the number of draws, never on how many
    were asked for at a time.
    """

    def __init__(
        self,
        sets: Sequence[PromptSet],
        *,
        seed: int,
        shuffle: bool = True,
        num_epochs: int | None = None,
    ) -> None:
        """
        Args:
            sets: the sources; all with a weight, or all without.
            seed: the run's seed, from which the order of each pass is derived.
            shuffle: draw each pass in a new order; False: in the order of the source.
            num_epochs: end after so many epochs; None: never.

        Raises:
            DataError: if there is no source, or an empty one.
            ConfigError: if names or weights do not fit each other, or num_epochs is below 1.
        """
        if num_epochs is not None and num_epochs < 1:
            raise ConfigError(f"num_epochs is {num_epochs}: at least 1 is needed")
        if not sets:
            raise DataError("there are no prompts: no source is given")
        for prompts in sets:
            if not prompts.prompts:
                raise DataError(f"source {prompts.name!r} holds no prompts")
        problems = mixture_problems([(prompts.name, prompts.weight) for prompts in sets])
        if problems:
            raise ConfigError("; ".join(problems))
        self._sets = tuple(sets)
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        weights = [len(s) if s.weight is None else s.weight for s in sets]
        self._mixture = Mixture(weights)
        self._drawn = [0] * len(sets)
        self._returned: list[_Place] = []
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._places = {
            (prompt.source, prompt.id): (i, k)
            for i, prompts in enumerate(sets)
            for k, prompt in enumerate(prompts.prompts)
        }
        if len(self._places) < self.num_prompts:
            raise DataError("two prompts have the same id and the same source")

    @property
    def num_prompts(self) -> int:
        """Prompts in all sources: the draws of one epoch."""
        return sum(len(prompts) for prompts in self._sets)

    @property
    def epoch(self) -> int:
        """Number of epochs of which every draw is out and none was given back.

        An epoch ended in a step if this is greater after the step than before it.
        """
        first_missing = self._returned[0].ordinal if self._returned else self._position
        return first_missing // self.num_prompts

    @property
    def num_left(self) -> int | None:
        """Draws until the stream is exhausted; None if it never is."""
        if self._num_epochs is None:
            return None
        fresh = max(0, self.num_prompts * self._num_epochs - self._position)
        return fresh + len(self._returned)

    @property
    def fingerprint(self) -> str:
        """Hash over everything that decides about the order: prompts, weights, shuffle, seed.

        The number of epochs is not in it: a run may be resumed to go on for longer.
        """
        text = json.dumps(self._identity(), sort_keys=True)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """What `fingerprint` hashes, by source, so that two streams can be compared in words."""
        identity = self._identity()
        sources = {source.pop("name"): source for source in identity["sources"]}
        return {"shuffle": identity["shuffle"], "sources": sources}

    def take(self, n: int) -> list[Draw]:
        """The next n draws: fewer at the end, none once the stream is exhausted.

        What was given back comes first, in the order of its ordinals.
        """
        if n < 0:
            raise ValueError(f"can not take {n} draws")
        places, self._returned = self._returned[:n], self._returned[n:]
        fresh = n - len(places)
        if (left := self.num_left) is not None:
            fresh = min(fresh, left - len(self._returned))
        places += [self._next_place() for _ in range(fresh)]
        return [self._draw(place) for place in places]

    def give_back(self, draws: Sequence[Draw]) -> None:
        """Put back draws that were not used; they keep their ordinals.

        Raises:
            DataError: if one was not drawn from this stream, or is back already.
        """
        places = [self._place_of(draw) for draw in draws]
        known = {place.ordinal for place in self._returned}
        for place in places:
            if not 0 <= place.ordinal < self._position or place.ordinal in known:
                raise DataError(
                    f"draw {place.ordinal} can not be given back: it "
                    + ("is back already" if place.ordinal in known else "was never taken")
                )
            known.add(place.ordinal)
        for place in places:
            insort(self._returned, place)

    def state(self, unfinished: Sequence[Draw] = ()) -> dict[str, Any]:
        """The cursor as JSON values; `unfinished` draws are in it as if given back."""
        places = sorted([*self._returned, *(self._place_of(draw) for draw in unfinished)])
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "identity": self._identity(),
            "drawn": list(self._drawn),
            "returned": [[p.ordinal, p.source, p.index] for p in places],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            CheckpointError: if the state is of another version or damaged.
            ResumeMismatchError: if it belongs to other prompts or another order of them.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the data state has version {state.get('version')!r}; this Paceline reads version "
                f"{STATE_VERSION}: resume with the version that wrote it, or start a new run"
            )
        try:
            if state["fingerprint"] != self.fingerprint:
                raise _mismatch(state["identity"], self._identity())
            drawn = [int(count) for count in state["drawn"]]
            returned = sorted(_Place(*map(int, place)) for place in state["returned"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the data state is damaged: {error!r}") from error
        if len(drawn) != len(self._sets) or not all(self._is_place(p, drawn) for p in returned):
            raise CheckpointError("the data state is damaged: its counts do not fit the sources")
        self._drawn, self._returned = drawn, returned

    @property
    def _position(self) -> int:
        """The next ordinal that was never used."""
        return sum(self._drawn)

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": [
                {
                    "name": prompts.name,
                    "prompts": len(prompts),
                    "weight": prompts.weight,
                    "fingerprint": prompts.fingerprint,
                }
                for prompts in self._sets
            ],
        }

    def _next_place(self) -> _Place:
        ordinal = self._position
        source = self._mixture.next(self._drawn)
        passed, offset = divmod(self._drawn[source], len(self._sets[source]))
        self._drawn[source] += 1
        return _Place(ordinal, source, self._order(source, passed)[offset])

    def _order(self, source: int, passed: int) -> Sequence[int]:
        """Indices into the source in the order of one pass over it."""
        prompts = self._sets[source]
        if not self._shuffle:
            return range(len(prompts))
        known = self._orders.get(source)
        if known is None or known[0] != passed:
            order = list(range(len(prompts)))
            Random(derive_seed(self._seed, "shuffle", prompts.name, passed)).shuffle(order)
            known = self._orders[source] = (passed, order)
        return known[1]

    def _draw(self, place: _Place) -> Draw:
        prompt = self._sets[place.source].prompts[place.index]
        return Draw(place.ordinal, place.ordinal // self.num_prompts, prompt)

    def _place_of(self, draw: Draw) -> _Place:
        place = self._places.get((draw.prompt.source, draw.prompt.id))
        if place is None:
            raise DataError(
                f"draw {draw.ordinal} is of prompt {draw.prompt.id!r} of {draw.prompt.source!r}, "
                "which is not in this stream"
            )
        return _Place(draw.ordinal, *place)

    def _is_place(self, place: _Place, drawn: list[int]) -> bool:
        return (
            0 <= place.ordinal < sum(drawn)
            and 0 <= place.source < len(self._sets)
            and 0 <= place.index < len(self._sets[place.source])
        )


def _mismatch(saved: Mapping[str, Any], current: Mapping[str, Any]) -> ResumeMismatchError:
    """Says what differs between the identity in a checkpoint and that of a stream."""
    found = [
        f"{key} was {saved[key]}, is {current[key]}"
        for key in ("seed", "shuffle")
        if saved[key] != current[key]
    ]
    before = {source["name"]: source for source in saved["sources"]}
    after = {source["name"]: source for source in current["sources"]}
    if list(before) != list(after):
        found.append(f"sources were {', '.join(before)}, are {', '.join(after)}")
    for name, old in before.items():
        new = after.get(name, old)
        for key, word in (("prompts", "prompts"), ("weight", "weight"), ("fingerprint", "hash")):
            if old[key] != new[key]:
                found.append(f"{word} of {name!r}: was {old[key]}, is {new[key]}")
    return ResumeMismatchError(
        f"the checkpoint was made with other data: {'; '.join(found)}. Restore the data and its "
        "settings, or start a new run"
    )
