"""TRL's side of `vs_trl.py`; runs in an environment that has TRL."""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vs_trl import TASKS, Task
from vs_trl_task import Clock, peak_mib, problems, reward_of, tell, wait


class Gate(TrainerCallback):  # type: ignore[misc]
    """Waits before each step and tells what it took after it."""

    def __init__(self, task: Task) -> None:
        self.clock, self.task = Clock(task.device), task
        self.rewards: list[float] = []
        self.tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        wait()
        self.clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = self.clock.seconds
        tell(
            **seconds,
            tokens=self.tokens,
            tokens_per_s=self.tokens / seconds[self.task.measure],
            reward=sum(self.rewards) / len(self.rewards),
            peak_mib=peak_mib(self.task.device),
        )


def main() -> None:
    name, path, steps, folder, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    task = TASKS[name]
    gate = Gate(task)

    def reward(completions: list[str], completion_ids: Any, answer: list[str], **_: Any) -> Any:
        gate.rewards = [reward_of(name, c, a) for c, a in zip(completions, answer, strict=True)]
        gate.tokens = sum(map(len, completion_ids))
        return gate.rewards

    config = GRPOConfig(
        output_dir=folder + "/trl-run",
        max_steps=int(steps),
        per_device_train_batch_size=task.prompts * task.samples,
        num_generations=task.samples,
        max_completion_length=task.max_tokens,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon_high=task.clip_high,
        loss_type="dapo",
        learning_rate=task.lr,
        adam_beta1=task.betas[0],
        adam_beta2=task.betas[1],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=task.device == "cpu",
        bf16=task.device != "cpu",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in problems(name)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[gate],
    ).train()


if __name__ == "__main__":
    main()
