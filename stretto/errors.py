"""Every error that stretto raises on purpose.

StrettoError
├── ConfigError          a deployment file or a flag is wrong; nothing was started
├── CheckpointError      a directory is no checkpoint, or its tensors are not the model's
├── InvalidRequest       a request cannot be served as asked; names the parameter
├── Overloaded           no room for one more request now; try again later
└── RequestFailed        a request was accepted and could not be finished
    ├── StageFailed      a stage died, hung or raised; names the stage
    ├── TransferFailed   a chunk was lost, late or unreadable; names the edge
    ├── RequestAborted   its owner, or somebody else who may, took it back
    └── PipelineClosed   the pipeline was shut down meanwhile
"""

from __future__ import annotations


class StrettoError(Exception):
    """The root of all errors raised on purpose."""


class ConfigError(StrettoError):
    """A deployment file or a flag is wrong; nothing was started."""


class CheckpointError(StrettoError):
    """A directory is no checkpoint, or its tensors are not those of the model."""


class InvalidRequest(StrettoError, ValueError):
    """A request cannot be served as asked.

    `param` is the field at fault. A ValueError, so that msgspec puts the field's path before the
    message when the value came over a wire.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(StrettoError):
    """No room for one more request now."""


class RequestFailed(StrettoError):
    """A request was accepted and could not be finished."""


class StageFailed(RequestFailed):
    """A stage died, hung or raised while it held the request."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"stage {stage}: {message}")
        self.stage = stage


class TransferFailed(RequestFailed):
    """A chunk was lost, late or unreadable."""

    def __init__(self, edge: str, message: str) -> None:
        super().__init__(f"edge {edge}: {message}")
        self.edge = edge


class RequestAborted(RequestFailed):
    """The request was taken back; whoever still reads its events is told so."""


class PipelineClosed(RequestFailed):
    """The pipeline was shut down before the request was finished."""
