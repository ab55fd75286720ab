"""The inbox of the entry stage: its ticket brings the whole prompt, and it feeds itself."""

from __future__ import annotations

import numpy as np

from stretto.payloads import Payload
from stretto.request import StageRequest

# More positions than any context has: covered without limit.
UNBOUNDED = 2**62


class PromptInbox:
    """`token_ids` int64 [n] is the prompt; what follows on it the stage draws itself."""

    is_void = False
    positions_ready = UNBOUNDED

    def __init__(self, ticket: StageRequest) -> None:
        self.token_ids = np.array(ticket.prompt_token_ids, dtype=np.int64)
        self.prompt_length: int | None = len(self.token_ids)

    def push(self, payload: Payload) -> None:
        raise TypeError("the entry stage has no upstream")

    def end(self) -> None:
        raise TypeError("the entry stage has no upstream")
