"""The replica seam: what the router needs of one server of an engine, whichever server it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from paceline.engines.base import Completion, Part, Request
from paceline.weights.base import Meeting, Parcel, PauseMode, TensorInfo, Transport
from paceline.weights.settings import WeightCheckConfig


class WeightIntake(Protocol):
    """How new weights get into one replica. It is paused meanwhile.

    begin -> (join, where a meeting is new) -> take, for each parcel -> end. What is not in order is
    a WeightError, or a LostServerError if the replica is gone.
    """

    @property
    def num_devices(self) -> int:
        """Members that the replica is of a meeting: one for each device that holds weights."""

    async def version(self) -> int | None:
        """What the server says that it holds; None if it says nothing of the kind."""

    async def join(self, meeting: Meeting, first_rank: int) -> None:
        """Take the ranks `first_rank ... first_rank + num_devices - 1`. Returns when all have met.
        A former meeting is left."""

    async def begin(self, transport: Transport) -> None: ...

    async def take(self, parcel: Parcel, transport: Transport) -> None:
        """Returns when the parcel's memory is not needed any more."""

    async def end(self, version: int) -> None:
        """All parcels have come: drop what was computed with former weights (prefix cache), and
        serve under this version from the next token on."""

    async def read(self, info: TensorInfo) -> list[float] | None:
        """The numbers of a tensor that is served, flat; None if the server does not show it."""


@runtime_checkable
class OwnCheck(Protocol):
    """Weights of a server that can reset them, and perhaps compare them itself."""

    async def reset(self, version: int, check: WeightCheckConfig) -> None:
        """Fill all tensors with other numbers, but for those that the check skips. version: of
        the weights that come next."""

    async def compare(self, check: WeightCheckConfig) -> list[str] | None:
        """Names of tensors that are not what they were before the reset; None if that can not be
        told, or says nothing of the weights that have come since."""


class Replica(Protocol):
    """One server that holds all weights of a policy. Its connections are its owner's."""

    @property
    def name(self) -> str:
        """For messages: its url."""

    @property
    def weights(self) -> WeightIntake: ...

    async def generate(self, request: Request) -> Completion:
        """Sample one answer. Cancelling the call ends the answer on the server, too.

        Raises LostServerError if another replica may be asked, and EngineError if the request can
        not be served anywhere.
        """

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See `Engine.score`. Raises as `generate` does."""

    async def check(self) -> None:
        """Raise LostServerError if it does not answer. Cheap, and allowed while it is paused."""

    async def pause(self, mode: PauseMode) -> None:
        """Make no token any more. `finish` is called when nothing runs on it."""

    async def resume(self) -> None:
        """Go on. Idempotent."""

    async def sleep(self, parts: frozenset[Part]) -> None:
        """Free the memory of parts that are awake."""

    async def wake(self, parts: frozenset[Part]) -> None:
        """Take the memory of parts that are asleep."""


class Supplier(Protocol):
    """Where one replica comes from: a server that is started, or a url that is attached to."""

    @property
    def name(self) -> str:
        """For messages: `replica 1 of policy`."""

    @property
    def is_ours(self) -> bool:
        """Whether the server is started here, and can be started again."""

    async def start(self, version: int) -> Replica:
        """A replica that answers, with the weights of the model's folder, which are `version`.

        Starts the server; what is left of an earlier one is ended before. Raises EngineError with
        the server's own last words.
        """

    async def problem(self) -> str | None:
        """How the server's process ended, with its last words; None while it runs."""

    async def stop(self) -> None:
        """End the server if it was started here. Idempotent."""


class Front(Protocol):
    """A server before all replicas that chooses which of them answers a request.

    What is not an answer goes to the replicas themselves. It holds no state that matters: where it
    is lost, another one takes its place.
    """

    async def serve(self, replicas: Callable[[], Sequence[Replica]]) -> None:
        """Returns when it hands requests to exactly these replicas. It is started, or started
        again, if it does not run. Cheap where nothing has changed.

        Raises LostServerError if it may be tried again, and EngineError from another one if not.
        """

    async def generate(self, request: Request, version: int) -> Completion:
        """See `Replica.generate`. version: that all replicas hold."""

    async def aclose(self) -> None:
        """End it. Idempotent."""
