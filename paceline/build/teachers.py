"""Making the teacher that a run file names: loaded here, or attached to where it is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.build.parts import Text
from paceline.config import RunFile, locate_model
from paceline.drivers.dispose import Disposer
from paceline.errors import ConfigError
from paceline.teachers.base import Teacher
from paceline.teachers.loaded import LoadedTeacher, load_teacher_model
from paceline.teachers.served import ServedTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel


async def open_teacher(
    run_file: RunFile, model: PreTrainedModel, text: Text, disposer: Disposer
) -> Teacher | None:
    """The teacher, if the algorithm needs one; owned by the disposer.

    model, text: the policy's, whose vocabulary it must share. Raises ConfigError if it does not,
    and EngineError if a server can not be reached.
    """
    if not run_file.algorithm.needs_teacher:
        return None
    config, top_k = run_file.teacher, run_file.algorithm.teacher_top_k
    vocab = model.get_input_embeddings().num_embeddings
    if config is not None and config.model is not None:
        located = locate_model(config.model, run_file.base)
        loaded = LoadedTeacher(
            run_file.single_trainer,
            load_teacher_model(located, text.tokenizer, seed=run_file.run.seed),
            config.model.path,
            top_k=top_k,
            vocab=vocab,
            where="device" if run_file.memory.order == "none" else "host",
        )
        disposer.add("teacher", loaded.aclose)
        return loaded
    if config is not None and config.url is not None:
        served = ServedTeacher(
            config.url,
            top_k=top_k,
            vocab=vocab,
            max_in_flight=config.max_in_flight,
            timeout_s=config.timeout_s,
            retries=config.retries,
        )
        disposer.add("teacher", served.aclose)
        await served.open(text.tokenizer)
        return served
    raise ConfigError("the algorithm learns from a teacher, and the run file has no [teacher]")
