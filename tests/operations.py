"""Counts the operations that a GPU would be given, on a CPU."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts what a GPU would compute: views and questions of types take no kernel; and the numbers
    that are read, for which the host would wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.reads += "local_scalar" in str(operation)
        self.count += not operation.is_view and "promote" not in str(operation)
        return operation(*args, **(kwargs or {}))
