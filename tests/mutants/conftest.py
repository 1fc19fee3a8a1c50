"""Data and a script that tools/mutants.py starts: no tests by themselves."""

collect_ignore = ["faults.py", "notice.py"]
