"""A step's output on its way to the host, while the device goes on.

On CUDA the tensor is cloned (a graph or the next step may overwrite it), copied by a stream of its
own into pinned memory, and an event says when it is there: the stream of the model never waits. On
a CPU the tensor is there already, and nobody overwrites it: runners give out fresh ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """Begins to copy `tensor`; any thread may wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = tensor
        if not tensor.is_cuda:
            return
        device = tensor.device
        if device not in _copy_streams:
            _copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = _copy_streams[device]
        snapshot = tensor.clone()
        # torch keeps pinned memory for reuse, so this allocates only at first.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._host.copy_(snapshot, non_blocking=True)
            # The snapshot's memory may be reused only behind this copy.
            snapshot.record_stream(stream)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(stream)

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
