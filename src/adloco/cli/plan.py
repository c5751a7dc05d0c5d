"""`adloco plan`: which method suits a cluster, and what a run on it will take."""

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from adloco.cli.arguments import SettingsCommand, argument
from adloco.cli.terminal import open_console, say, table_of
from adloco.errors import require

MOST_PARAMETERS = 1e13
"""The largest model that is planned: every 25 MiB of its gradients are an entry of a list."""


@dataclass(kw_only=True)
class Plan(SettingsCommand):
    """Predict what recipes take on a cluster, and recommend one.

    Which method, H, eta and wire format suit a cluster:

      adloco probe diloco --throughput cluster.toml --micro-batches 1,2,4,8
      adloco plan ddp diloco --cluster cluster.toml --run.tokens 100000000

    A setting with several values is an axis, as in --method.sync_every 20 50 100.
    With short runs of your own, plan for a loss instead of tokens:

      adloco plan --cluster cluster.toml --runs runs/a runs/b --target-loss 2.0

    What measured rounds say about other rounds (docs/plan.md has the columns):

      adloco plan --measured FILE.csv --predict ROWS.csv --to OUT.csv
      adloco plan --measured FILE.csv --cluster cluster.toml --run.tokens 100000000
    """

    key = "plan"
    summary = "predict which method suits a cluster, and what it takes"
    lists = True
    recipes: list[str] = argument([], "RECIPE", place=True, nargs="*")
    """Files or names of recipes (default: ddp, diloco; adloco if its batch is known and the
    islands are even in number)."""
    cluster: Path | None = argument(None, "FILE.toml")
    """Description of the cluster."""
    runs: list[Path] = argument([], "RUN", nargs="+")
    """Folders of short runs, from which the loss is predicted."""
    target_loss: float | None = argument(None, "LOSS")
    """Loss to reach (default: by run.tokens)."""
    parameters: float | None = argument(None, "N")
    """Size of the model (default: count it)."""
    noise_scale: float | None = argument(None, "N")
    """S / |G|^2 in samples (default: as measured by --runs)."""
    price: float | None = argument(None, "P")
    """Price of an island in an hour."""
    measured: Path | None = argument(None, "FILE.csv")
    """Measured rounds, to fit the time of a round to."""
    predict: Path | None = argument(None, "ROWS.csv")
    """Rounds to predict by that model."""
    to: Path | None = argument(None, "PATH")
    """Place to write the plan (a folder; default: runs/plan) or the rounds."""

    def run(self) -> int:
        if self.cluster:
            return _plan(self, self.cluster)
        if self.measured:
            return _show_calibration(self, self.measured)
        raise ValueError(
            "give --cluster FILE.toml for a plan, --measured FILE.csv for a fit to measured "
            "rounds, or both for a plan with what was measured"
        )


def _plan(arguments: Plan, file: Path) -> int:
    from adloco.cli.studies import print_table
    from adloco.distributed.parallel.layers import layers
    from adloco.plan.candidates import candidates, check_fragments
    from adloco.plan.cluster import read_cluster
    from adloco.plan.cluster_plan import make_plan
    from adloco.plan.fitted_link import fit_links
    from adloco.plan.loss_law import fit_loss_law
    from adloco.plan.measured_rows import read_rows
    from adloco.plan.prediction import Workload, trained_batch
    from adloco.plan.short_runs import check_shared_model, read_short_runs
    from adloco.plan.target import loss_target, tokens_target
    from adloco.report.plan_page import best_table, crossing_text, write_plan
    from adloco.run.start import open_recipe

    _check(arguments)
    cluster = read_cluster(file)
    if arguments.price is not None:
        cluster = replace(cluster, price_per_hour=arguments.price)
    console, size = open_console(), arguments.parameters
    with console.status("predicting ..."):
        runs = read_short_runs(arguments.runs) if arguments.runs else None
        fit = fit_loss_law(runs.points) if runs else None
        noise_scale = arguments.noise_scale or (runs.noise_scale if runs else None)
        names = arguments.recipes or ["ddp", "diloco"]
        # AdLoCo's two trainers need an even number of islands, and its batch a noise scale.
        if not arguments.recipes and noise_scale and cluster.islands % 2 == 0:
            names.append("adloco")
        found = candidates(names, arguments.settings, cluster, try_batches=bool(fit or noise_scale))
        recipe = found[0].recipe
        check_shared_model([one.recipe for one in found], runs.recipe if runs else None)
        if not size and any(one.recipe.streaming.fragments > 1 for one in found):
            check_fragments(found, len(layers(open_recipe(recipe).builder())))
        workload = Workload(
            parameters=size or sum(each.numel() for each in open_recipe(recipe).builder.parameters),
            tokens_per_sample=recipe.data.context_tokens,
            noise_scale=noise_scale,
        )
        measured = None
        if arguments.measured:
            rows = read_rows(arguments.measured, measured=True)
            measured = fit_links(rows, names, cluster, workload.parameters)
        if fit:
            batch = trained_batch(found[0], workload, cluster)
            target = loss_target(found, fit, arguments.target_loss, batch)
        else:
            target = tokens_target(found, parameters=workload.parameters, noise_scale=noise_scale)
        target = replace(
            target,
            assumptions=(
                *target.assumptions,
                *(runs.assumptions if runs else ()),
                *(measured.assumptions(names, cluster) if measured else ()),
                f"Islands train {workload.parameters:g} parameters at the speed in {file}.",
            ),
        )
        plan = make_plan(found, workload, cluster, target, measured)
        if size:
            advice = (
                f"Before you train recipe.toml, set its model.* to a model of {size:g} parameters; "
                "or plan with one, as in --model.shape tinyllama without --parameters."
            )
            plan = replace(plan, reasons=(*plan.reasons, advice), has_model=False)
        page = write_plan(plan, arguments.to or Path("runs/plan"))
    print_table(best_table(plan), console)
    console.print(f"target: {target.name}", soft_wrap=True)
    console.print(f"recommended: {plan.chosen.candidate.label}", soft_wrap=True)
    for sentence in filter(None, [*plan.reasons, crossing_text(plan)]):
        say(console, sentence, indent="  ")
    console.print("assumed (the page has all):", soft_wrap=True)
    for sentence in target.assumptions:
        say(console, sentence, indent="  ")
    console.print(str(page), soft_wrap=True)
    if plan.has_model:
        command = shlex.join(["adloco", "train", str(page.with_name("recipe.toml"))])
        console.print(f"train it: {command}", soft_wrap=True)
    return 0


def _check(arguments: Plan) -> None:
    """Raise ValueError for an option that cannot be meant."""
    require(
        arguments.target_loss is None or bool(arguments.runs),
        "--target-loss needs --runs RUN ..., the folders of short runs that tell the loss",
    )
    size, noise = arguments.parameters, arguments.noise_scale
    require(
        size is None or 1 <= size <= MOST_PARAMETERS,
        f"--parameters must be a number from 1 to {MOST_PARAMETERS:g}, got {size}",
    )
    require(
        noise is None or 0 < noise < math.inf, f"--noise-scale must be a number > 0, got {noise}"
    )
    require(
        arguments.to is None or not arguments.to.is_file(),
        f"--to must be a folder, got the file {arguments.to}",
    )
    require(arguments.predict is None, "--predict belongs to --measured without --cluster")


def _show_calibration(arguments: Plan, measured: Path) -> int:
    """Fit the rounds in --measured, show the errors, and write those of --predict to --to."""
    from adloco.plan.calibration import calibrate, describe, predict
    from adloco.plan.measured_rows import read_rows, write_rows

    require(
        (arguments.predict is None) == (arguments.to is None),
        "--predict ROWS.csv and --to OUT.csv belong together; give both or neither",
    )
    require(
        arguments.to is None or arguments.to.resolve() != measured.resolve(),
        f"--to {arguments.to} would replace what was measured; give another file",
    )
    calibrations = calibrate(read_rows(measured, measured=True))
    wanted = read_rows(arguments.predict, measured=False) if arguments.predict else None
    predicted = predict(calibrations, wanted.rows) if wanted else []

    console = open_console()
    for group, found in calibrations.items():
        console.print(f"{describe(group)}, {found.fitted.count} rounds", soft_wrap=True)
        unit = "s" if found.constants.measure == "round_seconds" else "steps"
        terms = {name: value for name, value in found.constants.terms.items() if value}
        said = [f"{name} {value:.4g}" for name, value in terms.items()]
        if found.constants.hidden:
            said.append(f"transfers hidden behind {found.constants.hidden:.0%} of the steps")
        if math.isfinite(found.constants.ceiling):
            said.append(f"no faster from {found.constants.ceiling / 1e6:.4g} Mbit/s on")
        console.print(f"  constants ({unit}): {', '.join(said) or 'none'}", soft_wrap=True)
        table = table_of("error of", "median", "worst", "rounds", names=1)
        errors = {
            "the fit": found.fitted,
            "each H, left out of the fit": found.held_out_steps,
            "each bandwidth, left out": found.held_out_bandwidths,
        }
        for name, each in errors.items():
            numbers = each and (f"{each.median:.1%}", f"{each.worst:.1%}", str(each.count))
            table.add_row(name, *(numbers or "---"))
        console.print(table)
    if wanted and arguments.to:
        write_rows(arguments.to, wanted, predicted)
        console.print(f"{len(predicted)} rounds predicted in {arguments.to}", soft_wrap=True)
    return 0
