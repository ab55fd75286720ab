"""Chunks grow so that a player never runs dry, and every frame is still heard once."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.bridges.codec_chunks import CodecChunker
from stretto.config.deployment import CodecChunkConfig

# In frames of sound: what one call of the vocoder costs, and each frame in it.
CALL, PER_FRAME = 0.1, 0.05


def sizes_of(num_frames: int, *, initial: int, growth: float | None, steady: int = 25) -> list[int]:
    chunker = CodecChunker(initial=initial, steady=steady, growth=growth)
    sizes, heard = [], []
    for number in range(num_frames):
        chunker.push(np.full((1, 16), number, np.int16))
        if chunker.is_ready:
            heard.append(chunker.cut())
            sizes.append(len(heard[-1]))
    if chunker.num_held:
        heard.append(chunker.cut())
        sizes.append(len(heard[-1]))
    assert [int(frame) for part in heard for frame in part[:, 0]] == list(range(num_frames))
    return sizes


def gaps(sizes: list[int], rtf: float) -> float:
    """Silence of a player that begins with the first chunk, in frames."""
    made = decoded = 0.0
    arrivals = []
    for size in sizes:
        made += size * rtf
        decoded = max(decoded, made) + CALL + PER_FRAME * size
        arrivals.append(decoded)
    played_until, silence = arrivals[0], 0.0
    for size, arrival in zip(sizes, arrivals, strict=True):
        silence += max(0.0, arrival - played_until)
        played_until = max(played_until, arrival) + size
    return silence


@pytest.mark.parametrize("initial", [2, 4, 8, 16, 25])
@pytest.mark.parametrize("rtf", [0.1, 0.4, 0.6, 0.79])
def test_with_the_default_growth_no_listener_waits_below_an_rtf_of_0_8(
    initial: int, rtf: float
) -> None:
    growth = CodecChunkConfig().codec_chunk_growth
    assert gaps(sizes_of(400, initial=initial, growth=growth), rtf) == 0.0


def test_without_growth_a_listener_would_wait() -> None:
    assert gaps(sizes_of(400, initial=2, growth=None), 0.4) > 1.0


@pytest.mark.parametrize("growth", [1.05, 1.2, 2.0, 64.0, None])
@pytest.mark.parametrize("num_frames", [0, 1, 2, 3, 7, 25, 26, 100])
def test_sizes_grow_from_the_initial_to_the_steady_one(
    growth: float | None, num_frames: int
) -> None:
    sizes = sizes_of(num_frames, initial=2, growth=growth)
    full = sizes[:-1]
    assert full == sorted(full)
    assert all(size <= 25 for size in sizes)
    assert not full or full[0] == 2


@pytest.mark.parametrize("initial", [4, 6, 16, 25])
def test_half_of_the_first_chunk_is_in_hand_while_the_second_is_made(initial: int) -> None:
    first, second, *rest = sizes_of(400, initial=initial, growth=1.2)
    assert first == initial
    assert initial / 2 / 1.2 - 1 < second <= initial / 2
    grown = [second, *rest[:-1]]
    assert grown == sorted(grown)
    assert max(grown) == 25


def test_all_streams_grow_in_the_same_steps() -> None:
    steps = {size for i in range(2, 17) for size in sizes_of(400, initial=i, growth=1.2)[1:-1]}
    assert steps == set(sizes_of(400, initial=2, growth=1.2)[:-1])


def gaps_of_a_late_second_chunk(late: float, initial: int) -> float:
    """Silence when the Talker, at an RTF of 0.5, is held up by `late` frames after the first."""
    arrivals, made = [], 0.0
    sizes = sizes_of(100, initial=initial, growth=1.2)
    for number, size in enumerate(sizes):
        made += size * 0.5 + (late if number == 1 else 0.0)
        arrivals.append(made)
    played_until, silence = arrivals[0], 0.0
    for size, arrival in zip(sizes, arrivals, strict=True):
        silence += max(0.0, arrival - played_until)
        played_until = max(played_until, arrival) + size
    return silence


@pytest.mark.parametrize("initial", [4, 6, 16])
def test_a_talker_may_be_held_up_by_three_quarters_of_the_first_chunk(initial: int) -> None:
    assert gaps_of_a_late_second_chunk(0.75 * initial, initial) == 0.0
    assert gaps_of_a_late_second_chunk(initial, initial) > 0.0
