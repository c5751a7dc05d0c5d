"""A Hugging Face Trainer whose processes are DiLoCo workers: the outer step is a callback, and the
Trainer is neither forked nor subclassed.

    # One worker: the outer step acts on its own steps.
    python examples/hf_trainer.py
    # Two workers that sync every SYNC_EVERY optimizer steps.
    torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer distributes batches over the processes, as it does for DDP, but must not wrap the model
in DDP, which averages gradients at every step. Its accelerator does not wrap a model that is
already prepared, so calling `prepare_model(..., evaluation_mode=True)` before `train()` is enough.
"""

import inspect
import tempfile
import textwrap

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import adloco

STEPS, SYNC_EVERY, BATCH, CONTEXT, LEARNING_RATE = 60, 10, 8, 64, 3e-3


class OuterSync(TrainerCallback):
    """Counts the Trainer's optimizer steps (not its micro-batches) and syncs after every
    `SYNC_EVERY` of them.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        # Here and not earlier: the Trainer has loaded a resumed model's checkpoint by now.
        placement = adloco.place(self.num_workers, args.device.type)
        self.diloco = adloco.DiLoCo(
            model, outer=make_outer(), sync_every=SYNC_EVERY, placement=placement
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.diloco.step()


class ShowSpread(TrainerCallback):
    """Prints the largest difference of any parameter between workers, within a round and after its
    sync.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        if state.global_step % 20 in (15, 0):
            flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            everyone: Tensor = self.trainer.accelerator.gather(flat[None])
            self.trainer.accelerator.print(
                f"step {state.global_step}: "
                f"workers {(everyone - everyone[0]).abs().max().item():.1e} apart"
            )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **sizes))


def make_data() -> list[dict[str, Tensor]]:
    """Windows of Python source as bytes, in random order. Spaces have no label (-100)."""
    text = torch.tensor(
        list(inspect.getsource(textwrap).encode() + inspect.getsource(inspect).encode())
    )
    windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": window, "labels": window.masked_fill(window == ord(" "), -100)}
        for window in windows[order]
    ]


def make_outer() -> adloco.OuterOptimizer:
    return adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})


def main(folder: str) -> None:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        # True would scale losses for DDP, by the tokens of all processes, counted at every step.
        average_tokens_across_devices=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_data())
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    trainer.add_callback(OuterSync(arguments.world_size))
    trainer.add_callback(ShowSpread(trainer))
    trainer.train()
    assert trainer.model_wrapped is trainer.model, "the Trainer wrapped the model after all"
    total = sum(
        parameter.detach().double().sum().item() for parameter in trainer.model.parameters()
    )
    trainer.accelerator.print(
        f"{arguments.world_size} workers, {STEPS // SYNC_EVERY} syncs: "
        f"sum of all parameters {total:.5f}"
    )


if __name__ == "__main__":
    with adloco.process_group(), tempfile.TemporaryDirectory() as folder:
        main(folder)
