"""The layout of the memory through which GPUs all-reduce a sum inside kernels. The exchange kernel, the relay and the
transports (devices/exchange) all follow it.

- rank: the number of a GPU, 0 to parts - 1.
- round: one all-reduce. Every rank sends its part of the sum to every other rank.
- word: 8 bytes, two halves of data. No half with data equals EMPTY, so a receiver polls a word until neither half is
  EMPTY; no separate flag is needed.
- slot: `capacity` words, for the data of one round. Rounds alternate between two slots and start with the second.
- outbox: two slots, which the rank writes.
- inbox: two slots for each other rank, in the order of ranks, which the rank reads.
- Control: int32 [CONTROL], one for each rank.

All halves are EMPTY at the start. A receiver sets a word to EMPTY again after it has read it.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

EXCHANGING = "exchange_"  # "exchange_A" replaces kernel A, and exchanges parts while it runs
THEN = "_then_"  # "exchange_A_then_B" replaces two consecutive kernels, A and B
RELAY = "relay.bin"  # file in an artifact: host machine code that moves words between GPUs
PROBE = EXCHANGING + "probe"  # the kernel, with a residual, that devices/exchange/check.py launches
CONTROL = 4  # elements of Control
# Indices into Control. DONE: finished rounds times GROUPS (each workgroup of a launch adds its share of GROUPS).
# FAILED: not 0 after this rank gave up waiting for words. RANK: the rank.
DONE, FAILED, RANK = 0, 1, 2
GROUPS = 4096  # upper limit of the workgroups of a launch; a power of two
WORD = 8  # bytes
EMPTY = -1  # a half without data: a bit pattern that is no result of float32 arithmetic, nor of two float16 results
LINE = 8  # words in a cache line; a round sends whole lines


def joint_name(product: str, total: str) -> str:
    """The name of the kernel that computes `product` and then all-reduces it as the kernel `total` does."""
    return EXCHANGING + product + THEN + total


def kernels_in(name: str) -> list[str]:
    """The names of the one or two kernels that an exchanging kernel replaces."""
    return name.removeprefix(EXCHANGING).split(THEN)


def joint_params(of: Sequence[Sequence[T]]) -> list[T]:
    """The parameters (or arguments) of a joint kernel, without its boxes. of: the parameters of each kernel that it
    replaces. The first two parameters of an exchange (the state, and the input of the sum) are left out: the joint
    kernel has the same state, and computes the input itself."""
    first, *others = of
    return [*first, *(one for params in others for one in params[2:])]


def boxes(parts: int, peers: bool) -> tuple[str, ...]:
    """The names of the parameters that an exchanging kernel has besides those of the kernels that it replaces. parts:
    number of ranks. peers: whether the kernel writes to the other ranks' inboxes itself, without a relay."""
    return "inbox", *(f"outbox{i}" for i in range(parts - 1 if peers else 1)), "control"


def outbox_words(capacity: int) -> int:
    return 2 * capacity


def inbox_words(parts: int, capacity: int) -> int:
    return (parts - 1) * outbox_words(capacity)


def row(sender: int, receiver: int) -> int:
    """The index of a sender's pair of slots in a receiver's inbox. Both are ranks."""
    return sender - (sender > receiver)
