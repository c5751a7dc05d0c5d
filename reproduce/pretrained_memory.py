"""Measures the host memory of a rank while trained weights are loaded into two shards: read whole
by from_pretrained, and part by part. It takes about a minute and 1 GiB of disk.

    OMP_NUM_THREADS=1 python reproduce/pretrained_memory.py
"""

import re
import tempfile
import threading
import time
from pathlib import Path

from adloco import place
from adloco.distributed.testing import run_on_ranks
from adloco.models.build import ModelBuilder
from adloco.models.source import ModelOptions
from adloco.models.sources.llama import LlamaShape
from adloco.models.sources.named_model import NamedModel
from adloco.models.weights import StoredWeights

HEAD = "AutoModelForCausalLM"


def own_mib() -> float:
    """Memory of this process in MiB, without mapped files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def peak_of_a_rank(folder: Path, whole: bool) -> tuple[int, int]:
    """(peak, end) of the memory in MiB that building and sharding the model adds to a process."""
    source = NamedModel(name=str(folder), pretrained=True)
    builder = ModelBuilder(
        config=source.config(256), head=HEAD, options=ModelOptions(), seed=0, weights=source.weights
    )
    if whole:
        vars(builder)["stored"] = StoredWeights(only_whole="to measure it")
    placement = place(1, "cpu", 1, 2, 1)
    before, seen, done = own_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(own_mib())
            time.sleep(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    model = builder()
    engine = placement.engine(model, False, builder.filling)
    done.set()
    watching.join()
    after = own_mib()
    del engine
    return round(max(seen) - before), round(after - before)


def main() -> None:
    """Measure a Llama of 305M parameters, saved in bf16 like those on the hub, loaded as fp32."""
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaShape(shape="microllama").config(256)
        ModelBuilder(
            config=config, head=HEAD, options=ModelOptions(dtype="bf16"), seed=0
        ).whole().save_pretrained(folder)  # type: ignore[operator]
        for name, whole in (("whole", True), ("part by part", False)):
            for rank, (most, after) in enumerate(
                run_on_ranks(peak_of_a_rank, 2, Path(folder), whole, timeout_seconds=300.0)
            ):
                print(f"{name}, rank {rank}: {most} MiB at most, {after} MiB afterwards")


if __name__ == "__main__":
    main()
