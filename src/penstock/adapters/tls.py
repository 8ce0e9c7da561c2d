"""TLS client contexts for the operator's servers: trusted certificates, and the client's own certificate."""

import ssl

from penstock.kernel.errors import ConfigError


def client_context(
    *, ca: str | None, cert: str | None = None, key: str | None = None, verify: bool = True
) -> ssl.SSLContext:
    """Return the context of a client.

    Args:
        ca: file of the certificates that sign the server's; None trusts the system's.
        cert, key: files of our own certificate and its key, where the server requires one.
        verify: whether the server's certificate counts at all.
    Raises:
        ConfigError: a file is missing, or holds something else.
    """
    context = ssl.create_default_context()
    try:
        if ca is not None:
            context = ssl.create_default_context(cafile=ca)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the server's own certificate will do
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(file for file in (ca, cert, key) if file is not None)
        raise ConfigError(f"no TLS client can be made of {named}: {error}") from error
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
