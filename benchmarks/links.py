"""Trains ddp, diloco and adloco with each wire format over slow links: losses, real seconds and the
bytes that the kernel counts.

    .venv/bin/python benchmarks/links.py [--bandwidth 10mbit] [--latency-ms 20] [--loss 0.1]
        [--islands 2] [--tokens 200000] [--arms ddp,diloco-fp32] [--json FILE]

Each island is a network namespace of this machine with one rank in it and a shaped virtual link to
the others (`links_network.py`). tc limits the bandwidth of what leaves an island, and the latency
and loss of every packet; if the kernel refuses, a process of ours that carries the packets does.
The report says which. Root is not needed where user namespaces are allowed; where they are not, the
program ends with one sentence and exit code 2. It leaves nothing behind.

The bytes that the run counts as sent (payload, mean over ranks) are compared with the *payload* on
each island's interface: its bytes less one header for each packet, which is exact whether packets
carry data or only an acknowledgement. The table shows all bytes too. The kernel's number includes
bytes that the run does not count (agreements, the collectives' own padding and framing, packets
sent again), so it is a little larger: the table has the difference per round. Neither includes
start-up and checkpoints (`links_worker.py`).

Seconds are those since the first round began, evaluations included. --json keeps the numbers of
every round; links.json and links_latency.json beside this file are of 2026-11-21. Every flag of the
form --section.key VALUE is a setting of adloco for all arms, for instance --model.hidden_size 64.

What a run would take if its steps took as long as another's is in the table too: the seconds
outside of inner steps, and those of a step.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from common import script_parser, table
from links_network import (
    PRIVATE_FOLDER,
    LinkShape,
    LinksRefusedError,
    Network,
    enter_private_namespaces,
    parse_bandwidth,
)

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings

WORKER = Path(__file__).with_name("links_worker.py")
BATCH_PER_ISLAND = 4
FORMATS = ("fp32", "bf16", "int8", "int4", "int2")
OVERLAP = (("streaming.fragments", "4"), ("streaming.tau", "4"))
EVERY = {"diloco": [("method.sync_every", "20")], "adloco": []}
Flags = list[tuple[str, str]]
ARMS: dict[str, tuple[str, Flags]] = {
    "ddp": ("ddp", []),
    **{
        f"{recipe}-{name}": (recipe, [*every, ("wire.format", name)])
        for recipe, every in EVERY.items()
        for name in FORMATS
    },
    "diloco-int4-overlap": ("diloco", [*EVERY["diloco"], ("wire.format", "int4"), *OVERLAP]),
}
"""The recipe and the flags of each arm."""


def flags_of(arm: str, islands: int) -> Flags:
    """The arm's flags, with those that put one worker (for ddp one replica) on each island."""
    recipe, flags = ARMS[arm]
    if recipe == "adloco":
        return [("method.num_trainers", str(islands)), *flags]
    spread = [("batch.initial", str(BATCH_PER_ISLAND * islands))]
    if recipe == "diloco":
        spread.insert(0, ("method.workers_per_trainer", str(islands)))
    return [*spread, *flags]


def main() -> None:
    known, settings = parse()
    shape = LinkShape(
        bits_per_second=known.bandwidth,
        latency_seconds=known.latency_ms / 1000,
        loss=known.loss / 100,
        mtu=known.mtu,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        enter_private_namespaces()
        # An arm with a setting that this version refuses must fail before any arm is trained.
        for arm in known.arms:
            build_recipe(
                override(read_values(ARMS[arm][0]), [*flags_of(arm, known.islands), *settings])
            )
        with (
            Network(known.islands, shape, use_tc=not known.without_tc) as network,
            tempfile.TemporaryDirectory(dir=PRIVATE_FOLDER) as folder,
        ):
            run_arms(known, settings, network, Path(folder))
    except (LinksRefusedError, ValueError, RuntimeError) as error:
        print(f"links: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RuntimeError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)


def parse() -> tuple[argparse.Namespace, Flags]:
    """The options of this program, and the settings of adloco among its flags."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--bandwidth", default="10mbit", help="out of each island; 0bit: unlimited (10mbit)")
    add("--latency-ms", type=float, default=0.0, help="one way, in milliseconds (0)")
    add("--loss", type=float, default=0.0, help="percent of packets that are lost (0)")
    add("--mtu", type=int, default=1500, help="bytes of the longest packet (1500)")
    add("--without-tc", action="store_true", help="let our own process carry packets in any case")
    add("--islands", type=int, default=2, help="islands, with one rank each (2)")
    add("--tokens", type=int, default=200_000, help="after which an arm ends (200000)")
    add("--max-seconds", type=float, default=0.0, help="after which an arm ends; 0: no limit (0)")
    arms = ", ".join(ARMS)
    add("--arms", type=lambda text: text.split(","), default=[*ARMS], help=f"(all): {arms}")
    add("--json", type=Path, help="file for the numbers of every round")
    settings, words = take_settings(sys.argv[1:])
    known = parser.parse_args(words)
    if unknown := [arm for arm in known.arms if arm not in ARMS]:
        parser.error(f"there is no arm {unknown[0]!r}; arms are {arms}")
    numbers = known.tokens > 0 and known.latency_ms >= 0 and 0 <= known.loss < 100
    if not (2 <= known.islands <= 200 and known.mtu >= 576 and numbers):
        parser.error(
            "--islands must be in 2 to 200, --tokens > 0, --latency-ms >= 0, "
            "--loss in [0, 100), --mtu >= 576"
        )
    try:
        known.bandwidth = parse_bandwidth(known.bandwidth)
    except ValueError as error:
        parser.error(str(error))
    return known, list(settings)


def run_arms(known: argparse.Namespace, settings: Flags, network: Network, folder: Path) -> None:
    link: dict[str, Any] = asdict(network.shape)
    link |= {f"{name}_by": used for name, used in asdict(network.mechanisms).items()}
    link |= {name: getattr(network, name) for name in ("congestion_control", "header_bytes")}
    print(
        f"{known.islands} islands; "
        f"bandwidth {link['bits_per_second'] / 1e6:g} Mbit/s: {link['bandwidth_by']}; "
        f"latency {known.latency_ms:g} ms: {link['latency_by']}; "
        f"loss {known.loss:g}%: {link['loss_by']}; TCP {link['congestion_control']}",
        flush=True,
    )
    arms: dict[str, Any] = {}
    for arm in known.arms:
        lines = run_arm(arm, known, settings, network, folder / arm)
        arms[arm] = {
            "flags": flags_of(arm, known.islands),
            **summarise(lines, network.header_bytes),
        }
        # Written after each arm, so that the results stay if the next arm fails.
        if known.json:
            about = {"torch": metadata.version("torch"), "islands": known.islands, "link": link}
            about |= {"settings": dict(settings), "tokens": known.tokens}
            text = json.dumps(about | {"max_seconds": known.max_seconds, "arms": arms}, indent=2)
            known.json.write_text(text + "\n")
    print("\n" + arms_table(arms))


def run_arm(
    arm: str, known: argparse.Namespace, settings: Flags, network: Network, folder: Path
) -> list[list[dict[str, Any]]]:
    """Train an arm and return the lines of each island; RuntimeError if a rank failed."""
    folder.mkdir()
    quiet = [
        *(("run.folder", str(folder / "run")), ("run.checkpoint_every", "1000000000")),
        *(("run.trackers", "none"), ("run.threads", "1")),
    ]
    order = {
        "arm": arm,
        "recipe": ARMS[arm][0],
        "flags": [*quiet, *flags_of(arm, known.islands), *settings],
        "tokens": known.tokens,
        "max_seconds": known.max_seconds,
        "folder": str(folder),
    }
    network.run_ranks([sys.executable, str(WORKER), json.dumps(order)])
    files = [folder / f"{island}.jsonl" for island in range(known.islands)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def summarise(lines: list[list[dict[str, Any]]], header_bytes: int) -> dict[str, Any]:
    """Totals of an arm and of each link; and the rounds of the first island, with the kernel's
    numbers of all islands.
    """
    last = lines[0][-1]
    links = [link_totals(island[-1], header_bytes) for island in lines]
    losses = [line["val_loss"] for line in lines[0] if line["val_loss"] is not None]
    rounds = [
        {**here, "kernel": [line["kernel"] for line in row]}
        for here, row in zip(lines[0], zip(*lines, strict=True), strict=True)
    ]
    return {
        "val_loss": losses[-1] if losses else None,
        "seconds": last["seconds"],
        # For ddp this leaves out the exchange of gradients, which is part of its steps.
        "outside_inner_steps": 1 - sum(line["busy_seconds"] for line in lines[0]) / last["seconds"],
        "counted_bytes": last["counted_bytes"],
        "syncs": last["syncs"],
        "links": links,
        "rounds": rounds,
    }


def link_totals(last: dict[str, Any], header_bytes: int) -> dict[str, Any]:
    sent, counted = payload(last["kernel"], header_bytes), last["counted_bytes"]
    return {
        **last["kernel"],
        "payload_bytes": sent,
        "counted_per_payload": counted / sent,
        "counted_per_tx_bytes": counted / last["kernel"]["tx_bytes"],
        "uncounted_bytes_per_round": (sent - counted) / last["round"],
    }


def payload(kernel: dict[str, int], header_bytes: int) -> int:
    """The bytes that left an island, without headers."""
    return kernel["tx_bytes"] - kernel["tx_packets"] * header_bytes


def arms_table(arms: dict[str, Any]) -> str:
    """A Markdown table with a row for each arm and link."""
    titles = "arm, island, val loss, seconds, outside of steps, s a step, syncs, counted MB, "
    titles += "payload by the kernel MB, counted / payload, "
    titles += "all bytes by the kernel MB, counted / all, uncounted bytes per round, sent again"
    heads = titles.split(", ")
    rows: list[list[str]] = []
    for arm, result in arms.items():
        seconds, outside = result["seconds"], result["outside_inner_steps"]
        step = (1 - outside) * seconds / result["rounds"][-1]["inner_steps"]
        loss = "-" if result["val_loss"] is None else f"{result['val_loss']:.4f}"
        of_arm = [f"{seconds:.1f}", f"{outside:.0%}", f"{step:.4f}", str(result["syncs"])]
        of_arm.append(f"{result['counted_bytes'] / 1e6:.3f}")
        for island, link in enumerate(result["links"]):
            rows.append([arm, str(island), loss, *of_arm, f"{link['payload_bytes'] / 1e6:.3f}"])
            rows[-1] += [f"{link['counted_per_payload']:.3f}"]
            rows[-1] += [f"{link['tx_bytes'] / 1e6:.3f}", f"{link['counted_per_tx_bytes']:.3f}"]
            rows[-1] += [f"{link['uncounted_bytes_per_round']:,.0f}", f"{link['retransmitted']:,}"]
    return table(heads, rows)


if __name__ == "__main__":
    main()
