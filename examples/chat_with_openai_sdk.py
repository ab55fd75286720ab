"""Talks to a running server with the official OpenAI SDK, as it would to OpenAI.

    stretto serve parrot                        # or tiny; in another terminal
    python examples/chat_with_openai_sdk.py     # writes whole.wav and streamed.wav

STRETTO_URL and STRETTO_API_KEY name another server than http://127.0.0.1:8091 and its key.
"""

from __future__ import annotations

import base64
import os
import wave
from pathlib import Path

from openai import OpenAI

url = os.environ.get("STRETTO_URL", "http://127.0.0.1:8091")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("STRETTO_API_KEY", "none"))

model = client.models.list().data[0].id
question = [{"role": "user", "content": "Computers can learn to speak."}]
# Where text and speech end at the latest; `tiny` has random weights and never ends by itself.
limits = {
    "max_completion_tokens": 40,
    "extra_body": {"sampling_params_list": [{}, {"max_tokens": 60}]},
}

# Text alone.
answer = client.chat.completions.create(model=model, messages=question, max_completion_tokens=40)
print("text:    ", answer.choices[0].message.content)

# Text and sound in one piece; the words are the sound's transcript.
answer = client.chat.completions.create(
    model=model,
    messages=question,
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "wav"},
    **limits,
)
spoken = answer.choices[0].message.audio
Path("whole.wav").write_bytes(base64.b64decode(spoken.data))
print("whole:   ", spoken.transcript)

# The same as a stream: text and PCM come while they are made.
stream = client.chat.completions.create(
    model=model,
    messages=question,
    modalities=["text", "audio"],
    audio={"voice": "alloy", "format": "pcm16"},
    stream=True,
    stream_options={"include_usage": True},
    **limits,
)
print("streamed: ", end="")
with wave.open("streamed.wav", "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(24000)
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            sound = choice.delta.audio
            if sound is not None and sound.transcript:
                print(sound.transcript, end="", flush=True)
            if sound is not None and sound.data:
                file.writeframes(base64.b64decode(sound.data))
    seconds = file.getnframes() / 24000
details = usage.completion_tokens_details
print(f"\n{details.text_tokens} tokens, {details.audio_tokens} frames, {seconds:.2f} s of sound")

# A spoken turn is named by its id; the server knows what was said.
answer = client.chat.completions.create(
    model=model,
    messages=[
        *question,
        {"role": "assistant", "audio": {"id": spoken.id}},
        {"role": "user", "content": "Say it again."},
    ],
    max_completion_tokens=40,
)
print("and then:", answer.choices[0].message.content)
