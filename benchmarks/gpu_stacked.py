"""Several Llamas that train at once on one device: the ways to compute their passes.

Kernel by kernel, one model after another; as a CUDA graph of each, in a stream each (what `adloco
train` does); by torch.func over stacked parameters; and by a Llama that is written over them, whose
linear layers are batched products and whose attention has all models in its batch.
`benchmarks/gpu.py --stage stacked` compares them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adloco.algorithms.cuda_graphs import Graph, Lane, has_graphs
from adloco.distributed.device import on_stream
from adloco.tasks.language_model import next_token_loss

MODELS = 4


def ways(
    build: Any, samples: int, context: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of four models, in bf16 by autocast, each way. They return the
    four losses, but for graphs.

    Args:
        build: The builder of a recipe's model.
        samples: Samples of each model.
        context: Tokens of a sample.
        device: Graphs are left out on devices that have none.
    """
    models = [build() for _ in range(MODELS)]
    for model in models:
        build.filling(model, model)
        model.to(device)
    ids = torch.randint(256, (MODELS, samples, context + 1), device=device)
    given, buffers = torch.func.stack_module_state(models)
    detached = {name: each.detach() for name, each in given.items()}
    params = {name: each.clone().requires_grad_() for name, each in detached.items()}

    def one(each: int, loss: Callable[[Any, Tensor], Tensor] = next_token_loss) -> Tensor:
        models[each].zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            nats = loss(models[each], ids[each])
        nats.backward()
        return nats.detach()

    def loss_of(params: Any, buffers: Any, one: Tensor) -> Tensor:
        def model(**inputs: Any) -> Any:
            return torch.func.functional_call(models[0], (params, buffers), kwargs=inputs)

        return next_token_loss(model, one)

    def written(loss: Callable[..., Tensor] = stacked_loss) -> Tensor:
        for each in params.values():
            each.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            nats = loss(models[0].config, params, ids)
        nats.sum().backward()
        return nats.detach()

    def in_turn(loss: Callable[[Any, Tensor], Tensor] = next_token_loss) -> Tensor:
        return torch.stack([one(each, loss) for each in range(MODELS)])

    func = torch.autocast(device.type, torch.bfloat16)(
        torch.func.vmap(torch.func.grad_and_value(loss_of))
    )
    compiled, written_compiled = torch.compile(next_token_loss), torch.compile(stacked_loss)
    sides = {
        "in turn": in_turn,
        "in turn, compiled": lambda: in_turn(compiled),
        "torch.func": lambda: func(detached, buffers, ids)[1],
        "written": written,
        "written, compiled": lambda: written(written_compiled),
    }
    if has_graphs(device):
        sides["graphs, a stream each"] = graphs([partial(one, i) for i in range(MODELS)], device)
        sides["written, a graph"] = graphs([written], device)
        sides["written, compiled, a graph"] = graphs([lambda: written(written_compiled)], device)
    return sides


def graphs(functions: list[Callable[[], Any]], device: torch.device) -> Callable[[], None]:
    """What replays all of these functions at once, each in a stream of its own. They are captured
    on the first call.
    """
    captured: list[tuple[Lane, Graph]] = []

    def capture(function: Callable[[], Any]) -> tuple[Lane, Graph]:
        lane = Lane(device)
        with on_stream(lane.stream):
            for _ in range(2):  # Libraries choose their kernels on the first calls.
                function()
            return lane, Graph(function, lane)

    def replay() -> None:
        if not captured:
            captured.extend([capture(each) for each in functions])
        outside = torch.cuda.current_stream(device)
        for lane, graph in captured:
            lane.stream.wait_stream(outside)
            with torch.cuda.stream(lane.stream):
                graph.replay()
        for lane, _ in captured:
            outside.wait_stream(lane.stream)

    return replay


def stacked_loss(config: Any, params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The mean next-token loss of each model.

    Args:
        config: The configuration of one `LlamaForCausalLM` without biases, with plain rotations.
        params: Its parameters by name, [k, ...] each, as `stack_module_state` gives them.
        ids: Samples of each model, [k, samples, context + 1].

    Returns:
        A loss for each model, [k].
    """
    models, samples, tokens = ids.shape
    context, heads, keys = tokens - 1, config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = samples * context
    table = params["model.embed_tokens.weight"]
    cos, sin = _rotations(context, head_dim, config.rope_parameters["rope_theta"], table)

    def linear(name: str, x: Tensor) -> Tensor:
        return torch.bmm(x, params[f"{name}.weight"].transpose(1, 2))

    def norm(name: str, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return params[f"{name}.weight"][:, None] * (wide * scale).to(x.dtype)

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(models * samples, context, count, head_dim).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    read = ids[:, :, :-1].reshape(models, rows)
    # One lookup in the tables of all models, one after another.
    places = read + torch.arange(models, device=ids.device)[:, None] * table.shape[1]
    x = functional.embedding(places, table.flatten(0, 1))
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        y = norm(f"{at}.input_layernorm", x)
        query = rotate(split(linear(f"{at}.self_attn.q_proj", y), heads))
        key = rotate(split(linear(f"{at}.self_attn.k_proj", y), keys))
        value = split(linear(f"{at}.self_attn.v_proj", y), keys)
        seen = functional.scaled_dot_product_attention(
            query, key, value.to(query.dtype), is_causal=True, enable_gqa=heads != keys
        )
        seen = seen.transpose(1, 2).reshape(models, rows, heads * head_dim)
        x = x + linear(f"{at}.self_attn.o_proj", seen)
        y = norm(f"{at}.post_attention_layernorm", x)
        gate = functional.silu(linear(f"{at}.mlp.gate_proj", y))
        x = x + linear(f"{at}.mlp.down_proj", gate * linear(f"{at}.mlp.up_proj", y))
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits = linear(head, norm("model.norm", x))
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, :, 1:].flatten(), reduction="none"
    )
    return losses.view(models, -1).mean(1)


def _rotations(context: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, [context, head_dim] each."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    places = torch.arange(context, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, 1 / theta**exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
