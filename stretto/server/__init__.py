"""The HTTP server: OpenAI's and vllm-omni's wire formats over one pipeline.

`stretto.server.run.serve(settings)` is a whole server process; `stretto.server.app.create_app` is
the application alone, over a pipeline that somebody else starts and closes.
"""
