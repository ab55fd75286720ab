"""stretto's models over the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stretto.models.code2wav import Code2Wav
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.qwen3_tts import talker as tts_talker
from stretto.models.qwen3_tts.spec import SPEECH_TOKENIZER, TtsSpec, read_spec
from stretto.models.tiny import CACHED_CHECKPOINTS, cached_checkpoint
from tests.models.small import load
from tests.reference_tts import load_reference


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def thinker(tiny_dir: Path, tiny_spec: OmniSpec) -> Thinker:
    return load(tiny_dir, lambda source: Thinker(source, tiny_spec.thinker))


@pytest.fixture(scope="session")
def talker(tiny_dir: Path, tiny_spec: OmniSpec) -> Talker:
    return load(tiny_dir, lambda source: Talker(source, tiny_spec.talker))


@pytest.fixture(scope="session")
def code2wav(tiny_dir: Path, tiny_spec: OmniSpec) -> Code2Wav:
    return load(tiny_dir, lambda source: Code2Wav(source, tiny_spec.code2wav))


@dataclass(frozen=True)
class Tts:
    """A tiny Qwen3-TTS checkpoint of some kind: the reference over it, and ours."""

    directory: Path
    spec: TtsSpec
    reference: Any
    talker: tts_talker.Talker
    code2wav: Code2Wav


TTS_CHECKPOINTS = [name for name, r in CACHED_CHECKPOINTS.items() if r.arch == "qwen3-tts"]


@cache
def open_tts(name: str, cache_dir: Path) -> Tts:
    directory = cached_checkpoint(name, cache_dir=cache_dir)
    speech_tokenizer = directory / SPEECH_TOKENIZER
    config, codec_config = (
        msgspec.json.decode((place / "config.json").read_bytes())
        for place in (directory, speech_tokenizer)
    )
    spec = read_spec(config, codec_config, str(directory))
    return Tts(
        directory=directory,
        spec=spec,
        reference=load_reference(directory),
        talker=load(directory, lambda source: tts_talker.Talker(source, spec.talker)),
        code2wav=load(speech_tokenizer, lambda source: Code2Wav(source, spec.code2wav)),
    )


@pytest.fixture(scope="session", params=TTS_CHECKPOINTS)
def tts(request: pytest.FixtureRequest, cache_dir: Path) -> Tts:
    return open_tts(request.param, cache_dir)


@pytest.fixture(scope="session")
def tts_base(cache_dir: Path) -> Tts:
    return open_tts("tiny-tts-base", cache_dir)


@pytest.fixture(scope="session")
def tts_custom(cache_dir: Path) -> Tts:
    return open_tts("tiny-tts", cache_dir)
