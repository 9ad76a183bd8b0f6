"""The waiting requests of each client, and the order in which clients are served."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from mlc_amd.runtime.engine.requests import Request


@dataclass
class _Client:
    unfinished: int = 0
    waiting: list[Request] = field(default_factory=list)  # in the order of their numbers


class ClientQueues:
    """The requests of all clients that are not done. waiting: the number of waiting ones."""

    def __init__(self) -> None:
        self.waiting = 0
        self._clients: OrderedDict[Hashable, _Client] = OrderedDict()  # in the order in which they are served

    def __iter__(self) -> Iterator[tuple[Hashable, Sequence[Request]]]:
        """Clients in the order in which they are served, with their waiting requests, the oldest first."""
        return ((key, client.waiting) for key, client in self._clients.items())

    def add(self, request: Request) -> None:
        """Adds a new request, as waiting."""
        self._clients.setdefault(request.client, _Client()).unfinished += 1
        self.wait(request)

    def wait(self, request: Request) -> None:
        request.state = "waiting"
        insort(self._clients[request.client].waiting, request, key=number)
        self.waiting += 1

    def dequeue(self, request: Request) -> None:
        """Removes a request from those that wait."""
        self._clients[request.client].waiting.remove(request)
        self.waiting -= 1

    def finish(self, request: Request) -> None:
        """Removes a request that is done. It must not be waiting."""
        client = self._clients[request.client]
        client.unfinished -= 1
        if not client.unfinished:
            del self._clients[request.client]

    def served(self, key: Hashable) -> None:
        """Moves a client to the end of the order."""
        self._clients.move_to_end(key)


def number(request: Request) -> int:
    return request.number


def fair_order(requests: Sequence[Request]) -> list[Request]:
    """The order in which running requests get a row: clients alternate, and within a client its requests alternate."""
    ranks: dict[Hashable, int] = {}
    order = []
    for request in sorted(requests, key=lambda request: request.last_step):
        rank = ranks[request.client] = ranks.get(request.client, -1) + 1
        order.append((rank, request.last_step, request.number, request))
    order.sort(key=lambda entry: entry[:3])
    return [request for *_, request in order]
