"""``python -m blocktable.cli`` is ``blocktable``, where the script is not on the path."""

from blocktable.cli import main

main()
