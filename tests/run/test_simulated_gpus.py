"""The tests of a GPU, on simulated ones: see tests/simulated_gpus. Skipped where torch knows real
ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
SIMULATED = TESTS / "simulated_gpus"
QUICK = (
    "computes_what_a_cpu and (streaming or merging)"
    " or encodes or waits or both_types or memory or replaced"
)


@pytest.fixture(scope="module")
def with_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch has GPUs."""
    compiler = shutil.which("c++")
    if torch.backends.cuda.is_built() or compiler is None:
        pytest.skip("needs a C++ compiler, and a torch that was built without CUDA")
    library = tmp_path_factory.mktemp("gpus") / "devices.so"
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    libraries = torch_folder / "lib"
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    source = str(SIMULATED / "devices.cpp")
    subprocess.run([compiler, *flags, source, "-o", str(library), *linked], check=True)
    path = [SIMULATED / "site", TESTS.parent / "src", TESTS.parent]
    return os.environ | {
        "SIMULATED_GPUS": str(library),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }


@pytest.mark.parametrize(
    "chosen",
    [
        QUICK,
        # Nothing is compiled for them.
        pytest.param(f"not compiled and not ({QUICK})", marks=pytest.mark.nightly),
    ],
    ids=["quick", "others"],
)
def test_the_tests_of_a_gpu_pass_on_simulated_ones(chosen: str, with_gpus: dict[str, str]) -> None:
    words = ["-p", "no:benchmark", "-p", "no:cacheprovider", "--show-capture", "no"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "tests/run/test_cuda.py", "-k", chosen],
        cwd=TESTS.parent,
        env=with_gpus,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert " passed" in ran.stdout and "skipped" not in ran.stdout
