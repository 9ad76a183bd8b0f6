"""Which function computes a step, and how prompts are cut into steps."""

import pytest

from mlc_amd.runtime.engine.functions import Functions, chunk_size, rows_at_once


def manifest(*functions: tuple[str, int, int, int], kind: str = "vulkan") -> dict:
    return {
        "target": {"kind": kind},
        "functions": {n: {"rows": rows, "single": single, "logits": logits} for n, rows, single, logits in functions},
    }


GPU = Functions(
    manifest(
        ("decode", 1, 1, 1), ("step_8", 8, 8, 8), ("step_64", 64, 64, 64), ("prefill_64", 64, 0, 1),
        ("prefill_512", 512, 0, 1), ("mixed_512", 512, 64, 64), ("score_64", 64, 0, 64),
    )
)  # fmt: skip


def steps(tokens: int, sizes: tuple[int, ...], most: int = 512) -> list[int]:
    found = []
    while tokens:
        found.append(chunk_size(tokens, sizes, most))
        tokens -= found[-1]
    return found


def test_smallest_function_that_holds_a_step():
    found = [GPU.of(*rows).name for rows in ((1, 0), (3, 0), (9, 0), (0, 40), (0, 65), (2, 70))]
    assert found == ["decode", "step_8", "step_64", "prefill_64", "prefill_512", "mixed_512"]
    assert GPU.chunk_sizes == (1, 8, 64, 512)


@pytest.mark.parametrize(
    "tokens, expected",
    [
        (1, [1]), (8, [8]), (16, [16]), (64, [64]), (65, [64, 1]), (128, [64, 64]), (256, [64] * 4), (400, [400]),
        (512, [512]), (577, [512, 64, 1]),
    ],
)  # fmt: skip
def test_chunks_leave_little_of_a_function_empty(tokens, expected):
    assert steps(tokens, GPU.chunk_sizes) == expected


def test_the_cpu_computes_a_chunk_in_one_step():
    """Its kernels leave out rows that are not live: four tokens took four steps of one."""
    cpu = Functions(manifest(("decode", 1, 1, 1), ("prefill_512", 512, 0, 1), ("score_64", 64, 0, 64), kind="cpu"))
    assert [steps(tokens, cpu.chunk_sizes) for tokens in (1, 4, 400, 513)] == [[1], [4], [400], [512, 1]]
    assert cpu.of(0, 4).name == "prefill_512" and cpu.of(0, 1).name == "decode"


def test_chunks_of_many_sizes():
    sizes = (1, 8, 16, 32, 64, 128, 512)
    assert steps(256, sizes) == [128, 128]
    assert steps(300, sizes) == [128, 128, 44]
    assert steps(17, sizes) == [17]


def test_chunks_that_something_else_limits():
    assert steps(100, (512,)) == [100]
    assert steps(100, (), 40) == [40, 40, 20]
    assert steps(130, GPU.chunk_sizes, 65) == [64, 64, 2]


def test_chunks_that_keep_several_gpus_busy():
    """A step's time is proportional to its rows and 48 more; the makespan of equal chunks on equal stages."""
    sizes = (1, 8, 16, 32, 64, 128, 512)

    def makespan(tokens: int, gpus: int, most: int) -> float:
        chunks, free = steps(tokens, sizes, most), [0.0] * gpus
        for count in chunks:
            at = 0.0
            for gpu in range(gpus):
                at = free[gpu] = max(at, free[gpu]) + (48 + next(size for size in sizes if size >= count)) / gpus
        return free[-1]

    for tokens in (100, 512, 1000, 2048, 4096, 20000):
        assert steps(tokens, sizes, rows_at_once(tokens, sizes, 1)) == steps(tokens, sizes)
        for gpus in (2, 4):
            best = min(makespan(tokens, gpus, size) for size in sizes)
            assert makespan(tokens, gpus, rows_at_once(tokens, sizes, gpus)) <= 1.02 * best
    assert makespan(512, 2, rows_at_once(512, sizes, 2)) < 0.8 * makespan(512, 2, 512)
