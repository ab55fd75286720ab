"""stretto's models over the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.models.code2wav import Code2Wav
from stretto.models.qwen3_omni.spec import OmniSpec
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from tests.models.small import MAX_ROWS, load


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def thinker(tiny_dir: Path, tiny_spec: OmniSpec) -> Thinker:
    return load(tiny_dir, lambda source: Thinker(source, tiny_spec.thinker))


@pytest.fixture(scope="session")
def talker(tiny_dir: Path, tiny_spec: OmniSpec) -> Talker:
    return load(tiny_dir, lambda source: Talker(source, tiny_spec.talker, max_rows=MAX_ROWS))


@pytest.fixture(scope="session")
def code2wav(tiny_dir: Path, tiny_spec: OmniSpec) -> Code2Wav:
    return load(tiny_dir, lambda source: Code2Wav(source, tiny_spec.code2wav))
