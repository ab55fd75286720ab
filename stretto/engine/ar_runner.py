"""Runs a step of an autoregressive stage: rows in, hidden rows, logits, ids; for a Talker a frame.

    ARBatch ─> rows [n, H] ─> decoder ─> last row of each request that draws ─> logits ─> ids
                 ▲                                                                        │
                 └── fed back on the device: last ids, or the sum of a frame's embeddings ┘

What a next step needs stays in per-row tables on the device; the host learns ids and frames through
the `PendingOutput`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.bridges.prompt_inbox import PromptInbox
from stretto.engine.host_copy import HostCopy
from stretto.engine.recorded_frames import RecordedFrames
from stretto.engine.runner import Materialized
from stretto.engine.sampler import Draw, DrawPlan, Sampler
from stretto.engine.scheduler import Admission, ARBatch, ScheduledRows
from stretto.models.decoder import Decoder, KVCache, Segment
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.talker import CodecTalker
from stretto.request import GIVEN_VOICE, SamplingParams

# Keeps a request's stages from drawing the same numbers with the same seed.
STAGE_SEED_STEP = 0x9E3779B97F4A7C15


def stage_seed(seed: int, stage_id: int) -> int:
    """A seed of its own for each stage of a request, in the range that generators take."""
    return (seed + stage_id * STAGE_SEED_STEP) % 2**63


class SpeechInbox(Protocol):
    """What a Talker asks an inbox about the rows that it is to run."""

    # Whom to sound like, float32 [H], and the first position and the frames of a reference.
    speaker_embedding: np.ndarray | None
    reference: tuple[int, np.ndarray] | None

    def text_ids(self, start: int, stop: int) -> list[int]:
        """Text ids of positions that the inbox covers."""

    def codec_ids(self, start: int, stop: int) -> list[int]:
        """Codec ids of prompt positions; NO_CODEC and GIVEN_VOICE are none."""


class ARPending:
    """The outputs of one autoregressive step."""

    def __init__(self, token_ids: Tensor | None, frames: Tensor | None, end_id: int | None) -> None:
        self._token_ids = None if token_ids is None else HostCopy(token_ids)
        self._frames = None if frames is None else HostCopy(frames.to(torch.int16))
        # The id for which there is no frame: the Talker's end.
        self._end_id = end_id

    def sampled(self) -> list[int]:
        if self._token_ids is None:
            return []
        token_ids: list[int] = self._token_ids.wait().tolist()
        return token_ids

    def materialize(self) -> Materialized:
        if self._frames is None:
            return Materialized()
        frames = self._frames.wait().numpy()
        return Materialized(
            frames=tuple(
                None if token_id == self._end_id else frame
                for token_id, frame in zip(self.sampled(), frames, strict=True)
            )
        )


class ARRunner(abc.ABC):
    """The part that is the same for every autoregressive model."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, sampler: Sampler, *, stage_id: int
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._stage_id = stage_id

    @abc.abstractmethod
    def _rows(self, items: Sequence[ScheduledRows]) -> Tensor:
        """Input rows of all items, [rows, H]."""

    @abc.abstractmethod
    def _finish(self, hidden: Tensor, token_ids: Tensor, rows: list[int]) -> ARPending:
        """Keeps what the next step needs; `hidden` are the normed rows that ids were drawn from."""

    @abc.abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor: ...

    def prepare(self) -> bool:
        return False

    def release(self, request_id: str) -> None:  # noqa: B027
        """Nothing is kept but table rows, which the next request overwrites."""

    @torch.inference_mode()
    def execute(self, batch: ARBatch) -> ARPending:
        for admission in batch.admitted:
            self._admit(admission)
        if not batch.items:
            return ARPending(None, None, None)
        segments, last_rows, first = [], [], 0
        for item in batch.items:
            base = item.place.first_block * self._cache.block_size
            segments.append(Segment(first, item.num_rows, item.start, base))
            first += item.num_rows
            if item.draws:
                last_rows.append(first - 1)
        x = self._decoder.forward(self._rows(batch.items), segments, self._cache)
        if not last_rows:
            return ARPending(None, None, None)
        if len(last_rows) < first:
            x = x[torch.tensor(last_rows, device=x.device)]
        hidden = self._decoder.final_norm(x)
        rows = [item.place.row for item in batch.items if item.draws]
        token_ids = self._sampler.sample(self._logits(hidden), rows)
        return self._finish(hidden, token_ids, rows)

    def _admit(self, admission: Admission) -> Draw:
        ticket, place = admission.ticket, admission.place
        if admission.num_copied_blocks:
            self._cache.copy_blocks(
                admission.copied_from, place.first_block, admission.num_copied_blocks
            )
        seed = ticket.sampling.seed
        assert seed is not None, "the front gives every request a seed"
        return self._sampler.admit(
            place.row,
            ticket.sampling,
            seed=stage_seed(seed, self._stage_id),
            prompt=ticket.prompt_token_ids,
        )


class ThinkerRunner(ARRunner):
    def __init__(
        self, model: Thinker, cache: KVCache, sampler: Sampler, *, max_rows: int, stage_id: int
    ) -> None:
        super().__init__(model.decoder, cache, sampler, stage_id=stage_id)
        self._model = model
        self._last_ids = torch.zeros(max_rows, dtype=torch.int64, device=model.decoder.device)

    def _rows(self, items: Sequence[ScheduledRows]) -> Tensor:
        device = self._last_ids.device
        parts = []
        for item in items:
            assert isinstance(item.inbox, PromptInbox)
            if item.num_prompt_rows:
                ids = item.inbox.token_ids[item.start : item.start + item.num_rows]
                parts.append(torch.from_numpy(ids).to(device))
            else:
                parts.append(self._last_ids[item.place.row : item.place.row + 1])
        return self._model.embed(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def _finish(self, hidden: Tensor, token_ids: Tensor, rows: list[int]) -> ARPending:
        self._last_ids[torch.tensor(rows, device=token_ids.device)] = token_ids
        return ARPending(token_ids, frames=None, end_id=None)


class TalkerRunner(ARRunner):
    def __init__(
        self,
        model: CodecTalker,
        cache: KVCache,
        sampler: Sampler,
        *,
        max_rows: int,
        stage_id: int,
        frames: RecordedFrames,
    ) -> None:
        super().__init__(model.decoder, cache, sampler, stage_id=stage_id)
        self._model = model
        self._frames = frames
        self._draws: list[Draw | None] = [None] * max_rows
        self._plan: tuple[list[int], DrawPlan] | None = None
        # Of each row's last frame: the sum of its codes' embeddings.
        self._frame_rows = torch.zeros(
            max_rows,
            model.spec.decoder.hidden_size,
            dtype=model.decoder.dtype,
            device=model.decoder.device,
        )

    def prepare(self) -> bool:
        return self._frames.prepare()

    def _admit(self, admission: Admission) -> Draw:
        own = super()._admit(admission)
        speech = admission.ticket.speech
        assert speech is not None
        greedy = own.params.greedy
        residual = SamplingParams() if greedy else speech.residual_sampling
        self._draws[admission.place.row] = Draw(residual, own.generator)
        self._plan = None
        return own

    def _rows(self, items: Sequence[ScheduledRows]) -> Tensor:
        device = self._frame_rows.device
        text: list[int] = []
        for item in items:
            inbox: SpeechInbox = item.inbox
            text += inbox.text_ids(item.start, item.start + item.num_rows)
        x = self._model.text_rows[torch.tensor(text, device=device)]
        decoding = [item.place.row for item in items if not item.num_prompt_rows]
        if len(decoding) == len(items):
            return x.add_(self._frame_rows[torch.tensor(decoding, device=device)])
        first = 0
        for item in items:
            rows = x[first : first + item.num_rows]
            if item.num_prompt_rows:
                self._add_codec_rows(rows, item)
            else:
                rows += self._frame_rows[item.place.row]
            first += item.num_rows
        return x

    def _add_codec_rows(self, rows: Tensor, item: ScheduledRows) -> None:
        """What stands beside the text in a prompt: codec ids, a given voice, reference frames."""
        inbox: SpeechInbox = item.inbox
        stop = item.start + item.num_rows
        codec_ids = inbox.codec_ids(item.start, stop)
        at = [index for index, codec_id in enumerate(codec_ids) if codec_id >= 0]
        if at:
            ids = torch.tensor([codec_ids[index] for index in at], device=rows.device)
            rows[torch.tensor(at, device=rows.device)] += self._model.codec_rows(ids)
        if GIVEN_VOICE in codec_ids:
            assert inbox.speaker_embedding is not None
            voice = torch.from_numpy(inbox.speaker_embedding)
            rows[codec_ids.index(GIVEN_VOICE)] += voice.to(rows.device, rows.dtype)
        if inbox.reference is not None:
            first, codes = inbox.reference
            begin, end = max(item.start, first), min(stop, first + len(codes))
            if begin < end:
                frames = torch.from_numpy(codes[begin - first : end - first])
                rows[begin - item.start : end - item.start] += self._model.frame_rows(
                    frames.to(rows.device, torch.int64)
                )

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def _finish(self, hidden: Tensor, token_ids: Tensor, rows: list[int]) -> ARPending:
        plan = self._residual_plan(rows)
        # All of a frame's noise at once: one call per request instead of one per code.
        noise = plan.noise(self._model.spec.num_codebooks - 1)
        first = self._model.codec_rows(token_ids)
        residual, total = self._frames.generate(hidden, first, plan, noise)
        self._frame_rows[torch.tensor(rows, device=total.device)] = total
        frames = torch.cat((token_ids[:, None], residual), 1)
        return ARPending(token_ids, frames, end_id=self._model.spec.codec_ids.eos)

    def _residual_plan(self, rows: list[int]) -> DrawPlan:
        """How the rows draw their residual codes; batches seldom change from step to step."""
        if self._plan is None or self._plan[0] != rows:
            draws = [draw for row in rows if (draw := self._draws[row]) is not None]
            vocab = self._model.spec.codebook_size
            self._plan = rows, DrawPlan(draws, vocab, self._frame_rows.device)
        return self._plan[1]
