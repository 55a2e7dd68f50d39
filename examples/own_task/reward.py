"""The reward of the task: which sign belongs between two numbers, as in "47?38:" and ">"."""


def score(completion, answer):
    """Any sign earns a little, so that early answers differ; the right one earns 1."""
    return {"sign": 0.1 * (completion in ("<", "=", ">")), "right": 0.9 * (completion == answer)}
