def score(completion, answer):
    """A sign earns a little, the right one the rest: so there is something to compare early on."""
    return {"sign": 0.1 * (completion in ("<", "=", ">")), "right": 0.9 * (completion == answer)}
