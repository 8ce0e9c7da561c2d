"""NIXL's package with `_api` in front of its own; all else is the installed package's."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
