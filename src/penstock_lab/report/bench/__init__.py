"""Load generator of ``penstock bench``: its plan, its open loop, its stream reader and its outcome."""
