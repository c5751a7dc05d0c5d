"""A plan on a link that was measured, against constants that are known."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import to_toml
from adloco.distributed.wire.int4 import Int4
from adloco.plan.calibration import Calibration, Errors
from adloco.plan.candidates import candidates
from adloco.plan.cluster import Cluster
from adloco.plan.fitted_link import FittedLink, FittedLinks, fit_links
from adloco.plan.measured_rows import Measure, Row, Rows, read_rows
from adloco.plan.prediction import Prediction, Workload, predict
from adloco.plan.round_model import Constants
from adloco.plan.round_time import Sync
from adloco.plan.target import Target

CLUSTER = Cluster(
    islands=4,
    bandwidth="100mbit",
    latency="50ms",
    sync_seconds=9.0,
    jitter=0.5,
    samples_per_second={1: 4.0, 8: 4.0},
)
"""Two samples of an island, as the recipes have them, take 0.5 s; the link is described wrongly."""
PARAMETERS, BITS = 1e6, (10e6, 30e6, 100e6, 300e6)
Time = Callable[[float, float], float]


def fitted(rows: Rows) -> FittedLinks:
    return fit_links(rows, [rows.rows[0].group[0].partition("-")[0]], CLUSTER, PARAMETERS)


def rows(method: str, time: Time, every: Sequence[int], measure: Measure) -> Rows:
    made = [
        Row(group=(method, 4.0, PARAMETERS), sync_every=h, bits_per_second=b, value=time(h, b))
        for h in every
        for b in BITS
    ]
    return Rows(rows=made, measure=measure, cells=[])


def planned(
    links: FittedLinks, name: str, every: int, wire: str, cluster: Cluster, *more: tuple[str, str]
) -> Prediction:
    settings = {"method.sync_every": str(every), "wire.format": wire}
    settings |= {"batch.initial": "8", "placement.shard_size": "1"} | dict(more)
    (one,) = candidates([name], list(settings.items()), cluster)
    workload = Workload(parameters=PARAMETERS, tokens_per_sample=128, noise_scale=None)
    target = Target(name="tokens", tokens=lambda recipe, batch: 1e6)
    return predict(one, workload, cluster, target, links)


def on(bits: float) -> Cluster:
    return Cluster(**{**vars(CLUSTER), "bandwidth": f"{bits / 1e6:g}mbit"})


def own_recipe(folder: Path, base: str, *settings: tuple[str, str]) -> str:
    """A file with a recipe that is another one with these settings; returns its name."""
    file = folder / "own.toml"
    file.write_text(to_toml(build_recipe(override(read_values(base), [*settings]))))
    return str(file)


@pytest.mark.parametrize("measure", ["round_seconds", "compute_utilisation"])
def test_the_constants_of_the_rows_are_those_of_the_plan(measure: Measure) -> None:
    """0.3 s a sync, 1.5 times the bits of fp32 in a ring of four: H = 50 on 50 Mbit/s, not among
    the rows, takes 25 + 0.3 + 72e6 / 50e6 s.
    """

    def seconds(every: float, bits: float) -> float:
        return 0.5 * every + 0.3 + 1.5 * 48e6 / bits

    def utilisation(every: float, bits: float) -> float:
        return 0.5 * every / seconds(every, bits)

    value = seconds if measure == "round_seconds" else utilisation
    links = fitted(rows("diloco-fp32", value, (5, 20, 100), measure))
    found = planned(links, "diloco", 50, "fp32", on(50e6))
    assert found.round.total == pytest.approx(25 + 0.3 + 72 / 50)
    assert found.round.computing == pytest.approx(25)
    wire = Int4()
    share = wire.block_bytes / wire.block / 4
    other = planned(links, "diloco", 50, "int4", on(50e6))
    assert other.round.total == pytest.approx(25 + 0.3 + share * 72 / 50), "by its bytes"


def test_waiting_becomes_jitter_and_overhead_slower_steps() -> None:
    """Utilisations of steps of 0.5 s: 0.1 of each besides, and 0.2 s sqrt(H) of waiting."""

    def utilisation(every: float, bits: float) -> float:
        return 0.5 * every / (0.55 * every + 0.2 * every**0.5 + 48e6 / bits)

    links = fitted(rows("diloco-fp32", utilisation, (1, 4, 16, 64), "compute_utilisation"))
    found = planned(links, "diloco", 36, "fp32", on(20e6))
    assert found.round.waiting == pytest.approx(0.2 * 6, rel=1e-3)
    assert found.round.total == pytest.approx(0.55 * 36 + 0.2 * 6 + 2.4, rel=1e-3)
    # Of two passes of 2 s each, one has no update of 0.2 s; the steps are slower by a tenth.
    updating = replace(on(20e6), update_seconds=0.2)
    more = ("batch.initial", "64"), ("switch.max_micro_batch", "8")
    steps = planned(links, "diloco", 36, "fp32", updating, *more).step_seconds
    assert steps == pytest.approx((1.1 * 3.8,) * 4, rel=1e-3)


def test_rows_of_fragments_have_their_syncs_and_waits(tmp_path: Path) -> None:
    """Four syncs of 0.2 s a round, before each of which workers wait for 0.2 s sqrt(H / 4)."""
    name = own_recipe(tmp_path, "diloco", ("streaming.fragments", "4"), ("wire.format", "fp32"))

    def seconds(every: float, bits: float) -> float:
        return 0.5 * every + 0.8 + 0.4 * every**0.5 + 60e6 / bits

    made = rows(name, seconds, (4, 16, 64, 100), "round_seconds")
    links = fit_links(made, [name], CLUSTER, PARAMETERS)
    for fragments, syncs, waits in (("4", 0.8, 2.4), ("1", 0.2, 1.2)):
        more = ("streaming.fragments", fragments), ("streaming.tau", "0")
        found = planned(links, name, 36, "fp32", on(20e6), *more).round
        assert found.waiting == pytest.approx(waits, rel=1e-3)
        assert found.transfer == pytest.approx(syncs + 3)


@pytest.mark.parametrize("measure", ["round_seconds", "compute_utilisation"])
def test_a_plan_hides_what_was_hidden(measure: Measure) -> None:
    """72 Mbit run beside half of the steps of 0.5 s; int4 sends so few that H = 4 hides all."""

    def seconds(every: float, bits: float) -> float:
        return 0.5 * every + 0.3 + max(0.0, 72e6 / bits - 0.25 * every)

    def utilisation(every: float, bits: float) -> float:
        return 0.5 * every / seconds(every, bits)

    value = seconds if measure == "round_seconds" else utilisation
    links = fitted(rows("diloco-fp32", value, (1, 2, 5, 20, 100), measure))
    for every in (4, 50):
        found = planned(links, "diloco", every, "fp32", on(40e6)).round.total
        assert found == pytest.approx(seconds(every, 40e6)), every
    assert planned(links, "diloco", 4, "int4", on(40e6)).round.total == pytest.approx(2.3)
    streamed = planned(links, "diloco", 4, "fp32", on(20e6), ("streaming.tau", "2"))
    assert streamed.round.total == pytest.approx(seconds(4, 20e6)), "hidden once"
    slower = planned(links, "diloco", 4, "fp32", on(20e6), ("batch.initial", "32"))
    assert slower.round.total == pytest.approx(8 + 0.3), "longer steps hide all of it"


def test_rows_in_a_wire_format_are_taken_for_it() -> None:
    int4 = rows("diloco-int4", lambda h, b: 0.5 * h + 7e6 / b, (5, 20, 100), "round_seconds")
    fp32 = rows("diloco-fp32", lambda h, b: 0.5 * h + 50e6 / b, (5, 20, 100), "round_seconds")
    links = fitted(Rows(rows=[*int4.rows, *fp32.rows], measure="round_seconds", cells=[]))
    for wire, bits in (("int4", 7e6), ("fp32", 50e6)):
        found = planned(links, "diloco", 10, wire, on(10e6))
        assert found.round.total == pytest.approx(5 + bits / 10e6)


def test_measured_steps_of_data_parallel_training_hide_nothing() -> None:
    links = fitted(rows("ddp", lambda h, b: 0.5 + 60e6 / b, (1,), "round_seconds"))
    assert planned(links, "ddp", 1, "fp32", on(20e6)).round.total == pytest.approx(0.5 + 3)


@pytest.mark.parametrize("latency", [-0.1, 0.3])
@pytest.mark.parametrize(("method", "every"), [("ddp", 1), ("diloco-fp32", 20)])
def test_rows_of_one_h_keep_their_latency(method: str, every: int, latency: float) -> None:
    """It cannot be told from steps, but those of the cluster are known: shorter ones have none."""
    made = rows(method, lambda h, b: 0.5 * h + latency + 60e6 / b, (every,), "round_seconds")
    found = planned(fitted(made), method.partition("-")[0], 40, "fp32", on(20e6))
    steps = 1 if method == "ddp" else 40
    assert found.round.total == pytest.approx(0.5 * steps + max(0.0, latency) + 3)


@pytest.mark.parametrize(("ranks", "step"), [(1, 0.75), (2, 1.0)])
def test_rows_of_data_parallel_training_have_whole_samples(ranks: int, step: float) -> None:
    """Of 8 samples on 3 islands the slowest takes 3, in 0.75 s; of 6 ranks on them it takes 2, as
    if its island took 4.
    """
    three = replace(on(20e6), islands=3, ranks=ranks, samples_per_second={1: 4.0})
    group, fixed = ("ddp", 3.0, PARAMETERS), step + 0.3
    made = [Row(group=group, sync_every=1, bits_per_second=b, value=fixed + 60e6 / b) for b in BITS]
    links = fit_links(
        Rows(rows=made, measure="round_seconds", cells=[]), ["ddp"], three, PARAMETERS
    )
    assert planned(links, "ddp", 1, "fp32", three).round.total == pytest.approx(fixed + 3)


def test_rows_have_the_samples_that_a_worker_needs() -> None:
    """8 for 8 ranks, in 2 s, where the recipe has 8 for all workers; 2 for a norm test of its 4."""
    eight = replace(on(20e6), ranks=8)
    made = rows("diloco-fp32", lambda h, b: 2 * h + 0.3 + 60e6 / b, (20,), "round_seconds")
    links = fit_links(made, ["diloco"], eight, PARAMETERS)
    assert planned(links, "diloco", 40, "fp32", eight).round.total == pytest.approx(80 + 0.3 + 3)
    made = rows("adloco", lambda h, b: 0.5 * h + 60e6 / b, (20,), "round_seconds")
    assert fitted(made).links["adloco"][0].step_seconds == (0.5,) * 4


@pytest.mark.parametrize(
    ("measure", "every"),
    [
        ("round_seconds", (20,)),
        ("compute_utilisation", (20,)),
        ("compute_utilisation", (5, 20, 100)),
    ],
)
def test_the_slowest_island_is_waited_for_once(measure: Measure, every: Sequence[int]) -> None:
    """Steps of 0.5 s on three islands and of 1 s on one, which all wait for: 0.625 s compute."""
    uneven = replace(on(20e6), speeds=(1.0, 1.0, 1.0, 0.5))

    def seconds(every: float, bits: float) -> float:
        return every + 0.3 + 60e6 / bits

    def utilisation(every: float, bits: float) -> float:
        return 0.625 * every / seconds(every, bits)

    value = seconds if measure == "round_seconds" else utilisation
    links = fit_links(rows("diloco-fp32", value, every, measure), ["diloco"], uneven, PARAMETERS)
    found = planned(links, "diloco", 40, "fp32", uneven).round
    assert (found.total, found.computing) == (pytest.approx(40 + 0.3 + 3), pytest.approx(25))


@pytest.mark.parametrize("measure", ["round_seconds", "compute_utilisation"])
@pytest.mark.parametrize(
    ("base", "lines", "speeds", "step"),
    [
        # Eight passes of 2 samples, of which seven have no update: each gathers the parameters.
        ("ddp", "initial = 64\nmax_micro_batch = 2\nshard_size = 0\nreplica_size = 1", (), 3.3),
        ("diloco", "initial = 64\nmax_micro_batch = 2", (), 3.3),
        # What fits are the 8 samples of the largest pass that was measured.
        ("diloco", 'initial = 64\nmax_micro_batch = "auto"', (), 3.9),
        ("diloco", 'initial = 64\nmax_micro_batch = 2\nmode = "never"', (), 0.5),
        ("diloco", 'initial = 12\nbalance = "speed"', (1.0, 1.0, 0.5, 0.5), 1.0),
        # Trainers of two workers that never merge, each with 8 samples.
        ("diloco", 'initial = 8\nnum_trainers = 2\npolicy = "none"', (), 1.0),
    ],
)
def test_rows_have_the_steps_of_their_recipe(
    base: str,
    lines: str,
    speeds: tuple[float, ...],
    step: float,
    measure: Measure,
    tmp_path: Path,
) -> None:
    """Accumulated, clipped at what fits, or shared by speed: a plan of the same gives them back."""
    keys = {"initial": "batch", "max_micro_batch": "switch", "mode": "switch"}
    keys |= {"num_trainers": "method", "policy": "merge"}
    own = [
        (f"{keys.get(key, 'placement')}.{key}", value.strip('"'))
        for key, value in (line.split(" = ") for line in lines.splitlines())
    ]
    name = own_recipe(tmp_path, base, *own, ("wire.format", "fp32"))
    cluster = replace(on(20e6), update_seconds=0.1, speeds=speeds)
    every = 1 if base == "ddp" else 20

    def value(every: float, bits: float) -> float:
        seconds = step * every + 0.3 + 60e6 / bits
        return seconds if measure == "round_seconds" else step * every / seconds

    links = fit_links(rows(name, value, (every,), measure), [name], cluster, PARAMETERS)
    fits = ("switch.max_micro_batch", "8")
    given = [pair for pair in own if pair[1] != "auto"]
    found = planned(links, name, every, "fp32", cluster, fits, *given)
    assert found.round.total == pytest.approx(step * every + 0.3 + 3)


def test_a_plan_of_measured_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, measured = tmp_path / "cluster.toml", tmp_path / "measured.csv"
    cluster.write_text('islands = 4\nbandwidth = "50mbit"\n[samples_per_second]\n8 = 4.0\n')
    lines = [f"diloco,4,1e6,{h},{b},{0.5 * h + 0.3 + 72e6 / b}" for h in (5, 20, 100) for b in BITS]
    header = "method,workers,parameters,sync_every,bandwidth_bits_per_second,round_seconds"
    measured.write_text("\n".join([header, *lines]))
    words = ["plan", "ddp", "diloco", "--cluster", str(cluster), "--measured", str(measured)]
    words += ["--parameters", "1e6", "--run.tokens", "1000000", "--to", str(tmp_path / "plan")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "fitted to 12 measured rounds of diloco, 4 workers" in said
    assert "No rounds of ddp with so many workers" in said


@pytest.mark.parametrize(
    ("method", "workers", "bits", "message"),
    [
        (
            "diloco",
            2,
            BITS,
            "with workers = 4, the islands of the cluster, and parameters = 1000000, .*diloco, 2",
        ),
        ("other", 4, BITS, "needs rows of the recipes of the plan \\(diloco, or NAME-FORMAT"),
        ("diloco-int5", 4, BITS, "method 'diloco-int5' of --measured: "),
        ("diloco", 4, (1e7,), "a plan needs rows of at least two bandwidths, got one of diloco"),
    ],
)
def test_rows_that_say_nothing_about_the_plan(
    method: str, workers: int, bits: Sequence[float], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"{method},{workers},1e6,{h},{b},{h + 1e7 / b}" for h in (1, 2, 4) for b in bits]
    header = "method,workers,parameters,sync_every,bandwidth_bits_per_second,round_seconds"
    path.write_text("\n".join([header, *lines]))
    with pytest.raises(ValueError, match=message):
        fit_links(read_rows(path, measured=True), ["diloco"], CLUSTER, PARAMETERS)


@pytest.mark.parametrize("trainers", ["3", "4"])
def test_rows_of_workers_that_never_exchange_say_nothing_about_a_link(
    tmp_path: Path, trainers: str
) -> None:
    """Three trainers on four islands ended in a logarithm of 0."""
    settings = ("method.num_trainers", trainers), ("method.workers_per_trainer", "1")
    name = own_recipe(tmp_path, "diloco", *settings, ("merge.policy", "none"))
    made = rows(name, lambda h, b: 0.5 * h + 7e6 / b, (5, 20), "round_seconds")
    with pytest.raises(ValueError, match="--measured needs rows of the recipes of the plan"):
        fit_links(made, [name], CLUSTER, PARAMETERS)


@pytest.mark.parametrize(("parameters", "fits"), [(1.009e6, True), (1.02e6, False), (1e3, False)])
def test_rows_of_another_size_are_not_used(parameters: float, fits: bool) -> None:
    """They would be scaled by their bytes without a word."""
    made = rows("diloco", lambda h, b: 0.5 * h + 7e6 / b, (5, 20), "round_seconds")
    if fits:
        assert fit_links(made, ["diloco"], CLUSTER, parameters).links
    else:
        with pytest.raises(ValueError, match="within 1%; measured were diloco, 4 workers, 1e\\+06"):
            fit_links(made, ["diloco"], CLUSTER, parameters)


def test_rows_of_another_size_are_not_denied() -> None:
    made = rows("diloco", lambda h, b: 0.5 * h + 7e6 / b, (5, 20), "round_seconds")
    other = [replace(row, group=("ddp", 4.0, 2 * PARAMETERS)) for row in made.rows]
    links = fit_links(
        replace(made, rows=[*made.rows, *other]), ["diloco", "ddp"], CLUSTER, PARAMETERS
    )
    said = links.assumptions(["diloco", "ddp"], on(50e6))[-1]
    assert said.startswith("No rounds of ddp with so many workers and parameters were measured")


def test_a_ceiling_and_the_steps_beside_a_fragment_by_hand() -> None:
    known = Errors(median=0.0, worst=0.0, count=9)
    terms = {"volume": 48e6, "inefficiency": 0.04 * 50e6**0.5}  # 0.96 and 0.04 s at the ceiling.
    law = Constants(measure="round_seconds", terms=terms, ceiling=50e6, hidden=0.5)
    fit = Calibration(constants=law, fitted=known, held_out_steps=None, held_out_bandwidths=known)
    link = FittedLink(
        group=("diloco", 4.0, 1e6),
        calibration=fit,
        sync=Sync(workers=4, bytes_sent=6e6),
        step_seconds=(0.5,) * 4,
        bandwidths=(BITS[0], BITS[-1]),
    )
    assert link.applied(on(300e6)).link.bytes_per_second == pytest.approx(6e6)
    free = replace(link, calibration=replace(fit, constants=replace(law, terms={}, hidden=0.0)))
    assert free.applied(on(300e6)).link.bytes_per_second > 1e15
    sync = Sync(workers=4, bytes_sent=6e6, fragments=2, tau=3)
    found = link.hiding(sync, 50)
    assert (found.tau, found.hidden_steps) == (0, 0.5 * 50 / 2)
    found = free.hiding(sync, 50)
    assert (found.tau, found.hidden_steps) == (3, 0), "the recipe's own, where rows have none"


def test_a_bandwidth_that_was_not_measured_is_said() -> None:
    links = fitted(
        rows("diloco", lambda every, bits: 0.5 * every + 7e7 / bits, (5, 20), "round_seconds")
    )
    (between,), (beyond,) = (links.assumptions(["diloco"], on(bits)) for bits in (50e6, 1e9))
    assert between.endswith("(worst).")
    assert beyond == (
        f"{between} The cluster's is not between the 10 and 300 Mbit/s that were measured, so "
        "errors are larger."
    )
