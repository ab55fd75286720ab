"""The reference implementation of Qwen3-TTS, from a side installation without its dependencies.

`make .reference` installs it. Of what it imports, only what its 12 Hz models need is there: the
rest (another codec, a web page) is stood in for by modules that refuse to be used, and librosa by
the two functions of it that count, from libraries that are there.

    load_reference(model_dir, directory)          the reference over a checkpoint, CPU, float32
    reference_codes(model, text, kind=..., ...)   what it says, greedily: codes, and their sound
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import ConfigError

PACKAGE = "qwen_tts"
# Imported by it; those that are not installed are stood in for while it is imported.
DEPENDENCIES = (
    "librosa", "librosa.filters", "torchaudio", "torchaudio.compliance",
    "torchaudio.compliance.kaldi", "sox", "onnxruntime", "einops",
)  # fmt: skip


class _Absent(ModuleType):
    """In place of a module that is not installed: whatever is taken from it raises when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError(f"{self.__name__}.{name} is not there; the tests need none of it")

        return refuse


def _mel(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> np.ndarray:
    """`librosa.filters.mel`, by transformers."""
    from transformers.audio_utils import mel_filter_bank

    filters: np.ndarray = mel_filter_bank(
        num_frequency_bins=1 + n_fft // 2, num_mel_filters=n_mels, min_frequency=fmin,
        max_frequency=fmax, sampling_rate=sr, norm="slaney", mel_scale="slaney",
    )  # fmt: skip
    return filters.T.astype(np.float32)


def _resample(y: np.ndarray, *, orig_sr: int, target_sr: int) -> np.ndarray:
    """`librosa.resample`, which also uses soxr unless it is told otherwise."""
    import soxr

    resampled: np.ndarray = soxr.resample(y, orig_sr, target_sr)
    return resampled


@cache
def reference_package(directory: Path) -> ModuleType:
    """The package in `directory`.

    Raises:
        ConfigError: it is not there.
    """
    if not (directory / PACKAGE).is_dir():
        raise ConfigError(
            f"{directory} has no {PACKAGE}, the reference implementation to compare with: run "
            "`make .reference`, or name its directory (--reference, STRETTO_QWEN_TTS)"
        )
    # transformers asks once which libraries are there; the stand-ins must not count.
    from transformers.utils import import_utils

    import_utils.is_librosa_available()
    import_utils.is_torchaudio_available()
    import_utils.is_onnxruntime_available()
    absent = {
        name: _Absent(name)
        for name in DEPENDENCIES
        if importlib.util.find_spec(name.split(".")[0]) is None
    }
    for name, module in absent.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(absent[parent], own, module)
    if "librosa" in absent:
        absent["librosa"].resample = _resample  # type: ignore[attr-defined]
        absent["librosa.filters"].mel = _mel  # type: ignore[attr-defined]
    sys.modules.update(absent)
    sys.path.insert(0, str(directory))
    try:
        with plain_rotary():
            return importlib.import_module(PACKAGE)
    finally:
        sys.path.remove(str(directory))
        for name in absent:
            del sys.modules[name]


@contextmanager
def plain_rotary() -> Iterator[None]:
    """Plain rotary embeddings in transformers' registry, where the reference looks for them.

    It puts them there itself, but so that Mimi cannot be loaded with them, and for good, which
    changes how other models are loaded.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def plain(config: Any, device: Any = None, **kwargs: object) -> tuple[Tensor, float]:
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or config.rope_theta
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / theta ** (torch.arange(0, size, 2, device=device).float() / size), 1.0

    assert "default" not in ROPE_INIT_FUNCTIONS
    ROPE_INIT_FUNCTIONS["default"] = plain
    try:
        yield
    finally:
        del ROPE_INIT_FUNCTIONS["default"]


def load_reference(model_dir: Path, directory: Path) -> Any:
    """The reference's `Qwen3TTSModel` over a checkpoint, on the CPU in float32.

    Raises:
        ConfigError: `directory` has no reference.
    """
    package = reference_package(directory)
    with warnings.catch_warnings(), plain_rotary():
        warnings.simplefilter("ignore")
        model = package.Qwen3TTSModel.from_pretrained(str(model_dir), dtype=torch.float32)
    model.model.eval()
    model.model.speech_tokenizer.model.eval()
    return model


def one_shot(model: Any, codes: Tensor) -> Tensor:
    """Samples of frames int64 [n, codebooks] by one call of the reference's decoder, float32."""
    decoder = model.model.speech_tokenizer.model.decoder
    with torch.inference_mode():
        samples: Tensor = decoder(codes.T[None])[0, 0]
    return samples


def reference_codes(
    model: Any,
    text: str,
    *,
    kind: str,
    speaker: str | None = None,
    language: str | None = None,
    instruct: str | None = None,
    ref_audio: tuple[np.ndarray, int] | None = None,
    ref_text: str | None = None,
    voice_clone_prompt: Any = None,
    non_streaming_mode: bool | None = None,
    max_new_tokens: int = 24,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """What the reference says to `text`: codes int16 [n, codebooks] and their samples, float32.

    Greedily, with the checkpoint's repetition penalty, unless `options` (of its `generate`) say
    otherwise. Of a clone only the row of the speaker counts where there is no `ref_text`; with it
    the samples are those of one decode of reference and speech, the reference's part cut off.
    `non_streaming_mode` None is the reference's default for that kind.
    """
    kwargs: dict[str, Any] = {
        "text": text,
        "language": language,
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "subtalker_dosample": False,
        **options,
    }
    if non_streaming_mode is not None:
        kwargs["non_streaming_mode"] = non_streaming_mode
    speak = {
        "custom_voice": model.generate_custom_voice,
        "voice_design": model.generate_voice_design,
        "base": model.generate_voice_clone,
    }[kind]
    if kind == "custom_voice":
        kwargs |= {"speaker": speaker, "instruct": instruct}
    elif kind == "voice_design":
        kwargs |= {"instruct": instruct}
    else:
        if voice_clone_prompt is None:
            voice_clone_prompt = model.create_voice_clone_prompt(
                ref_audio=ref_audio, ref_text=ref_text, x_vector_only_mode=ref_text is None
            )
        kwargs |= {"voice_clone_prompt": voice_clone_prompt}
    codes = _overheard(model, lambda: speak(**kwargs))
    reference = codes[:0] if kind != "base" else voice_clone_prompt[0].ref_code
    before = codes[:0] if reference is None else reference
    samples = one_shot(model, torch.cat((before, codes)))
    per_frame = model.model.speech_tokenizer.get_decode_upsample_rate()
    return codes.numpy().astype(np.int16), samples[len(before) * per_frame :].numpy()


def _overheard(model: Any, speak: Callable[[], object]) -> Tensor:
    """The codes that the model hands its decoder while it speaks one text, without the end."""
    inner = model.model
    generate = inner.generate
    heard: list[Tensor] = []

    def listen(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        heard.extend(result[0])
        return result

    inner.generate = listen
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            speak()
    finally:
        del inner.generate
    (codes,) = heard
    return codes.clone()
