"""Every store keeps the contract."""

from penstock.testing.store_contract import *  # noqa: F403
