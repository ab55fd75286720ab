"""What the server itself can be told. What the pipeline can be told stands in `stretto.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from stretto.errors import ConfigError

Modality = Literal["text", "audio"]

POSITIVE = (
    "max_body_bytes", "max_input_chars", "segment_chars", "max_instruction_chars", "drain_s",
    "ping_s", "stall_s", "socket_config_s", "socket_idle_s",
)  # fmt: skip


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    host: str = "127.0.0.1"
    # 0 takes any free port; the ready line says which.
    port: int = 8091
    deploy_config: Path | None = None
    async_chunk: bool | None = None
    # A file for a Chrome trace of all stages, written at the end.
    trace: Path | None = None
    # Where made checkpoints are kept; None: where the offline API keeps them.
    cache_dir: Path | None = None
    # None of them: everybody may use the server.
    api_keys: tuple[str, ...] = ()
    # Names that requests may call the model by; the first is what answers say. None: its own.
    served_model_names: tuple[str, ...] = ()
    # What a chat request gets that names no modalities and nothing about sound.
    default_modalities: tuple[Modality, ...] = ("text",)
    # Origins whose pages may call the server from a browser.
    allowed_origins: tuple[str, ...] = ("*",)
    max_body_bytes: int = 32 * 2**20
    # The longest text of a speech request; OpenAI's limit.
    max_input_chars: int = 4096
    # A longer one is spoken in pieces of at most this length, each of whole sentences.
    segment_chars: int = 600
    max_instruction_chars: int = 500
    # The directory under which requests may name files (`file://`); None: they may name none.
    allowed_local_media_path: Path | None = None
    # Where uploaded voices are kept; None: under `cache_dir`.
    voices_dir: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # How long running requests may take to end after SIGTERM.
    drain_s: float = 30.0
    # Silence on a stream after which a comment keeps proxies from closing it (nginx: 15 s).
    ping_s: float = 10.0
    # A client that takes nothing for so long counts as gone.
    stall_s: float = 120.0
    # How long a WebSocket may say nothing: before its first message, and between utterances.
    socket_config_s: float = 10.0
    socket_idle_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed is 0 (any free one) to 65535")
        for name in POSITIVE:
            value = msgspec.structs.asdict(self)[name]
            if value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
