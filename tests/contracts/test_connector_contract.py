"""Every connector keeps the contract."""

from penstock.testing.connector_contract import *  # noqa: F403
