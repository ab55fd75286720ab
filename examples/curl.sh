#!/bin/sh
# Requests to a running server (`stretto serve tiny`, or parrot), as they can be typed.
# STRETTO_URL names another server than http://127.0.0.1:8091.
set -eu
URL=${STRETTO_URL:-http://127.0.0.1:8091}
ask() { curl -sS --fail-with-body -N "$URL/v1/chat/completions" -H 'Content-Type: application/json' -d "$1"; echo; }

# The beginning of what each event brings.
shown() { sed 's/^data: .*"choices"/data: ... "choices"/' | grep . | cut -c 1-120; }

echo '--- is it well, and what does it serve?'
curl -sS --fail-with-body "$URL/health"; echo
curl -sS --fail-with-body "$URL/v1/models"; echo
curl -sS --fail-with-body "$URL/v1/audio/voices"; echo

echo '--- text, in one piece'
ask '{"max_tokens": 40, "messages": [{"role": "user", "content": "Computers can learn to speak."}]}'

echo '--- text and sound as they come, a WAV in each chunk of sound'
ask '{"stream": true, "modalities": ["text", "audio"], "max_tokens": 40,
      "sampling_params_list": [{}, {"max_tokens": 40}],
      "messages": [{"role": "user", "content": "Computers can learn to speak."}]}' | shown

echo '--- the same the way OpenAI does it, with an audio object: PCM and a transcript'
ask '{"stream": true, "modalities": ["text", "audio"], "max_tokens": 40,
      "audio": {"voice": "alloy", "format": "pcm16"},
      "sampling_params_list": [{}, {"max_tokens": 40}],
      "messages": [{"role": "user", "content": "Computers can learn to speak."}]}' | shown

echo '--- sound in one piece, as an MP3: answer.mp3'
ask '{"modalities": ["text", "audio"], "max_tokens": 40,
      "audio": {"voice": "alloy", "format": "mp3"},
      "sampling_params_list": [{}, {"max_tokens": 40}],
      "messages": [{"role": "user", "content": "Computers can learn to speak."}]}' |
    sed 's/.*"data":"\([^"]*\)".*/\1/' | base64 -d > answer.mp3
ls -l answer.mp3
