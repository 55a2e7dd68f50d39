"""The running batch: slots, prefix sharing, decode steps and the end of sequences.

Everything here runs in the engine's one worker thread; the event loop hands over a `Job` and takes
back what ended. Rows 0..N-1 are compact before each step: what arrives fills the holes first, then
the last rows move into those that are left. With captured steps, whose number of rows is rounded
up, they move only when that makes the step smaller; until then a hole is a row that nobody reads.

On a CPU, rows that are equal so far (answers to one prompt that begin alike) are computed once in a
step. What that makes is written to the slots of all of them, so each slot is complete at any time.
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

from paceline.engines.embedded_cache import Copies, SlotCache, row_index
from paceline.engines.embedded_columns import Columns
from paceline.engines.embedded_graphs import DecodeGraphs, rounded_rows
from paceline.engines.embedded_model import CachedModel, Prefill, plan_batches, step_inputs
from paceline.engines.embedded_queue import Generation
from paceline.engines.embedded_sampler import IntArray, RowSettings, row_settings, sample, uniforms

MIN_COPIES = 3
"""Equal rows are computed once if there are so many rows to each that differs. Their keys and
values are gathered for that, which takes as long as it saves where there are fewer."""


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
        self._columns = Columns(max_batch)

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
        self._columns.clear(slot)

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
        self.cache.move(sources, targets, int(self._columns.position_B[sources].max()))
        self._columns.move(sources, targets)
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
        taken = [self._take_slot(sequence) for sequence in job.admit]
        self._columns.fill(taken, job.admit)
        slots_by_prompt: dict[bytes, list[int]] = {}
        for sequence, slot in zip(job.admit, taken, strict=True):
            slots_by_prompt.setdefault(sequence.prompt_key, []).append(slot)
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
        settings = row_settings(self._columns.sampling_5B[:, slots], self._model.device)
        return self._draw(torch.cat(logits), slots, settings, self._uniforms(slots))

    def _take_slot(self, sequence: Generation) -> int:
        if self._holes:
            slot = self._holes.pop(0)
            self._rows[slot] = sequence
        else:
            slot = len(self._rows)
            self._rows.append(sequence)
        self.counts.prompt_tokens += len(sequence.prompt)
        self._settings = None
        if sequence.request.sampling.repetition_penalty != 1:
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
        longest = int(self._columns.position_B[:n].max()) + 1
        self.cache.reserve(longest)
        if self._settings is None:
            self._settings = row_settings(self._columns.sampling_5B[:, :n], self._model.device)
        # Before the forward: on a GPU each transfer waits for what was launched.
        uniform_N = self._uniforms(slice(n))
        logits_NV = self._decode(n, longest)
        self.counts.decode_steps += 1
        self.counts.decode_tokens += self.num_active
        return self._draw(logits_NV, list(range(n)), self._settings, uniform_N)

    def _decode(self, n: int, longest: int) -> Tensor:
        token_N, position_N = self._columns.token_B[:n], self._columns.position_B[:n]
        if self._graphs is None:
            copies = self._copies(n)
            return self._model.decode(self.cache, token_N, position_N, longest, copies)
        self._graphs.check((self.cache.generation, self._addresses))
        inputs_3N = step_inputs(token_N, position_N, self.cache.capacity)
        return self._graphs.step(inputs_3N, longest, self.cache.capacity)

    def _copies(self, n: int) -> Copies | None:
        """Rows that are equal so far, where it pays to compute one for all.

        A GPU's step takes as long with fewer rows: there they are left as they are.
        """
        if self._model.device.type != "cpu":
            return None
        found = self._columns.distinct(n)
        if found is None or MIN_COPIES * len(found[0]) > n:
            return None
        return Copies(*map(torch.from_numpy, found))

    def _uniforms(self, index: Any) -> Tensor:
        drawn = uniforms(self._columns.stream_B[index], self._columns.count_B[index])
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
        self._columns.advance(slots, tokens)
        self._columns.position_B[self._holes] = 0
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
