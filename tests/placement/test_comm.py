"""Reductions and their byte counts, by hand."""

import torch

from adloco.placement.comm import LocalComm, Traffic


def test_weighted_mean_and_bytes() -> None:
    traffic = Traffic()
    comm = LocalComm(2, traffic)
    first, second = [torch.tensor([1.0, 2.0]), torch.tensor([[10.0]])], [torch.tensor([5.0, -2.0]), torch.tensor([[20.0]])]
    # Weights 1 and 3: (1 + 15) / 4 = 4, (2 - 6) / 4 = -1, (10 + 60) / 4 = 17.5.
    mean = comm.mean([first, second], [0.25, 0.75])
    assert [tensor.tolist() for tensor in mean] == [[4.0, -1.0], [[17.5]]]
    assert first[0].tolist() == [1.0, 2.0]
    # Two workers hand over three float32 each.
    assert traffic.between == 2 * 3 * 4


def test_every_tensor_is_averaged() -> None:
    entries = [[torch.full((size,), float(worker)) for size in (1, 7, 1000, 3)] for worker in (1, 3)]
    for mean, size in zip(LocalComm(2, Traffic()).mean(entries, [0.5, 0.5]), (1, 7, 1000, 3), strict=True):
        assert mean.tolist() == [2.0] * size


def test_a_worker_alone_hands_over_nothing() -> None:
    traffic = Traffic()
    value = torch.tensor([1 / 3])
    assert LocalComm(1, traffic).mean([[value]], [1.0])[0].equal(value)
    assert traffic.between == 0


def test_broadcast_is_handed_over_once_if_anyone_needs_it() -> None:
    traffic = Traffic()
    comm = LocalComm(3, traffic)
    comm.broadcast([torch.zeros(5)], source=0, receivers=[])
    assert traffic.between == 0
    comm.broadcast([torch.zeros(5)], source=0, receivers=[1, 2])
    assert traffic.between == 20
