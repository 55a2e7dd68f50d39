"""What a decode step reads of each slot: arrays of numbers, one entry a slot.

Shape legend: B slots, N active rows, R rows that differ from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engines.embedded_queue import Generation
from paceline.engines.embedded_sampler import IntArray, stream_keys

PLAIN_DRAW = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
"""Temperature, top-k, top-p, min-p and repetition penalty of a row that nobody reads."""


class Columns:
    """The newest token of each slot, where it stands, and how the next one is drawn."""

    def __init__(self, num_slots: int) -> None:
        self.token_B = np.zeros(num_slots, np.int64)
        self.position_B = np.zeros(num_slots, np.int64)
        self.count_B = np.zeros(num_slots, np.int64)
        """Draws made so far from the slot's random stream."""
        self.stream_B = np.zeros(num_slots, np.uint64)
        self.sampling_5B = np.zeros((5, num_slots), np.float64)
        """In the order of `PLAIN_DRAW`."""
        self._history_B = np.zeros(num_slots, np.int64)
        """Equal for rows that were admitted together with one prompt and have made the same
        tokens since, the newest aside."""
        self._num_histories = 0
        self._has_equal = False
        """False once all rows differ, which they do for good."""

    def fill(self, slots: list[int], sequences: Sequence[Generation]) -> None:
        """Set what new sequences bring; they are admitted together."""
        requests = [sequence.request for sequence in sequences]
        samplings = [request.sampling for request in requests]
        self.position_B[slots] = [len(sequence.prompt) - 1 for sequence in sequences]
        self.count_B[slots] = [request.num_sampled for request in requests]
        self.stream_B[slots] = stream_keys([request.seed for request in requests])
        self.sampling_5B[:, slots] = np.transpose(
            [(s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty) for s in samplings]
        )
        keys = {sequence.prompt_key: None for sequence in sequences}
        histories = {key: self._num_histories + i for i, key in enumerate(keys)}
        self._history_B[slots] = [histories[sequence.prompt_key] for sequence in sequences]
        self._num_histories += len(histories)
        self._has_equal = True

    def clear(self, slot: int) -> None:
        """Make it a hole: the cheapest draw there is, written where nobody reads."""
        self.token_B[slot] = self.position_B[slot] = 0
        self.sampling_5B[:, slot] = PLAIN_DRAW

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy slots. No target is a source."""
        columns = (self.token_B, self.position_B, self.count_B, self.stream_B, self._history_B)
        for column_B in columns:
            column_B[targets] = column_B[sources]
        self.sampling_5B[:, targets] = self.sampling_5B[:, sources]

    def advance(self, slots: list[int], tokens: IntArray) -> None:
        """Take a newly drawn token for each of the slots."""
        self.token_B[slots] = tokens
        self.position_B[slots] += 1
        self.count_B[slots] += 1

    def distinct(self, n: int) -> tuple[IntArray, IntArray] | None:
        """Which of the rows 0..N-1 differ: the first row of each kind [R], and which kind each
        row is of [N]. None if all do. Called once a step.

        Equal rows have equal keys, values and logits; they part when their draws differ.
        """
        if not self._has_equal:
            return None
        pairs_N = self._history_B[:n] << 32 | self.token_B[:n]
        _, first_R, kind_N = np.unique(pairs_N, return_index=True, return_inverse=True)
        self._history_B[:n] = self._num_histories + kind_N
        self._num_histories += len(first_R)
        self._has_equal = len(first_R) < n
        return (first_R, kind_N) if self._has_equal else None
