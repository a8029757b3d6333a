"""``python -m scaling`` is the ``scaling`` command."""

from scaling.cli.main import main

main()
