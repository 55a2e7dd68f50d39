"""Which name may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

SYNONYMS: Mapping[str, str] = {
    "learning_rate": "trainer.lr",
    "lr_scheduler": "trainer.lr_schedule",
    "lr_scheduler_type": "trainer.lr_schedule",
    "warmup_steps": "trainer.lr_warmup_steps",
    "gradient_clipping": "trainer.max_grad_norm",
    "clip_grad": "trainer.max_grad_norm",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "max_new_tokens": "rollout.sampling.max_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "max_steps": "run.num_steps",
    "steps": "run.num_steps",
    "num_rollout": "run.num_steps",
    "epochs": "run.num_epochs",
    "num_train_epochs": "run.num_epochs",
    "output_dir": "run.dir",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
}
"""Names that other systems give to a key."""


def nearest(word: str, names: Sequence[str], count: int = 1) -> list[str]:
    """Names that look like `word`, best first; case and dashes do not count."""
    plain = {name.lower().replace("-", "_"): name for name in names}
    asked = word.lower().replace("-", "_")
    return [plain[name] for name in difflib.get_close_matches(asked, plain, count, cutoff=0.7)]
