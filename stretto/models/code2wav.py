"""The vocoder, streaming: codec frames in any portions, the samples that one decode would give.

Everything in the network is causal, so a stream only has to remember what its layers would still
look back on: keys and values of the attention window, the last inputs of each convolution, one
input frame of each transposed convolution. That is `VocoderState`, one per request; a batch is
their states side by side.

    frames   [. . .|. . . . .|.]          fed 3, then 5, then 1
    samples  [====:=========:==]          the same as fed 9, whatever the portions

There are two of them, alike but for their ends:

    Qwen3-Omni   mean of code embeddings ───────────────> transformer ─> upsampling, snake blocks
    Qwen3-TTS    sum of codewords ─> convolution ─> in ─> transformer ─> out ─> the same

In Omni the transposed convolutions (kernel 2 r, stride r) drop r samples on either side, so they
look one frame ahead at their own rate. Holding that frame back makes every feed of n frames give
exactly n * samples_per_frame samples, except a stream's first: what stands before the first true
sample (555 samples for rates 8, 5, 4, 3) is dropped, and zeroed where a convolution would look at
it, so that streams at their start and in their middle share a batch. In TTS they drop on the right
alone: nothing looks ahead, nothing is held back, and the first feed is whole too.

The networks are transformers' `Qwen3OmniMoeCode2Wav` and the decoder of the reference's
`Qwen3TTSTokenizerV2Model`. Layer scales are folded into the projections in front of them, and a
codeword's projection into the codeword.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.models.decoder import DenseMLP, Norm, transposed
from stretto.models.weights import ParameterSource

# transformers' SnakeBeta adds this to the magnitude before it divides by it.
SNAKE_EPSILON = 1e-9
CONVNEXT_EPSILON = 1e-6
CONVNEXT_KERNEL = 7
DECODER_KERNEL = 7
# Frames of one call, padding included; 250 at once cost a quarter more per frame than 100.
CPU_BATCH_FRAMES = 100
RESIDUAL_DILATIONS = (1, 3, 9)
PRE_KERNEL = 3
# Codeword sums are divided by how often each was used, at least this.
USAGE_EPSILON = 1e-5


class SplitQuantizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the codes of Qwen3-TTS reach the transformer: codewords of one semantic and several
    acoustic codebooks, half of `codebook_dim` wide, projected and summed."""

    codebook_dim: int
    # Channels of everything that is neither codeword nor transformer.
    latent_dim: int


class Code2WavConfig(msgspec.Struct, frozen=True, kw_only=True):
    num_codebooks: int
    codebook_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    # None in Qwen3-Omni, where codes are embedded at the transformer's width.
    quantizer: SplitQuantizerConfig | None = None

    @property
    def latent_dim(self) -> int:
        return self.hidden_size if self.quantizer is None else self.quantizer.latent_dim

    @property
    def looks_ahead(self) -> bool:
        """Whether the transposed convolutions drop samples on the left, too."""
        return self.quantizer is None

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def samples_missing(self) -> int:
        """By how many samples a one-shot decode is shorter than its frames."""
        missing = 0
        if self.looks_ahead:
            for rate in self.upsample_rates:
                missing = (missing + 1) * rate
        return missing


class VocoderState:
    """What one stream's layers still look back on. Changed by `Code2Wav.feed` alone."""

    def __init__(self, kv: Tensor, tails: list[Tensor]) -> None:
        self.num_frames = 0
        # [layers, 2, heads, window - 1, D]; newest last.
        self.kv = kv
        # Per stateful convolution the inputs it still needs, [channels, n]; newest last.
        self.tails = tails


@dataclass(frozen=True)
class _Conv:
    weight: Tensor
    bias: Tensor
    dilation: int
    groups: int
    # Index of its tail in the state; None for kernel 1, which looks back on nothing.
    tail: int | None

    @property
    def lookback(self) -> int:
        return (self.weight.shape[-1] - 1) * self.dilation


@dataclass(frozen=True)
class _Product:
    """A convolution of few positions with many channels: all rows in one product of matrices.

    `weight` [taps C_in, C_out], the oldest tap first; `bias` [C_out]. oneDNN would bring weights
    into its own order in each call (docs/log.md, "The vocoder's ends and upsampling as products").
    """

    weight: Tensor
    bias: Tensor
    taps: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, C_in, n + taps - 1] to [rows, n, C_out]."""
        rows, channels, length = x.shape
        positions = length - self.taps + 1
        # Neighbouring positions lie side by side, so that a window is one run of numbers.
        windows = (
            x.transpose(1, 2)
            .contiguous()
            .as_strided((rows, positions, self.taps * channels), (length * channels, channels, 1))
        )
        product = torch.addmm(self.bias, windows.reshape(rows * positions, -1), self.weight)
        return product.view(rows, positions, -1)


@dataclass(frozen=True)
class _ConvIn:
    product: _Product
    tail: int


@dataclass(frozen=True)
class _ConvOut:
    """To one channel: `weight` [taps, C] sees every position once, and what the taps gave is added
    along diagonals; oneDNN would compute sixteen channels."""

    weight: Tensor
    bias: Tensor
    tail: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, C, n + taps - 1] to [rows, n]."""
        by_tap = torch.matmul(self.weight, x)
        rows, taps, length = by_tap.shape
        diagonals = by_tap.as_strided(
            (rows, taps, length - taps + 1), (taps * length, length + 1, 1)
        )
        return diagonals.sum(1) + self.bias


@dataclass(frozen=True)
class _Upsample:
    """A transposed convolution of stride r. With a tail it has kernel 2 r, and an output looks at
    two inputs; without one kernel r."""

    product: _Product
    rate: int
    tail: int | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, C_in, n + taps - 1] to [rows, C_out, n r]."""
        product = self.product(x)
        rows, positions, _ = product.shape
        by_phase = product.view(rows, positions, -1, self.rate).transpose(1, 2)
        return by_phase.reshape(rows, -1, positions * self.rate)


@dataclass(frozen=True)
class _Snake:
    """x + sin(x alpha)^2 / beta, exponentials taken once; [1, C, 1] each."""

    alpha: Tensor
    inverse_beta: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        y = (x * self.alpha).sin_().square_()
        return torch.addcmul(x, y, self.inverse_beta, out=y)


@dataclass(frozen=True)
class _ConvNeXt:
    depthwise: _Conv
    norm_weight: Tensor
    norm_bias: Tensor
    expand: tuple[Tensor, Tensor]
    # gamma folded in.
    project: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Residual:
    act1: _Snake
    conv1: _Conv
    act2: _Snake
    conv2: _Conv


@dataclass(frozen=True)
class _Block:
    act: _Snake
    upsample: _Upsample
    residuals: list[_Residual]


@dataclass(frozen=True)
class _Layer:
    """Projections are [in, out], as in the decoder."""

    attn_norm: Norm
    qkv: Tensor
    out: Tensor
    mlp_norm: Norm
    mlp: DenseMLP


@dataclass(frozen=True)
class _Ends:
    """What Qwen3-TTS has around its transformer."""

    conv: _Conv
    project_in: tuple[Tensor, Tensor]
    project_out: tuple[Tensor, Tensor]


class Code2Wav:
    """The network's weights and the streaming decode over them."""

    def __init__(self, source: ParameterSource, config: Code2WavConfig) -> None:
        self.config = config
        self._tail_shapes: list[tuple[int, int]] = []
        hidden, latent, decoder_dim = config.hidden_size, config.latent_dim, config.decoder_dim
        quantizer = config.quantizer
        self._ends: _Ends | None = None
        if quantizer is None:
            prefix = "code2wav"
            # A row per codebook and code; their sum is what a frame is.
            self._codewords = source.take(
                f"{prefix}.code_embedding.weight",
                config.num_codebooks * config.codebook_size,
                hidden,
            )
        else:
            prefix = "decoder"
            self._codewords = self._load_codewords(source, f"{prefix}.quantizer", quantizer)
            self._ends = self._load_ends(source, prefix, quantizer)
        self._layers = [
            self._load_layer(source, f"{prefix}.pre_transformer.layers.{index}")
            for index in range(config.num_layers)
        ]
        norm = source.take(f"{prefix}.pre_transformer.norm.weight", hidden)
        self._norm = Norm(norm, config.rms_norm_eps)
        self._upsamples = [
            (
                self._load_upsample(source, f"{prefix}.upsample.{i}.0", latent, latent, ratio, 1),
                self._load_convnext(source, f"{prefix}.upsample.{i}.1"),
            )
            for i, ratio in enumerate(config.upsampling_ratios)
        ]
        self._conv_in = self._load_conv_in(source, f"{prefix}.decoder.0")
        self._blocks = [
            self._load_block(source, f"{prefix}.decoder.{i + 1}.block", i)
            for i in range(len(config.upsample_rates))
        ]
        last = len(config.upsample_rates) + 1
        channels = decoder_dim // 2 ** len(config.upsample_rates)
        self._act_out = self._load_snake(source, f"{prefix}.decoder.{last}", channels)
        self._conv_out = self._load_conv_out(source, f"{prefix}.decoder.{last + 1}", channels)
        device = self._codewords.device
        self._offsets = torch.arange(config.num_codebooks, device=device) * config.codebook_size
        self._inv_freq = 1.0 / config.rope_theta ** (
            torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
            / config.head_dim
        )

    @property
    def device(self) -> torch.device:
        return self._codewords.device

    def open(self) -> VocoderState:
        """The state of a stream that has not begun."""
        config, like = self.config, self._codewords
        window = config.sliding_window - 1
        kv = like.new_zeros(config.num_layers, 2, config.num_heads, window, config.head_dim)
        return VocoderState(kv, [like.new_zeros(shape) for shape in self._tail_shapes])

    def feed(self, codes: Sequence[Tensor], states: Sequence[VocoderState]) -> list[Tensor]:
        """The next samples of each stream, float32 [samples] in -1..1.

        `codes[i]` are the next frames of the stream with `states[i]`, int64 [frames, codebooks],
        at least one frame; streams may give different numbers of frames.
        """
        samples: list[Tensor | None] = [None] * len(codes)
        for rows in _batches([len(frames) for frames in codes], self.device):
            fed = self._feed([codes[row] for row in rows], [states[row] for row in rows])
            for row, part in zip(rows, fed, strict=True):
                samples[row] = part
        return [part for part in samples if part is not None]

    def _feed(self, codes: Sequence[Tensor], states: Sequence[VocoderState]) -> list[Tensor]:
        """As `feed`, in one call of the network; rows are padded to the longest."""
        feed = _Feed([len(frames) for frames in codes], list(states), self.device)
        width = max(feed.lengths)
        padded = [F.pad(frames, (0, 0, 0, width - len(frames))) for frames in codes]
        x = self._contextual(torch.stack(padded), feed).transpose(1, 2)
        for upsample, convnext in self._upsamples:
            x = self._run_upsample(upsample, x, feed)
            x = self._run_convnext(convnext, x, feed)
        x = feed.look_back(x, self._conv_in.tail, DECODER_KERNEL - 1)
        x = self._conv_in.product(x).transpose(1, 2)
        for block in self._blocks:
            x = self._run_upsample(block.upsample, block.act(x), feed)
            for residual in block.residuals:
                y = self._run_conv(residual.conv1, residual.act1(x), feed)
                x = x + self._run_conv(residual.conv2, residual.act2(y), feed)
        x = feed.look_back(self._act_out(x), self._conv_out.tail, DECODER_KERNEL - 1)
        wave = self._conv_out(x).clamp(-1, 1).float()
        samples = [
            wave[row, feed.garbage if first else 0 : length]
            for row, (first, length) in enumerate(zip(feed.is_first, feed.lengths, strict=True))
        ]
        for state, frames in zip(states, codes, strict=True):
            state.num_frames += len(frames)
        return samples

    def _contextual(self, codes: Tensor, feed: _Feed) -> Tensor:
        """Codes [rows, frames, codebooks] to what the upsampling begins with, [rows, frames, C]."""
        codewords = F.embedding(codes + self._offsets, self._codewords)
        if self._ends is None:
            return self._transform(codewords.mean(2), feed)
        x = self._run_conv(self._ends.conv, codewords.sum(2).transpose(1, 2), feed)
        x = F.linear(x.transpose(1, 2), *self._ends.project_in)
        return F.linear(self._transform(x, feed), *self._ends.project_out)

    def _transform(self, x: Tensor, feed: _Feed) -> Tensor:
        """The pre-transformer over [rows, frames, H], each row behind its own window."""
        config = self.config
        rows, frames, hidden = x.shape
        window, heads, head_dim = config.sliding_window - 1, config.num_heads, config.head_dim
        done = torch.tensor([state.num_frames for state in feed.states], device=x.device)
        angles = (done[:, None] + torch.arange(frames, device=x.device))[..., None] * self._inv_freq
        cos = angles.cos()[:, :, None].to(x.dtype)
        sin = angles.sin()[:, :, None].to(x.dtype)
        # Keys are the window and then the new frames; query i stands at key window + i.
        key = torch.arange(window + frames, device=x.device)
        query = torch.arange(frames, device=x.device)[:, None] + window
        in_window = (key <= query) & (key >= query - window)
        filled = key >= (window - done)[:, None]
        mask = (in_window[None] & filled[:, None])[:, None]
        past = feed.stack([state.kv for state in feed.states])
        kept: list[list[Tensor]] = [[] for _ in feed.states]
        x = x.reshape(rows * frames, hidden)
        for index, layer in enumerate(self._layers):
            qkv = torch.mm(layer.attn_norm(x), layer.qkv).view(rows, frames, 3, heads, head_dim)
            q, k, v = qkv.unbind(2)
            q = _rotated(q, cos, sin).transpose(1, 2)
            new = torch.stack((_rotated(k, cos, sin).transpose(1, 2), v.transpose(1, 2)), 1)
            kv = torch.cat((past[:, index], new), 3)
            attended = F.scaled_dot_product_attention(q, kv[:, 0], kv[:, 1], attn_mask=mask)
            x = torch.addmm(x, attended.transpose(1, 2).reshape(rows * frames, -1), layer.out)
            x = layer.mlp.added_to(x, layer.mlp_norm(x))
            for row, length in enumerate(feed.lengths):
                kept[row].append(kv[row, :, :, length : length + window])
        for state, layers in zip(feed.states, kept, strict=True):
            state.kv = torch.stack(layers)
        return self._norm(x).view(rows, frames, hidden)

    def _run_conv(self, conv: _Conv, x: Tensor, feed: _Feed) -> Tensor:
        if conv.tail is not None:
            x = feed.look_back(x, conv.tail, conv.lookback)
        return F.conv1d(x, conv.weight, conv.bias, dilation=conv.dilation, groups=conv.groups)

    def _run_upsample(self, upsample: _Upsample, x: Tensor, feed: _Feed) -> Tensor:
        if upsample.tail is None:
            feed.grow(upsample.rate, held_back=0)
            return upsample(x)
        x = upsample(feed.extend(x, upsample.tail, 1))
        feed.grow(upsample.rate, held_back=1 if self.config.looks_ahead else 0)
        return x

    def _run_convnext(self, block: _ConvNeXt, x: Tensor, feed: _Feed) -> Tensor:
        y = self._run_conv(block.depthwise, x, feed).transpose(1, 2)
        y = F.layer_norm(y, (y.shape[-1],), block.norm_weight, block.norm_bias, CONVNEXT_EPSILON)
        y = F.linear(F.gelu(F.linear(y, *block.expand)), *block.project)
        return x + y.transpose(1, 2)

    def _load_codewords(
        self, source: ParameterSource, prefix: str, quantizer: SplitQuantizerConfig
    ) -> Tensor:
        """[codebooks * codebook_size, codebook_dim]: codewords behind their group's projection."""
        dim, inner = quantizer.codebook_dim, quantizer.codebook_dim // 2
        tables = []
        for group, count in (("rvq_first", 1), ("rvq_rest", self.config.num_codebooks - 1)):
            project = source.take(f"{prefix}.{group}.output_proj.weight", dim, inner, 1)[:, :, 0]
            for index in range(count):
                book = f"{prefix}.{group}.vq.layers.{index}._codebook"
                usage = source.take(f"{book}.cluster_usage", self.config.codebook_size)
                sums = source.take(f"{book}.embedding_sum", self.config.codebook_size, inner)
                codewords = sums / usage.clamp(min=USAGE_EPSILON)[:, None]
                tables.append(F.linear(codewords, project))
        return torch.cat(tables)

    def _load_ends(
        self, source: ParameterSource, prefix: str, quantizer: SplitQuantizerConfig
    ) -> _Ends:
        hidden, latent = self.config.hidden_size, quantizer.latent_dim
        inside = f"{prefix}.pre_transformer"
        return _Ends(
            conv=self._load_conv(
                source, f"{prefix}.pre_conv", quantizer.codebook_dim, latent, PRE_KERNEL
            ),
            project_in=(
                source.take(f"{inside}.input_proj.weight", hidden, latent),
                source.take(f"{inside}.input_proj.bias", hidden),
            ),
            project_out=(
                source.take(f"{inside}.output_proj.weight", latent, hidden),
                source.take(f"{inside}.output_proj.bias", latent),
            ),
        )

    def _load_layer(self, source: ParameterSource, prefix: str) -> _Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [source.take(f"{attn}.{p}_proj.weight", inner, hidden) for p in ("q", "k", "v")]
        out = source.take(f"{attn}.o_proj.weight", hidden, inner)
        gate_up = [
            source.take(f"{mlp}.{p}_proj.weight", config.intermediate_size, hidden)
            for p in ("gate", "up")
        ]
        down = source.take(f"{mlp}.down_proj.weight", hidden, config.intermediate_size)
        attn_scale = source.take(f"{prefix}.self_attn_layer_scale.scale", hidden)
        mlp_scale = source.take(f"{prefix}.mlp_layer_scale.scale", hidden)
        eps = config.rms_norm_eps
        return _Layer(
            attn_norm=Norm(source.take(f"{prefix}.input_layernorm.weight", hidden), eps),
            qkv=transposed(torch.cat(qkv)),
            out=transposed(out * attn_scale[:, None]),
            mlp_norm=Norm(source.take(f"{prefix}.post_attention_layernorm.weight", hidden), eps),
            mlp=DenseMLP(
                gate_up=transposed(torch.cat(gate_up)), down=transposed(down * mlp_scale[:, None])
            ),
        )

    def _load_conv(
        self,
        source: ParameterSource,
        prefix: str,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        dilation: int = 1,
        groups: int = 1,
    ) -> _Conv:
        lookback = (kernel - 1) * dilation
        return _Conv(
            weight=source.take(
                f"{prefix}.conv.weight", channels_out, channels_in // groups, kernel
            ),
            bias=source.take(f"{prefix}.conv.bias", channels_out),
            dilation=dilation,
            groups=groups,
            tail=self._new_tail(channels_in, lookback) if lookback else None,
        )

    def _load_upsample(
        self,
        source: ParameterSource,
        prefix: str,
        channels_in: int,
        channels_out: int,
        rate: int,
        overlap: int,
    ) -> _Upsample:
        kernel = source.take(f"{prefix}.conv.weight", channels_in, channels_out, rate * overlap)
        bias = source.take(f"{prefix}.conv.bias", channels_out)
        # Of the outputs between two inputs the later one's taps come first.
        taps = kernel.view(channels_in, channels_out, overlap, rate).permute(2, 0, 1, 3).flip(0)
        return _Upsample(
            _Product(
                weight=taps.reshape(overlap * channels_in, channels_out * rate),
                bias=bias.repeat_interleave(rate),
                taps=overlap,
            ),
            rate=rate,
            tail=self._new_tail(channels_in, 1) if overlap > 1 else None,
        )

    def _load_conv_in(self, source: ParameterSource, prefix: str) -> _ConvIn:
        latent, channels_out = self.config.latent_dim, self.config.decoder_dim
        kernel = source.take(f"{prefix}.conv.weight", channels_out, latent, DECODER_KERNEL)
        product = _Product(
            weight=kernel.permute(2, 1, 0).reshape(DECODER_KERNEL * latent, channels_out),
            bias=source.take(f"{prefix}.conv.bias", channels_out),
            taps=DECODER_KERNEL,
        )
        return _ConvIn(product, self._new_tail(latent, DECODER_KERNEL - 1))

    def _load_conv_out(self, source: ParameterSource, prefix: str, channels: int) -> _ConvOut:
        kernel = source.take(f"{prefix}.conv.weight", 1, channels, DECODER_KERNEL)
        return _ConvOut(
            weight=kernel[0].T.contiguous(),
            bias=source.take(f"{prefix}.conv.bias", 1),
            tail=self._new_tail(channels, DECODER_KERNEL - 1),
        )

    def _load_convnext(self, source: ParameterSource, prefix: str) -> _ConvNeXt:
        dim = self.config.latent_dim
        gamma = source.take(f"{prefix}.gamma", dim)
        project = source.take(f"{prefix}.pwconv2.weight", dim, 4 * dim)
        project_bias = source.take(f"{prefix}.pwconv2.bias", dim)
        return _ConvNeXt(
            depthwise=self._load_conv(
                source, f"{prefix}.dwconv", dim, dim, CONVNEXT_KERNEL, groups=dim
            ),
            norm_weight=source.take(f"{prefix}.norm.weight", dim),
            norm_bias=source.take(f"{prefix}.norm.bias", dim),
            expand=(
                source.take(f"{prefix}.pwconv1.weight", 4 * dim, dim),
                source.take(f"{prefix}.pwconv1.bias", 4 * dim),
            ),
            project=(project * gamma[:, None], project_bias * gamma),
        )

    def _load_block(self, source: ParameterSource, prefix: str, index: int) -> _Block:
        channels_in = self.config.decoder_dim // 2**index
        channels = channels_in // 2
        rate = self.config.upsample_rates[index]
        return _Block(
            act=self._load_snake(source, f"{prefix}.0", channels_in),
            upsample=self._load_upsample(source, f"{prefix}.1", channels_in, channels, rate, 2),
            residuals=[
                _Residual(
                    act1=self._load_snake(source, f"{prefix}.{i + 2}.act1", channels),
                    conv1=self._load_conv(
                        source, f"{prefix}.{i + 2}.conv1", channels, channels, DECODER_KERNEL,
                        dilation=dilation,
                    ),
                    act2=self._load_snake(source, f"{prefix}.{i + 2}.act2", channels),
                    conv2=self._load_conv(source, f"{prefix}.{i + 2}.conv2", channels, channels, 1),
                )
                for i, dilation in enumerate(RESIDUAL_DILATIONS)
            ],
        )  # fmt: skip

    def _load_snake(self, source: ParameterSource, prefix: str, channels: int) -> _Snake:
        alpha = source.take(f"{prefix}.alpha", channels)
        beta = source.take(f"{prefix}.beta", channels)
        return _Snake(
            alpha=alpha.exp()[None, :, None],
            inverse_beta=(1.0 / (beta.exp() + SNAKE_EPSILON))[None, :, None],
        )

    def _new_tail(self, channels: int, length: int) -> int:
        self._tail_shapes.append((channels, length))
        return len(self._tail_shapes) - 1


def _batches(lengths: list[int], device: torch.device) -> list[list[int]]:
    """Rows that go through the network together: of like length, and not too many at once.

    Padding is work, so a row shares a call with rows at most twice its length. On a CPU a call's
    activations should stay in cache (docs/log.md, "Vocoder batches").
    """
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fits = batches and 2 * lengths[row] >= longest
        if device.type == "cpu" and batches:
            fits = fits and longest * (len(batches[-1]) + 1) <= CPU_BATCH_FRAMES
        if not fits:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [..., D] by cos and sin of half that size."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Feed:
    """One call of `feed`: how far each row reaches at the present rate, and what it keeps."""

    def __init__(
        self, lengths: list[int], states: list[VocoderState], device: torch.device
    ) -> None:
        self.lengths = lengths
        self.states = states
        self.is_first = [state.num_frames == 0 for state in states]
        # Positions of a first row, at the present rate, that stand before its first true sample.
        self.garbage = 0
        self._first_rows = torch.tensor(
            [row for row, first in enumerate(self.is_first) if first], device=device
        )

    def grow(self, rate: int, *, held_back: int) -> None:
        """The rate has gone up by `rate`, behind `held_back` frames at the old one."""
        self.lengths = [length * rate for length in self.lengths]
        self.garbage = (self.garbage + held_back) * rate

    def look_back(self, x: Tensor, tail: int, length: int) -> Tensor:
        """As `extend`; what stands before the first true sample of rows at their start is zeroed,
        in place.
        """
        if self.garbage and len(self._first_rows):
            if len(self._first_rows) == len(self.states):
                x[:, :, : self.garbage] = 0
            else:
                x[self._first_rows, :, : self.garbage] = 0
        return self.extend(x, tail, length)

    def extend(self, x: Tensor, tail: int, length: int) -> Tensor:
        """x [rows, C, T] behind each row's kept inputs, [rows, C, length + T]; keeps new ones."""
        kept = self.stack([state.tails[tail] for state in self.states])
        full = torch.cat((kept, x), -1)
        for row, (state, valid) in enumerate(zip(self.states, self.lengths, strict=True)):
            # A copy: a view would hold on to the whole batch.
            state.tails[tail] = full[row, :, valid : valid + length].clone()
        return full

    @staticmethod
    def stack(parts: list[Tensor]) -> Tensor:
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)
