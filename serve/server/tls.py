"""TLS: the server's certificate, and the verification of clients' certificates."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from runtime.config.options.http import HttpArgs
    from runtime.config.plan import ServePlan


def tls_context(plan: HttpArgs | ServePlan) -> ssl.SSLContext | None:
    """Return the TLS context, or None for unencrypted connections.

    Raises `ConfigurationError` for invalid files. Never asks for a password on the terminal.
    """
    if plan.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_keyfile_password"):
            if getattr(plan, name) is not None:
                raise ConfigurationError(f"--{name.replace('_', '-')} requires --ssl-certfile.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    password = plan.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(plan.ssl_certfile, plan.ssl_keyfile, lambda: password)
    except OSError as error:  # SSLError is an OSError
        files = f"--ssl-certfile {plan.ssl_certfile}"
        if plan.ssl_keyfile is not None:
            files += f" and --ssl-keyfile {plan.ssl_keyfile}"
        raise ConfigurationError(f"{files} cannot be used: {_reason(error)}.") from None
    if plan.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(plan.ssl_ca_certs)
        except OSError as error:
            raise ConfigurationError(
                f"--ssl-ca-certs {plan.ssl_ca_certs} cannot be used: {_ca_reason(error)}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    return (
        "the files are not in PEM format or damaged, the key is missing, or its password differs from "
        "--ssl-keyfile-password"
    )


def _ca_reason(error: OSError) -> str:
    return "it contains no certificates in PEM format" if isinstance(error, ssl.SSLError) else str(error.strerror)
