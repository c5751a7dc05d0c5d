"""What the coordinate-wise norm test asks for: Var_i / b <= eta^2 g_i^2 in each coordinate i, the
condition of the theorem of arXiv 2412.21124.

.venv/bin/python reproduce/coordinates.py
    # the default recipe's run of noise_scale.py, trained if it is not there; 2,048 samples

With the mean m_i and the variance v_i of N samples' gradients, Var_i / g_i^2 is at least about
v_i / m_i^2, because E[m_i^2] = g_i^2 + v_i / N. The script prints this for shares of all
coordinates, beside the noise scale of the sum over coordinates, and the share of coordinates whose
m_i is within two standard errors of zero: N samples do not even tell their sign.
"""

from collections.abc import Iterator

import torch
from noise_scale import trained
from torch import Tensor

from adloco.distributed.parallel.gradient_norms import trainable
from adloco.lab.gradients.full_gradient import cut_into_batches
from adloco.run.trained import Trained, load_trained, own_task

ROUNDS, SAMPLES, SHARES = (3, 8, 14, 20), 2048, (0.1, 0.5, 0.9, 0.99)


def gradients(one: Trained) -> Iterator[Tensor]:
    """The gradient of each sample, flat, in float64."""
    recipe, params = one.stored.recipe, trainable(one.model)
    streams = recipe.method.num_workers
    task = own_task(one, recipe.evaluation)
    source = task.train_source(streams, recipe.run.seed, least=streams)
    one.model.eval()
    for batch in cut_into_batches(SAMPLES, 1, streams):
        loss = task.loss(one.model, source.read(batch.stream, batch.position, 1))
        found = torch.autograd.grad(loss, params)
        yield torch.cat([each.flatten() for each in found]).double()


def row(one: Trained) -> list[str]:
    """Noise scale, what shares of the coordinates ask for, and how many are not told from zero."""
    zeros = torch.zeros(sum(each.numel() for each in trainable(one.model)), dtype=torch.float64)
    total, squares = zeros, zeros.clone()
    for gradient in gradients(one):
        total += gradient
        squares.addcmul_(gradient, gradient)
    mean = total / SAMPLES
    variance = (squares - SAMPLES * mean**2) / (SAMPLES - 1)
    used = variance > 0  # Embeddings of bytes that the samples lack have no gradient.
    mean, variance = mean[used], variance[used]
    norm_sq = (mean**2).sum() - variance.sum() / SAMPLES
    wanted = (variance / mean**2).sort().values
    asked = [wanted[min(len(wanted) - 1, int(share * len(wanted)))] for share in SHARES]
    untold = (wanted > SAMPLES / 4).double().mean()
    return [f"{variance.sum() / norm_sq:,.0f}", *(f"{one:,.0f}" for one in asked), f"{untold:.0%}"]


def main() -> None:
    folder = trained("adloco", "default", "", 0)
    heads = [f"{share:.0%} of coordinates" for share in SHARES]
    print(f"| round | noise scale | {' | '.join(heads)} | within two errors of zero |")
    print("| --- " * (3 + len(SHARES)) + "|")
    for number in ROUNDS:
        print(f"| {number} | {' | '.join(row(load_trained(folder, 0, number)))} |", flush=True)


if __name__ == "__main__":
    main()
