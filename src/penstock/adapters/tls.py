"""Whom do we trust at the other end of a TLS connection to a server of the operator's, and as whom do we come?"""

import ssl

from penstock.kernel.errors import ConfigError


def client_context(*, ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """Return the context of a client.

    Args:
        ca: file of the certificates that sign the server's; None trusts those of the system.
        cert, key: files of our own certificate and its key, where the server asks for one.
    Raises:
        ConfigError: a file is not there, or holds something else.
    """
    context = ssl.create_default_context()
    try:
        if ca is not None:
            context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(file for file in (ca, cert, key) if file is not None)
        raise ConfigError(f"no TLS client can be made of {named}: {error}") from error
    return context
