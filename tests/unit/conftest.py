"""A script that tests start in processes of its own is no test module."""

collect_ignore = ["replica_worker.py"]
