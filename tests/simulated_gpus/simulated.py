"""Tensors on simulated GPUs, and what torch.cuda answers about them."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map

from adloco.algorithms import optimizer_state
from adloco.distributed.parallel import fsdp as sharding

MEMORY = 64 * 2**30
CPU = torch.device("cpu")
aten = torch.ops.aten

WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
}
"""Operations whose result, or the size of it, the host must know."""

TAKES_BOTH = {
    aten._foreach_copy_.default,
    aten._index_put_impl_.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put_.default,
}
"""Operations that take tensors of the host beside those of a GPU."""


class OnGpu(Tensor):
    """A tensor whose device is a GPU, and whose numbers are a tensor of the host."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device) -> "OnGpu":
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        made.numbers = numbers
        return made

    def __repr__(self) -> str:
        return f"OnGpu({self.numbers})"

    def tolist(self) -> Any:
        host_waits("tolist", getattr(_get_current_dispatch_mode(), "graph", None))
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})


class EveryOperation(TorchDispatchMode):
    """A mode in which operations that make a tensor on a GPU, or pinned memory, are simulated; and
    captured by a graph, if there is one. Backward passes have the mode of the thread that asks for
    them.
    """

    def __init__(self, graph: "Graph | None" = None) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kinds = {type(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)}
        if DTensor in kinds:
            return NotImplemented  # It asks again for its shard.
        if OnGpu in kinds or on_gpu(kwargs.get("device")) or kwargs.get("pin_memory"):
            return compute(function, args, kwargs, self.graph)
        return function(*args, **kwargs)


def on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def with_index(device: Any) -> torch.device:
    device = torch.device(device)
    return device if device.index is not None else torch.device("cuda", devices.current_gpu())


def inside(value: Any) -> Any:
    return value.numbers if isinstance(value, OnGpu) else value


def compute(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], graph: "Graph | None" = None
) -> Any:
    """The result of an operation, on the device that it would be on; a graph captures it."""
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    ours = [each for each in given if isinstance(each, OnGpu)]
    to = kwargs.get("device")
    if ours and function not in TAKES_BOTH:
        # A GPU takes single numbers of the host.
        places = {each.device for each in given if each.dim() > 0 or isinstance(each, OnGpu)}
        if len(places) > 1:
            raise RuntimeError(f"{function} was given tensors on {places}")
    if (ours and function in WAITS) or copies_and_waits(function, args, kwargs):
        host_waits(str(function), graph)
    own_args, own_kwargs = tree_map(inside, (args, dict(kwargs)))
    if on_gpu(to):
        own_kwargs["device"] = CPU
    pin = own_kwargs.pop("pin_memory", False)
    if graph:
        graph.before(function, own_args, own_kwargs)
    result = function(*own_args, **own_kwargs)
    if graph:
        graph.operations.append((function, own_args, own_kwargs, result))
    if pin:
        pinned.add(result.untyped_storage().data_ptr())
    device = with_index(to) if on_gpu(to) else ours[0].device if ours and to is None else CPU
    same = {id(inside(each)): each for each in given}  # What is returned may be an argument.

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_new = id(value) not in same and device != CPU
        return OnGpu(value, device) if is_new else same.get(id(value), value)

    return tree_map(outside, result)


def copies_and_waits(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a copy between the host and a GPU that is not left to run: pageable memory is waited
    for whatever is asked.
    """
    if function is aten._to_copy.default:
        source, to = args[0], kwargs.get("device")
        crosses = to is not None and on_gpu(to) != isinstance(source, OnGpu)
        in_host = [] if isinstance(source, OnGpu) else [source]  # The new tensor is pageable.
        left = kwargs.get("non_blocking", False)
    elif function is aten.copy_.default:
        both = args[:2]
        crosses = isinstance(both[0], OnGpu) != isinstance(both[1], OnGpu)
        in_host = [each for each in both if not isinstance(each, OnGpu)]
        left = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return False
    is_pinned = bool(in_host) and in_host[0].untyped_storage().data_ptr() in pinned
    return crosses and not (left and is_pinned)


def host_waits(why: str, graph: "Graph | None") -> None:
    if graph or waits.raise_errors:
        raise RuntimeError(f"called a synchronizing CUDA operation: {why}")


class Graph:
    """The operations between the beginning and the end of a capture, whose effects the end undoes:
    a GPU computes nothing meanwhile.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def before(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        arguments = function._schema.arguments
        values = {each.name: value for each, value in zip(arguments, args, strict=False)}
        values.update(kwargs)
        for each in arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                written = tree_flatten(values.get(each.name))[0]
                tensors = [value for value in written if isinstance(value, Tensor)]
                self._before += [(tensor, tensor.clone()) for tensor in tensors]

    def end(self) -> None:
        for tensor, value in reversed(self._before):
            tensor.copy_(value)
        self._before.clear()
        for function, _, _, result in self.operations:
            for tensor in new_tensors(function, result):
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    def replay(self) -> None:
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            for tensor, value in zip(
                new_tensors(function, result), new_tensors(function, again), strict=True
            ):
                tensor.copy_(value)


def new_tensors(function: Any, result: Any) -> list[Tensor]:
    """The results that are not what the operation was given, or a view of it."""
    schema = function._schema
    if schema.is_mutable or any(each.alias_info for each in schema.returns):
        return []
    return [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]


class Capture:
    """A context in which a graph is captured, with the arguments of torch.cuda.graph."""

    def __init__(self, graph: Graph, **settings: Any) -> None:
        self._graph, self._mode = graph, EveryOperation(graph)

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)
        self._graph.end()


class Stream:
    """A stream, or an event, with nothing left to do."""

    def __init__(self, device: Any = None, **settings: Any) -> None:
        self.device = with_index(device or "cuda")

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> "Stream":
        return Stream(self.device)

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


devices = ctypes.CDLL(os.environ["SIMULATED_GPUS"])
pinned: set[int] = set()
"""Addresses of the memory that was asked for as pinned."""
waits = SimpleNamespace(raise_errors=False)


def set_device(device: Any) -> None:
    devices.set_gpu(with_index(device).index)


def set_sync_debug_mode(mode: str) -> None:
    waits.raise_errors = mode == "error"


def properties(device: Any = None) -> SimpleNamespace:
    index = with_index(device or "cuda").index
    return SimpleNamespace(uuid=f"GPU-{index}", name="a simulated GPU", total_memory=MEMORY)


def pin_memory(tensor: Tensor) -> Tensor:
    pinned.add(tensor.untyped_storage().data_ptr())
    return tensor


def tensor_of(data: Any, **settings: Any) -> Tensor:
    """torch.tensor, which shows no mode the device that it is given."""
    device = settings.pop("device", None)
    made = make_tensor(data, **settings)
    return made if device is None else made.to(device)


def shard(model: torch.nn.Module, **settings: Any) -> Any:
    """fully_shard, which moves parameters by their data, where the numbers cannot follow."""
    model.to(settings["mesh"].device_type)
    return fully_shard(model, **settings)


def run_thread(thread: threading.Thread) -> None:
    with EveryOperation():
        run_bare(thread)


def plain_of(tensor: Tensor) -> Tensor:
    """The shard of a tensor, of torch's own class."""
    return inside(local(tensor))


make_tensor, run_bare, fully_shard, local = (
    torch.tensor,
    threading.Thread.run,
    fsdp.fully_shard,
    optimizer_state.local,
)
ANSWERS = {
    "CUDAGraph": Graph,
    "Event": Stream,
    "Stream": Stream,
    "current_device": lambda: devices.current_gpu(),  # torch hashes it.
    "current_stream": Stream,
    "device": lambda device: contextlib.nullcontext(),
    "device_count": lambda: devices.gpus(),
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: properties(device).name,
    "get_device_properties": properties,
    "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    "graph": Capture,
    "graph_pool_handle": lambda: (0, 0),
    "is_available": lambda: True,
    "is_bf16_supported": lambda **settings: True,
    "is_initialized": lambda: True,
    "max_memory_allocated": lambda device=None: 0,
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "set_device": set_device,
    "set_rng_state": lambda state, device=None: None,
    "set_sync_debug_mode": set_sync_debug_mode,
    "stream": lambda stream: contextlib.nullcontext(),
}


def install() -> None:
    """Answer for torch.cuda, in this process and from now on."""
    if torch.tensor is tensor_of:
        return
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.tensor = tensor_of
    Tensor.cuda = lambda tensor: tensor.to("cuda")
    Tensor.pin_memory = pin_memory
    Tensor.record_stream = lambda tensor, stream: None
    sharding.fully_shard = shard
    # The memory of a simulated tensor is not its own to give back.
    fsdp_param.alloc_storage = fsdp_param.free_storage = lambda tensor: None
    optimizer_state.local = plain_of
    threading.Thread.run = run_thread
    EveryOperation().__enter__()
