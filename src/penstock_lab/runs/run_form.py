"""The form of prompts as runs of blocks, which simulations use: cheaper, and shown by tests to decide the same."""

from penstock.router.kv_index import pool_index
from penstock.router.kv_index.pool_index import PromptForm
from penstock_lab.runs.run_history import RunHistory
from penstock_lab.runs.run_index import RunIndex
from penstock_lab.runs.run_load import RunLoad

RUNS = PromptForm(
    name="runs",
    exact=RunIndex,
    history=lambda ttl: RunHistory(ttl=ttl, blocks_max=pool_index.APPROXIMATE_BLOCKS_MAX),
    load=RunLoad,
)
"""Prompts are `penstock_lab.runs.block_runs.Chain`."""
