"""The tests of real vLLM that the gate of a landing runs, in one process; `make nightly` runs them all."""

GATE = (
    "tests/vllm/test_environment.py",
    "tests/vllm/children/test_1_serves.py",
    "tests/vllm/children/test_3_killed.py",
    "tests/vllm/handoff/test_1_splits.py",
    "tests/vllm/tiers/test_4_one_flag.py",
    "tests/vllm/attached",
    "tests/vllm/test_front_door.py",
)
"""Paths for pytest. The last two share a server, and the others end theirs before it starts."""
