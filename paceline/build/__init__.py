"""From a run file to a run: the one place that knows every part by name.

RunFile --parts--> tokenizer, prompts, reward, model, trainer, engine
        --training--> Run --drivers--> RunResult
        --serving---> evals and answers of a model that is not trained
"""

from paceline.build.results import EvalReport, RunResult
from paceline.build.serving import evaluate, generate
from paceline.build.training import train

__all__ = ["EvalReport", "RunResult", "evaluate", "generate", "train"]
