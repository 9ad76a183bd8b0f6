"""Devices run the functions of an artifact's plan. An engine sees one device, which may consist of several GPUs.

opening.py opens the device of an artifact: CpuDevice (cpu.py), VulkanDevice (vulkan/), HipDevice (hip/), or several
GPUs as one: StagedDevice (staged.py: each has some of the layers), TensorDevice (tensor.py: each has a part of every
layer).

A function computes one *step*: some rows, one for each token. Its inputs and results are *io buffers*, which have names
(artifact/io_names.py). LATE io buffers are inputs that only the last launches of a function read, so the host may write
them while the first launches run. The protocol of all devices:

Device(artifact, threads)    checks that this machine can run the artifact; maps or uploads the weights; allocates the
                             KV cache and the arena
.kv_types                    {name: (shape, dtype)} of the KV cache's tensors; the first dimension is the device's pages
.write(name, values)         writes the first rows of an io buffer ("state", "tokens" ..)
.fill(name, rows, put)       calls `put(array)`, which writes the first `rows` rows of an io buffer; the array is the io
                             buffer itself where the host can write to it
.run(function, meanwhile)    runs a function and waits for its end. GPUs run long steps in pieces (pieces.py).
                             meanwhile: an optional callable that writes the LATE io buffers; a GPU computes at the
                             same time what does not read them. An error of `meanwhile` is raised after the GPU has
                             become idle
.feed(function)              runs a function whose results the caller does not need. It may return before the end; the
                             caller's next call must be `run` or `feed`
.can_start_ahead(function, late)  whether a run of the function may start while another run is in progress; late: even
                             before its LATE inputs are written. Only if it is true, the methods up to `wait` exist
.prepare(function, ahead, late)  does the slow work of the first `start` (ahead: of the first `start_ahead`) in advance
.start(function, meanwhile)  like `run`, but returns without waiting
.start_ahead(function, late) starts another run of the function that is in progress, with the same rows. Its tokens are
                             those that the run in progress samples (`sampled`); its other inputs are those that were
                             written after the start of that run. There can be one such run at a time
.complete_inputs(function)   to be called when the LATE inputs of a run have been written that started without them
.wait()                      waits for the oldest run in progress. Then `read` returns its results; `logits` only if no
                             other run is in progress
.run_plain(function)         like `run`, but submits each launch separately, without recorded command buffers or graphs:
                             for comparison
.read(name, rows, first=0)   rows first .. rows-1 of an io buffer as a NumPy array, valid until the next run
.clear()                     zeros the KV cache
.page_parts(span)            [(name, bytes of a page)] of each KV tensor with pages of that span
.read_pages(span, pages)     contents of pages of the KV cache, uint8 [pages, bytes]: for each page its bytes in each KV
                             tensor, in the order of `page_parts`. No run may be in progress
.write_pages(span, pages, contents)  writes such contents to pages
.page_memory(span, count)    host memory for the contents of pages, uint8 [count, bytes]: `write_pages` can use its rows
                             without a copy. It lives as long as the device
.close()                     releases memory and the device. No other method may be called afterwards
.time(function)              optional: runs a function; returns [(kernel, seconds, seconds of the gap before it)] of all
                             launches
.waited                      total seconds for which runs waited for the device
.on_host                     whether it computes on the host's cores
.copy_bandwidth()            optional: bytes per second (reads plus writes) of a copy in device memory; 0.0 if unknown

A GPU that is one of several also has these methods. One thread at a time may use it:

.begin(function)             starts a run
.finished()                  whether the run is done; call it repeatedly until it is true, then `read` returns results
.connect(before, after)      called once, first: the `Handover`s (handover.py) from which runs receive the data of other
                             GPUs, and to which they send data
.hand_over(received, sent)   chooses the parts of the two `Handover`s that the next run uses
.run_plain, .time            have a parameter `meanwhile`, a callable that they call once the GPU computes
.exchange_through(boxes)     called before any run, where kernels exchange parts while they run (exchange/). boxes:
                             {name: address} (names: `boxes_of` of artifact/manifest.py). Returns an iterator that
                             pauses after each step that it starts, because all GPUs must run that step at the same time

TensorDevice also has:

.can_run_beside(function)    whether a chunk of a prompt can be computed by that function at the same time as the next
                             run, which is faster than one after the other. Only if it is true, `run_beside` exists
.run_beside(function)        makes the next `run` also compute this function, with the inputs written so far. In each
                             layer this function comes first

StagedDevice also has:

.in_flight                   how many steps may be started before the caller must wait for the oldest
.discard()                   waits for all steps, and drops their results
"""
