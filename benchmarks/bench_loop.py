"""A small Llama on random bytes, and the loop around it that one would write by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    Batching,
    InnerAdamW,
    Method,
    Problem,
    SwitchMode,
    Syncing,
    TensorSource,
)
from adloco.algorithms.method import Source
from adloco.models.build import ModelBuilder
from adloco.models.source import ModelOptions
from adloco.models.sources.llama import LlamaShape
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.tasks.language_model import next_token_loss

CONTEXT, BATCH, VOCABULARY = 128, 8, 257
INNER_STEPS = 20
"""H by default; the norm test takes its statistics once in so many steps."""
WIDTHS = {1: 128, 10: 512, 30: 768}
"""Width of a model of about so many million parameters (0.9, 13 and 29)."""


def problem(width: int, *, layers: int = 4, streams: int = 1) -> Problem:
    """A Llama of this width, and samples of random bytes for so many workers."""
    shape = LlamaShape(hidden_size=width, num_layers=layers, intermediate_size=width * 11 // 4)
    ids = torch.randint(
        0, VOCABULARY, (4000, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    builder = ModelBuilder(
        config=shape.config(VOCABULARY),
        head="AutoModelForCausalLM",
        options=ModelOptions(),
        seed=0,
    )
    return Problem(
        build_model=builder.whole,
        loss_fn=next_token_loss,
        data=TensorSource(ids, num_streams=streams),
    )


def batching(
    batch: int = BATCH, *, rule: BatchRule | None = None, maximum: int | None = None, fits: int = 0
) -> Batching:
    """Batches of so many samples, in one pass unless fewer fit; with a maximum, the rule may raise
    them to it.
    """
    return Batching(
        rule=rule or ConstantBatch(),
        guards=BatchGuards(initial=batch, minimum=batch, maximum=maximum or batch),
        switch=SwitchMode(max_micro_batch=fits or max(batch, BATCH), mode="always"),
    )


def plain_run(given: Problem, steps: int, *, trainers: int = 1, **others: Any) -> AdLoCo:
    """Rounds of so many steps without an outer optimizer: AdamW and a constant batch, unless an
    argument of AdLoCo says otherwise.
    """
    standard: dict[str, Any] = {"inner": InnerAdamW(), "batching": batching()}
    method = Method(num_trainers=trainers, sync_every=steps)
    return AdLoCo(given, method, syncing=Syncing(outer=None), **standard | others)


class BareLoop:
    """Training steps in plain torch: read, forward, backward, clip, AdamW."""

    def __init__(
        self,
        model: nn.Module,
        data: Source,
        *,
        forward: Callable[..., Any] | None = None,
        batch: int = BATCH,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """
        Args:
            model: The model to train.
            data: Its samples; the first stream is read.
            forward: What is called in its place, such as DistributedDataParallel.
            batch: Samples of a step over all ranks.
            rank: This process's number.
            ranks: How many processes share a step.
        """
        self._model, self._data, self._forward = model, data, forward or model
        self._optimizer = InnerAdamW()(model)[0]
        self._share, self._batch = batch // ranks, batch
        self._position = rank * self._share

    def steps(self, count: int) -> None:
        """Take so many steps."""
        for _ in range(count):
            ids: Tensor = self._data.read(0, self._position, self._share)
            self._position += self._batch
            loss = next_token_loss(self._forward, ids)
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            float(loss.detach())
