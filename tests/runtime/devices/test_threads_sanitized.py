"""The thread pool of the CPU kernels under the compiler's sanitizers: races, memory that is used wrongly or lost."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mlc_amd.compiler.codegen import cpu
from mlc_amd.runtime.errors import UserError

ROUNDS = 3000


@pytest.mark.full
@pytest.mark.parametrize(("sanitizers", "forks"), [("thread", 0), ("address,undefined", 1)])
def test_pool(tmp_path, sanitizers, forks):
    made = tmp_path / "stress"
    source = Path(__file__).parents[2] / "support" / "pool_stress.c"
    options = (
        "-g",
        "-O1",
        "-fno-sanitize-recover=all",
        f"-fsanitize={sanitizers}",
        "-pthread",
        f"-I{cpu.NATIVE.parent}",
    )
    try:
        cpu.compile_c(*options, "-o", str(made), str(source))
    except UserError as error:
        pytest.skip(f"this compiler has no sanitizers: {error}")
    # ThreadSanitizer wants its memory where the system's random layout may put something else.
    fixed = [shutil.which("setarch") or "setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, str(made), str(ROUNDS), str(forks)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stdout and not done.stderr, (done.stdout + done.stderr)[:4000]
