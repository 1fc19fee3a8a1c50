"""Targets are driven by tests and by tools/fuzz.py."""

collect_ignore = ["targets.py"]
