"""The bare work of `vs_trl.py`: what any system does for the same tokens, and nothing else."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vs_trl import TASKS
from vs_trl_task import Clock, peak_mib, tell, wait

Rows = list[dict[str, Any]]


@torch.no_grad()
def decode(model: Any, rows: Rows, prompts: int) -> None:
    """Prompts once each, then one token a call for all rows until the longest is done."""
    answers = [row["trained"] for row in rows]
    heads = [row["tokens"][: len(row["tokens"]) - row["trained"]] for row in rows]
    each = len(rows) // prompts
    width = max(map(len, heads))
    ids = torch.tensor([[0] * (width - len(head)) + head for head in heads[::each]])
    seen = torch.tensor([[0] * (width - len(head)) + [1] * len(head) for head in heads])
    found = model(input_ids=ids, attention_mask=seen[::each], use_cache=True, logits_to_keep=1)
    cache, logits = found.cache, found.logits[:, -1].repeat_interleave(each, 0)
    cache.batch_repeat_interleave(each)
    for turn in range(max(answers)):
        token = torch.multinomial(logits.softmax(-1), 1)
        logits.log_softmax(-1).gather(1, token)
        if turn + 1 < max(answers):
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
            found = model(input_ids=token, attention_mask=seen, cache=cache)
            logits = found.logits[:, -1]


def learn(model: Any, rows: Rows) -> None:
    """One padded forward and backward of all rows; logits of the trained tokens only."""
    lengths = [len(row["tokens"]) - 1 for row in rows]
    width = max(lengths)
    ids = torch.tensor(
        [row["tokens"][:-1] + [0] * (width + 1 - len(row["tokens"])) for row in rows]
    )
    at = [
        b * width + t
        for b, row in enumerate(rows)
        for t in range(lengths[b] - row["trained"], lengths[b])
    ]
    targets = torch.tensor([t for row in rows for t in row["tokens"][-row["trained"] :]])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.lm_head(hidden[torch.tensor(at)])
    torch.nn.functional.cross_entropy(logits, targets).backward()
    model.zero_grad()


def main() -> None:
    name, path, steps, _, threads = sys.argv[1:6]
    if TASKS[name].device != "cpu":
        raise SystemExit("the bare work is done on a CPU: use --no-floor")
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    clock = Clock()
    for _ in range(int(steps)):
        groups = json.loads(wait())["groups"]
        rows = [row for group in groups for row in group]
        clock.start()
        decode(model, rows, len(groups))
        decode_s, began = clock.seconds["cpu_s"], time.process_time()
        learn(model, rows)
        learn_s = time.process_time() - began
        tell(**clock.seconds, decode_s=decode_s, learn_s=learn_s, peak_mib=peak_mib())


if __name__ == "__main__":
    main()
