"""How GPUs that compute parts of a sum get each other's parts, while their kernels run (runtime/exchange_layout.py).

relay.py      threads that move words from host memory to GPUs
vulkan.py     boxes of Vulkan GPUs, and the relay between them
hip.py        boxes of AMD's own API: GPUs write to each other's memory
check.py      whether it works on this machine, and how long a round takes; check_vulkan.py, check_hip.py: of which GPUs
choice.py     whether kernels exchange while they run; the transport between devices that are open

A transport has:

.arguments(rank)       addresses for what `boxes` of runtime/exchange_layout.py names
.begin(rounds, words)  before the start of a step with so many rounds of so many words
.failed()              after it: the ranks that gave up waiting for words; then `reset` is due
.reset()               all begins anew; no kernel is running
.close()
"""
