"""What an answer is worth. Of "23 in 3=" every answer is right that is three digits adding up to 23.

Close ones earn a part: a model that never got anything would have nothing to compare.
"""


def score(completion, metadata):
    """Parts that add up to 1 for a right answer; each is a metric of its own."""
    if not (completion.isascii() and completion.isdigit()):
        return {"digits": 0.0, "count": 0.0, "sum": 0.0}
    count = abs(len(completion) - metadata["count"])
    distance = abs(sum(int(digit) for digit in completion) - metadata["sum"])
    return {"digits": 0.1, "count": 0.3 / (1 + count), "sum": 0.6 / (1 + distance)}
