"""The script of `make gpu` is run by hand, and is no test module."""

collect_ignore = ["gpu.py"]
