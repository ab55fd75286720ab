#!/bin/sh
# Texts read out by a running server (`stretto serve tiny-tts`), as they can be typed.
# STRETTO_URL names another server than http://127.0.0.1:8091.
set -eu
URL=${STRETTO_URL:-http://127.0.0.1:8091}
ask() { curl -sS --fail-with-body -N "$URL/v1/audio/$1" -H 'Content-Type: application/json' -d "$2"; }
TEXT='"input": "Computers can learn to speak.", "max_new_tokens": 40'

echo '--- who can speak?'
curl -sS --fail-with-body "$URL/v1/audio/voices"; echo

echo '--- an MP3, written while it is being made: speech.mp3'
ask speech "{$TEXT, \"voice\": \"alloy\"}" > speech.mp3
ls -l speech.mp3

echo '--- a whole WAV with its lengths in the header: speech.wav'
ask speech "{$TEXT, \"response_format\": \"wav\", \"stream\": false}" > speech.wav
ls -l speech.wav

echo '--- events'
ask speech "{$TEXT, \"stream\": true, \"response_format\": \"pcm\"}" | grep '^data' | cut -c 1-100

echo '--- two at once, the second one wrong'
ask speech/batch '{"response_format": "mp3", "max_new_tokens": 20,
                   "items": [{"input": "One."}, {"input": "Two.", "voice": "nobody"}]}' |
    sed 's/"audio_data":"[^"]*"/"audio_data":"..."/'
echo
