"""The norm test in a training loop of your own: the batch grows with the gradient's noise. Both
commands print the same numbers, to rounding.

    python examples/norm_test_loop.py
    # Data-parallel (DDP); with shard_size=0 instead of replica_size=0 it is FSDP2.
    torchrun --nproc-per-node 2 examples/norm_test_loop.py

It has four pieces. `SwitchMode` divides the requested batch into micro-batches. The engine of a
placement takes |g|^2 of each micro-batch when its gradient is computed. `group_moments` and
`estimate` compute S (the gradient's variance) and |G|^2 (the squared norm of its mean) from these.
`BatchController` asks the norm test for the next batch.
"""

import inspect
import textwrap

import torch
from torch import Tensor, nn

import adloco

STEPS, TEST_EVERY, GROUPS, CONTEXT = 400, 5, 8, 16


def make_model() -> nn.Module:
    """Predicts a byte of Python source from the CONTEXT bytes before it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(128, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 128),
        nn.GELU(),
        nn.Linear(128, 128),
    )


def make_data() -> adloco.TensorSource:
    text = (inspect.getsource(textwrap) + inspect.getsource(inspect)).encode("ascii", "replace")
    return adloco.TensorSource(torch.tensor(list(text)).unfold(0, CONTEXT + 1, 1), num_streams=1)


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def main() -> None:
    # One worker, replicated on all ranks; in one process the model is not wrapped.
    placement = adloco.place(1, replica_size=0)
    ranks = placement.ranks_per_worker
    model, data = make_model(), make_data()
    engine = placement.engine(model, compile=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    guards = adloco.BatchGuards(initial=8, maximum=256, max_growth=2.0)
    controller = adloco.BatchController(adloco.NormTest(eta=2.0), guards)
    switch = adloco.SwitchMode(max_micro_batch=32, mode="always")

    position = 0
    for step in range(STEPS):
        testing = step % TEST_EVERY == 0
        plan = switch.plan(switch.clipped(controller.requested_batch, ranks=ranks), ranks)
        if testing:
            # The same samples in at least GROUPS micro-batches, whose gradients are compared.
            plan = plan.in_groups(GROUPS)

        own = plan.of_rank(engine.rank)
        loss, norms_sq = 0.0, [0.0] * len(plan.micro_batches)
        with engine.incoming() as incoming:
            for index, (offset, samples) in enumerate(own):
                part = samples / plan.worker_batch
                with engine.reducing(last=index == len(own) - 1):
                    # A rank without samples in the last pass reads one sample, with weight 0.
                    batch = data.read(0, position + offset, max(samples, 1))
                    weighted = mean_loss(engine.forward, batch) * part
                    weighted.backward()
                loss += weighted.item()
                if samples:
                    norms_sq[engine.rank + index * ranks] = incoming.take() / part**2
        loss, mean_norm_sq, *norms_sq = engine.sum([loss, engine.norm_sq_part(), *norms_sq])
        optimizer.step()
        optimizer.zero_grad()
        position += plan.worker_batch

        if testing:
            controller.update(
                adloco.estimate(adloco.group_moments(plan.micro_batches, norms_sq, mean_norm_sq)),
                position,
            )
            if step % 50 == 0 and placement.is_rank_zero:
                taken, asked = (
                    f"{plan.worker_batch} in {len(plan.micro_batches)} micro-batches",
                    controller.requested_batch,
                )
                print(
                    f"step {step}: loss {loss:.3f}, batch {taken}, "
                    f"noise scale {controller.estimate.noise_scale:.1f}, next {asked}"
                )
    if placement.is_rank_zero:
        print(
            f"{position} samples in {STEPS} steps, last batch {plan.worker_batch}, loss {loss:.4f}"
        )


if __name__ == "__main__":
    with adloco.process_group():
        main()
