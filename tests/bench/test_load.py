"""When requests are sent, and what is asked."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from pathlib import Path

import pytest

from stretto.bench.datasets import (
    Prompt,
    RandomWords,
    jsonl_prompts,
    random_prompts,
    repeated,
    seed_tts_prompts,
    text_prompts,
)
from stretto.bench.load import Outcome, arrival_times, run_load
from stretto.errors import ConfigError
from stretto.metrics import Timeline


def test_arrivals_are_the_same_for_a_seed_and_come_at_the_rate() -> None:
    times = arrival_times(4000, rate=20.0, burstiness=1.0, seed=3)
    assert times == arrival_times(4000, rate=20.0, burstiness=1.0, seed=3)
    assert times != arrival_times(4000, rate=20.0, burstiness=1.0, seed=4)
    assert times[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Of an exponential distribution: as wide as its mean.
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)
    assert arrival_times(3, rate=math.inf, burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]


def run(count: int, *, rate: float, limit: int | None, takes_s: float) -> tuple[list[float], int]:
    """How long after the start each request was let through, and how many were in at most."""
    inside = most = 0
    began: list[float] = []

    async def ask(prompt: Prompt) -> Outcome:
        nonlocal inside, most
        timeline = Timeline(time.perf_counter())
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(takes_s)
        inside -= 1
        timeline.ended_s = time.perf_counter()
        return Outcome(prompt, timeline)

    prompts = [Prompt(text=str(number)) for number in range(count)]
    start_s = time.perf_counter()
    load = asyncio.run(
        run_load(
            prompts,
            ask,
            arrivals=arrival_times(count, rate=rate, burstiness=1.0, seed=1),
            max_concurrency=limit,
            on_done=lambda outcome: began.append(outcome.timeline.sent_s),
        )
    )
    assert [outcome.prompt for outcome in load.outcomes] == prompts
    assert load.wall_s >= takes_s
    return sorted(at - start_s for at in began), most


def test_a_closed_loop_never_has_more_than_its_limit() -> None:
    _, most = run(12, rate=math.inf, limit=3, takes_s=0.01)
    assert most == 3


def test_an_open_loop_sends_at_its_times_however_slow_the_server() -> None:
    began, most = run(10, rate=30.0, limit=None, takes_s=1.0)
    times = arrival_times(10, rate=30.0, burstiness=1.0, seed=1)
    assert most == 10
    # Late on a busy machine, but never early.
    assert all(at >= planned for at, planned in zip(began, times, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 2, 57])
def test_random_prompts_have_exactly_their_tokens_and_differ(
    parrot_dir: Path, num_tokens: int
) -> None:
    words = RandomWords(parrot_dir / "tokenizer.json")
    texts = [words.text(num_tokens, seed=seed) for seed in range(5)]
    assert {words.count(text) for text in texts} == {num_tokens}
    assert texts[0] == words.text(num_tokens, seed=0)
    if num_tokens > 2:
        assert len(set(texts)) == 5
    (prompt,) = random_prompts(words, count=1, input_len=num_tokens, output_len=9, seed=0)
    assert (prompt.num_tokens, prompt.max_tokens) == (num_tokens, 9)


def test_files_give_their_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("One.\n\nTwo.\n")
    assert [prompt.text for prompt in text_prompts(lines, 5)] == ["One.", "Two."]
    assert [prompt.text for prompt in repeated(text_prompts(lines, 5), 3)] == [
        "One.",
        "Two.",
        "One.",
    ]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "One.", "output_len": 3, "extra_body": {"voice": "x"}}\n')
    assert jsonl_prompts(objects, 5) == [Prompt(text="One.", max_tokens=3, extra={"voice": "x"})]


def test_what_a_file_lacks_is_named_with_its_line(tmp_path: Path) -> None:
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "One."}\n{"promt": "Two."}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2: .*promt"):
        jsonl_prompts(objects, 5)
    with pytest.raises(ConfigError, match=r"nowhere.txt: No such file"):
        text_prompts(tmp_path / "nowhere.txt", 5)


def test_seed_tts_lines_become_requests_of_their_kind(tmp_path: Path) -> None:
    (tmp_path / "en" / "wavs").mkdir(parents=True)
    (tmp_path / "en" / "wavs" / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "en" / "meta.lst").write_text("a|Her words.|wavs/a.wav|My words.|A low voice.\n")
    (clone,) = seed_tts_prompts("seed-tts", tmp_path, "en", chat=False, output_len=64)
    assert clone.text == "My words." and clone.system is None
    assert clone.extra == {
        "ref_audio": "data:audio/wav;base64,UklGRg==",
        "ref_text": "Her words.",
        "task_type": "Base",
        "language": "English",
        "max_new_tokens": 64,
    }
    (plain,) = seed_tts_prompts("seed-tts-text", tmp_path, "en", chat=True, output_len=64)
    assert plain.extra == {} and plain.system is not None
    (design,) = seed_tts_prompts("seed-tts-design", tmp_path, "en", chat=False, output_len=64)
    assert design.extra["instructions"] == "A low voice."
    assert json.dumps(design.extra)
