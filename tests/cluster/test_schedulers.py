"""The files of `adloco launch`: what their shell does, and that schedulers would take them."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from adloco.cli.main import main
from adloco.cluster.job import Job, plan_job, torchrun_can_wait
from adloco.cluster.schedulers import SCHEDULERS, VARIABLES
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.distributed.launch import rank_store
from tests.conftest import wait_for

AROUND = {"image": "registry/adloco:1", "storage": "s3://runs", "gpu": "H100"}
LINE = ["launch", "diloco", "--on", "slurm", "--islands", "2", "--gpus-per-island", "8"]
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}
SBATCH |= {"requeue", "signal", "open-mode", "output"}
"""Long options of sbatch, as its manual lists them, among them all that the script uses."""


@pytest.fixture(autouse=True)
def newer_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are the same with every version of torch that the tests run with."""
    monkeypatch.setattr("adloco.cluster.job.torchrun_can_wait", lambda: True)


def job(recipe: str = "diloco", *settings: tuple[str, str], **numbers: int) -> Job:
    shape = {"islands": 2, "gpus_per_island": 8} | numbers
    return plan_job(
        recipe,
        settings,
        islands=shape["islands"],
        gpus_per_island=shape["gpus_per_island"],
        gpus_per_node=numbers.get("gpus_per_node"),
        started="20261122-120000",
    )


def written(name: str, planned: Job) -> str:
    return SCHEDULERS[name].text(planned, AROUND)


def command(name: str, planned: Job) -> list[str]:
    """The words of torchrun's line in a file."""
    text = written(name, planned)
    if name != "slurm":
        text = shell(name, yaml.safe_load(text))
    line = text[text.index("torchrun ") :].partition("\n\n")[0].replace("\\\n", "")
    return shlex.split(line.partition(' "$@"')[0].partition("\n")[0])


def shell(name: str, content: Any) -> str:
    """What a node runs."""
    if name == "skypilot":
        return str(content["run"])
    (node,) = content["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    return str(container["args"][0])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchrun_and_adloco_understand_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are read by torchrun's own parser, the rest as `adloco train` reads a line."""
    monkeypatch.undo()
    grace = 110 if torchrun_can_wait() else 30
    asked = [("run.tokens", "10M"), ("run.name", "it's 8 $HOME")]
    planned = job("diloco", *asked, gpus_per_node=4)
    words = command(name, planned)
    # A command in the place of an option's value is more words.
    words = [word for word in words if not word.startswith(("is_host", "[[", "$JOB", "$SKY"))]
    words = shlex.split(re.sub(r"--rdzv-conf .*?--max", "--max", shlex.join(words)))
    options = get_args_parser().parse_args(words[1:])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("4", "4", 3)
    assert options.rdzv_backend == "c10d"
    assert getattr(options, "shutdown_timeout", 30) == grace
    assert options.rdzv_endpoint.endswith(":$port" if name == "slurm" else ":29400")
    assert (options.module, options.training_script) == (True, "adloco")
    settings, others = take_settings(options.training_script_args)
    assert others == ["train", "diloco", "--restart"]
    recipe = build_recipe(override(read_values("diloco"), settings))
    assert (recipe.run.tokens, recipe.run.name) == (10_000_000, "it's 8 $HOME")
    assert recipe.run.folder == "runs/it-s-8-home-20261122-120000"
    assert (recipe.placement.shard_size, recipe.run.grace_seconds) == (8, grace)


def test_a_torchrun_that_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adloco.cluster.job.torchrun_can_wait", lambda: False)
    planned = job()
    assert planned.grace_seconds == 30
    assert "grace_seconds" not in written("slurm", planned)
    assert "--shutdown-timeout" not in written("slurm", planned)


def test_ranks_that_are_started_again_have_a_new_store() -> None:
    assert VARIABLES.split()[1] == f"{rank_store.VARIABLE}=1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM of three commands, which write what they are told to a file `said`."""
    commands = {
        "scontrol": f"""
            if [[ "$1 $2" == "show job" ]]; then cat {tmp_path}/job; exit; fi
            if [[ $1 == show ]]; then printf 'node7\\nnode8\\n'; exit; fi
            echo "scontrol $@" >> {tmp_path}/said""",
        "scancel": f'echo "scancel $@" >> {tmp_path}/said; kill -TERM $(cat {tmp_path}/pid)',
        "srun": f"""
            echo "srun $@" >> {tmp_path}/said
            [[ -e {tmp_path}/short ]] && exit 3
            trap 'echo saved >> {tmp_path}/said; exit 130' TERM
            echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid
            while :; do sleep 0.02; done""",
    }
    for name, lines in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "30077")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[7-8]")
    (tmp_path / "job").write_text(f"{PREEMPTIBLE}None\n")
    (tmp_path / "job.sh").write_text(written("slurm", job("single", islands=1, gpus_per_island=2)))
    return tmp_path


PREEMPTIBLE = "JobId=30077\n   PreemptEligibleTime=2026-11-30T21:21:31 PreemptTime="
TRAINED = (
    "srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=8 "
    "torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d "
    "--rdzv-endpoint node7:29477 --rdzv-id 30077 --max-restarts 3 --shutdown-timeout 110 -m adloco "
    "train single --restart --run.folder runs/single-20261122-120000 --run.grace_seconds 110 "
    "--placement.shard_size 2"
)


def test_a_script_that_ends_by_itself(slurm: Path) -> None:
    (slurm / "short").touch()
    done = subprocess.run(["bash", slurm / "job.sh", "--run.tokens", "5"], capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")
    assert (slurm / "said").read_text() == f"{TRAINED} --run.tokens 5\n"


@pytest.mark.parametrize("when", ["None", "2026-11-30T21:22:08", "Mon 21:22"])
def test_a_preempted_script_is_queued_again(when: str, slurm: Path) -> None:
    """SLURM signals its ranks itself, and does not queue a job that ends in its grace time. The
    user's SLURM_TIME_FORMAT says how it writes the time.
    """
    (slurm / "short").touch()
    (slurm / "job").write_text(f"{PREEMPTIBLE}{when}\n")
    done = subprocess.run(["bash", slurm / "job.sh"], capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")
    requeued = "" if when == "None" else "scontrol requeue 30077\n"
    assert (slurm / "said").read_text() == f"{TRAINED}\n{requeued}"


def test_a_script_whose_job_asks_for_no_number_of_cores(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sets the variable only for a job with --cpus-per-task; a user may take that out."""
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    (slurm / "short").touch()
    subprocess.run(["bash", slurm / "job.sh"], check=False)
    assert (slurm / "said").read_text() == TRAINED.replace(" --cpus-per-task=8", "") + "\n"


@pytest.mark.parametrize("task", ["", "3"])
def test_at_its_time_limit_a_script_saves_and_is_queued_again(
    task: str, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job, or a task of an array, whose others are left alone."""
    if task:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "30077")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
    script = subprocess.Popen(["bash", slurm / "job.sh"])
    wait_for(slurm / "pid")
    time.sleep(0.1)  # The signal may come while the script waits, not before.
    script.send_signal(signal.SIGUSR1)
    assert script.wait(timeout=60) > 0
    said = (slurm / "said").read_text().splitlines()
    job = "30077_3" if task else "30077"
    assert said == [TRAINED, f"scancel --signal=TERM {job}", "saved", f"scontrol requeue {job}"]


def test_sbatch_knows_the_options() -> None:
    text = written("slurm", job(gpus_per_node=4))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.+))?$", text, re.MULTILINE))
    assert options.keys() == SBATCH and len(options) == text.count("\n#SBATCH")
    assert (options["nodes"], options["gpus-per-node"]) == ("4", "H100:4")
    # Time to save, and to notice that it is saved.
    assert options["signal"] == "B:USR1@130"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_example_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--run.folder", "runs/first", "--dry-run"]) == 0
    example = Path(__file__).parents[2] / "examples" / "slurm.sh"
    assert example.read_text() == capsys.readouterr().out


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_a_name_that_yaml_takes_for_no_text(name: str) -> None:
    content = yaml.safe_load(written(name, job("diloco", ("run.name", "no"))))
    assert content.get("metadata", content)["name"] == "no"


@pytest.mark.nightly
def test_a_job_set_has_the_fields_that_its_schema_knows() -> None:
    """The models of kubeflow-trainer-api leave out what they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    content = yaml.safe_load(written("kubernetes", job()))
    named = {"apiVersion", "kind", "metadata", "spec"}
    assert content.keys() == named
    assert models.JobsetV1alpha2JobSet.from_dict(content).to_dict() == content
    (node,) = content["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["completions"] == node["template"]["spec"]["parallelism"] == 2
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 130
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.nightly
def test_a_task_follows_the_schema_of_skypilot() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    content = yaml.safe_load(written("skypilot", job()))
    jsonschema.validate(content, schemas.get_task_schema())
    jsonschema.validate(content["resources"], schemas.get_resources_schema())
    jsonschema.validate(content["file_mounts"]["/adloco"], schemas.get_storage_schema())


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_a_recipe_of_ones_own_travels_with_the_job(name: str, tmp_path: Path) -> None:
    """Where nodes see no files of this machine, the shell writes it; torchrun only echoes."""
    text = '# It\'s mine,\u2028all.\n[run]\n  \nname = "my $HOME"\n\n[method]\nnum_trainers = 1\n'
    own = tmp_path / "my own.toml"
    own.write_text(text)
    script = shell(name, yaml.safe_load(written(name, job(str(own), islands=1))))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    there = Path("/tmp/my own.toml")
    assert f"train '{there}' --restart" in script
    lines = script[script.index("cat >") : script.index("export")]
    moved = lines.replace(str(there), str(tmp_path / "there.toml"))
    subprocess.run(["bash", "-c", moved], check=True)
    assert (tmp_path / "there.toml").read_text() == text
    assert f"train '{own}'" in written("slurm", job(str(own), islands=1))


@pytest.mark.parametrize(
    ("recipe", "settings", "numbers", "spread"),
    [
        ("diloco", [], {}, {"placement.shard_size": "8"}),
        ("ddp", [], {}, {}),  # One worker on all GPUs.
        ("diloco", [], {"gpus_per_island": 1}, {}),
        ("diloco", [("placement.replica_size", "8")], {}, {"placement.replica_size": "8"}),
    ],
)
def test_how_an_island_shares_a_worker(
    recipe: str, settings: list[tuple[str, str]], numbers: dict[str, int], spread: dict[str, str]
) -> None:
    planned = job(recipe, *settings, **numbers)
    found = {key: value for key, value in planned.settings if key.startswith("placement.")}
    assert found == spread


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--islands 0", "--islands must be >= 1, got 0"),
        ("--islands 4", "take at most 2, or add --method.workers_per_trainer 4"),
        ("--gpus-per-node 3", "--gpus-per-node 3 must divide"),
        ("--placement.shard_size 4", "makes islands of 4 GPUs, not of --gpus-per-island 8"),
        ("--run.tokens -1", "run.tokens must be > 0, got -1"),
        ("--run.tokns 1", "run.tokns is not a setting of [run] (did you mean 'tokens'?)"),
        ("--image x", "--image 'x' is not for --on slurm"),
        ("--on kubernetes", "--on kubernetes needs --image"),
        ("--on kubernetes --image x --storage a;b", "--storage must have only letters"),
        (
            "--on kubernetes --image x --storage y --run.folder /home/x",
            "run.folder must be in /adloco",
        ),
        ("--to nowhere/x.sh", "there is no folder 'nowhere'"),
        ("--to there.sh", "'there.sh' exists already"),
        ("--run.on_rank_failure replace", "run.on_rank_failure replace cannot work in such a job"),
    ],
)
def test_bad_lines(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.sh").write_text("mine")
    assert main([*LINE, *words.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there.sh"]
    assert Path("there.sh").read_text() == "mine"


def test_it_submits_where_the_client_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # Nothing is submitted to a SLURM that is here.
    assert main(LINE) == 0
    said = capfd.readouterr().out
    assert said.endswith("sbatch is not installed here: submit it with sbatch diloco-slurm.sh\n")
    assert Path("diloco-slurm.sh").read_text().startswith("#!/bin/bash\n# diloco: 2 islands of 8")
    client = tmp_path / "sbatch"
    client.write_text('#!/bin/bash\necho "got $@"; [[ -s $1 ]] && exit 0\n')
    client.chmod(0o755)
    assert main([*LINE, "--to", "job.sh"]) == 0
    assert capfd.readouterr().out.endswith("got job.sh\n")
    client.write_text("#!/bin/bash\nexit 5\n")
    assert main([*LINE, "--to", "other.sh"]) == 2
    assert "sbatch ended with code 5" in capfd.readouterr().err
