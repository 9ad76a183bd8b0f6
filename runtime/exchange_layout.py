"""The memory that GPUs exchange parts of a sum through: what the kernel, the relay and the transports agree on.

A word is 8 bytes: two halves of data, of which none is EMPTY. Rounds use two slots in turn, the second one first. An
outbox is two slots of `capacity` words. An inbox is such a pair of slots for each other rank, in their order. All
halves are EMPTY before anything is sent, and again once who waited for them has them. `Control` is int32[CONTROL].
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# before a kernel's name: the kernel that exchanges parts while it runs, instead of that one
EXCHANGING = "exchange_"
THEN = "_then_"  # between the names of a kernel and of the one after it: the exchanging kernel that is both
RELAY = "relay.bin"  # file of an artifact: machine code of the host that moves words between GPUs
PROBE = EXCHANGING + "probe"  # a kernel with a residual that devices/exchange/check.py launches
CONTROL = 4
# Control's elements: rounds that are done, times GROUPS (each workgroup of a launch adds its share of one); not 0 when
# words did not come; this GPU's number
DONE, FAILED, RANK = 0, 1, 2
GROUPS = 4096  # workgroups of a launch, at most; a power of two
WORD = 8  # bytes
EMPTY = -1  # a half without data: no float32 that arithmetic makes, and no two float16
LINE = 8  # words of a cache line; what a round sends is whole lines


def joint_name(product: str, total: str) -> str:
    """The kernel that computes `product`, and exchanges it as `total` does."""
    return EXCHANGING + product + THEN + total


def kernels_in(name: str) -> list[str]:
    """The kernels that an exchanging kernel is instead of."""
    return name.removeprefix(EXCHANGING).split(THEN)


def joint_params(of: Sequence[Sequence[T]]) -> list[T]:
    """Its parameters before the boxes, or arguments, of those of these kernels: the first two of an exchange, the state
    and what it adds up, are the product's."""
    first, *others = of
    return [*first, *(one for params in others for one in params[2:])]


def boxes(parts: int, peers: bool) -> tuple[str, ...]:
    """What such a kernel takes besides the other one's parameters. peers: it writes to the others' inboxes itself."""
    return "inbox", *(f"outbox{i}" for i in range(parts - 1 if peers else 1)), "control"


def outbox_words(capacity: int) -> int:
    return 2 * capacity


def inbox_words(parts: int, capacity: int) -> int:
    return (parts - 1) * outbox_words(capacity)


def row(sender: int, receiver: int) -> int:
    """The place of a sender's pair of slots in a receiver's inbox."""
    return sender - (sender > receiver)
