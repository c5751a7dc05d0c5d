"""What adloco makes of one CUDA device, in stages of less than nine minutes each.

    .venv/bin/python benchmarks/gpu.py                        # all that are not stored, in order
    .venv/bin/python benchmarks/gpu.py --stage speed-305M
    .venv/bin/python benchmarks/gpu.py --table                # what is stored, of all devices
    .venv/bin/python benchmarks/gpu.py --check                # fails where this version is slower
    .venv/bin/python benchmarks/gpu.py --platform cpu --tiny  # to try the script; stores nothing

What was measured is stored in benchmarks/gpu/DEVICE.json at once, and is not measured again without
`--again`; a run that failed, or whose words have changed since, is. Most stages train a few rounds
with `adloco train` on the source code of Python's standard library, in bytes, with a head of 32,000
rows, and take the rounds after the first two: median tokens per second, MFU (`run/model_flops.py`
says what it counts), and the peak memory. `deviation` is the standard deviation over the rounds, or
over the turns of a measurement, as a part of their mean: of tokens per second, MFU and seconds.
`--check` measures once more what is stored, stores nothing, and ends with exit code 1 if something
has become slower by more than 5% and three deviations, or larger by more than 5%.
"""

import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_pairs import in_turns
from bench_ranks import wire_formats
from common import run_script, script_parser
from gpu_stacked import ways
from torch import Tensor, nn

from adloco.algorithms.model_state import Replica
from adloco.algorithms.muon_step import Muon
from adloco.algorithms.outer_sync import OuterSync
from adloco.cli.main import main as adloco_main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.traffic import Traffic
from adloco.errors import require
from adloco.plan.cluster import Cluster
from adloco.plan.prediction import memory_of_island
from adloco.rules.sync_schedule import SyncEvent
from adloco.run.records import Records
from adloco.run.start import build_algorithm, open_recipe, place_workers, prepare_run
from adloco.whole_file import write_text

FOLDER = Path(__file__).parent / "gpu"
STAGE_SECONDS = 540
CUDA_TESTS = ("tests/run/test_cuda.py", "tests/run/test_memory_use.py", "tests/elastic")
LARGE = ("1.1B", "3.4B", "6.7B")
"""Sizes of the stages largest-SIZE."""
WARM_UP_ROUNDS = 2
WIDTH, LAYERS, VALUES, TURNS = 1024, 24, 291 << 20, 10
MARGIN = 0.05
"""Part by which `--check` lets a number be worse; by three deviations if they are more."""
PACKAGE = 500_000
"""Most characters of a package's source code in the text of the stages loss-30M."""
Result = dict[str, Any]
"""Numbers of a run or a measurement; `failure` says why some are missing."""
Results = Iterable[tuple[str, Result]]
"""Results by name, as soon as each is there."""

SIZES = {
    "0.9M": "",
    "30M": "--model.hidden_size 512 --model.num_layers 8 --model.num_heads 8 "
    "--model.intermediate_size 1408",
    "124M": "--model.hidden_size 768 --model.num_layers 12 --model.num_heads 12 "
    "--model.intermediate_size 2048 --model.vocab_size 32000",
    "305M": "--model.shape microllama",
    "1.1B": "--model.shape tinyllama",
    "3.4B": "--model.shape openllama-3b",
    "6.7B": "--model.shape openllama-3b --model.hidden_size 4096 --model.num_layers 32 "
    "--model.intermediate_size 11008",
}
TINY = (
    "--model.hidden_size 32 --model.num_layers 1 --model.num_heads 2 --model.intermediate_size 64 "
    "--data.context_tokens 32 --run.inner_steps 2 --memory.gib 2"
)
LONG = "--data.context_tokens 1024"
MUON = "--inner.optimizer muon --inner.lr 8e-3"
STEPS = "--run.tokens 20M --run.inner_steps 40 --run.checkpoint_every 99"
ROUNDS = f"--method.sync_every 5 {STEPS}"
"""Eight rounds of five steps."""
TESTED = "--run.tokens 20M --run.inner_steps 100 --run.checkpoint_every 99"
"""In rounds of 20 steps, or of 10 as in ddp-norm, of which four are test steps."""


def batch(samples: int, micro: int) -> str:
    return f"--batch.initial {samples} --switch.max_micro_batch {micro}"


def same(samples: int) -> str:
    """A batch rule that asks for a constant batch, so that its cost alone is measured."""
    return f"--batch.minimum {samples} --batch.maximum {samples}"


def speed(size: str, micro: int) -> dict[str, str]:
    """Runs of one worker with 32,768 tokens a step, eager and compiled."""
    words = f"single {SIZES[size]} {LONG} {MUON} {ROUNDS} {batch(32, micro)}"
    return {
        how: f"{words} --run.compile {on}" for how, on in (("eager", "false"), ("compiled", "true"))
    }


def methods(size: str) -> dict[str, str]:
    """One worker beside four on the same device, with as many tokens a step of each worker."""
    common = f"{SIZES[size]} {LONG} {MUON} --method.sync_every 20 {TESTED}"
    four = f"--method.workers_per_trainer 4 {batch(128, 32)} --wire.format int1"
    trainers = f"--method.num_trainers 4 --method.workers_per_trainer 1 {batch(32, 32)} {same(32)}"
    trainers += " --learning_rate.reference_batch 32 --merge.policy none"
    return {
        "single": f"single {common} {batch(32, 32)}",
        "DiLoCo, 4 workers": f"diloco {common} {four}",
        "AdLoCo, 4 trainers": f"adloco {common} {trainers}",
    }


def norm_test(size: str) -> dict[str, str]:
    """Data-parallel training with and without a test that asks for what is there."""
    common = f"{SIZES[size]} {LONG} --method.sync_every 10 {TESTED} {batch(32, 32)}"
    return {"constant": f"ddp {common}", "norm test": f"ddp-norm {common} {same(32)}"}


def instances(size: str, samples: int, context: int) -> dict[str, str]:
    """Four trainers on one device with small batches: at once, one after another, compiled."""
    words = f"adloco {SIZES[size]} --data.context_tokens {context} {MUON} {STEPS}"
    words += " --method.num_trainers 4 --method.sync_every 10 --merge.policy none"
    words += f" {batch(samples, samples)} {same(samples)}"
    return {
        "at once": f"{words} --run.compile false --run.threads 4",
        "in turn": f"{words} --run.compile false --run.threads 1",
        "compiled": f"{words} --run.compile true",
    }


def python_sources() -> Iterator[str]:
    """The Python files of each installed package as one text, so that whole packages are held out.

    It is the `data.factory` of runs that need more text than the standard library has.
    """
    installed = Path(sysconfig.get_path("purelib"))
    for package in sorted(installed.iterdir()):
        text = ""
        for file in sorted(package.rglob("*.py")):
            if len(text) < PACKAGE:
                text += file.read_text(errors="ignore")
        if text:
            yield text[:PACKAGE]


def losses(method: str) -> dict[str, str]:
    """23.9M parameters on 40M bytes; DiLoCo has the settings with which gap.py compares."""
    step = "--wire.format int1 --method.sync_every 3 --method.sync_growth 1 --inner.lr 3e-3 "
    arms = {
        "single": f"single {batch(32, 32)} --inner.lr 3e-3 --method.sync_every 40",
        "diloco": f"diloco --method.workers_per_trainer 4 {batch(64, 16)} {step} --outer.lr 1",
        "adloco": f"adloco --method.num_trainers 4 {batch(8, 16)} --batch.minimum 8 "
        "--batch.maximum 64 --learning_rate.reference_batch 32 --inner.lr 3e-3",
    }
    common = (
        f"{SIZES['30M']} {LONG} --data.factory gpu:python_sources --run.tokens 40M "
        "--learning_rate.shape cosine --inner.optimizer muon --run.compile true "
        "--evaluation.every 9999 --evaluation.windows 1024"
    )
    return {method: f"{arms[method]} {common}"}


def paper(method: str) -> dict[str, str]:
    """MicroLlama from random weights by a recipe of the first paper, on as many tokens as fit."""
    words = f"{method}-paper --model.source llama {SIZES['305M']} --data.context_tokens 512 "
    words += "--data.dataset= --data.config= --data.validation_split= --data.samples 0 "
    words += "--data.validation_samples 0 --data.streaming false --data.tokenizer bytes "
    words += "--data.factory gpu:python_sources --run.tokens 6M --method.sync_every 50 "
    words += "--inner.lr 3e-4 --evaluation.every 9999 --evaluation.windows 1024"
    return {method: words}


RUNS: dict[str, Callable[[], Mapping[str, str]]] = {
    "speed-305M": lambda: speed("305M", 32),
    "speed-124M": lambda: speed("124M", 32),
    "speed-30M": lambda: speed("30M", 32),
    "default": lambda: {
        "default recipe": "adloco",
        "default recipe, compiled": "adloco --run.compile true",
        "single": f"single {MUON} {ROUNDS} {batch(256, 256)}",
    },
    "instances-0.9M": lambda: instances("0.9M", 4, 128),
    "instances-30M": lambda: instances("30M", 4, 1024),
    "instances-305M": lambda: instances("305M", 2, 512),
    "methods-124M": lambda: methods("124M"),
    "norm-test-124M": lambda: norm_test("124M"),
    "loss-30M-single": lambda: losses("single"),
    "loss-30M-diloco": lambda: losses("diloco"),
    "loss-30M-adloco": lambda: losses("adloco"),
    "paper-305M-diloco": lambda: paper("diloco"),
    "paper-305M-adloco": lambda: paper("adloco"),
}
"""Stages that train: the words of `adloco train` of each run."""


def trained(words: str, seconds: float) -> Result:
    """Train a run, and say how fast it was."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        line = ["train", *words.split(), "--run.folder", str(run), "--run.trackers", "none"]
        ended, _ = in_child(run_command, line, seconds)
        rounds = [*Records(run).read()]
    return {"words": words} | ended | (of_rounds(rounds) if rounds else {})


def in_child(
    function: Callable[[Any], None], argument: Any, seconds: float
) -> tuple[Result, list[str]]:
    """Call a function in a process of its own; its seconds, or how it failed, and its output."""
    processes = multiprocessing.get_context("forkserver")
    # Imported once, before the device is touched: they take eight seconds there. A command alone
    # imports nothing of this before it runs.
    processes.set_forkserver_preload(
        ["adloco.cli.train_here", "transformers.models.llama.modeling_llama"]
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        output.touch()  # A process that dies at once writes none.
        began = time.monotonic()
        child = processes.Process(target=call, args=(function, argument, output))
        child.start()
        child.join(seconds)
        text = output.read_text()
        failure = f"exit code {child.exitcode}: {text[-1000:]}" if child.exitcode else ""
        if child.exitcode is None:
            child.kill()
            child.join()
            failure = f"did not end within {seconds:.0f} s: {text[-500:]}"
        took = round(time.monotonic() - began, 1)
    return {"seconds": took} | ({"failure": failure} if failure else {}), text.splitlines()


def call(function: Callable[[Any], None], argument: Any, output: Path) -> None:
    """Call a function with its output in a file."""
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            function(argument)
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def run_command(line: Sequence[str]) -> None:
    """Run a command of adloco in this process."""
    sys.exit(adloco_main(line))


def recipe_of(words: str) -> Recipe:
    """The recipe that `adloco train` makes of these words."""
    name, *flags = words.split()
    settings = [(f.removeprefix("--"), v) for f, v in zip(flags[::2], flags[1::2], strict=True)]
    return build_recipe(override(read_values(name), settings))


def in_memory(words: str) -> None:
    """Train two rounds without a folder, whose checkpoint would not fit on the disk, and print the
    number of parameters and the peak memory.
    """
    recipe = recipe_of(words)
    algorithm = build_algorithm(prepare_run(recipe, place_workers(recipe)))
    for _ in range(2):
        algorithm.round()
    params = next(iter(algorithm.workers.values())).replica.params
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(sum(each.numel() for each in params), peak)


def largest(size: str, extra: str = "") -> Results:
    """A large model, as two workers whose global parameters are on the host."""
    words = f"diloco {SIZES[size]} {LONG} --method.workers_per_trainer 2 --method.sync_every 2 "
    words += f"{batch(4, 2)} --outer.on_host true --model.gradient_checkpointing true "
    words += f"--model.dtype bf16 --run.inner_steps 4 --run.compile false {extra}"
    ended, said = in_child(in_memory, words, STAGE_SECONDS)
    if "GiB" in ended.get("failure", ""):  # By our own check or torch's: that is the answer.
        ended["does_not_fit"] = ended.pop("failure")
    found: dict[str, Any] = {"words": words} | ended
    if not ended.keys() & {"failure", "does_not_fit"}:
        parameters, peak = map(int, said[-1].split())
        found |= {"parameters": parameters, "peak_bytes": peak}
        found |= {"planned_bytes": planned_bytes(words, parameters)}
    return [(size, found)]


def planned_bytes(words: str, parameters: int) -> float:
    """What `adloco plan` says of the memory of these two workers, which share a device."""
    islands = Cluster(islands=2, bandwidth="1gbit", samples_per_second={1: 1.0})
    return 2 * memory_of_island(recipe_of(words), parameters, islands)


def of_rounds(rounds: Sequence[Mapping[str, Any]]) -> Result:
    """Numbers of a run from its metrics.jsonl."""
    later = rounds[WARM_UP_ROUNDS:] or rounds[-1:]
    last = rounds[-1]

    def median(name: str) -> float | None:
        known = [each[name] for each in later if each.get(name) is not None]
        return statistics.median(known) if known else None

    return {
        "tokens_per_second": median("tokens_per_second"),
        "deviation": deviation([each["tokens_per_second"] for each in later]),
        "mfu": median("mfu"),
        "sync_seconds": statistics.median(each["sync"]["exposed_seconds"] for each in later),
        "peak_bytes": last["memory_bytes"],
        "rounds": last["round"],
        "tokens": last["tokens"],
        "bytes": last["bytes_communicated"],
        "val_loss": last["val_loss"],
    }


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of these values as a part of their mean; 0 for one value."""
    return statistics.pstdev(values) / statistics.mean(values)


def cuda_tests() -> Results:
    """The tests that need a CUDA device."""
    # Ended in time, so that what it said is stored.
    line = ["timeout", "--signal=INT", str(STAGE_SECONDS), sys.executable, "-m", "pytest"]
    line += ["-q", "-p", "no:benchmark", *CUDA_TESTS, "-k", "cuda"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=FOLDER.parent.parent)
    return [("tests", {"failure" if done.returncode else "end": done.stdout[-1500:]})]


def optimizers() -> Results:
    """Steps on the hidden matrices of a Llama with 24 layers of width 1024 (271M values)."""
    steps = optimizer_steps(hidden_matrices(WIDTH, LAYERS, torch.device("cuda")))
    for name, result in times(steps):
        known = {} if "failure" in result else {"peak_bytes": peak_bytes(steps[name])}
        yield name, result | known


def formats() -> Results:
    """Each wire format encodes and decodes 305M values, in pieces as a sync does it."""
    return times(wire_formats(torch.randn(VALUES, device="cuda")))


def syncs() -> Results:
    """A sync of four workers of the device, each with the matrices of `optimizers`."""
    for name in ("fp32", "int4", "int1"):
        yield from times({name: sync_of_four(name, WIDTH, LAYERS, torch.device("cuda"))})


def sync_of_four(name: str, width: int, layers: int, device: torch.device) -> Callable[[], Any]:
    """A sync of four workers in this wire format, by the outer step of the recipe diloco."""
    syncing = recipe_of(f"diloco --wire.format {name}").syncing
    models = [nn.ParameterList(hidden_matrices(width, layers, device)) for _ in range(4)]
    workers = [Replica.of(model, syncing.residuals_in) for model in models]
    sync, event = OuterSync(workers[0], syncing).sync, SyncEvent(step=0, kind="sync", fragment=0)
    return partial(sync, event, workers, [1 / 4] * 4, Comm(Islands(workers=[4], traffic=Traffic())))


def stacked() -> Results:
    """Passes of four models with small batches, by each way to train several on a device."""
    for size, samples, context in (("0.9M", 4, 128), ("30M", 4, 1024), ("305M", 2, 512)):
        recipe = recipe_of(f"single {SIZES[size]} --data.context_tokens {context}")
        sides = ways(open_recipe(recipe).builder, samples, context, torch.device("cuda"))
        for name, result in times(sides):
            yield f"{size}, {name}", result
        torch.compiler.reset()


MEASURED: dict[str, Callable[[], Results]] = {
    "cuda-tests": cuda_tests,
    "optimizers": optimizers,
    "formats": formats,
    "syncs": syncs,
    "stacked": stacked,
    **{f"largest-{size}": partial(largest, size) for size in LARGE},
}
"""Stages that need a CUDA device."""


def hidden_matrices(width: int, layers: int, device: torch.device) -> list[Tensor]:
    """The hidden matrices of a Llama with grouped queries, as parameters with gradients."""
    keys, inner = width // 4, width * 11 // 4
    layer = [(width, width), (keys, width), (keys, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner)]
    matrices = [torch.randn(shape, device=device) / width**0.5 for shape in layer * layers]
    for matrix in matrices:
        matrix.requires_grad_()
        matrix.grad = torch.randn_like(matrix)
    return matrices


def optimizer_steps(matrices: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """The step of each optimizer on these matrices."""
    settings: Any = {"lr": 1e-3, "weight_decay": 0.1}
    muon: Any = settings | {"momentum": 0.9}
    return {
        "Muon": Muon(matrices, **muon).step,
        "torch.optim.Muon": torch.optim.Muon(matrices, **muon, adjust_lr_fn="match_rms_adamw").step,
        "AdamW, fused": torch.optim.AdamW(matrices, **settings, fused=True).step,
    }


def times(sides: Mapping[str, Callable[[], Any]]) -> Results:
    """Milliseconds of each side: the median of its turns. One that fails does not end the others,
    because a device is lent for minutes.
    """
    work: dict[str, Callable[[], Any]] = {}
    for name, side in sides.items():
        try:
            side()
            torch.cuda.synchronize()
            work[name] = side
        except Exception as error:  # Of torch's compiler, too, which has many.
            yield name, {"failure": f"{type(error).__name__}: {error}"[-1000:]}
    for name, turns in in_turns(work, TURNS, meet=torch.cuda.synchronize).items():
        yield name, {"milliseconds": 1e3 * statistics.median(turns), "deviation": deviation(turns)}


def peak_bytes(step: Callable[[], Any]) -> int:
    """How much more memory a step has at its peak than there was before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(stage: str, runs: Mapping[str, str]) -> Iterator[tuple[str, Result]]:
    """The results of one stage, as soon as each is there: of these runs, if it trains."""
    if stage in MEASURED:
        yield from MEASURED[stage]()
    ends = time.monotonic() + STAGE_SECONDS
    for name, words in runs.items():
        yield name, trained(words, max(1.0, ends - time.monotonic()))


def worse(stored: Result, found: Result) -> list[str]:
    """What is worse in a result than in the stored one of the same words; empty if nothing is."""
    if "failure" in found:
        return [found["failure"]]
    if "does_not_fit" in found:
        return [] if "does_not_fit" in stored else [found["does_not_fit"]]
    slower = 1 + max(MARGIN, 3 * stored.get("deviation", 0.0))
    most = {"milliseconds": slower, "peak_bytes": 1 + MARGIN}
    pairs = {
        name: (found[name] / stored[name], by) for name, by in most.items() if stored.get(name)
    }
    if stored.get("tokens_per_second"):
        pairs["seconds a token"] = (
            stored["tokens_per_second"] / found["tokens_per_second"],
            slower,
        )
    return [
        f"{name} {ratio:.3g} times those that are stored, which is more than {by:.3g}"
        for name, (ratio, by) in pairs.items()
        if ratio > by
    ]


def check(stage: str, runs: Mapping[str, str], known: Mapping[str, Result]) -> int:
    """Measure once more what is known of a stage; how many of its results are worse now."""
    failed = 0
    again = {name: words for name, words in runs.items() if name in known}
    for name, result in measure(stage, again) if known else ():
        if name in known:
            problems = worse(known[name], result)
            failed += bool(problems)
            print(f"{stage} · {name}: {'; '.join(problems) or 'no worse'}", flush=True)
    if not known:
        print(f"{stage}: nothing stored to compare with", flush=True)
    return failed


def table(stored: Mapping[str, Mapping[str, Result]]) -> str:
    """What is stored, a line for each run or measurement."""
    return "\n".join(
        f"{stage} · {name}: "
        + ", ".join(
            f"{key} {value:,.4g}" if isinstance(value, int | float) else f"{key} {value}"
            for key, value in numbers.items()
            if key != "words"
        )
        for stage, found in stored.items()
        for name, numbers in found.items()
    )


def read(file: Path) -> dict[str, dict[str, Result]]:
    return json.loads(file.read_text()) if file.exists() else {}


def main(words: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    add = parser.add_argument
    stages = [*RUNS, *MEASURED]
    add("--stage", nargs="+", choices=stages, help="which (default: all of the device, in order)")
    add("--json", type=Path, help="where results are stored (default: benchmarks/gpu/DEVICE.json)")
    add("--again", action="store_true", help="measure what is stored, too")
    add("--check", action="store_true", help="compare with what is stored; exit code 1 if worse")
    add("--table", action="store_true", help="only print what is stored")
    add("--platform", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script")
    add("--tiny", action="store_true", help="a tiny model, one round of two steps; --json stores")
    options = parser.parse_args(words)
    if options.table:
        files = [options.json] if options.json else sorted(FOLDER.glob("*.json"))
        shown = [f"{file.stem}\n{table(kept)}" for file in files if (kept := read(file))]
        require(bool(shown), f"nothing is stored in {options.json or FOLDER}; measure it first")
        print("\n\n".join(shown))
        return
    cuda = options.platform == "cuda"
    require(
        not cuda or torch.cuda.is_available(), "this script needs a CUDA device; torch finds none"
    )
    chosen = options.stage or (stages if cuda else [*RUNS])
    for stage in chosen:
        require(cuda or stage in RUNS, f"--stage {stage} needs a CUDA device, not --platform cpu")
    device = torch.cuda.get_device_name() if cuda else "cpu"
    own_file = None if options.tiny else FOLDER / f"{device.replace(' ', '-')}.json"
    file = options.json or own_file
    stored = read(file) if file else {}
    about = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    extra = f"--run.device {options.platform} {TINY if options.tiny else ''}"
    failed = 0
    for stage in chosen:
        lines = RUNS[stage]() if stage in RUNS else {}
        runs = {name: f"{words} {extra}" for name, words in lines.items()}
        found = stored.get(stage, {})
        known = {
            name: each
            for name, each in found.items()
            if "failure" not in each and (name not in runs or each["words"] == runs[name])
        }
        if options.check:
            failed += check(stage, runs, known)
            continue
        if options.again:
            known = {}
        missing = {name: words for name, words in runs.items() if name not in known}
        if known and not missing and (runs or known == found):
            print(f"{stage}: stored", flush=True)
            continue
        print(f"{stage}: measuring ...", flush=True)
        stored[stage] = known
        for name, result in measure(stage, missing):
            known[name] = result | about
            if file:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(stored, indent=1) + "\n")
            print(table({stage: {name: result}}), flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_script("gpu", main)
