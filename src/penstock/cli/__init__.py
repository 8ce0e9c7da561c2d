"""The ``penstock`` command: one file per command, imported only when it runs."""
