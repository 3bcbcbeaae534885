"""Options about the HTTP server and the content of its responses."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import inert, option, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpArgs:
    """HTTP server."""

    config: str | None = option(
        None,
        "YAML file (.yaml or .yml) with options, one `name: value` per line, with dashes or underscores. The command "
        "line overrides the file.",
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on. The default accepts connections from this machine only; 0.0.0.0 accepts them from "
        "every network.",
        plan="serve.host",
    )
    port: int = option(30000, "TCP port to listen on; 0: any free port.", low=0, high=65535, plan="serve.port")
    ssl_certfile: str | None = option(
        None,
        "PEM file with the server's certificate and its intermediate certificates. If set, the server speaks HTTPS "
        "only.",
        plan="serve.ssl_certfile",
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the certificate's private key. Default: the key is in --ssl-certfile.",
        plan="serve.ssl_keyfile",
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of an encrypted private key.", secret=True, plan="serve.ssl_keyfile_password"
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file with certificates of authorities. If set, clients must present a certificate that one of these "
        "authorities signed. Default: clients need no certificate.",
        plan="serve.ssl_ca_certs",
    )
    api_key: str | None = option(
        None,
        "Secret that every request must carry as `Authorization: Bearer ...`. /health, /ready, /metrics and the "
        "chat page's files stay open. Default: no key is required.",
        secret=True,
        plan="serve.api_key",
    )
    admin_api_key: str | None = option(
        None,
        "Secret for the routes that manage the server, as `Authorization: Bearer ...`. It is valid for all other "
        "routes too. Default: management routes answer on loopback addresses only, and require --api-key if that is "
        "set.",
        secret=True,
        plan="serve.admin_api_key",
    )
    api_key_file: str | None = option(
        None,
        "File with one key per line: NAME KEY, or NAME KEY admin. Lines that start with # are comments. Clients can "
        "abort only requests that were sent with their own key.",
        plan="serve.api_key_file",
    )
    cors_allow_origins: tuple[str, ...] = option(
        (),
        "Origins, such as https://app.example, whose web pages may call this server; *: all origins. Default: only "
        "the server's own chat page.",
        empty=True,
        plan="serve.cors_allow_origins",
    )
    public_origin: str | None = option(
        None,
        "Origin under which clients see this server behind a proxy, for example https://models.example: its chat page "
        "may call the server. Default: the address that the server listens on.",
        plan="serve.public_origin",
    )
    shutdown_timeout: float = option(
        30.0,
        "Seconds that running requests have to finish after the first SIGTERM, SIGINT or SIGHUP. Requests that take "
        "longer end with an error.",
        low=0,
        plan="serve.shutdown_timeout_s",
    )
    max_open_calls_per_client: int | None = option(
        None,
        "Maximum number of simultaneous calls of one client. Clients are told apart by their key, or by their address "
        "if they send no key. Further calls are answered with status 429. Default: no limit.",
        low=1,
        plan="serve.max_open_calls",
    )
    max_choice_tokens: int = option(
        65_536,
        "Maximum of n times max_new_tokens per prompt of an HTTP request with n above 1. A missing max_new_tokens "
        "counts as 4,096. Without this limit, a request of 100 bytes could cause an answer of 100 MB.",
        low=1,
        plan="serve.max_choice_tokens",
    )
    max_body_bytes: int | None = option(
        None,
        "Maximum size of a request's body in bytes, for all routes. Default: 2,000,000, or 10,000,000 for routes that "
        "accept token ids, but at least 8 bytes per token of the context length.",
        low=1024,
        plan="serve.max_body_bytes",
    )
    served_model_name: str | None = option(
        None,
        "Name of the model in answers and in /v1/models. Default: the value of --model-path.",
        plan="serve.served_model_name",
    )
    skip_server_warmup: bool = option(
        False, "Skip the short test request that runs before the server is ready.", plan="serve.skip_warmup"
    )
    weight_version: str = option(
        "default", "Label of the weights, which is returned in every response.", plan="serve.weight_version"
    )
    enable_cache_report: bool = option(
        False,
        "Report the number of cached prompt tokens in the usage of OpenAI responses.",
        plan="serve.cache_report",
    )
    disable_chat_page: bool = option(
        False,
        "Do not serve the chat page at / and the page at /live. The API is not affected.",
        plan="serve.chat_page",
        invert=True,
    )
    allow_auto_truncate: bool = option(
        False,
        "Truncate prompts and output lengths that exceed the context length, instead of answering with status 400.",
        plan="serve.allow_auto_truncate",
    )
    refuse_unknown_fields: bool = option(
        False,
        "Answer requests with an unknown field with status 400. Default: unknown fields are ignored and logged once.",
        plan="serve.refuse_unknown_fields",
    )
    ignore_model_name: bool = option(
        False,
        "Accept any model name in OpenAI requests, as SGLang does. Default: an unknown name is answered with status "
        "404.",
        plan="serve.ignore_model_name",
    )
    warmups: str | None = inert(
        None,
        "Names of warm-up functions, separated by commas, that run before the server is ready.",
        reason="SGLang has a single such function, for speech models, and skips unknown names too",
    )
    file_storage_path: str | None = option(
        None,
        "Folder for the files of /v1/files and /v1/batches. It is created if it does not exist. Default: no folder, "
        "and these routes answer with status 501.",
        aliases=("--file-storage-pth",),
        sglang="sglang_storage",
        plan="serve.file_storage",
    )
    tool_server: str | None = refused(
        None,
        "Tool servers for /v1/responses: `demo`, or addresses separated by commas.",
        reason="it needs the gpt-oss package, whose tools search the web and run code, or MCP servers; Penstock runs "
        "no tools",
        instead="define the tools in the request, and run them in the client",
    )
    return_token_ids: bool = inert(
        False,
        "Return the token ids of the output from /generate.",
        reason="they are always returned, as output_ids",
    )
