# Everything runs in a virtual environment that the first target makes.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1

PARROT_WORK ?= $(HOME)/.cache/stretto/parrot

.PHONY: demo parrot test check lint types serve clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

## demo: say a sentence with the model that ships, and write it to demo.wav
demo: $(VENV)/installed
	$(BIN)/stretto say "Computers can learn to speak with very small models." -o demo.wav

# The reference implementation of Qwen3-TTS, which tests compare with; none of its dependencies.
.reference: | $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps --target $@ qwen-tts-hf==0.1.1.post1

## parrot: make the demo voice anew, from text to checkpoint (hours; needs espeak-ng, bible-kjv, scowl)
parrot: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[training]"
	$(BIN)/python -m training.parrot --work $(PARROT_WORK)

## test: all tests
test: $(VENV)/installed .reference
	$(BIN)/pytest

## check: format, lint, types, tests
check: lint types test

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .reference build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache demo.wav
