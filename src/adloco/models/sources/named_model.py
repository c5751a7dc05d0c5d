"""Any model of transformers, by hub name, folder or type. Code from the hub is never run."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from adloco.errors import require
from adloco.hub_access import hub_asked
from adloco.models.source import MOST_LAYERS, Builder

ALWAYS_WITH_PADDING = ("modernbert", "modernbert-decoder", "nomic_bert", "xlm", "flaubert")
"""Types whose code fails without an id of padding, which from scratch is then their default."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Any model of transformers, trained or from scratch: model.pretrained must be given."""

    key: ClassVar[str] = "transformers"
    for_transformers: ClassVar[bool] = True

    name: str
    """Hub name or folder of a model; if pretrained is false, also a model type such as bert or
    gpt2.
    """
    pretrained: bool
    """true: start from the model's trained weights; false: use only its configuration, and start
    from random weights.
    """
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Values to replace in the model's configuration, for instance { num_hidden_layers = 2 }; a
    sliding_window of 0 is none.
    """

    @property
    def builder(self) -> type[Builder]:
        from adloco.models.build import ModelBuilder

        return ModelBuilder

    @property
    def weights(self) -> str:
        return self.name if self.pretrained else ""

    def config(self, vocab_size: int) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        from_type = not self.pretrained and self.name in CONFIG_MAPPING
        silent = ""
        try:
            if from_type:
                default = CONFIG_MAPPING[self.name]()
            else:
                with hub_asked(self.name) as silent:
                    default = AutoConfig.from_pretrained(self.name, trust_remote_code=False)
        except Exception as error:
            # transformers raises OSError, ValueError and errors of hub clients, with long messages.
            raise ValueError(
                f"model.name {self.name!r} could not be loaded ({silent or type(error).__name__}); "
                "allowed are a folder with config.json, a hub name that can be reached, or from "
                "scratch a type such as bert"
            ) from error
        require(
            hasattr(default, "vocab_size") and not getattr(default, "is_encoder_decoder", False),
            f"model.name {self.name!r} is a {default.model_type}, which no task here trains; take "
            "a decoder such as gpt2 or an encoder such as bert",
        )
        known = default.to_dict()
        for key, value in self.overrides.items():
            nearest = difflib.get_close_matches(key, list(known), n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else "see its config.json"
            require(
                key in known or hasattr(default, key),
                f"model.overrides has {key!r}, which the configuration of {self.name!r} does not "
                f"have; {advice}",
            )
            require(
                "dropout" not in key or not isinstance(value, (int, float)) or 0 <= value < 1,
                f"model.overrides has {key} = {value!r}; a rate of dropout must be >= 0 and < 1",
            )
        sizes: dict[str, Any] = {"vocab_size": vocab_size} if from_type else {}
        if not self.pretrained and default.model_type not in ALWAYS_WITH_PADDING:
            # It is an id of another tokenizer, whose row is never trained. Tasks that pad set it.
            sizes["pad_token_id"] = None
        sizes |= self.overrides
        if sizes.get("sliding_window") == 0:  # TOML has no null, and a window of 0 shows nothing.
            sizes["sliding_window"] = None
        try:
            # Built again, not changed: some values are computed from others (a head's width, for
            # instance) and must be computed from the new ones.
            if from_type:
                config = CONFIG_MAPPING[self.name](**sizes)
            else:
                # The hub was asked above, so its file is here.
                config = AutoConfig.from_pretrained(
                    self.name, trust_remote_code=False, local_files_only=True, **sizes
                )
        except Exception as error:
            # Values of wrong types, or sizes that do not fit together.
            raise ValueError(
                f"model.overrides do not fit {self.name!r}: {' '.join(str(error).split())[:200]}"
            ) from error
        if not self.pretrained:
            config.name_or_path = ""  # What else is in the folder is of trained weights.
        require(
            not getattr(config, "output_router_logits", False),
            f"model.name {self.name!r} has output_router_logits = true, but the auxiliary loss of "
            "routers is not trained here; set it to false in model.overrides",
        )
        layers = getattr(config, "num_hidden_layers", 0)
        # transformers checks types itself since 5.4.
        require(
            isinstance(layers, int) and isinstance(config.vocab_size, int),
            f"model.overrides do not fit {self.name!r}: sizes must be whole numbers",
        )
        require(
            layers <= MOST_LAYERS,
            f"model.name {self.name!r} has {layers:,} layers; at most {MOST_LAYERS:,} are allowed, "
            "set them in model.overrides",
        )
        require(
            vocab_size <= config.vocab_size,
            f"model.name {self.name!r} has {config.vocab_size} embeddings, fewer than the "
            f"{vocab_size} ids of the tokenizer; set data.tokenizer to the model's own"
            + ("" if self.pretrained else ", or model.overrides { vocab_size = ... }"),
        )
        return config
