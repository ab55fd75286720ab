"""The demo voice `parrot`: from word lists to a Qwen3-Omni checkpoint that speaks.

Each step is a command, `python -m training.parrot.<step>`, reads what the steps before it left
in the work directory and leaves its own; `make parrot` runs them all, README.md explains them.

    corpus ─> durations ─> vocabulary ─> synthesis ─> codec ─┬─> talker ──┬─> code2wav ─> assemble
    text      word lengths  tokenizer     frames      codes  └─> thinker ─┘                  │
                                                                                          quality
"""
