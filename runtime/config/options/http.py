"""Options about the HTTP server and what its answers contain."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import inert, option, planned
from runtime.config.plan import ServePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpArgs:
    """HTTP server."""

    config: str | None = option(
        None,
        "YAML file (.yaml or .yml) with options, one `name: value` each, with dashes or underscores. What is "
        "set on the command line wins over the file.",
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on. The default answers this machine only; 0.0.0.0 answers every network.",
        plan=ServePlan.host,
    )
    port: int = option(
        30000, "TCP port to listen on; 0 takes any free one.", low=0, high=65535, plan=ServePlan.port
    )
    ssl_certfile: str | None = option(
        None,
        "PEM file with the server's certificate, and those between it and its root: answers over https alone.",
        plan=ServePlan.ssl_certfile,
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the certificate's key. Default: it is in --ssl-certfile.",
        plan=ServePlan.ssl_keyfile,
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of the key, where it is encrypted.", secret=True, plan=ServePlan.ssl_keyfile_password
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file with certificates of authorities: clients must show a certificate that one of them signed. "
        "Default: clients need none.",
        plan=ServePlan.ssl_ca_certs,
    )
    api_key: str | None = option(
        None,
        "Secret that every request must carry as `Authorization: Bearer ...`. /health, /ready, /metrics and the "
        "chat page's files stay open. Default: no key is asked for.",
        secret=True,
        plan=ServePlan.api_key,
    )
    admin_api_key: str | None = option(
        None,
        "Secret for the routes that manage the server, as `Authorization: Bearer ...`; it opens the others too. "
        "Default: these routes answer on loopback addresses alone, with --api-key where one was set.",
        secret=True,
        plan=ServePlan.admin_api_key,
    )
    api_key_file: str | None = option(
        None,
        "File with several keys, one a line: NAME KEY, or NAME KEY admin; lines with # are comments. Clients can "
        "end requests of their own key only.",
        plan=ServePlan.api_key_file,
    )
    cors_allow_origins: tuple[str, ...] = option(
        (),
        "Origins, such as https://app.example, whose web pages may call this server; * for all. Default: only the "
        "server's own chat page.",
        empty=True,
        plan=ServePlan.cors_allow_origins,
    )
    shutdown_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish after a first SIGTERM or SIGINT; then they end with an error.",
        low=0,
        plan=ServePlan.shutdown_timeout_s,
    )
    max_open_calls_per_client: int | None = option(
        None,
        "Calls that one client may have open at once: one key, or one address where no key is shown; more are "
        "answered with status 429. Default: no limit.",
        low=1,
        plan=ServePlan.max_open_calls,
    )
    max_body_bytes: int | None = option(
        None,
        "Bytes that a request's body may have, on any route. Default: 2,000,000, or 10,000,000 where prompts may be "
        "token ids; at least 8 for each token of the context.",
        low=1024,
        plan=ServePlan.max_body_bytes,
    )
    served_model_name: str | None = option(
        None,
        "Name of the model in answers and in /v1/models. Default: the value of --model-path.",
        plan=ServePlan.served_model_name,
    )
    skip_server_warmup: bool = option(
        False, "Be ready at once, without the short test request that runs first.", plan=ServePlan.skip_warmup
    )
    weight_version: str = option(
        "default", "Text that marks the weights; returned with every answer.", plan=ServePlan.weight_version
    )
    enable_cache_report: bool = option(
        False,
        "Say in the usage of OpenAI answers how many prompt tokens were cached.",
        plan=ServePlan.cache_report,
    )
    disable_chat_page: bool = option(
        False,
        "Do not serve the chat page at / and the page at /live. The API stays as it is.",
        plan=ServePlan.chat_page,
        says="the opposite",
    )
    allow_auto_truncate: bool = option(
        False,
        "Cut prompts and output lengths that exceed the context instead of answering with status 400.",
        plan=ServePlan.allow_auto_truncate,
    )
    refuse_unknown_fields: bool = option(
        False,
        "Answer requests with a field that no API knows with status 400. Default: such a field is ignored, and "
        "logged once.",
        plan=ServePlan.refuse_unknown_fields,
    )
    ignore_model_name: bool = option(
        False,
        "Answer OpenAI requests whatever model they name, as SGLang does. Default: a name that is not served is "
        "answered with status 404.",
        plan=ServePlan.ignore_model_name,
    )
    warmups: str | None = inert(
        None,
        "Names of warm-up functions, separated by commas, that run before the server is ready.",
        reason="there is one where it comes from, for voices; unknown names are skipped there too",
    )
    file_storage_path: str | None = option(
        None,
        "Folder for the files of /v1/files and /v1/batches, which is made if it is not there. Default: none, and these "
        "routes answer with status 501.",
        aliases=("--file-storage-pth",),
        sglang="sglang_storage",
        plan=ServePlan.file_storage,
    )
    tool_server: str | None = planned(
        None, "Tool servers for /v1/responses: `demo`, or addresses separated by commas."
    )
    return_token_ids: bool = inert(
        False,
        "Return the token ids of the output from /generate.",
        reason="they are always returned, as output_ids",
    )
