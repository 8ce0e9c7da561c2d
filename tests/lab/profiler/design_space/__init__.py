"""Tests of the design space."""
