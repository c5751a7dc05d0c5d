"""`adloco generate`: continues a text with a run's model."""

from dataclasses import dataclass

from adloco.cli.arguments import ModelCommand, argument
from adloco.cli.terminal import open_console, printable


@dataclass(kw_only=True)
class Generate(ModelCommand):
    """Continue a text with a run's model."""

    key = "generate"
    summary = "continue a text with a run's model"
    prompt: str = argument(metavar="TEXT")
    """Text to continue."""
    tokens: int = argument(200, "N")
    """Most tokens to add (default: 200)."""
    temperature: float = argument(0.8, "T")
    """0 takes the most likely token each time (default: 0.8)."""
    seed: int = argument(0, "N")
    """Seed of the draw (default: 0)."""

    def run(self) -> int:
        trained = self.load()
        from adloco.run.trained import continued  # It imports torch.

        pieces = continued(
            trained,
            self.prompt,
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
        )
        encoding = open_console().encoding
        for piece in pieces:
            print(printable(piece, encoding), end="", flush=True)
        print()
        return 0
