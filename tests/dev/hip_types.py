"""The types of AMD's `rocm.bindings.hip` as `hip_recorder.py` has them, and what its kernels get and return."""

from enum import IntEnum

WAITING = object()


class Launch(tuple):
    """(symbol, grid, block). late: what the kernel waits for does not come."""

    late = False


class hipError_t(IntEnum):
    hipSuccess = 0
    hipErrorInvalidValue = 1
    hipErrorOutOfMemory = 2
    hipErrorNoDevice = 100
    hipErrorNoBinaryForGpu = 209
    hipErrorNotFound = 500
    hipErrorNotReady = 600
    hipErrorPeerAccessAlreadyEnabled = 704
    hipErrorHostMemoryAlreadyRegistered = 712
    hipErrorLaunchFailure = 719
    hipErrorStreamCaptureUnsupported = 900


class hipMemcpyKind(IntEnum):
    hipMemcpyHostToDevice = 1
    hipMemcpyDeviceToHost = 2
    hipMemcpyDeviceToDevice = 3


class hipStreamCaptureMode(IntEnum):
    hipStreamCaptureModeThreadLocal = 1


OK = (hipError_t.hipSuccess,)


class Handle:
    """A stream, event, module, function or graph; `alive` until it is destroyed."""

    def __init__(self, kind: str, **facts):
        self.kind, self.alive = kind, True
        self.__dict__.update(facts)
