"""Loading models and tokenizers, and writing them where `from_pretrained` finds them.

The configuration is read without torch or transformers; the functions import them when called.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from paceline.errors import CheckpointError, ConfigError, MissingExtraError
from paceline.types import Config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class ModelConfig(Config):
    """`[model]`: which language model, and how it is held."""

    path: str
    """A folder in Hugging Face format, or a model id that `transformers` can load."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; default: that of the model."""
    adapter: str | None = None
    """A folder with an adapter in PEFT's format, such as `adapter/` of a checkpoint. It is merged
    into the weights when they are loaded: what is trained starts from the sum, and the reference is
    the sum. Needs the extra `lora`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory (trainer and embedded engine). Training needs `float32`, or
    `bfloat16` with the loss of updates below 1/256 of a weight; `float16` can only be served."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    random_init: bool = False
    """Take only the configuration from `path` and draw the weights from the run's seed."""
    trust_remote_code: bool = False
    """Let the model folder bring its own Python code. Only for models you trust."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""

    @model_validator(mode="after")
    def _has_weights_to_adapt(self) -> ModelConfig:
        if self.adapter is not None and self.random_init:
            raise ValueError("an `adapter` is of the weights at `path`: leave out `random_init`")
        return self


def load_model(
    config: ModelConfig, *, seed: int, device: str | torch.device = "cpu", key: str = "model"
) -> PreTrainedModel:
    """The causal language model of `config`, in evaluation mode, on the device.

    `seed` matters with `random_init` only: it decides the weights. key: the block of the run file
    that `config` stands in, for errors. Raises ConfigError if the model can not be found or loaded,
    or if its files lack weights.
    """
    model, missing = _load(config, seed, key)
    _refuse_missing(config, missing, key)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_body(config: ModelConfig, *, seed: int, key: str) -> PreTrainedModel:
    """The same without its head over the vocabulary, whose weights may be missing; on the CPU.

    key: the block of the run file that `config` stands in, for errors.
    """
    model, missing = _load(config, seed, key)
    body: PreTrainedModel = model.base_model
    if body is model:
        raise ConfigError(
            f"{key}.path = {config.path!r}: {type(model).__name__} has no body apart from its "
            "head, on which a critic could be built; use another model"
        )
    own = f"{model.base_model_prefix}."
    _refuse_missing(config, [name for name in missing if name.startswith(own)], key)
    return body.eval()


def blank_model(config: ModelConfig, *, key: str = "model") -> PreTrainedModel:
    """The model of `load_model` without its weights: parameters on torch's meta device.

    Buffers are real; those that are saved hold what a fresh model has.
    """
    with blank_parameters():
        model, _ = _load(config.model_copy(update={"random_init": True}), 0, key)
    if not config.random_init and model.can_generate():
        _load_generation_config(model, config)
    blank: PreTrainedModel = model.eval()
    return blank


@contextmanager
def blank_parameters() -> Iterator[None]:
    """Within it, parameters of new modules have shape and type, and no memory."""
    from torch import nn

    register = nn.Module.register_parameter

    def register_blank(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            blank = parameter.data.to("meta")
            parameter = nn.Parameter(blank, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_blank  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _load_generation_config(model: Any, config: ModelConfig) -> None:
    from transformers import GenerationConfig

    source = _locate(config.path, key="model.path", needs="config.json")
    with suppress(OSError):  # without a file of its own it follows from the model's configuration
        model.generation_config = GenerationConfig.from_pretrained(source)


def _load(config: ModelConfig, seed: int, key: str) -> tuple[Any, list[str]]:
    """The model, and the names of tensors that its files lack."""
    source = _locate(config.path, key=f"{key}.path", needs="config.json")
    try:
        with _progress_bars.off():
            model, missing = _create(config, source, seed)
    except Exception as error:  # whatever the files hold; transformers raises many kinds
        trust = config.trust_remote_code
        raise _load_error("model", f"{key}.path", config.path, trust, error) from error
    if config.adapter is not None and not config.random_init:
        model = _with_adapter(model, config.adapter, f"{key}.adapter")
    return model, missing


def _with_adapter(model: Any, named: str, key: str) -> Any:
    """The model with an adapter merged into its weights, of its own class."""
    peft = load_peft(key)
    folder = Path(named).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{key} = {named!r}: the folder {folder.resolve()} has no adapter_config.json; it must "
            "hold an adapter in PEFT's format"
        )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
        except Exception as error:  # as above
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{key} = {named!r}: the adapter does not fit {type(model).__name__}: {reason}"
            ) from error
    for warning in told:
        if "adapter keys" in (text := str(warning.message)):
            raise ConfigError(f"{key} = {named!r}: the adapter is of another model: {text[:300]}")
        if issubclass(warning.category, UserWarning):
            logger.warning("%s: %s", key, text)
    return adapted.merge_and_unload().requires_grad_(True)


def load_peft(wanted_by: str) -> Any:
    """The package, which takes a second to load. Raises MissingExtraError."""
    if find_spec("peft") is None:
        raise MissingExtraError(wanted_by, "peft", "lora")
    import peft

    return peft


def _refuse_missing(config: ModelConfig, missing: list[str], key: str) -> None:
    if missing:
        raise ConfigError(
            f"{key}.path = {config.path!r}: {len(missing)} tensors are missing from its weight "
            f"files ({', '.join(missing[:5])}); use a complete copy of the model, or set "
            f"{key}.random_init = true to draw all weights from the seed"
        )


def _create(config: ModelConfig, source: str, seed: int) -> tuple[Any, list[str]]:
    """The model, and the names of tensors that its files lack."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.trust_remote_code
    settings = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": config.attention,
        "trust_remote_code": trust,
    }
    if not config.random_init:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, **settings
        )
        return model, sorted(report["missing_keys"])
    architecture = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(architecture, **settings), []


def load_tokenizer(config: ModelConfig, *, key: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of `config`; its pad token is the end token where it has none of its own.

    key: the block of the run file that `config` stands in, for errors.
    """
    from transformers import AutoTokenizer

    block, key = key, f"{key}.path" if config.tokenizer is None else f"{key}.tokenizer"
    named = config.path if config.tokenizer is None else config.tokenizer
    trust = config.trust_remote_code
    source = _locate(named, key=key, needs=None)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust
        )
    except Exception as error:  # as above
        raise _load_error("tokenizer", key, named, trust, error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{key} = {named!r}: the tokenizer has neither a pad token nor an end token; set "
                "`eos_token` in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{block}.chat_template = {config.chat_template!r} can not be read: {error}"
            ) from error
    return tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All token ids that end an answer: those of the generation config, model and tokenizer."""
    generation = getattr(model, "generation_config", None)
    found: set[int] = set()
    for owner in (generation, model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids = value if isinstance(value, list | tuple) else [value]
        found.update(int(i) for i in ids if i is not None and int(i) >= 0)
    return frozenset(found)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write model, generation config and tokenizer in Hugging Face format into the folder `path`.

    Nothing here is atomic: the caller writes to a temporary folder and renames it. tensors: those
    of the model by name, where it holds only shards of them.
    """
    path.mkdir(parents=True, exist_ok=True)
    generation = getattr(model, "generation_config", None)
    try:
        if generation is not None:
            model.generation_config = _valid_generation_config(generation)
        with _progress_bars.off():
            model.save_pretrained(path, state_dict=None if tensors is None else dict(tensors))
    finally:
        if generation is not None:
            model.generation_config = generation
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def write_model_files(model: Any, tokenizer: PreTrainedTokenizerBase | None, path: Path) -> None:
    """Write all files of a model folder that are not weights into the folder `path`."""
    config = copy.deepcopy(model.config)
    # A sharded model has a class of its own, made from that which the configuration names.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if (generation := getattr(model, "generation_config", None)) is not None:
        _valid_generation_config(generation).save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """What must be equal for weights and moments to fit: JSON, with the shape of each parameter."""
    parameters = dict(model.named_parameters())
    return {
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "dtype": ", ".join(sorted({str(p.dtype)[len("torch.") :] for p in parameters.values()})),
        "parameters": {name: list(p.shape) for name, p in parameters.items()},
    }


def fingerprint_differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words; empty if weights fit."""
    found = [
        f"{key} is {saved.get(key)!r} in the checkpoint and {own[key]!r} in the run"
        for key in ("architecture", "model_type", "dtype")
        if saved.get(key) != own[key]
    ]
    before: dict[str, list[int]] = saved.get("parameters", {})
    now: dict[str, list[int]] = own["parameters"]
    found += [f"parameter {name} is only in the checkpoint" for name in before.keys() - now.keys()]
    found += [f"parameter {name} is only in the run" for name in now.keys() - before.keys()]
    found += [
        f"parameter {name} has shape {before[name]} in the checkpoint and {now[name]} in the run"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return found


def restore_model(like: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The model that `export_model` wrote, of the class and type of `like`, on the CPU.

    Raises ValueError if tensors are missing, and what transformers raises for other damage.
    """
    with _progress_bars.off():
        model, report = type(like).from_pretrained(path, dtype=like.dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:5])}")
    restored: PreTrainedModel = model
    return restored


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """A file that can not be written within it is a CheckpointError.

    Libraries have errors of their own for a full disk, or for a limit on the size of files.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise CheckpointError(f"{path} can not be written: {error}") from error
        raise


class _ProgressBars:
    """Those of transformers, of which there is one switch for all threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._num_off = 0
        self._were_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """They would break the live display of a run. On again after the last one who wants it."""
        from transformers.utils import logging as transformers_logging

        with self._guard:
            if self._num_off == 0:
                self._were_on = transformers_logging.is_progress_bar_enabled()
                transformers_logging.disable_progress_bar()
            self._num_off += 1
        try:
            yield
        finally:
            with self._guard:
                self._num_off -= 1
                if self._num_off == 0 and self._were_on:
                    transformers_logging.enable_progress_bar()


_progress_bars = _ProgressBars()


def _locate(named: str, *, key: str, needs: str | None) -> str:
    """The folder if it is one, else the name as a model id; ConfigError for a folder not there."""
    folder = Path(named).expanduser()
    if folder.is_dir():
        if needs is not None and not (folder / needs).is_file():
            raise ConfigError(
                f"{key} = {named!r}: the folder {folder.resolve()} has no {needs}; it must be a "
                "model in Hugging Face format (config.json, safetensors, tokenizer)"
            )
        return str(folder)
    if named.startswith(("/", ".", "~")) or named.count("/") > 1 or folder.exists():
        raise ConfigError(
            f"{key} = {named!r}: no such folder ({folder.resolve()}); give a model folder in "
            "Hugging Face format, or a model id such as `HuggingFaceTB/SmolLM2-135M-Instruct`"
        )
    return named


def _load_error(what: str, key: str, named: str, trust: bool, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    folder = Path(named).expanduser()
    if what == "tokenizer" and folder.is_dir() and not _holds_tokenizer(folder):
        return ConfigError(
            f"{key} = {named!r}: the folder holds no tokenizer (such as tokenizer.json): set "
            f"{key.rpartition('.')[0]}.tokenizer to a folder or a model id that has one"
        )
    if folder.is_dir():
        advice = "the folder's files are damaged or of an unknown kind"
    else:
        advice = (
            f"there is no folder {named!r} here, so it was taken for a model id: check its "
            "spelling, the network and your access, or download it and give the folder"
        )
    block = key.rpartition(".")[0]
    if "attn_implementation" in str(error):
        advice = f'set {block}.attention = "eager"'
    if "trust_remote_code" in str(error) and not trust:
        advice = f"set {block}.trust_remote_code = true if you trust the code that comes with it"
    return ConfigError(f"{key} = {named!r}: the {what} can not be loaded: {reason} ({advice})")


def _holds_tokenizer(folder: Path) -> bool:
    patterns = ("*tokenizer*", "*vocab*", "*.model", "*.tiktoken", "*.gguf")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def _valid_generation_config(config: Any) -> Any:
    """A copy that transformers agrees to save; published ones often contradict themselves."""
    for changes in ({}, {"do_sample": True}):
        candidate = copy.deepcopy(config)
        for name, value in changes.items():
            setattr(candidate, name, value)
        try:
            candidate.validate(strict=True)
        except ValueError as error:
            logger.warning("generation config: %s", str(error).splitlines()[0])
        else:
            return candidate
    kept = {k: getattr(config, k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return type(config)(**kept)
