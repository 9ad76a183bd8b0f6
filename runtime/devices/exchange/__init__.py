"""All-reduce between GPUs while their kernels run: a kernel sends its part of a sum to the other GPUs, and waits for
theirs, without returning to the host. runtime/exchange_layout.py defines rank, round, word, slot, inbox and outbox.

choice.py     decides whether kernels exchange while they run, and makes the transport between open devices
check.py      tests on this machine that words arrive, and measures a round; check_vulkan.py, check_hip.py: for each API
vulkan.py     the transport of Vulkan GPUs: a GPU writes to its outbox, the relay copies from there to the inboxes
relay.py      the relay: host threads that copy words
hip.py        the transport of AMD GPUs through HIP: a GPU writes to the other GPUs' inboxes itself

A transport owns the inboxes, outboxes and Control of all ranks. It has:

.arguments(rank)       the addresses that a rank's kernels get, in the order of `boxes` of runtime/exchange_layout.py
.begin(rounds, words)  called before a step starts: its kernels will do `rounds` rounds of `words` words
.failed()              called after a step: the ranks that gave up waiting for words. If there are any, call `reset`
.reset()               empties all boxes and restarts the count of rounds. No kernel may be running
.close()               releases everything
"""
