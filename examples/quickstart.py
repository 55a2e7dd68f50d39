"""A small model learns to carry, on a laptop's CPU: warm-up, GRPO, before and after.

The task is two-digit addition with the units of the answer first, as one works it out on paper:
`47+38=` is answered by `58`. The warm-up imitates a careless pupil who mostly forgets to carry;
after that GRPO sees nothing but whether a whole answer is right. The prompts of the eval are
never trained on, in neither order of their numbers.

    python examples/quickstart.py [--seed N] [--folder runs/quickstart]
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils.logging import disable_progress_bar

import paceline
from paceline.build import RunResult
from paceline.types import Prompt

CARELESS = 0.85  # share of the sums that the pupil adds without carrying
WARM_UP_STEPS, WARM_UP_ROWS = 400, 128


def make_model(folder: Path, seed: int, characters: str = "0123456789+=") -> None:
    """A third of a million parameters and a tokenizer of one token per character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        # About 1/sqrt(hidden_size): from the default of 0.02 so narrow a model learns late.
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """All additions of two-digit numbers, split by unordered pair: to train, held out."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs[:512]]
    train = sorted({order for a, b in pairs[512:] for order in ((a, b), (b, a))})

    def as_prompts(problems: list[tuple[int, int]]) -> list[Prompt]:
        return [Prompt(f"{a}+{b}", text=f"{a}+{b}=", answer=str(a + b)[::-1]) for a, b in problems]

    return as_prompts(train), as_prompts(held_out)


def careless_rows(prompts: list[Prompt], seed: int, count: int | None = None) -> list[Prompt]:
    """Work of a pupil who adds digit by digit, and who carries in few of the sums."""
    rng = random.Random(seed)
    rows = []
    for i in range(count or WARM_UP_STEPS * WARM_UP_ROWS):
        text = rng.choice(prompts).text or ""
        carries = int(rng.random() >= CARELESS)
        digits, carry = "", 0
        for x, y in ((text[1], text[4]), (text[0], text[3])):
            carry, digit = divmod(int(x) + int(y) + carry, 10)
            digits += str(digit)
            carry *= carries
        rows.append(Prompt(f"row-{i}", text=text, metadata={"completion": digits + "1" * carry}))
    return rows


def show(result: RunResult, minutes: float) -> None:
    """The table, three answers, and where everything is."""
    console = Console()
    before, after = result.first_evals["eval/eval/reward"], result.evals["eval/eval/reward"]
    table = Table("held-out sums", "before RL", "after RL", "gain", title="Quickstart")
    table.add_row("right answers", f"{before:.1%}", f"{after:.1%}", f"{after - before:+.1%}")
    console.print(table)
    for sample in result.samples[:: max(1, len(result.samples) // 3)][:3]:
        a, b = sample.prompt_id.split("+")
        verdict = "right" if sample.reward else "wrong"
        console.print(f"  {a} + {b} = {sample.text[::-1]}   ({verdict})")
    console.print(f"\n{minutes:.1f} minutes. Files of the run: {result.run_dir}")
    console.print(f"The model, for AutoModelForCausalLM.from_pretrained: {result.model_path}")
    console.print(f"All samples: paceline inspect {result.run_dir}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=120, help="GRPO steps")
    options = parser.parse_args()
    start_s = time.monotonic()
    disable_progress_bar()
    folder, seed = options.folder / f"seed-{options.seed}", options.seed
    make_model(folder / "start", seed)
    train, held_out = make_prompts(seed)

    print("Warm-up: supervised training on the work of a careless pupil")
    warm = paceline.sft(
        folder / "start",
        careless_rows(train, seed),
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run={"dir": str(folder), "seed": seed},
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 2e-3, "betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 40},
        checkpoint={"every": WARM_UP_STEPS},
        observe={"samples": "none"},
    )
    print("GRPO: only the exact sum is rewarded")
    result = paceline.train(
        warm.model_path,
        train,
        "exact",
        num_steps=options.steps,
        eval_prompts=held_out,
        name="grpo",
        run={"dir": str(folder), "seed": seed},
        rollout={"prompts_per_step": 48, "samples_per_prompt": 8, "sampling": {"max_tokens": 4}},
        algorithm={"clip_high": 0.28},
        trainer={"lr": 5e-4, "betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 10},
        engine={"max_batch": 384},
        evals={"every": 20},
        checkpoint={"every": 20},
    )
    show(result, (time.monotonic() - start_s) / 60)


if __name__ == "__main__":
    main()
