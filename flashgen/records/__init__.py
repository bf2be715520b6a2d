"""Tuning records: what was measured, where it is kept, and which of it speaks for a workload."""
