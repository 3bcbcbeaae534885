"""Options about the HTTP server and what its answers contain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from runtime.config.option_spec import OptionSpec, inert, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpArgs:
    """HTTP server."""

    config: Annotated[
        str | None,
        OptionSpec(
            "YAML file (.yaml or .yml) with options, one `name: value` each, with dashes or underscores. "
            "What is said on the command line wins over the file.",
        ),
    ] = None
    host: Annotated[
        str,
        OptionSpec(
            "Address to listen on. The default answers this machine only; 0.0.0.0 answers every network.",
            plan="serve.host",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        OptionSpec("TCP port to listen on; 0 takes any free one.", low=0, high=65535, plan="serve.port"),
    ] = 30000
    api_key: Annotated[
        str | None,
        OptionSpec(
            "Secret that every request must carry as `Authorization: Bearer ...`. Health checks and metrics "
            "stay open. Default: no key is asked for.",
            secret=True,
            plan="serve.api_key",
        ),
    ] = field(default=None, repr=False)
    served_model_name: Annotated[
        str | None,
        OptionSpec(
            "Name of the model in answers and in /v1/models. Default: the value of --model-path.",
            plan="serve.served_model_name",
        ),
    ] = None
    skip_server_warmup: Annotated[
        bool,
        OptionSpec(
            "Be ready at once, without the short test request that runs first.", plan="serve.skip_warmup"
        ),
    ] = False
    weight_version: Annotated[
        str,
        OptionSpec("Text that marks the weights; returned with every answer.", plan="serve.weight_version"),
    ] = "default"
    enable_cache_report: Annotated[
        bool,
        OptionSpec(
            "Say in the usage of OpenAI answers how many prompt tokens were cached.",
            plan="serve.cache_report",
        ),
    ] = False
    disable_chat_page: Annotated[
        bool,
        OptionSpec("Do not serve the chat page at /. The API stays as it is.", plan="serve.chat_page"),
    ] = False
    allow_auto_truncate: Annotated[
        bool,
        OptionSpec(
            "Cut prompts and output lengths that exceed the context instead of answering with status 400.",
            plan="serve.allow_auto_truncate",
        ),
    ] = False
    warmups: Annotated[
        str | None,
        planned("Names of warm-up functions, separated by commas, that run before the server is ready."),
    ] = None
    file_storage_path: Annotated[
        str,
        inert(
            "Folder for the files and batches endpoints.",
            because="these endpoints do not exist, as in the server the option comes from",
            aliases=("--file-storage-pth",),
        ),
    ] = "sglang_storage"
    tool_server: Annotated[
        str | None,
        planned("Tool servers for /v1/responses: `demo`, or addresses separated by commas."),
    ] = None
    return_token_ids: Annotated[
        bool,
        inert(
            "Return the token ids of the output from /generate.",
            because="they are always returned, as output_ids",
        ),
    ] = False
