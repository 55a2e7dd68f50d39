"""The running batch: slots, prefix sharing, decode steps and the end of sequences.

Everything here runs in the engine's one worker thread; the event loop hands over a `Job` and takes
back what ended. Rows 0..N-1 are compact before each step: what arrives fills the holes first, then
the last rows move into those that are left. With captured steps, whose number of rows is rounded
up, they move only when that makes the step smaller; until then a hole is a row that nobody reads.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engines.embedded_cache import SlotCache, row_index
from paceline.engines.embedded_graphs import DecodeGraphs, rounded_rows
from paceline.engines.embedded_model import CachedModel, Prefill, plan_batches, step_inputs
from paceline.engines.embedded_queue import Generation
from paceline.engines.embedded_sampler import IntArray, RowSettings, row_settings, sample, uniforms

PLAIN_DRAW = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
"""Temperature, top-k, top-p, min-p and repetition penalty of a row that nobody reads."""


@dataclass(slots=True)
class Job:
    """What the event loop hands to the worker at a step boundary."""

    admit: list[Generation] = field(default_factory=list)
    ahead: dict[bytes, IntArray] = field(default_factory=dict)
    """Prompts that wait, to be computed together with those admitted if there is room."""
    released: set[bytes] = field(default_factory=set)
    """Prompts that nobody waits for any more after `admit`."""
    recomputes: bool = False
    """Compute keys and values of running sequences anew, with the weights as they are now."""


@dataclass(slots=True)
class Counts:
    """What the engine did since it was made."""

    prompt_tokens: int = 0
    """Of the requests admitted."""
    prefill_tokens: int = 0
    """Of those, computed: each prompt once; and what was computed anew after a pause."""
    decode_steps: int = 0
    decode_tokens: int = 0
    """Sum over steps of the rows in them."""


class Batch:
    """Slots and the sequences in them."""

    def __init__(
        self,
        model: CachedModel,
        *,
        max_batch: int,
        max_positions: int | None,
        max_prefill_tokens: int,
        version: int,
        tokenizer: Any,
        graphs: bool = True,
    ) -> None:
        """graphs: capture decode steps as graphs, where the device is a GPU."""
        self.version = version
        """Stamped on each token; changed by the engine between jobs."""
        self.is_interrupted = False
        """Set by the event loop: end the job at the next step boundary."""
        self.counts = Counts()
        self.cache = SlotCache(max_batch, max_positions)
        self._model = model
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._tokenizer = tokenizer
        self._owns_tokenizer = False
        self._rows: list[Generation | None] = []
        self._holes: list[int] = []
        self._is_dropped = False
        """Running sequences have lost their keys and values."""
        self._settings: RowSettings | None = None
        self._seen: dict[Generation, Tensor] = {}
        self._prefixes: dict[bytes, tuple[Prefill, int, int]] = {}
        self._graphs: DecodeGraphs | None = None
        self._addresses: tuple[int, ...] = ()
        if graphs and model.device.type == "cuda":
            self._graphs = DecodeGraphs(
                lambda inputs_3N, longest: model.step(self.cache, inputs_3N, longest),
                model.device,
                max_batch,
            )
        self._token = np.zeros(max_batch, np.int64)
        self._position = np.zeros(max_batch, np.int64)
        self._count = np.zeros(max_batch, np.int64)
        self._stream = np.zeros(max_batch, np.uint64)
        self._sampling = np.zeros((5, max_batch), np.float64)

    @property
    def num_active(self) -> int:
        return len(self._rows) - len(self._holes)

    @property
    def num_free(self) -> int:
        return self._max_batch - self.num_active

    def run(self, job: Job) -> list[Generation]:
        """Admit, then step until a sequence ends or the loop interrupts, but once at least.

        If a sequence was cut, the step is left for the next job. Returns the sequences that ended.
        """
        if self._graphs is not None:
            self._addresses = self._model.addresses
        with self._model.evaluating():
            self._free_cancelled()
            finished = self._end_cut()
            if job.recomputes or self._is_dropped:
                self._recompute()
            finished += self._admit(job)
            self._compact()
            while not finished and self.num_active:
                finished = self._step()
                if self.is_interrupted:
                    break
        return finished

    def score(self, rows: list[IntArray], temperatures: list[float]) -> list[list[float]]:
        with self._model.evaluating():
            return self._model.score(rows, temperatures, self._max_prefill_tokens)

    def clear(self) -> list[Generation]:
        """Free all slots; return the sequences that were in them."""
        running = [row for row in self._rows if row is not None]
        self._rows, self._holes, self._settings = [], [], None
        self._seen.clear()
        self._prefixes.clear()
        return running

    def forget_prefixes(self) -> None:
        """Drop prompts computed ahead; none may be used under other weights."""
        self._prefixes.clear()

    def drop_graphs(self) -> None:
        """Free the captured decode steps; they are captured anew when they are needed."""
        if self._graphs is not None:
            self._graphs.drop()

    def drop_cache(self) -> None:
        """Free all keys and values; running sequences are computed anew at the next job."""
        self._prefixes.clear()
        self.cache.drop()
        self._is_dropped = True

    def _free_cancelled(self) -> None:
        for slot, row in enumerate(self._rows):
            if row is not None and row.is_cancelled:
                self._free(slot)

    def _end_cut(self) -> list[Generation]:
        ended = []
        for slot, row in enumerate(self._rows):
            if row is not None and row.is_cut:
                row.finish = "length"
                self._end(slot, row)
                ended.append(row)
        return ended

    def _free(self, slot: int) -> None:
        sequence = self._rows[slot]
        assert sequence is not None
        self._seen.pop(sequence, None)
        self._rows[slot] = None
        bisect.insort(self._holes, slot)
        self._settings = None
        # What a step does with a hole: the cheapest draw there is, written where nobody reads.
        self._token[slot] = self._position[slot] = 0
        self._sampling[:, slot] = PLAIN_DRAW

    def _compact(self) -> None:
        if self._graphs is not None and self.num_active:
            sizes = (rounded_rows(n, self._max_batch) for n in (self.num_active, len(self._rows)))
            if len(set(sizes)) == 1:
                return
        moves: list[tuple[int, int]] = []
        while self._holes:
            last = len(self._rows) - 1
            if self._rows[last] is None:
                self._holes.pop()
            else:
                hole = self._holes.pop(0)
                moves.append((last, hole))
                self._rows[hole] = self._rows[last]
            self._rows.pop()
        if not moves:
            return
        sources, targets = map(list, zip(*moves, strict=True))
        self.cache.move(sources, targets, int(self._position[sources].max()))
        for column in (self._token, self._position, self._count, self._stream):
            column[targets] = column[sources]
        self._sampling[:, targets] = self._sampling[:, sources]
        self._settings = None

    def _recompute(self) -> None:
        """Fill the slots of running sequences with keys and values of the current weights."""
        slots = [slot for slot, row in enumerate(self._rows) if row is not None]
        contexts = [row.context() for row in self._rows if row is not None]
        for part in plan_batches([len(c) for c in contexts], self._max_prefill_tokens):
            prefill = self._prefill([contexts[i] for i in part])
            self._place(prefill, list(range(len(part))), [slots[i] for i in part])
        self._is_dropped = False

    def _prefill(self, prompts: list[IntArray]) -> Prefill:
        self.counts.prefill_tokens += sum(map(len, prompts))
        return self._model.prefill(prompts)

    def _place(self, prefill: Prefill, rows: list[int], slots: list[int]) -> None:
        device = self._model.device
        self.cache.reserve(next(iter(prefill.blocks.values()))[0].shape[1])
        self.cache.place(prefill.blocks, row_index(rows, device), row_index(slots, device))

    def _admit(self, job: Job) -> list[Generation]:
        """Give each sequence a slot with its prompt's keys and values, and its first token."""
        if not job.admit:
            return []
        slots_by_prompt: dict[bytes, list[int]] = {}
        for sequence in job.admit:
            slots_by_prompt.setdefault(sequence.prompt_key, []).append(self._take_slot(sequence))
        logits: list[Tensor] = []
        slots: list[int] = []

        def fill(prefill: Prefill, found: Iterable[tuple[int, bytes]]) -> None:
            pairs = [(row, slot) for row, key in found for slot in slots_by_prompt.get(key, ())]
            if pairs:
                rows_K, slots_K = map(list, zip(*pairs, strict=True))
                self._place(prefill, rows_K, slots_K)
                logits.append(prefill.logits_UV[row_index(rows_K, self._model.device)])
                slots.extend(slots_K)

        for prefill, found in self._known(slots_by_prompt):
            fill(prefill, found)
        for prefill, keys in self._compute(slots_by_prompt, job):
            fill(prefill, enumerate(keys))
        for key in job.released:
            self._prefixes.pop(key, None)
        settings = row_settings(self._sampling[:, slots], self._model.device)
        return self._draw(torch.cat(logits), slots, settings, self._uniforms(slots))

    def _take_slot(self, sequence: Generation) -> int:
        if self._holes:
            slot = self._holes.pop(0)
            self._rows[slot] = sequence
        else:
            slot = len(self._rows)
            self._rows.append(sequence)
        sampling = sequence.request.sampling
        self._position[slot] = len(sequence.prompt) - 1
        self._count[slot] = sequence.request.num_sampled
        self._stream[slot] = sequence.stream
        self._sampling[:, slot] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
        )
        self.counts.prompt_tokens += len(sequence.prompt)
        self._settings = None
        if sampling.repetition_penalty != 1:
            seen = np.zeros(max(self._model.vocab_size, self._model.num_logits), np.bool_)
            seen[sequence.prompt] = True
            seen_V = torch.from_numpy(seen[: self._model.num_logits])
            self._seen[sequence] = seen_V.to(self._model.device)
        return slot

    def _known(
        self, slots_by_prompt: dict[bytes, list[int]]
    ) -> list[tuple[Prefill, list[tuple[int, bytes]]]]:
        """Prompts computed before, gathered by the prefill that made them."""
        found: dict[int, tuple[Prefill, list[tuple[int, bytes]]]] = {}
        for key in slots_by_prompt:
            if key in self._prefixes:
                prefill, row, _ = self._prefixes[key]
                found.setdefault(id(prefill), (prefill, []))[1].append((row, key))
        return list(found.values())

    def _compute(
        self, slots_by_prompt: dict[bytes, list[int]], job: Job
    ) -> Iterable[tuple[Prefill, list[bytes]]]:
        """Prefill the prompts that are new, and with them what waits, within the token budget."""
        prompts = {s.prompt_key: s.prompt for s in job.admit if s.prompt_key not in self._prefixes}
        if not prompts:
            return
        room = self._max_prefill_tokens - sum(map(len, prompts.values()))
        room -= sum(length for _, _, length in self._prefixes.values())
        for key, prompt in job.ahead.items():
            if key in prompts or key in self._prefixes:
                continue
            room -= len(prompt)
            if room < 0:
                break
            prompts[key] = prompt
        keys = list(prompts)
        for part in plan_batches([len(prompts[k]) for k in keys], self._max_prefill_tokens):
            part_keys = [keys[i] for i in part]
            prefill = self._prefill([prompts[key] for key in part_keys])
            for row, key in enumerate(part_keys):
                if key not in job.released:
                    self._prefixes[key] = (prefill, row, len(prompts[key]))
            yield prefill, part_keys

    def _step(self) -> list[Generation]:
        n = len(self._rows)
        longest = int(self._position[:n].max()) + 1
        self.cache.reserve(longest)
        if self._settings is None:
            self._settings = row_settings(self._sampling[:, :n], self._model.device)
        # Before the forward: on a GPU each transfer waits for what was launched.
        uniform_N = self._uniforms(slice(n))
        logits_NV = self._decode(n, longest)
        self.counts.decode_steps += 1
        self.counts.decode_tokens += self.num_active
        return self._draw(logits_NV, list(range(n)), self._settings, uniform_N)

    def _decode(self, n: int, longest: int) -> Tensor:
        if self._graphs is None:
            return self._model.decode(self.cache, self._token[:n], self._position[:n], longest)
        self._graphs.check((self.cache.generation, self._addresses))
        inputs_3N = step_inputs(self._token[:n], self._position[:n], self.cache.capacity)
        return self._graphs.step(inputs_3N, longest, self.cache.capacity)

    def _uniforms(self, index: Any) -> Tensor:
        drawn = uniforms(self._stream[index], self._count[index])
        return torch.from_numpy(drawn).to(self._model.device)

    def _draw(
        self, logits_KV: Tensor, slots: list[int], settings: RowSettings, uniform_K: Tensor
    ) -> list[Generation]:
        """Sample the next token of the given slots; return what ended."""
        rows = [self._rows[slot] for slot in slots]
        seen = [self._seen[rows[i]] for i in settings.penalised_rows]  # type: ignore[index]
        token_K, logprob_K = sample(logits_KV, settings, uniform_K, seen)
        for seen_V, i in zip(seen, settings.penalised_rows, strict=True):
            seen_V[token_K[i : i + 1]] = True
        drawn_2K = torch.stack((token_K.double(), logprob_K)).cpu().numpy()  # the step's one sync
        tokens = drawn_2K[0].astype(np.int64)
        self._token[slots] = tokens
        self._position[slots] += 1
        self._count[slots] += 1
        self._position[self._holes] = 0
        finished = []
        for i, (row, token, logprob) in enumerate(
            zip(rows, tokens.tolist(), drawn_2K[1].tolist(), strict=True)
        ):
            if row is not None and self._append(row, token, logprob):
                finished.append(row)
                self._end(slots[i], row)
        return finished

    def _end(self, slot: int, sequence: Generation) -> None:
        if sequence.error is not None:
            self.cache.clear(slot)
        self._free(slot)

    def _append(self, sequence: Generation, token: int, logprob: float) -> bool:
        """Add a token; True if it ends the sequence."""
        if not math.isfinite(logprob):
            sequence.error = (
                f"the model's logits are not finite numbers at token {len(sequence.tokens)} of "
                f"the answer, under version {self.version}: the weights or the inputs are broken"
            )
            return True
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(self.version)
        if sequence.request.progress is not None:
            sequence.request.progress.num_tokens += 1
        if token in sequence.end_ids:
            sequence.finish, sequence.matched = "stop", token
        elif sequence.stop and (text := self._stop_text(sequence)) is not None:
            sequence.finish, sequence.matched = "stop", text
        elif len(sequence.tokens) >= sequence.limit:
            sequence.finish = "length"
        return sequence.finish is not None

    def _stop_text(self, sequence: Generation) -> str | None:
        """The stop text that stands first in the answer's tail, across the borders of tokens."""
        if not self._owns_tokenizer:
            # Fast tokenizers may not be used from two threads at one time.
            self._tokenizer, self._owns_tokenizer = copy.deepcopy(self._tokenizer), True
        tokens = [*sequence.before, *sequence.tokens[-sequence.stop_window :]]
        tail = self._tokenizer.decode(
            tokens[-sequence.stop_window :],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        places = [(place, text) for text in sequence.stop if (place := tail.find(text)) >= 0]
        return min(places)[1] if places else None
