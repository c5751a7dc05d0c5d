"""What the authors' keys for devices, data, models and logs are here."""

from pydantic import NonNegativeInt, PositiveInt

from adloco.config.authors.row import Row, Table

SETUP: Table = {
    "devices and seed": (
        Row(
            keys=("CUDA_VISIBLE_DEVICES",),
            kind=str | int,
            default="0",
            ours="`adloco train --ranks N`, or torchrun; `run.device`",
            differs="Theirs is one process with a thread per node, on CUDA only. Ours has one rank "
            "per GPU, also over several machines, or runs on a CPU. Workers are spread over the "
            "ranks, and the numbers do not depend on that.",
        ),
        Row(
            keys=("devices", "real_device_ids"),
            kind=object,
            differs="Only their README shows them; the last commit counts `CUDA_VISIBLE_DEVICES`.",
        ),
        Row(
            keys=("nodes_per_gpu",),
            kind=PositiveInt,
            default=1,
            ours="`method.workers_per_trainer` = devices x nodes_per_gpu / trainers",
            differs="Theirs is how many nodes share a device; ours is how many workers a trainer "
            "has, wherever they live: the same number for each, rounded down, and at least one.",
            settings=lambda given: {"method.workers_per_trainer": given.workers},
        ),
        Row(
            keys=("num_init_trainers",),
            older=("number_of_initial_trainers",),
            kind=PositiveInt,
            default=1,
            ours="`method.num_trainers`",
            differs="Theirs assigns the nodes again in every round, by demand; ours moves only "
            "workers that a merge frees.",
            settings=lambda given: {"method.num_trainers": given["num_init_trainers"]},
        ),
        Row(
            keys=("training_seed",),
            kind=int,
            ours="`run.seed`",
            differs="Theirs seeds the global generators, and trainers in parallel threads draw "
            "from them, so a run cannot be repeated. Ours can, to the last bit.",
            settings=lambda given: {"run.seed": given["training_seed"]},
        ),
        Row(
            keys=("single_seed", "need_to_reinit_output_layers"),
            kind=bool,
            differs="Theirs draws the output layer (`lm_head`, `classifier`) of pretrained weights "
            "again, with the seed, and with `single_seed` once more without one, separately in "
            "each trainer. In ours all trainers start from one model, and only a head that the "
            "weights lack is drawn, once.",
        ),
    ),
    "data": (
        Row(
            keys=("dataset",),
            only="c4",
            ours="`data.dataset` (allenai/c4), `data.validation_split`, "
            '`data.context_tokens = 512`, `task.kind = "language-model"`',
            differs="The hub no longer has the bare names c4 and imdb. Theirs pads each text to "
            "512 tokens (IMDB: 128) and cuts off the rest. Ours packs C4's texts into windows of "
            "`data.context_tokens` without loss, and cuts IMDB's at that length.",
            settings=lambda given: {
                "data.dataset": "allenai/c4",
                "data.validation_split": "validation",
                # The whole split has 364,608 rows, and evaluation.windows reads 64 windows.
                **({} if given["val_size"] else {"data.validation_samples": 100}),
                "data.context_tokens": 512,
                "task.kind": "language-model",
            },
        ),
        Row(
            keys=("dataset",),
            only="imdb",
            ours="`data.dataset` (stanfordnlp/imdb), `data.validation_split`, "
            "`data.context_tokens = 128`, "
            '`task.kind = "classification"`',
            differs="As for c4.",
            settings=lambda given: {
                "data.dataset": "stanfordnlp/imdb",
                "data.validation_split": "test",
                "data.context_tokens": 128,
                "task.kind": "classification",
            },
        ),
        Row(
            keys=("c4_language",),
            default="en",
            ours="`data.config`",
            settings=lambda given: (
                {"data.config": given["c4_language"]} if given["dataset"] == "c4" else {}
            ),
        ),
        Row(
            keys=("data_sample_size",),
            kind=PositiveInt,
            ours="`data.samples`",
            differs="IMDB's rows are sorted by label and ours takes the first, so `data.samples` "
            "stays 0 (all) there; theirs shuffles.",
            settings=lambda given: (
                {} if given["dataset"] == "imdb" else {"data.samples": given["data_sample_size"]}
            ),
        ),
        Row(
            keys=("c4_streaming",),
            kind=bool,
            default=False,
            ours="`data.streaming`",
            differs="Theirs streams the sample into memory first; ours can fetch while it trains.",
            settings=lambda given: (
                {"data.streaming": given["c4_streaming"]} if given["dataset"] == "c4" else {}
            ),
        ),
        Row(
            keys=("c4_tokenized_path",),
            kind=str | None,
            ours="`data.cache`",
            differs="Theirs is made by c4/tokenize_c4.py and must have *more* than "
            "data_sample_size rows, or it stops. Ours keeps tokenised text in a cache, by source "
            "and tokenizer.",
        ),
        Row(
            keys=("val_size",),
            kind=PositiveInt,
            ours="`data.validation_samples`; for classification `task.evaluation_per_class`",
            differs="For IMDB, theirs takes val_size reviews of *each* class, and every trainer "
            "loads the set again. Ours evaluates language models on `evaluation.windows` windows "
            "of these rows; without the key, of C4's first 100.",
            settings=lambda given: {
                "task.evaluation_per_class"
                if given["dataset"] == "imdb"
                else "data.validation_samples": given["val_size"]
            },
        ),
        Row(
            keys=("samples_per_class",),
            kind=NonNegativeInt,
            differs="Never read; for IMDB theirs takes `val_size` instead.",
        ),
    ),
    "model": (
        Row(
            keys=("model_type",),
            ours="`task.kind`, which the dataset decides",
            differs="microllama needs c4, bert needs imdb.",
        ),
        Row(
            keys=("model_config.name",),
            ours="`model.name`, `data.tokenizer`; from scratch also `model.shape = "
            '"microllama"`, which needs no hub',
            settings=lambda given: {
                "model.source": "transformers",
                "model.name": given["model_config.name"],
                "data.tokenizer": given["model_config.name"],
            },
        ),
        Row(
            keys=("model_config.pretrained",),
            kind=bool,
            default=True,
            ours="`model.pretrained`",
            differs="As shipped (`pretrained=True` inside the braces) it is read as a key of that "
            "name without a value, and MicroLlama uses the default, true.",
            settings=lambda given: (
                {"model.pretrained": given["model_config.pretrained"]}
                if given["model_config.name"]
                else {}
            ),
        ),
        Row(keys=("model_config.num_labels",), kind=int, differs="Ours counts the labels."),
    ),
    "logs": (
        Row(
            keys=("project_name",),
            ours="`run.trackers`",
            differs="Theirs needs ClearML. Ours needs no tracker: a run folder has metrics, plots "
            "and a report.",
        ),
        Row(
            keys=("task_name",),
            ours="`run.name`",
            settings=lambda given: {"run.name": given["task_name"]},
        ),
        Row(
            keys=(
                "log_dir",
                "log_file",
                "memory_report_dir",
                "model_training_report_dir",
                "model_weights_dir",
            ),
            ours="`run.folder`",
            differs="All files of a run are in one folder (docs/run-folder.md), in `runs/` unless "
            "it is named.",
        ),
    ),
}
"""By heading."""
