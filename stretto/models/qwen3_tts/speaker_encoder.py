"""Whom a recording sounds like: an ECAPA-TDNN over mel frames, to one row for the Talker.

    samples ─> log mel ─> convolutions, squeeze and excite ─> weighted mean and std ─> row

It runs once per voice, over the whole recording; nothing streams. The mel frames are librosa's
(Slaney's scale, filters of equal area), the network is the reference's `Qwen3TTSSpeakerEncoder`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.qwen3_tts.spec import SpeakerEncoderSpec
from stretto.models.weights import ParameterSource

# The reference's, at any checkpoint.
MEL_WINDOW = 1024
MEL_HOP = 256
MAGNITUDE_EPSILON = 1e-9
QUIETEST = 1e-5
# Under the root of a variance.
VARIANCE_EPSILON = 1e-12


@dataclass(frozen=True)
class _TimeDelay:
    """A convolution over frames, [C, T] to [C', T]; the ends are mirrored."""

    weight: Tensor
    bias: Tensor
    dilation: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        around = (self.weight.shape[-1] - 1) * self.dilation
        if around:
            x = F.pad(x, (around // 2, around - around // 2), mode="reflect")
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)


@dataclass(frozen=True)
class _Block:
    enter: _TimeDelay
    # By part of the channels from the second on: each hears the part before it, too.
    parts: list[_TimeDelay]
    leave: _TimeDelay
    squeeze: _TimeDelay
    excite: _TimeDelay

    def __call__(self, x: Tensor) -> Tensor:
        first, *others = F.relu(self.enter(x)).chunk(len(self.parts) + 1)
        outputs, before = [first], None
        for part, conv in zip(others, self.parts, strict=True):
            before = F.relu(conv(part if before is None else part + before))
            outputs.append(before)
        y = F.relu(self.leave(torch.cat(outputs)))
        gate = self.excite(F.relu(self.squeeze(y.mean(1, keepdim=True))))
        return x + y * torch.sigmoid(gate)


class SpeakerEncoder:
    def __init__(self, source: ParameterSource, spec: SpeakerEncoderSpec) -> None:
        self.spec = spec
        channels, widest = spec.channels[0], spec.channels[-1]
        self._first = _load_conv(
            source, "blocks.0.conv", spec.mel_dim, channels, spec.kernel_sizes[0], spec.dilations[0]
        )
        self._blocks = [
            _load_block(source, spec, index) for index in range(1, len(spec.channels) - 1)
        ]
        self._gather = _load_conv(
            source, "mfa.conv", widest, widest, spec.kernel_sizes[-1], spec.dilations[-1]
        )
        self._attend_in = _load_conv(source, "asp.tdnn.conv", 3 * widest, spec.attention_channels)
        self._attend_out = _load_conv(source, "asp.conv", spec.attention_channels, widest)
        self._out = _load_conv(source, "fc", 2 * widest, spec.embedding_size)
        like = self._out.weight
        self._filters = torch.from_numpy(mel_filters(spec.sample_rate, spec.mel_dim)).to(like)
        self._window = torch.hann_window(MEL_WINDOW).to(like)

    def embed(self, samples: Tensor) -> Tensor:
        """Samples [n] at the spec's rate to [embedding_size]; half a second at least."""
        x = F.relu(self._first(self._log_mel(samples)))
        outputs = []
        for block in self._blocks:
            x = block(x)
            outputs.append(x)
        x = F.relu(self._gather(torch.cat(outputs)))
        mean, std = _mean_and_std(x, torch.full_like(x[:1], 1 / x.shape[1]))
        told = torch.cat((x, mean.expand_as(x), std.expand_as(x)))
        weights = self._attend_out(torch.tanh(F.relu(self._attend_in(told)))).softmax(1)
        return self._out(torch.cat(_mean_and_std(x, weights)))[:, 0]

    def _log_mel(self, samples: Tensor) -> Tensor:
        """[mel_dim, frames]."""
        around = (MEL_WINDOW - MEL_HOP) // 2
        padded = F.pad(samples[None], (around, around), mode="reflect")[0]
        spectrum = torch.stft(
            padded, MEL_WINDOW, MEL_HOP, window=self._window, center=False, return_complex=True
        )
        magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + MAGNITUDE_EPSILON)
        return (self._filters @ magnitude).clamp(min=QUIETEST).log()


def _load_conv(
    source: ParameterSource,
    name: str,
    channels_in: int,
    channels_out: int,
    kernel: int = 1,
    dilation: int = 1,
) -> _TimeDelay:
    prefix = f"speaker_encoder.{name}"
    return _TimeDelay(
        source.take(f"{prefix}.weight", channels_out, channels_in, kernel),
        source.take(f"{prefix}.bias", channels_out),
        dilation,
    )


def _load_block(source: ParameterSource, spec: SpeakerEncoderSpec, index: int) -> _Block:
    name, squeezed = f"blocks.{index}", spec.squeeze_channels
    channels, part = spec.channels[index], spec.channels[index] // spec.res2net_scale
    return _Block(
        enter=_load_conv(source, f"{name}.tdnn1.conv", channels, channels),
        parts=[
            _load_conv(
                source, f"{name}.res2net_block.blocks.{at}.conv", part, part,
                spec.kernel_sizes[index], spec.dilations[index],
            )
            for at in range(spec.res2net_scale - 1)
        ],
        leave=_load_conv(source, f"{name}.tdnn2.conv", channels, channels),
        squeeze=_load_conv(source, f"{name}.se_block.conv1", channels, squeezed),
        excite=_load_conv(source, f"{name}.se_block.conv2", squeezed, channels),
    )  # fmt: skip


def _mean_and_std(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Over frames, [C, T] to [C, 1] each; the weights of a channel sum to one."""
    mean = (weights * x).sum(1, keepdim=True)
    variance = (weights * (x - mean).square()).sum(1, keepdim=True)
    return mean, variance.clamp(min=VARIANCE_EPSILON).sqrt()


def mel_filters(sample_rate: int, num_filters: int) -> np.ndarray:
    """Triangles on Slaney's scale from 0 to half the rate, float32 [filters, MEL_WINDOW / 2 + 1].

    The scale is linear up to 1000 Hz (15 mel) and then gives 27 mel to a factor of 6.4.
    """
    step = np.log(6.4) / 27.0
    top = 15.0 + np.log(sample_rate / 2 / 1000.0) / step
    mels = np.linspace(0.0, top, num_filters + 2)
    corners = np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp(step * (mels - 15.0)))
    bins = np.linspace(0.0, sample_rate / 2, MEL_WINDOW // 2 + 1)
    widths = np.diff(corners)[:, None]
    distances = corners[:, None] - bins
    rising, falling = -distances[:-2] / widths[:-1], distances[2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)
