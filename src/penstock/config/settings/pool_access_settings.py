"""Settings of the access to a pool's engines: keys, headers and TLS of servers that do not serve everybody."""

from typing import Annotated

from penstock.kernel.settings import Knob, Settings


class PoolAccessSettings(Settings, frozen=True, kw_only=True):
    """What a pool's engines ask of whoever talks to them; each process reads files and variables at its start."""

    api_key_file: Annotated[
        str | None,
        Knob(
            "File with the API key that the engines ask for, sent as 'Authorization: Bearer KEY'; vllm and "
            "llama-server get it as their own where they are started here."
        ),
    ] = None
    api_key_env: Annotated[
        str | None, Knob("Name of the environment variable that has that key, in place of a file.")
    ] = None
    headers: Annotated[
        dict[str, str],
        Knob(
            "More headers of every request to the engines: a text, file:PATH or env:NAME; a header that carries a "
            "secret takes one of the last two."
        ),
    ] = {}
    ca: Annotated[
        str | None,
        Knob("File of the certificates that sign those of the engines; unset trusts those of the system."),
    ] = None
    cert: Annotated[str | None, Knob("File of our own certificate, for engines that ask for one.")] = None
    cert_key: Annotated[str | None, Knob("File of its private key; unset is the same file.")] = None

    @property
    def any(self) -> bool:
        """Whether the engines ask for anything."""
        return bool(self.api_key_file or self.api_key_env or self.headers or self.ca or self.cert)
