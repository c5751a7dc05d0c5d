"""The task: labels are next tokens, the loss is summed over tokens, and a model that memorises says
what comes next.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from adloco import InnerAdamW
from adloco.cli.main import main
from adloco.data.byte_tokenizer import ByteTokenizer
from adloco.data.data_settings import DataSettings
from adloco.data.sources import TokenSource
from adloco.data.token_cache import TokenCache
from adloco.models.sources.llama import LlamaShape
from adloco.models.sources.named_model import NamedModel
from adloco.tasks.kinds.language_model_settings import LanguageModelSettings
from adloco.tasks.language_model import (
    LanguageModel,
    compiled_cross_entropy,
    cross_entropy,
    evaluation_windows,
    generate,
    next_token_loss,
    open_language_model,
)
from adloco.tasks.task import EvaluationSettings, TaskData
from tests.operations import Operations
from tests.problems import build_llama, make_run

TINY = LlamaShape(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64)


class Oracle(nn.Module):
    """A model that always predicts (token + 1) % vocabulary."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        class Output:
            logits = 50.0 * nn.functional.one_hot((input_ids + 1) % 10, 10).float()

        return Output()


def on_tokens(tokens: NDArray[np.uint16], context_tokens: int, windows: int) -> LanguageModel:
    """The task with these tokens to validate on."""
    cache = SimpleNamespace(
        validation=tokens,
        data=DataSettings(context_tokens=context_tokens),
        tokenizer=ByteTokenizer(),
        lost=lambda: 0,
    )
    return LanguageModel(cast(TokenCache, cache), windows)


def test_labels_are_the_next_tokens() -> None:
    counting = torch.arange(12)[None] % 10
    assert float(next_token_loss(Oracle(), counting)) == pytest.approx(0, abs=1e-6)
    # Twice shifted labels (token t + 2) would be as wrong for this oracle as these.
    assert float(next_token_loss(Oracle(), torch.arange(0, 24, 2)[None] % 10)) == pytest.approx(
        50, rel=1e-3
    )


def test_loss_of_uniform_predictions_is_log_vocabulary() -> None:
    model = build_llama(TINY, vocab_size=10, seed=0)
    nn.init.zeros_(model.lm_head.weight)  # type: ignore[union-attr, arg-type]
    task = on_tokens(np.arange(101, dtype=np.uint16) % 10, context_tokens=5, windows=0)
    total, _, count = task.measure(model, torch.device("cpu"), 32)
    assert count == 100
    assert total / count == pytest.approx(math.log(10), rel=1e-6)


def test_evaluation_sums_over_tokens_however_it_is_shared() -> None:
    model = build_llama(TINY, vocab_size=10, seed=0)
    tokens = np.random.default_rng(0).integers(0, 10, 500).astype(np.uint16)
    task = on_tokens(tokens, context_tokens=7, windows=41)
    source = TokenSource(tokens, context_tokens=7)
    windows = evaluation_windows(source, 41)
    assert len(set(windows.tolist())) == 41
    total, _, count = task.measure(model, torch.device("cpu"), 32)
    parts = [task.measure(model, torch.device("cpu"), 32, part, 3) for part in range(3)]
    assert sum(own for _, _, own in parts) == count == 41 * 7
    assert sum(own for own, _, _ in parts) == pytest.approx(total, rel=1e-6)
    with torch.no_grad():
        expected = (
            sum(
                float(next_token_loss(model, source.windows(windows[i : i + 1]))) for i in range(41)
            )
            / 41
        )
    assert total / count == pytest.approx(expected, rel=1e-5)
    with Operations() as operations:
        task.measure(model, torch.device("cpu"), 8)
    assert operations.reads == 1  # Not one for each of six calls of the model.


@pytest.mark.parametrize(
    ("tokenizer", "streaming"), [("bytes", False), ("bpe:300", False), ("bpe:300", True)]
)
def test_bits_per_byte_are_those_of_the_evaluated_text(
    tokenizer: str, streaming: bool, corpus: Path, tmp_path: Path
) -> None:
    """The bytes are counted by decoding what each window predicts, without the ends of texts."""
    data = DataSettings(
        path=str(corpus), cache=str(tmp_path / "cache"), tokenizer=tokenizer, context_tokens=200
    )
    if streaming:
        pytest.importorskip("datasets", reason="datasets is not installed")
        rows = [json.dumps({"text": file.read_text()}) for file in sorted(corpus.iterdir())]
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "train.jsonl").write_text("\n".join(rows))
        data = replace(
            data, path="", dataset=str(tmp_path / "rows"), streaming=True, validation_samples=4
        )
    settings = LanguageModelSettings()
    task = settings.open(TaskData(data, EvaluationSettings(windows=0)))
    model = build_llama(TINY, vocab_size=task.tokenizer.vocab_size, seed=0)
    nats, size, count = task.measure(model, torch.device("cpu"), 8)
    tokens = cast(TokenSource, task.largest_source())
    predicted = tokens.windows(evaluation_windows(tokens, 0))[:, 1:].tolist()
    end = task.tokenizer.end_of_text
    ends = sum(window.count(end) for window in predicted)
    texts = [task.tokenizer.decode([i for i in window if i != end]) for window in predicted]
    by_hand = sum(len(text.encode()) for text in texts)
    assert ends > 0 and size == by_hand

    bits = settings.measured([nats / count, size / count])["bits_per_byte"]
    assert bits == pytest.approx(nats / math.log(2) / by_hand, rel=1e-12)
    if tokenizer == "bytes":
        assert by_hand == count - ends
        assert bits == pytest.approx(nats / count / math.log(2), rel=2 * ends / count)
    if streaming:  # What is fetched later is trained on.
        task.train_source(1, 0, 1).read(0, 20, 1)
    parts = [task.measure(model, torch.device("cpu"), 8, part, 3) for part in range(3)]
    assert [sum(column) for column in zip(*parts, strict=True)][1:] == [size, count]


@pytest.mark.parametrize("fraction", [0.05, 0.5])
@pytest.mark.parametrize("texts", [["alpha beta " * 9], ["one two ", "three four ", "five six "]])
def test_another_text_is_evaluated_whole_and_in_its_order(
    texts: list[str], fraction: float, tmp_path: Path
) -> None:
    """The loss is that of the texts' bytes with one end of text after each, computed by hand."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trained_on = DataSettings(
        context_tokens=8, validation_fraction=fraction, cache=str(tmp_path / "cache")
    )
    task = LanguageModelSettings().open(
        TaskData(trained_on.at(str(file)), EvaluationSettings(windows=0), everything=True)
    )
    model = build_llama(TINY, vocab_size=256, seed=0)
    nats, _, count = task.measure(model, torch.device("cpu"), 8)
    tokens = list("".join(text + "\0" for text in texts).encode())
    windows = [tokens[start : start + 9] for start in range(0, len(tokens) - 8, 8)]
    by_hand = [float(next_token_loss(model, torch.tensor([own])).detach()) * 8 for own in windows]
    assert count == 8 * len(windows)
    assert nats == pytest.approx(sum(by_hand), rel=1e-6)


def test_same_seed_same_model() -> None:
    first, second, other = (build_llama(TINY, 10, seed) for seed in (3, 3, 4))
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(a.equal(b) for a, b, _ in pairs)
    assert any(not a.equal(c) for a, _, c in pairs)


@pytest.mark.nightly
def test_a_periodic_text_is_memorised_and_continued() -> None:
    period = list(b"the quick brown fox; ")
    tokens = np.array(period * 100, dtype=np.uint16)
    run = make_run(
        build_model=lambda: build_llama(TINY, 256, 0),
        loss_fn=next_token_loss,
        data=TokenSource(tokens, context_tokens=32, num_streams=2),
        inner=InnerAdamW(lr=5e-3, weight_decay=0.0),
        sync_every=10,
        outer=None,
    )
    last = list(run.rounds(20))[-1]
    assert last.train_loss < 0.05
    model = run.model(0)
    continued = generated(model, b"the quick", max_tokens=60, context_tokens=32)
    assert bytes(continued).decode() == ("the quick brown fox; " * 4)[9:69]


def generated(model: nn.Module, ids: Sequence[int], **changes: Any) -> list[int]:
    """Tokens after these ids; the likeliest ones of 256, in a context of eight."""
    settings: dict[str, Any] = {
        "max_tokens": 10,
        "temperature": 0,
        "context_tokens": 8,
        "vocab_size": 256,
        "stop": 0,
        "seed": 0,
    }
    return list(generate(model, list(ids), **settings | changes))


def test_generation_stops_at_the_end_of_text_and_draws_by_seed() -> None:
    assert generated(_WithParameters(), [7], max_tokens=20) == [8, 9]
    model = build_llama(TINY, 256, 0)
    draws = [generated(model, [1], temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_generation_draws_no_id_that_the_tokenizer_lacks() -> None:
    model = build_llama(TINY, 256, 0)
    drawn = generated(model, [1], max_tokens=30, temperature=9.0, vocab_size=5, stop=9)
    assert {*drawn} == {0, 1, 2, 3, 4}


def test_generation_goes_on_without_a_cache_that_a_model_does_not_return() -> None:
    class TakesOne(_WithParameters):
        def forward(
            self, input_ids: Tensor, use_cache: bool, past_key_values: object = None
        ) -> object:
            return super().forward(input_ids, use_cache)

    assert generated(TakesOne(), [7], max_tokens=20) == [8, 9]


def test_generation_computes_a_token_once_while_the_context_has_room() -> None:
    """Then the window slides, and all of it is computed for each token, as without a cache."""
    model, lengths = build_llama(TINY, 256, 0), list[int]()

    def draw() -> list[int]:
        return generated(model, [1, 2], max_tokens=9, stop=256)

    def count(module: nn.Module, words: Any, settings: dict[str, Any]) -> None:
        lengths.append(settings["input_ids"].shape[1])

    def without_cache(input_ids: Tensor, use_cache: bool = False) -> Any:
        return type(model).forward(model, input_ids=input_ids, use_cache=False)

    model.register_forward_pre_hook(count, with_kwargs=True)
    cached, found = draw(), lengths.copy()
    assert found == [2, 1, 1, 1, 1, 1, 1, 8, 8]
    lengths.clear()
    model.forward = without_cache  # type: ignore[method-assign]
    assert draw() == cached
    assert lengths == [2, 3, 4, 5, 6, 7, 8, 8, 8]


class _WithParameters(Oracle):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": -1}, "^num_layers must be >= 0"),
        (
            {"hidden_size": 30, "num_heads": 4},
            "^hidden_size must be a multiple of 2 x num_heads = 8, got 30",
        ),
        ({"num_kv_heads": 3}, "^num_kv_heads must divide num_heads = 4, got 3"),
    ],
)
def test_refusals(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaShape(**settings)


def opened(text: Path, context_tokens: int) -> LanguageModel:
    text.write_text("one text and another one " * 80)
    data = DataSettings(path=str(text), context_tokens=context_tokens, cache=str(text.parent))
    return open_language_model(TaskData(data, EvaluationSettings()))


def test_positions_that_begin_after_the_padding_s_id(tmp_path: Path) -> None:
    """By hand: of 64 positions, those of ids 0 to 4 are left out, so 59 tokens fit."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 64}
    given = NamedModel(name="roberta", pretrained=False, overrides=sizes | {"pad_token_id": 4})
    task = opened(tmp_path / "text", 59)
    config = task.configure(given.config(256))
    model: Any = AutoModelForCausalLM.from_config(config)
    assert math.isfinite(float(task.loss(model, task.largest_source().read(0, 0, 1)).detach()))
    with pytest.raises(ValueError, match="context_tokens must be <= 59, .* begin at 5, .* got 60"):
        opened(tmp_path / "text", 60).configure(given.config(256))
    own = NamedModel(name="roberta", pretrained=False, overrides=sizes).config(256)
    assert task.configure(own).pad_token_id == 0, "the tokenizer's, which it cannot do without"


def test_a_model_without_a_longest_context(tmp_path: Path) -> None:
    unlimited = NamedModel(name="xlnet", pretrained=False).config(256)
    assert unlimited.max_position_embeddings == -1
    opened(tmp_path / "text", 64).configure(unlimited)


def test_a_model_that_sees_what_it_predicts_is_refused(
    small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """BERT reads in both directions unless it is told not to."""
    sizes = (
        "hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64"
    )
    own = [
        word
        for index, word in enumerate(small)
        if not (word.startswith("--model.") or small[index - 1].startswith("--model."))
    ]
    bert = [
        "--model.source",
        "transformers",
        "--model.name",
        "bert",
        "--model.pretrained",
        "false",
        "--run.tokens",
        "2000",
    ]
    assert main(["train", "single", *own, *bert, "--model.overrides", f"{{ {sizes} }}"]) == 2
    assert "the model sees the tokens that it must predict" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert (
        main(
            [
                "train",
                "single",
                *own,
                *bert,
                "--model.overrides",
                f"{{ {sizes}, is_decoder = true }}",
            ]
        )
        == 0
    )


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
def test_the_compiled_cross_entropy_is_the_other_one() -> None:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(11, (3, 5), generator=generator)
    for dtype, rel in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found = []
        for loss_fn in (cross_entropy, compiled_cross_entropy()):
            logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(3)).to(dtype)
            logits.requires_grad_()
            loss = loss_fn(logits, targets)
            loss.backward()
            found.append((loss.detach(), logits.grad))
        torch.testing.assert_close(found[1], found[0], rtol=rel, atol=rel / 100)
        assert found[1][0].dtype == torch.float32
