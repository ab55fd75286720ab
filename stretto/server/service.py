"""What all routes share: the pipeline, its names, and what is kept between requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.api import AsyncOmni
from stretto.pipeline.pipeline import PipelineRequest
from stretto.server.door import Gate
from stretto.server.meters import Meters
from stretto.server.settings import ServerSettings
from stretto.server.streaming import Job

# OpenAI keeps the sound of an answer for an hour.
REPLY_LIFETIME_S = 3600
MAX_REPLIES = 4096


class Replies:
    """Transcripts of spoken answers by id, so that a later turn can name them; a bounded store."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def keep(self, audio_id: str, transcript: str) -> int:
        """When it will be forgotten, in Unix seconds; earlier if there are too many."""
        expires_at = int(time.time()) + REPLY_LIFETIME_S
        self._kept[audio_id] = (transcript, expires_at)
        if len(self._kept) > MAX_REPLIES:
            self._kept.popitem(last=False)
        return expires_at

    def transcript(self, audio_id: str) -> str | None:
        if audio_id not in self._kept:
            return None
        transcript, expires_at = self._kept[audio_id]
        return transcript if time.time() < expires_at else None


class Service:
    def __init__(self, omni: AsyncOmni, settings: ServerSettings) -> None:
        self.omni = omni
        self.settings = settings
        self.names = settings.served_model_names or (omni.model.name,)
        self.stages = tuple(stage.name for stage in omni.model.config.stages)
        self.meters = Meters(self.names[0], self.stages)
        self.gate = Gate()
        self.replies = Replies()
        self.created = int(time.time())
        # Tokenizing a long prompt takes longer than a frame may wait, and a tokenizer is not made
        # for two threads at once.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    @property
    def speakers(self) -> Sequence[str]:
        return self.omni.frontend.speakers

    async def prepared(self, prepare: Callable[[], PipelineRequest]) -> PipelineRequest:
        """What `prepare` makes of a prompt. Raises what it raises: InvalidRequest."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    def job(self, request: PipelineRequest) -> Job:
        return Job(self.omni.pipeline, request, self.meters)
