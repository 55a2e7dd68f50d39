"""What a step is told of the samples that it gets from a buffer."""

from __future__ import annotations

from batches import make_group, make_sample

from paceline.data.buffer import Taken
from paceline.rollout.feed_batch import batch_of
