"""A save of copies: the same bytes as one that is written at once, whatever the trainer does then.

And a disk that does not take them: one clear error, whichever library met it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import PlainPolicyGradient, make_trainer, random_rows, train

from paceline.algorithms import ALGORITHMS
from paceline.checkpoint import CheckpointStore
from paceline.checkpoint_settings import CheckpointConfig
from paceline.errors import CheckpointError
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.single import SingleTrainer
from paceline.trainers.values import ValueModel


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def critic() -> SingleTrainer:
    objective = ALGORITHMS["ppo"]().critic
    model = ValueModel(tiny_model().base_model)
    return SingleTrainer(SingleTrainerConfig(), model, tiny_tokenizer(), objective, horizon=5)


def policy() -> SingleTrainer:
    config = SingleTrainerConfig(lr=1e-2)
    objective = PlainPolicyGradient()
    trainer = SingleTrainer(config, tiny_model(), tiny_tokenizer(), objective, horizon=9)
    train(trainer, [random_rows()] * 2)
    return trainer


@pytest.mark.parametrize("make", [policy, critic])
def test_copies_are_written_as_they_were(tmp_path: Path, make: Any) -> None:
    trainer = make()

    async def save_both() -> None:
        writes: list[Any] = []
        await trainer.save(tmp_path / "at once")
        await trainer.save(tmp_path / "later", writes.append)
        assert not (tmp_path / "later").exists()
        with torch.no_grad():
            for parameter in trainer._core.model.parameters():
                parameter.add_(1.0)
            for state in trainer._core.optimizer.state.values():
                state["exp_avg"].add_(1.0)
                state["step"].add_(1.0)
        await writes[0]()

    asyncio.run(save_both())
    assert contents(tmp_path / "at once") == contents(tmp_path / "later")
    assert "model/tokenizer.json" in contents(tmp_path / "later")


def test_the_trainer_learns_while_they_are_written(tmp_path: Path) -> None:
    trainer = policy()

    async def save() -> None:
        writes: list[Any] = []
        await trainer.save(tmp_path, writes.append)
        await asyncio.gather(writes[0](), asyncio.to_thread(train, trainer, [random_rows(1)] * 3))

    asyncio.run(save())
    assert trainer.version == 5
    again = make_trainer(tiny_model(seed=7))
    asyncio.run(again.load(tmp_path))
    assert again.version == 2


def limited_save(folder: Path, later: bool, found: Any) -> None:
    """In a process of its own, whose files may not get larger than its model is."""
    trainer = policy()
    writes: list[Any] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    store = CheckpointStore(folder, CheckpointConfig())
    try:
        with store.staging(3) as staged:
            asyncio.run(trainer.save(staged.policy_folder("p"), writes.append if later else None))
            for write in writes:
                asyncio.run(write())
    except BaseException as error:
        found.put((type(error).__name__, str(error), [p.name for p in folder.iterdir()]))


@pytest.mark.parametrize("later", [False, True])
def test_a_limit_on_the_size_of_files_is_a_checkpoint_error(tmp_path: Path, later: bool) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=limited_save, args=(tmp_path / "all", later, found))
    process.start()
    kind, text, left = found.get(timeout=100)
    process.join(timeout=30)
    assert kind == CheckpointError.__name__
    assert "could not save step 3" in text
    assert "File too large" in text
    assert "ulimit -f" in text
    assert left == []
