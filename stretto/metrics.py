"""What is measured of a request, defined once for the server and the bench (api.md 4.9).

    TTFT      first text minus sending                 TTFP   first sound minus sending
    ITL       time between text tokens: a gap that brought k of them counts k times, a k-th each
    TPOT      the mean ITL of a request               E2EL   its end minus sending
    RTF       last sound minus sending, over the sound's duration; below 1 keeps up with a player
    underrun  how long a player that starts with the first sound has to stand still, in all

Times are seconds on any one clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

# Below this a listener notices no gap.
CONTINUITY_THRESHOLD_S = 0.1


class TextClock:
    """When text came: the first of it, and the time between tokens."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.num_tokens = 0

    def arrived(self, at_s: float, num_tokens: int) -> list[float]:
        """Books tokens; the inter-token latencies that they add."""
        if num_tokens == 0:
            return []
        if self.first_s is None:
            gaps = [0.0] * (num_tokens - 1)
            self.first_s = at_s
        else:
            gaps = [(at_s - self.last_s) / num_tokens] * num_tokens
        self.last_s = at_s
        self.num_tokens += num_tokens
        return gaps

    @property
    def time_per_output_token_s(self) -> float | None:
        """Between the first token and the last; None for a single one."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


class SoundClock:
    """When sound came, and how a player that began with the first of it fared."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.duration_s = 0.0
        self.underrun_s = 0.0
        # How often the player had nothing to play.
        self.num_gaps = 0
        # Of the sound that came first.
        self.first_duration_s = 0.0

    def arrived(self, at_s: float, duration_s: float) -> None:
        if self.first_s is None:
            self.first_s = at_s
            self.first_duration_s = duration_s
        # Each time it stands still the player falls back by so much, and plays on from there.
        behind_s = at_s - self.first_s - self.duration_s
        if behind_s > self.underrun_s:
            self.underrun_s = behind_s
            self.num_gaps += 1
        self.last_s = at_s
        self.duration_s += duration_s

    @property
    def is_continuous(self) -> bool:
        return self.underrun_s <= CONTINUITY_THRESHOLD_S


class Timeline:
    """One request as its client sees it, from sending to its end."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.ended_s = sent_s
        self.text = TextClock()
        self.sound = SoundClock()
        # When tokens came, and how many with each arrival.
        self.token_arrivals: list[tuple[float, int]] = []
        self.inter_token_s: list[float] = []
        # Tokens of text and of the prompt; what the server says of them goes before what came.
        self.num_text_tokens = 0
        self.num_prompt_tokens = 0
        self.num_samples = 0
        # Set where all that comes is sound: its end is then the time of the last sound.
        self.is_sound_alone = False

    def text_arrived(self, at_s: float, num_tokens: int) -> None:
        self.token_arrivals.append((at_s, num_tokens))
        self.inter_token_s += self.text.arrived(at_s, num_tokens)
        self.ended_s = at_s

    def sound_arrived(self, at_s: float, num_samples: int, sample_rate: int) -> None:
        """`num_samples` per channel."""
        self.sound.arrived(at_s, num_samples / sample_rate)
        self.num_samples += num_samples
        self.ended_s = at_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.text.first_s is None else self.text.first_s - self.sent_s

    @property
    def ttfp_s(self) -> float | None:
        return None if self.sound.first_s is None else self.sound.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        return self.text.time_per_output_token_s

    @property
    def e2el_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def rtf(self) -> float | None:
        if self.sound.duration_s == 0.0:
            return None
        last_s = self.ended_s if self.is_sound_alone else self.sound.last_s
        return (last_s - self.sent_s) / self.sound.duration_s


class Spread(msgspec.Struct, frozen=True):
    """How values lie; `percentiles` by their names ("p99"). All 0 where there are no values."""

    mean: float
    median: float
    percentiles: dict[str, float]


def spread(values: Sequence[float], percentiles: Sequence[float] = ()) -> Spread:
    """Percentiles are interpolated linearly."""
    some = values or [0.0]
    return Spread(
        mean=float(np.mean(some)),
        median=float(np.median(some)),
        percentiles={f"p{p:g}": float(np.percentile(some, p)) for p in percentiles},
    )
