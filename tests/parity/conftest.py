"""The case list is loaded by the tests here, and is none itself."""

collect_ignore = ["cases.py"]
