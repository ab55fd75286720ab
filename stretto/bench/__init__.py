"""Measures: servers over HTTP, our own modes against each other, and us against transformers.

    bench serve      a load on any server of this kind; vLLM's definitions and printed layout
    bench ablation   async_chunk off and on x Code2Wav's batch x concurrency, in this process
    bench peers      the same prompts through transformers' `generate` and through stretto
    bench report     a page of plots from the results and traces of the others

What a figure means stands in `stretto.metrics` and nowhere else.
"""
