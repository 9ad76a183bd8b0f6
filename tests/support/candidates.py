"""Candidates for tests of measuring: y = x + w."""

from mlc_amd.runtime.measure import candidate

STATE = [7, 3, 0, 0]
ADD = [  # y = x + w, which the tests' kernels compute
    {"name": "state", "shape": [4], "dtype": "int32", "role": "state"},
    {"name": "X", "shape": [4, 64], "dtype": "float32", "role": "input"},
    {"name": "G", "shape": [4, 64], "dtype": "float32", "role": "weight"},
    {"name": "Y", "shape": [4, 64], "dtype": "float32", "role": "output"},
]


def made(folder, content: bytes | None = b"", params=ADD, op="add", **facts):
    """A candidate in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (folder / "kernel").write_bytes(content)
    case = {"name": "d0", "state": STATE, "bytes": 3072, "flops": 256}
    about = {
        "workload": {"op": op, "args": {}},
        "plan": None,
        "api": "cpu",
        "arch": "any",
        "needs": {"flags": []},
        "code": "kernel",
    }
    steps = [{"symbol": "kernel", "args": [0, 1, 2, 3]}]
    about |= {
        "steps": steps,
        "scratch": [],
        "params": params,
        "cases": [case],
        "states": [STATE],
        "bytes": 3072,
        "flops": 256,
    }
    return candidate.write(folder, about | facts)
