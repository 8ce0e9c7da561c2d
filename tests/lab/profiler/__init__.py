"""Tests of the profiler's rooms."""
