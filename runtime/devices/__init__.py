"""Devices run plans. They share a protocol:

Device(artifact, threads) -> checks that this machine can run the artifact, maps or uploads weights, allocates KV cache
                             and arena
.kv_types                    shapes and types of the cache's tensors, with the pages that they have
.write(name, values)         fills the first part of an io buffer ("state", "tokens" ..)
.fill(name, rows, put)       the same of so many rows, which `put(array)` writes: where the device takes them, if it can
.run(function, meanwhile)    runs one function of the plan and waits; GPUs run long steps in pieces (pieces.py).
                             meanwhile: optional: is called once and writes LATE io buffers (io_names.py); a GPU
                             computes what does not read these at the same time. Its errors are raised when it is idle
.feed(function)              runs a function whose results nobody wants, and need not wait for all of it: `run` or
                             another `feed` follows before anything else
.can_start_ahead(function, late)  whether a run of that function may start while another one is in progress; late: also
                             before its LATE inputs are known; if so, the methods up to `wait` exist
.prepare(function, ahead, late)  what `start`, or `start_ahead`, would do at its first call, which may take long
.start(function, meanwhile)  `run` without waiting
.start_ahead(function, late) starts another run of the same function and rows while one is in progress: its tokens are
                             those that the other one samples (`sampled`), its other inputs what was written since. One
                             such run at a time
.complete_inputs(function)   the LATE inputs of a run that was started before they were known have been written
.wait()                      waits for the oldest of these runs; `read` returns its results, but for rows of `logits`
                             while another one is in progress
.run_plain(function)         the same launch by launch, without what was recorded or captured at load: for comparison
.read(name, rows, first=0)   rows first to rows - 1 of an io buffer as a NumPy array, valid until the next run
.clear()                     zeros the KV cache
.page_parts(span)            of each cache with pages of that span: (name, bytes of a page)
.read_pages(span, pages)     what these pages hold, uint8 [pages, bytes]: a page's part in each cache, in the order of
                             `page_parts`. No run may be in progress
.write_pages(span, pages, contents)  the reverse
.page_memory(span, count)    memory of the host for what pages hold, uint8 [count, bytes], rows of which `write_pages`
                             takes as they stand; lives as long as the device
.close()                     releases memory and the device; nothing else may be called afterwards
.time(function)              optional: runs a function; (kernel, seconds, gap before it in seconds) of each launch
.waited                      seconds that all runs spent waiting for the device
.on_host                     whether it computes on the host's cores
.copy_bandwidth()            optional: bytes per second, reads plus writes, of a copy in device memory; 0.0 if unknown

Of a GPU that is a stage of several (staged.py), which one thread at a time may use:

.begin(function)             starts a run
.finished()                  whether it is done; then `read` returns its results. To be called until it is true
.connect(before, after)      once, at first: the `Handover`s through which runs receive bytes of the stage before, and
                             hand over bytes to the next one
.hand_over(received, sent)   the parts of these that the next run uses
.run_plain, .time            take `meanwhile`, too, which is called once the GPU computes
.exchange_through(boxes)     before anything else, where kernels exchange parts while they run: the addresses that they
                             get, by name (artifact/manifest.py's `boxes_of`). Returns an iterator, which pauses after
                             each start of a step: all GPUs compute it at the same time

Of several GPUs that compute parts of the same rows:

.can_run_beside(function)    whether a chunk computed by that function may be computed beside the next run, which is
                             faster than one after the other: then `run_beside` exists
.run_beside(function)        the next run computes this one, too, with the inputs that were written: both compute at the
                             same time, this one first in each layer

Of several GPUs that have layers each:

.in_flight                   how many steps may be started before the oldest is waited for
.discard()                   waits for steps whose results nobody wants any more
"""
