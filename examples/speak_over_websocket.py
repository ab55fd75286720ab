"""Speaks a text while it is still being written, as it would come out of a language model.

    stretto serve tiny-tts                      # in another terminal
    python examples/speak_over_websocket.py     # writes spoken.wav

STRETTO_URL and STRETTO_API_KEY name another server than http://127.0.0.1:8091 and its key.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import wave
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

url = os.environ.get("STRETTO_URL", "http://127.0.0.1:8091").replace("http", "ws", 1)
key = os.environ.get("STRETTO_API_KEY", "none")
text = "Computers can learn to speak, and need not wait until a sentence has been written."


async def write(connection: ClientConnection) -> None:
    """The words, one by one, at the pace of a language model."""
    for word in text.split():
        await send(connection, type="input.text", text=f"{word} ")
        await asyncio.sleep(0.05)
    await send(connection, type="input.done")
    print(f"written after {time.monotonic() - began_s:.2f} s")


async def send(connection: ClientConnection, **message: Any) -> None:
    await connection.send(json.dumps(message))


async def main() -> None:
    headers = {"Authorization": f"Bearer {key}"}
    path = "/v1/audio/speech/stream"
    async with connect(url + path, additional_headers=headers) as connection:
        # `tiny-tts` has random weights and never ends by itself.
        await send(connection, type="session.config", text_streaming=True, max_new_tokens=60)
        writing = asyncio.create_task(write(connection))
        with wave.open("spoken.wav", "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(24000)
            async for message in connection:
                if isinstance(message, bytes):
                    if not file.tell():
                        print(f"first sound after {time.monotonic() - began_s:.2f} s")
                    file.writeframes(message)
                    continue
                event = json.loads(message)
                if event["type"] == "error":
                    raise SystemExit(event["message"])
                if event["type"] == "session.done":
                    break
            print(f"spoken.wav: {file.getnframes() / 24000:.2f} s of sound")
        await writing


began_s = time.monotonic()
asyncio.run(main())
