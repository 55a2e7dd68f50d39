"""GRPO in one file: a tiny language model learns to carry, on one CPU core, in about a minute.

The task is two-digit addition with the units of the answer first, as one works it out on paper:
``47+38=`` is answered by ``58`` and the end of the sequence. The supervised warm-up imitates a
pupil who forgets to carry in six sums out of seven; GRPO then only sees whether a whole answer is
right. Read from top to bottom: tokenizer, model, data, warm-up, rollouts, loss, training.
"""

import argparse
import copy
import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CARELESS = 0.85  # share of the sums in which the pupil of the warm-up forgets to carry


class Problem(NamedTuple):
    """One addition and its sum, written units first."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class GRPOConfig:
    """Hyper-parameters of the reinforcement-learning phase."""

    prompts_per_step: int = 48
    group_size: int = 8
    max_new_tokens: int = 4  # three digits and the end of the sequence
    temperature: float = 1.0
    num_iterations: int = 1  # optimizer steps on each batch of rollouts
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    lr: float = 5e-4
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass
class Rollouts:
    """Sampled completions, ``B = prompts * group_size`` rows; the rows of a group are adjacent."""

    prompt_ids: Tensor  # (B, P) int64
    completion_ids: Tensor  # (B, C) int64, padding after the end of the sequence
    mask: Tensor  # (B, C) bool, true up to and including the end of the sequence
    behavior_logprobs: Tensor  # (B, C) float32, of the distribution that was sampled from
    rewards: Tensor  # (B,) float32


@dataclass
class StepRecord:
    """What one optimizer step read and computed."""

    rollouts: Rollouts
    advantages: Tensor  # (B,) float32
    loss: float
    grad_norm: float  # before clipping


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of fifteen tokens, one per character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+="])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """Build a randomly initialised Llama with a third of a million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        # From the default of 0.02 so narrow a model learns late.
        initializer_range=0.05,
        pad_token_id=make_tokenizer().pad_token_id,
        eos_token_id=make_tokenizer().eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_prompts(seed: int, num_held_out: int = 512) -> tuple[list[Problem], list[Problem]]:
    """Split all two-digit additions into training and held-out problems.

    The split is by unordered pair, so that ``38+47=`` is no training for a held-out ``47+38=``.
    """
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs[:num_held_out]]
    train = sorted({order for a, b in pairs[num_held_out:] for order in ((a, b), (b, a))})
    rng.shuffle(train)
    splits = [[Problem(f"{a}+{b}=", str(a + b)[::-1]) for a, b in x] for x in (train, held_out)]
    return splits[0], splits[1]


def careless_answer(prompt: str, rng: random.Random) -> str:
    """Add digit by digit, in a share CARELESS of the sums without carrying."""
    carries = int(rng.random() >= CARELESS)
    digits, carry = "", 0
    for x, y in ((prompt[1], prompt[4]), (prompt[0], prompt[3])):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        digits += str(digit)
        carry *= carries
    return digits + "1" * carry


def completion_logprobs(
    model: PreTrainedModel, prompt_ids: Tensor, completion_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return log-probabilities (B, C) of completion_ids (B, C) after prompt_ids (B, P).

    Padding only follows a completion, so that causal attention needs no mask.
    """
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)[:, :-1]
    logits = model(input_ids, logits_to_keep=completion_ids.shape[1], use_cache=False).logits
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)


def sft(model: PreTrainedModel, problems: list[Problem], seed: int, steps: int = 400) -> None:
    """Warm the model up, in place, on answers of the careless pupil."""
    rng, tokenizer = random.Random(seed), make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    # Linear warm-up over a tenth of the steps, linear decay over the last three tenths.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / (0.1 * steps), (steps - k) / (0.3 * steps))
    )
    for _ in range(steps):
        prompts = [problem.prompt for problem in rng.choices(problems, k=128)]
        answers = [careless_answer(prompt, rng) + tokenizer.eos_token for prompt in prompts]
        prompt_ids = tokenizer(prompts, return_tensors="pt")["input_ids"]
        targets = tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")
        mask = targets["attention_mask"]
        logprobs = completion_logprobs(model, prompt_ids, targets["input_ids"])
        loss = -(logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def rollout(
    model: PreTrainedModel, problems: list[Problem], config: GRPOConfig, generator: torch.Generator
) -> Rollouts:
    """Sample group_size completions of each prompt, greedily at temperature 0, and reward them.

    There is no KV cache: sequences of ten tokens do not repay one.
    """
    tokenizer = make_tokenizer()
    repeated = [problem for problem in problems for _ in range(config.group_size)]
    prompts = [problem.prompt for problem in repeated]
    ids = prompt_ids = tokenizer(prompts, return_tensors="pt")["input_ids"]
    alive = torch.ones(len(ids), 1, dtype=torch.bool)
    masks: list[Tensor] = []
    logprobs: list[Tensor] = []
    while alive.any() and len(masks) < config.max_new_tokens:
        logits = model(ids, logits_to_keep=1, use_cache=False).logits[:, -1].float()
        dist = torch.log_softmax(logits / (config.temperature or 1.0), dim=-1)
        if config.temperature:
            next_ids = torch.multinomial(dist.exp(), 1, generator=generator)
        else:
            next_ids = dist.argmax(dim=-1, keepdim=True)
        next_ids = next_ids.masked_fill(~alive, tokenizer.pad_token_id)
        ids = torch.cat([ids, next_ids], dim=1)
        masks.append(alive)
        logprobs.append(dist.gather(-1, next_ids))
        alive = alive & (next_ids != tokenizer.eos_token_id)
    completion_ids, mask = ids[:, prompt_ids.shape[1] :], torch.cat(masks, dim=1)
    texts = [tokenizer.decode(row[kept]) for row, kept in zip(completion_ids, mask, strict=True)]
    # An answer that does not end is wrong.
    right = [
        text == p.answer + tokenizer.eos_token for text, p in zip(texts, repeated, strict=True)
    ]
    return Rollouts(
        prompt_ids, completion_ids, mask, torch.cat(logprobs, dim=1), torch.tensor(right).float()
    )


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return ``(r - mean) / (std + 1e-6)`` within groups, (B,) to (B,), with the unbiased std.

    GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    advantages = centered / (groups.std(dim=1, keepdim=True) + 1e-6)
    # The mean of equal rewards may be off by a rounding error, which 1e-6 does not tame.
    equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(equal, 0.0).flatten()


def grpo_loss(
    logprobs: Tensor,
    rollouts: Rollouts,
    advantages: Tensor,
    config: GRPOConfig,
    ref_logprobs: Tensor | None = None,
) -> Tensor:
    """Return the scalar loss from log-probabilities (B, C) and advantages (B,).

    Per token it is PPO's clipped surrogate ``-min(ratio * A, clip(ratio) * A)``, where ``ratio =
    exp(logprobs - behavior_logprobs)`` (https://arxiv.org/abs/1707.06347, equation 7), plus
    ``kl_coef`` times the k3 estimate of the divergence from the reference, ``exp(d) - d - 1`` with
    ``d = ref_logprobs - logprobs`` (http://joschu.net/blog/kl-approx.html). Its mean is over all
    tokens of the optimizer step, so that every token weighs the same.
    """
    ratio = torch.exp(logprobs - rollouts.behavior_logprobs)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    if ref_logprobs is not None:
        delta = ref_logprobs - logprobs
        per_token = per_token + config.kl_coef * (torch.exp(delta) - delta - 1)
    return (per_token * rollouts.mask).sum() / rollouts.mask.sum()


def train(
    model: PreTrainedModel, problems: list[Problem], config: GRPOConfig, steps: int, seed: int
) -> Iterator[StepRecord]:
    """Improve the model in place, yielding a record after each optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    ref_model = copy.deepcopy(model).requires_grad_(False) if config.kl_coef else None
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / max(1, config.warmup_steps))
    )
    for step in range(steps):
        start = step * config.prompts_per_step
        batch = [problems[(start + i) % len(problems)] for i in range(config.prompts_per_step)]
        rollouts = rollout(model, batch, config, generator)
        advantages = group_advantages(rollouts.rewards, config.group_size)
        inputs = (rollouts.prompt_ids, rollouts.completion_ids, config.temperature)
        ref_logprobs = completion_logprobs(ref_model, *inputs) if ref_model else None
        for _ in range(config.num_iterations):
            logprobs = completion_logprobs(model, *inputs)
            loss = grpo_loss(logprobs, rollouts, advantages, config, ref_logprobs)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            schedule.step()
            yield StepRecord(rollouts, advantages, loss.item(), grad_norm.item())


def evaluate(model: PreTrainedModel, problems: list[Problem], temperature: float = 0.0) -> float:
    """Return the share of problems answered right, greedily unless a temperature is given."""
    config = GRPOConfig(group_size=1, temperature=temperature)
    return rollout(model, problems, config, torch.Generator()).rewards.mean().item()


def main() -> None:
    """Warm up, train with GRPO and compare the held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start, model = time.perf_counter(), make_model(args.seed)
    problems, held_out = make_prompts(args.seed)
    sft(model, problems, args.seed)
    before = evaluate(model, held_out)
    print(f"warm-up took {time.perf_counter() - start:.0f} s, accuracy {before:.3f}", flush=True)
    records = train(model, problems, GRPOConfig(), args.steps, args.seed)
    for step, record in enumerate(records, start=1):
        if step % 10 == 0:
            reward = record.rollouts.rewards.mean().item()
            print(f"step {step}: reward {reward:.3f}, loss {record.loss:+.4f}", flush=True)
    print(f"accuracy: {before:.3f} before, {evaluate(model, held_out):.3f} after", end=", ")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
