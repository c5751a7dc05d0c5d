"""What the authors' keys for training, merging and the batch are here."""

from pydantic import PositiveFloat, PositiveInt

from adloco.config.authors.row import Given, Row, Settings, Table
from adloco.rules.controller import BatchGuards


def _initial_batch(given: Given) -> Settings:
    each = max(given["initial_batch_size"], 2 if given.tests else 1)
    initial = given.workers * each
    return {
        "batch.initial": initial,
        "batch.minimum": initial,
        "batch.maximum": max(initial, BatchGuards().maximum),
    }


def _merges(policy: str, given: Given) -> Settings:
    if given.local_sgd:
        return {}
    return {"merge.policy": policy, "merge.count": 2}


TRAINING: Table = {
    "training": (
        Row(
            keys=("num_outer_steps",),
            older=("number_of_training_epochs",),
            kind=PositiveInt,
            ours="`run.rounds`, with `run.tokens = 0`",
            differs="A number of rounds, whatever their size. To compare methods at equal data, "
            "give a budget of tokens instead (`run.tokens`).",
            settings=lambda given: {"run.rounds": given["num_outer_steps"], "run.tokens": 0},
        ),
        Row(
            keys=("num_inner_steps",),
            older=("number_of_inner_steps_between_outers",),
            kind=PositiveInt,
            ours="`method.sync_every`",
            differs="Theirs counts micro-batches, ours optimizer steps. Theirs also ends a round "
            "when a node's part of the data is used up, so H shrinks as the batch grows.",
            settings=lambda given: {"method.sync_every": given["num_inner_steps"]},
        ),
        Row(
            keys=("lr_inner",),
            older=("learning_rate_for_inner_opt",),
            kind=PositiveFloat,
            ours='`inner.lr`, with `method.max_grad_norm = 0`, `learning_rate.shape = "constant"`, '
            "`learning_rate.warmup_fraction = 0`",
            settings=lambda given: {
                "inner.lr": given["lr_inner"],
                "method.max_grad_norm": 0,
                "learning_rate.shape": "constant",
                "learning_rate.warmup_fraction": 0,
            },
        ),
        Row(
            keys=("lr_outer",),
            older=("learning_rate_for_outer_opt",),
            kind=PositiveFloat,
            ours="`outer.lr`",
            differs="LocalSGD has none.",
            settings=lambda given: {} if given.local_sgd else {"outer.lr": given["lr_outer"]},
        ),
        Row(keys=("lr_sgd",), kind=object, differs="Never read."),
        Row(
            keys=("initial_batch_size",),
            older=("INITIAL_BATCH_SIZE",),
            kind=PositiveInt,
            ours="`batch.initial` = `batch.minimum`, `batch.maximum`",
            differs="Theirs is per node, ours per trainer, so it is multiplied by a trainer's "
            "workers. A test compares samples, so ours needs at least two for each worker. Theirs "
            "has no maximum; choose one.",
            settings=_initial_batch,
        ),
        Row(
            keys=("distributed_algo",),
            only="DiLoCo",
            default="DiLoCo",
            ours='`inner.optimizer = "adamw"`, `inner.betas = [0.9, 0.999]`, '
            '`inner.weight_decay = 0.01`, `outer.update = "optimizer"`, `outer.optimizer = "SGD"`, '
            "`outer.options = {}`",
            differs="One core for all methods; `merge.policy` decides whether trainers merge. "
            "Theirs creates the inner AdamW again in each round, without its moments, and decays "
            "vectors (norms, biases) too. Ours persists. Their outer SGD has no momentum; as "
            "published, DiLoCo has Nesterov's, `outer.options = { momentum = 0.9, nesterov = true "
            "}`.",
            settings=lambda given: {
                "inner.optimizer": "adamw",
                "inner.betas": [0.9, 0.999],
                "inner.weight_decay": 0.01,
                "outer.update": "optimizer",
                "outer.optimizer": "SGD",
                "outer.options": {},
            },
        ),
        Row(
            keys=("distributed_algo",),
            only="LocalSGD",
            ours='`outer.update = "mean"`, `inner.optimizer = "sgd"`, `inner.momentum = 0`, '
            '`inner.weight_decay = 0`, `merge.policy = "none"`',
            differs="Theirs never merges with LocalSGD.",
            settings=lambda given: {
                "inner.optimizer": "sgd",
                "inner.momentum": 0,
                "inner.weight_decay": 0,
                "outer.update": "mean",
                "merge.policy": "none",
            },
        ),
        Row(
            keys=("padding_percentage",),
            kind=PositiveFloat,
            ours='`memory.fraction`, with `switch.max_micro_batch = "auto"`',
            differs="The fraction of a GPU's memory that its nodes share. Theirs finds the largest "
            "batch from it, but does not keep to it. It has nothing to do with padding. On a CPU, "
            "ours needs `memory.gib` too.",
            settings=lambda given: {
                "memory.fraction": given["padding_percentage"],
                "switch.max_micro_batch": "auto",
            },
        ),
        Row(
            keys=("save_weights_every",),
            kind=PositiveInt,
            ours="`run.checkpoint_every`",
            differs="In theirs every save fails (the method that names the device is missing); the "
            "error is logged and training goes on. Ours saves all that a run needs to go on bit "
            "for bit.",
            settings=lambda given: {"run.checkpoint_every": given["save_weights_every"]},
        ),
    ),
    "merging": (
        Row(
            keys=("merging_policy",),
            only="worst_with_worst",
            default="worst_with_worst",
            ours='`merge.policy = "smallest"`, `merge.count = 2`',
            differs="Worst means the smallest demand, not the highest loss. The larger of the two "
            "survives, with its batch.",
            settings=lambda given: _merges("smallest", given),
        ),
        Row(
            keys=("merging_policy",),
            only="best_with_worst",
            ours='`merge.policy = "largest-with-smallest"`, `merge.count = 2`',
            differs="Best means the largest demand. The best survives, with its batch.",
            settings=lambda given: _merges("largest-with-smallest", given),
        ),
        Row(
            keys=("merge_frequency",),
            kind=PositiveInt,
            default=2,
            ours="`merge.every` = `merge.first_round`",
            differs="Both merge until one trainer is left. Ours also says what becomes of "
            "momentum, inner state and data (`merge.*`).",
            settings=lambda given: (
                {}
                if given.local_sgd
                else dict.fromkeys(("merge.every", "merge.first_round"), given["merge_frequency"])
            ),
        ),
    ),
    "batching": (
        Row(
            keys=("sampling_method",),
            only="norm_test",
            default="norm_test",
            ours='`batch.rule = "norm-test"`, `batch.estimator = "plug-in"`, '
            "`batch.grow_only = true`",
            differs="The formula is the same, but theirs is divided by the nodes and ours is for "
            "the trainer.",
            settings=lambda given: {
                "batch.rule": "norm-test",
                "batch.estimator": "plug-in",
                "batch.grow_only": True,
            },
        ),
        Row(
            keys=("sampling_method",),
            only="augmented_inner_product_test",
            ours='`batch.rule = "augmented"`, `batch.estimator = "plug-in"`, '
            "`batch.grow_only = true`",
            differs="Theirs computes another quantity: the variance of the nodes' batch gradients "
            "stands for that of single samples, and a mean over coordinates for a trace.",
            settings=lambda given: {
                "batch.rule": "augmented",
                "batch.estimator": "plug-in",
                "batch.grow_only": True,
            },
        ),
        Row(
            keys=("sampling_method",),
            ours='`batch.rule = "constant"`',
            differs="Theirs takes any other word as this.",
            settings=lambda given: {"batch.rule": "constant"},
        ),
        Row(
            keys=("ETA",),
            kind=PositiveFloat,
            ours="`batch.eta`, with the norm test",
            differs="No other rule reads it.",
            settings=lambda given: (
                {"batch.eta": given["ETA"]} if given["sampling_method"] == "norm_test" else {}
            ),
        ),
        Row(
            keys=("vartheta",),
            kind=PositiveFloat,
            ours="`batch.theta`, which keeps its default, 0.9",
            differs="Theirs reads it and never uses it: it tests the inner product with nu "
            "instead. Here, the shipped 0.01 would request the maximum at the first test.",
        ),
        Row(
            keys=("nu",),
            kind=PositiveFloat,
            ours="`batch.nu`, which keeps its default, 5.84",
            differs="The number belongs to a mean over coordinates, where a trace is meant.",
        ),
        Row(
            keys=("switch_mode",),
            only="threshold_switch_mode",
            default="threshold_switch_mode",
            ours='`switch.mode = "switch"`, `switch.multiplier = 2`',
            differs="Theirs applies only after one trainer is left; until then all accumulate.",
            settings=lambda given: {"switch.mode": "switch", "switch.multiplier": 2},
        ),
        Row(
            keys=("switch_mode",),
            only="only_gradient_accumulation",
            ours='`switch.mode = "always"`',
            settings=lambda given: {"switch.mode": "always"},
        ),
        Row(
            keys=("switch_mode",),
            only="only_data_loader",
            ours='`switch.mode = "never"`',
            settings=lambda given: {"switch.mode": "never"},
        ),
    ),
}
"""By heading."""
