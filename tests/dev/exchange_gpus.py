"""Whether the Vulkan GPUs of a machine exchange data while kernels run, and how fast; not part of the test run.

    python -m tests.dev.exchange_gpus build FOLDER [--arch nvidia] [--gpus 2]     # where TVM is
    python -m tests.dev.exchange_gpus run FOLDER [--devices 0,1] [--rounds 6000]  # on the machine; needs NumPy only

Every word of every round is checked. Prints microseconds of a round, launch and barrier included, by the bytes of
float16 that each GPU sends to each other one, by workgroups and by threads of the relay. Exits with 1 for errors.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from mlc_amd.runtime.devices.exchange.check import Kernel, check, parts
from mlc_amd.runtime.devices.exchange.check_vulkan import CheckedVulkanGpu
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory

SIZES = (8, 16, 32, 64)  # KB
GROUPS = (16, 32, 64)
RELAY, KERNELS = "relay.bin", "kernels.json"


def build(folder: Path, arch: str, gpus: int) -> None:
    from mlc_amd.compiler.codegen.relay import relay_code
    from mlc_amd.compiler.codegen.spirv import compile_spirv
    from mlc_amd.schedules.gpu.base import profiles
    from mlc_amd.schedules.gpu.exchange.exchange import ExchangePlan, exchange
    from mlc_amd.schedules.operators import AllReduce

    profile, found = profiles.resolve(arch), []
    for size in SIZES:
        for groups in GROUPS:
            values = size * 512
            threads = min(profile.threads, max(profile.wave, values // 8 // groups))
            op = AllReduce(m=1, n=values, parts=gpus, residual=True)
            pause = 200 if arch == "lavapipe" else 0  # it leaves loops after 65536 steps
            kernel = exchange(op, values // 4, profile, "exchange", plan=ExchangePlan(groups, threads, pause))
            module = compile_spirv({"exchange": kernel}, profile)
            (launch,), (made,) = module.functions["exchange"].launches, module.modules.values()
            one = {"binary": made.binary.hex(), "grid": made.grid, "block": made.block, "args": launch.args}
            found.append(one | {"values": values})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RELAY).write_bytes(relay_code())
    facts = {"gpus": gpus, "push": profile.push, "subgroup": profile.wave if profile.subgroups else 0}
    (folder / KERNELS).write_text(json.dumps(facts | {"kernels": found}))


def run(folder: Path, devices: list[int], rounds: int, relay_threads: list[int]) -> int:
    built, errors = json.loads((folder / KERNELS).read_text()), 0
    with ExitStack() as held:
        instances = [held.enter_context(Instance()) for _ in range(built["gpus"])]
        devices = devices or [gpu.index for gpu in instances[0].gpus if gpu.type != "cpu"]
        chosen = [instance.gpus[i] for instance, i in zip(instances, devices, strict=False)]
        if len(chosen) < len(instances):
            print(f"{len(instances)} GPUs are needed, here are {len(chosen)}")
            return 1
        contexts = [Context(instance, gpu, held) for instance, gpu in zip(instances, chosen, strict=True)]
        print(f"GPUs: {', '.join(f'{gpu.name} {gpu.pci} ({gpu.driver})' for gpu in chosen)}", flush=True)
        for one in built["kernels"]:
            facts = (tuple(one[name]) for name in ("grid", "block", "args"))
            kernel = Kernel(bytes.fromhex(one["binary"]), *facts, values=one["values"])
            numbers, push = parts(len(contexts), kernel.values), (built["push"], built["subgroup"])
            for threads in relay_threads:
                try:
                    memories = [VulkanMemory(context) for context in contexts]
                    boxes = RelayedBoxes(memories, kernel.values // 4, folder / RELAY, threads)
                except Unsuitable as e:
                    print(f"no exchange: {e}")
                    return 1
                try:
                    gpus = [
                        CheckedVulkanGpu(context, boxes, rank, kernel, numbers[rank], *push)
                        for rank, context in enumerate(contexts)
                    ]
                    found = check(gpus, boxes, kernel.values, rounds)
                    result = f"{found * 1e6:.2f} us a round, {rounds} rounds right"
                except Unsuitable as e:
                    result, errors = f"ERROR {e}", errors + 1
                finally:
                    boxes.close()
                shape = f"{kernel.values // 512:3} KB, {kernel.grid[0]:2} x {kernel.block[0]:3} threads"
                print(f"{shape}, relay {threads:2}: {result}", flush=True)
    return int(errors > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in (verbs.add_parser("build"), verbs.add_parser("run")):
        verb.add_argument("folder", type=Path)
    verbs.choices["build"].add_argument("--arch", default="nvidia", help="a Vulkan profile")
    verbs.choices["build"].add_argument("--gpus", type=int, default=2)
    numbers = {"type": lambda text: [int(number) for number in text.split(",")]}
    verbs.choices["run"].add_argument("--devices", default=[], help="numbers of GPUs", **numbers)
    verbs.choices["run"].add_argument("--rounds", type=int, default=6000)
    verbs.choices["run"].add_argument("--relay-threads", default=[2, 4, 8], **numbers)
    options = vars(parser.parse_args())
    if options.pop("verb") == "build":
        build(**options)
        return 0
    return run(**options)


if __name__ == "__main__":
    sys.exit(main())
