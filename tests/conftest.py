"""What all tests share: checkpoints that are made once and kept, and the references over them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

# Examples are drawn the same way on every run, and a slow machine is no fault of the code.
settings.register_profile(
    "stretto",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("stretto")


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where made checkpoints are kept between runs; STRETTO_CACHE names another place."""
    named = os.environ.get("STRETTO_CACHE")
    return Path(named) if named else Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session")
def tiny_dir(cache_dir: Path) -> Path:
    from stretto.models.tiny import cached_checkpoint

    return cached_checkpoint("tiny", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def parrot_dir() -> Path:
    from stretto import models

    return Path(models.__path__[0]) / "parrot"


@pytest.fixture(scope="session")
def tiny_spec(tiny_dir: Path) -> Any:
    from transformers import AutoConfig

    from stretto.models.qwen3_omni.spec import read_spec

    return read_spec(AutoConfig.from_pretrained(tiny_dir).to_dict(), str(tiny_dir))


@pytest.fixture(scope="session")
def tiny_reference(tiny_dir: Path) -> Any:
    """transformers' own model over the same weights, float32."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_dir, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
