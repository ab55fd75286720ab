"""After `quality`: pictures of what it heard, to look at. Leaves `spectrograms.png`.

A column a sentence, a row a voice: espeak-ng, the target, its true codes through Code2Wav, parrot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import soundfile

from training.parrot.held_out import SENTENCES
from training.parrot.speech import SAMPLE_RATE
from training.parrot.workspace import argument_parser, open_workspace, published

_VOICES = ("espeak", "target", "codec", "parrot")
_WINDOW, _HOP = 512, 128
# From the loudest down, dB.
_DEPTH = 70.0


def decibels(wave: np.ndarray) -> np.ndarray:
    """Power [257 bins, columns] in dB below the loudest place of `wave` [n]."""
    padded = np.pad(wave, (0, max(0, _WINDOW - len(wave))))
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
    power = np.abs(np.fft.rfft(windows * np.hanning(_WINDOW))) ** 2
    level = 10 * np.log10(power + 1e-12)
    return np.asarray(np.maximum(level - level.max(), -_DEPTH).T)


def main() -> None:
    from matplotlib.figure import Figure

    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="parrot", help="the checkpoint's folder name")
    parser.add_argument("--sentences", type=int, nargs="+", default=[3, 24, 60])
    options = parser.parse_args()
    folder = open_workspace(options).quality / options.model
    size = (5 * len(options.sentences), 2.2 * len(_VOICES))
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.subplots(len(_VOICES), len(options.sentences), squeeze=False, sharex="col")
    for row, voice in enumerate(_VOICES):
        for column, sentence in enumerate(options.sentences):
            wave, _ = soundfile.read(folder / voice / f"{sentence:02}.wav", dtype="float32")
            level = decibels(wave)
            extent = (0, len(wave) / SAMPLE_RATE, 0, SAMPLE_RATE / 2000)
            here = axes[row, column]
            here.imshow(level, origin="lower", aspect="auto", extent=extent, cmap="magma")
            here.set_ylabel(f"{voice}, kHz")
            if row == 0:
                here.set_title(SENTENCES[sentence], fontsize=8)
    with published(folder / "spectrograms.png") as path:
        figure.savefig(path, format="png", dpi=80)


if __name__ == "__main__":
    main()
