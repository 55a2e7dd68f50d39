"""Teachers: what a policy's answers are graded by, token for token. `base.py` is the seam."""
