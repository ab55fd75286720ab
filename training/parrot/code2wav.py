"""Step 8: Code2Wav, from codec frames to the wave itself.

The target wave was built from what the codes encode, pulses, noise and all, so plain regression
is enough: of the samples and of their spectra. It learns on true codes first
(`--true-codes-only`), and then mostly on those that the Talker predicts, because those are what
it will hear.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from training.parrot.architecture import parrot_config
from training.parrot.codec import CODEBOOK_SIZE, NUM_CODEBOOKS, NUM_STAGES, Codec, load_codec
from training.parrot.optimisation import Cosine, Muon, TrainingRun, all_but
from training.parrot.speech import FRAME_SAMPLES
from training.parrot.synthesis import load_utterances
from training.parrot.workspace import argument_parser, load, open_workspace

modeling: Any = modeling_qwen3_omni_moe

_HELD_OUT = 20
_CROP_FRAMES = 14
# The first frames of a crop lack their past.
_SKIPPED_SAMPLES = 2 * FRAME_SAMPLES
_SPECTRA = ((1024, 240), (512, 120), (256, 80))


def fuse_snake() -> None:
    """Compiles the decoder's activation into one kernel; it is most of the time on a CPU."""

    def snake(hidden: Tensor, log_alpha: Tensor, log_beta: Tensor) -> Tensor:
        alpha, beta = log_alpha.exp()[None, :, None], log_beta.exp()[None, :, None]
        return hidden + (1.0 / (beta + 1e-9)) * torch.sin(hidden * alpha) ** 2

    # One variant for each layer's shape is more than dynamo allows by itself.
    dynamo_config.recompile_limit = 64
    fused = torch.compile(snake, dynamic=True)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return fused(hidden_states, self.alpha, self.beta)

    modeling.Qwen3OmniMoeSnakeBeta.forward = forward


def new_code2wav(tokenizer: Tokenizer) -> Any:
    config = parrot_config(tokenizer).code2wav_config
    return modeling.Qwen3OmniMoeCode2Wav._from_config(config)


def init_code2wav(model: Any, codec: Codec, sample: Tensor) -> None:
    """Code embeddings from the centroids; every convolution scaled by what passes through it.

    `sample` [b, 16, frames] are codes that one forward pass is made with.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            fan_in = module.in_channels // module.groups * module.kernel_size[0]
            nn.init.normal_(module.weight, 0, 1 / math.sqrt(fan_in))
            nn.init.zeros_(_bias(module))
        elif isinstance(module, nn.ConvTranspose1d):
            taps = max(1, module.kernel_size[0] // module.stride[0])
            nn.init.normal_(module.weight, 0, 1 / math.sqrt(module.in_channels * taps))
            nn.init.zeros_(_bias(module))
        elif isinstance(module, modeling.Qwen3OmniMoeCode2WavDecoderResidualUnit):
            module.conv2.conv.weight.data.mul_(0.3)
        elif isinstance(module, modeling.Qwen3OmniMoeConvNeXtBlock):
            module.gamma.data.fill_(0.1)
    width = model.config.hidden_size
    # The last components, which matter least, find no room here. Of melodies no component says
    # anything; they are as loud as code 0, since faint ones are learnt far later (README).
    components = codec.centroids.flatten(0, 1)[:, :width]
    melodies = torch.randn(CODEBOOK_SIZE, width) * components[:CODEBOOK_SIZE].std()
    components = torch.cat([components, melodies])
    embeddings = components @ torch.linalg.qr(torch.randn(width, width))[0]
    scale = (codec.centroids[0].pow(2).sum(1).mean() / width).sqrt()
    # The model takes the mean over codebooks; their sum is the mel spectrum.
    embeddings = embeddings * NUM_CODEBOOKS / scale / 3
    embeddings = embeddings + 0.01 * torch.randn_like(embeddings)
    model.code_embedding.weight.data.copy_(embeddings)

    last = max(int(name.split(".")[1]) for name, _ in model.named_modules() if _is_decoder(name))
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            continue
        if name.startswith(f"decoder.{last}"):
            spread = 0.15
        elif ".conv2" in name:
            spread = 0.25
        else:
            spread = 0.7
        hooks.append(module.register_forward_hook(_scale_output_to(spread)))
    with torch.no_grad():
        model(sample)
    for hook in hooks:
        hook.remove()


def _is_decoder(name: str) -> bool:
    return name.startswith("decoder.") and name.split(".")[1].isdigit()


def _bias(module: nn.Conv1d | nn.ConvTranspose1d) -> Tensor:
    assert module.bias is not None
    return module.bias


def _scale_output_to(spread: float) -> Any:
    """A forward hook that scales a convolution's weights until its output has this deviation."""

    def scale(module: Any, inputs: Any, output: Tensor) -> Tensor:
        factor = spread / (output.std() + 1e-6)
        module.weight.data.mul_(factor)
        return output * factor

    return scale


def spectral_loss(spoken: Tensor, true: Tensor) -> Tensor:
    """Log and linear magnitude distance of waves [b, n], mean over three resolutions."""
    total = torch.zeros(())
    for window, hop in _SPECTRA:
        ours, theirs = _spectrum(spoken, window, hop), _spectrum(true, window, hop)
        floor = 3e-3 * math.sqrt(window)
        total = total + (torch.log(ours + floor) - torch.log(theirs + floor)).abs().mean()
        difference = (ours - theirs).pow(2).sum().sqrt()
        total = total + 0.5 * difference / (theirs.pow(2).sum().sqrt() + 1e-3)
    return total / len(_SPECTRA)


def _spectrum(wave: Tensor, window: int, hop: int) -> Tensor:
    shape = torch.hann_window(window)
    return torch.stft(wave, window, hop, window, shape, center=False, return_complex=True).abs()


def dense_kernels(model: Any) -> list[Tensor]:
    """What Muon trains: all convolutions but those that keep their channels apart, and matrices."""
    return [
        weight
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and "embedding" not in name and "dwconv" not in name
    ]


class Crops:
    """Random crops of codes [b, 16, frames] and their waves [b, samples].

    `predicted_share` of them have the Talker's codes, which only the first waves need to have; in
    some of the others the last codebooks of the sound are random: the Talker predicts those worst.
    """

    def __init__(
        self,
        true_codes: list[Tensor],
        predicted_codes: list[Tensor],
        waves: list[Tensor],
        *,
        predicted_share: float,
        seed: int,
    ) -> None:
        self._true = true_codes
        self._predicted = predicted_codes
        self._waves = waves
        self._share = predicted_share
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        crops = [self._crop() for _ in range(size)]
        return torch.stack([codes for codes, _ in crops]), torch.stack([w for _, w in crops])

    def _crop(self) -> tuple[Tensor, Tensor]:
        if self._predicted and self._rng.random() < self._share:
            index = self._rng.randrange(_HELD_OUT, len(self._predicted))
            codes = self._predicted[index]
        else:
            index = self._rng.randrange(_HELD_OUT, len(self._waves))
            codes = self._true[index]
            if self._rng.random() < 0.3:
                codes = self._blurred(codes)
        wave = self._waves[index].float() / 32768
        missing = _CROP_FRAMES - len(codes)
        if missing > 0:
            codes = torch.cat([codes, codes[-1:].expand(missing, -1)])
            wave = F.pad(wave, (0, missing * FRAME_SAMPLES))
        start = self._rng.randint(0, len(codes) - _CROP_FRAMES)
        end = start + _CROP_FRAMES
        return codes[start:end].T, wave[start * FRAME_SAMPLES : end * FRAME_SAMPLES]

    def _blurred(self, codes: Tensor) -> Tensor:
        codes = codes.clone()
        first = self._rng.randint(5, NUM_STAGES)
        tail = codes[:, first:NUM_STAGES]
        wrong = torch.rand(tail.shape, generator=self._generator) < 0.7
        tail[wrong] = torch.randint(CODEBOOK_SIZE, (int(wrong.sum()),), generator=self._generator)
        return codes


def load_predicted_codes(path: Path) -> list[Tensor]:
    return [torch.from_numpy(codes.astype(np.int64)) for codes in load(path)["codes"]]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=None, help="4000, and then 2500")
    parser.add_argument("--peak", type=float, default=None, help="learning rate: 1e-3, then 6e-4")
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--predicted-share", type=float, default=0.6)
    parser.add_argument("--true-codes-only", action="store_true", help="the first of the two runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workspace = open_workspace(options)
    torch.manual_seed(options.seed)
    fuse_snake()
    tokenizer = Tokenizer.from_file(str(workspace.tokenizer))
    waves = [torch.from_numpy(samples) for samples in load(workspace.waveforms)["waveforms"]]
    utterances = load_utterances(workspace.codes)[: len(waves)]
    true_codes = [torch.from_numpy(each.codes.astype(np.int64)) for each in utterances]
    predicted = []
    if not options.true_codes_only:
        predicted = load_predicted_codes(workspace.predicted_codes)

    model = new_code2wav(tokenizer)
    if not workspace.code2wav.exists():
        whole = [codes for codes in true_codes[_HELD_OUT:] if len(codes) > 20]
        sample = torch.stack([codes[5:19].T for codes in whole[:6]])
        init_code2wav(model, load_codec(workspace.codec), sample)
    kernels = dense_kernels(model)
    others = all_but(model.parameters(), kernels)
    optimizers = {
        "muon": Muon(kernels, scale=1.0, kernels=True),
        "adamw": torch.optim.AdamW(others, betas=(0.8, 0.95), weight_decay=0.0),
    }
    name, steps, peak = ("predicted codes", 2500, 6e-4)
    if options.true_codes_only:
        name, steps, peak = ("true codes", 4000, 1e-3)
    cosine = Cosine(options.peak or peak, options.steps or steps, warmup_steps=100)
    run = TrainingRun(workspace.code2wav, name, model, optimizers, cosine, max_norm=3.0)
    crops = Crops(
        true_codes,
        predicted,
        waves,
        predicted_share=options.predicted_share,
        seed=options.seed + run.step,
    )
    while not run.is_done:
        codes, wave = crops.batch(options.batch_size)
        spoken = model(codes)[:, 0]
        length = spoken.shape[1]
        wave = wave[:, :length]
        heard = slice(_SKIPPED_SAMPLES, None)
        sample_loss = (spoken - wave)[:, heard].abs().mean()
        spectrum_loss = spectral_loss(spoken[:, heard], wave[:, heard])
        (spectrum_loss + 15 * sample_loss).backward()
        run.finish_step(
            {"spectrum": spectrum_loss.item(), "samples x1000": 1e3 * sample_loss.item()}
        )


if __name__ == "__main__":
    main()
