"""Llamas of shipped shapes, with random weights."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from adloco.errors import SettingError, require_range
from adloco.models.source import MOST_LAYERS, Builder
from adloco.setting import setting

LARGEST_SIZE = 1 << 24
"""Sizes from here on are mistakes, and their products overflow."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_position: int
    vocab_size: int
    rms_norm_eps: float


SHAPES = {
    "nano": Shape(128, 4, 4, 4, 352, 1024, 0, 1e-6),
    "microllama": Shape(1024, 12, 16, 4, 5632, 2048, 32_000, 1e-5),
    "tinyllama": Shape(2048, 22, 32, 4, 5632, 2048, 32_000, 1e-5),
    "openllama-3b": Shape(3200, 26, 32, 32, 8640, 2048, 32_000, 1e-6),
}
"""Shapes by name. They have 869,504 (with the tokenizer bytes), 304,636,928, 1,100,048,384 and
3,426,473,600 parameters. A vocab_size of 0 stands for the tokenizer's number of ids.
"""


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama with random weights. A size of 0 stands for the size of model.shape."""

    key: ClassVar[str] = "llama"
    for_transformers: ClassVar[bool] = True
    weights: ClassVar[str] = ""

    shape: Literal["nano", "microllama", "tinyllama", "openllama-3b"] = setting(
        "nano", aliases=("model",)
    )
    """Sizes of the model: nano (0.9M parameters with the tokenizer bytes), microllama (305M),
    tinyllama (1.1B) or openllama-3b (3.4B). The sizes below replace those of the shape.
    """
    hidden_size: int = 0
    """Width of the residual stream; 0: as in the shape."""
    num_layers: int = 0
    """Number of transformer blocks; 0: as in the shape."""
    num_heads: int = 0
    """Number of attention heads; 0: as in the shape."""
    num_kv_heads: int = 0
    """Number of key and value heads, less than num_heads for grouped-query attention; 0: as in the
    shape, or num_heads if that is less.
    """
    intermediate_size: int = 0
    """Width of the feed-forward blocks; 0: as in the shape."""
    max_position: int = 0
    """Longest context, in tokens; 0: as in the shape."""
    vocab_size: int = 0
    """Rows of the embedding; 0: as in the shape (32,000, but for nano the tokenizer's number of
    ids).
    """
    tie_embeddings: bool = False
    """Use the embedding's weights for the output head too."""

    def __post_init__(self) -> None:
        wide = ("hidden_size", "intermediate_size", "max_position", "vocab_size")
        require_range(self, *wide, "num_layers", "num_heads", "num_kv_heads", at_least=0)
        require_range(self, *wide, below=LARGEST_SIZE)
        require_range(self, "num_layers", at_most=MOST_LAYERS)
        sizes = self.sizes
        if sizes.hidden_size % (2 * sizes.num_heads) != 0:
            problem = f"must be a multiple of 2 x {{num_heads}} = {2 * sizes.num_heads}"
            raise SettingError(self, "hidden_size", f"{problem}, got {sizes.hidden_size}")
        if sizes.num_heads % sizes.num_kv_heads != 0:
            problem = f"must divide {{num_heads}} = {sizes.num_heads}, got {sizes.num_kv_heads}"
            raise SettingError(self, "num_kv_heads", problem)

    @property
    def sizes(self) -> Shape:
        """The sizes of the shape, replaced by those that are not 0."""
        shape = SHAPES[self.shape]
        given = {each.name: getattr(self, each.name, 0) for each in fields(shape)}
        sizes = replace(shape, **{name: size for name, size in given.items() if size})
        # A shape scaled down to fewer heads keeps as many key and value heads as fit.
        fitting = min(sizes.num_kv_heads, sizes.num_heads)
        return sizes if self.num_kv_heads else replace(sizes, num_kv_heads=fitting)

    @property
    def builder(self) -> type[Builder]:
        from adloco.models.build import ModelBuilder

        return ModelBuilder

    def config(self, vocab_size: int) -> Any:
        from transformers import LlamaConfig

        sizes = self.sizes
        return LlamaConfig(
            vocab_size=sizes.vocab_size or vocab_size,
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            intermediate_size=sizes.intermediate_size,
            max_position_embeddings=sizes.max_position,
            rms_norm_eps=sizes.rms_norm_eps,
            tie_word_embeddings=self.tie_embeddings,
        )
