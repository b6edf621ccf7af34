"""`python -m tinylm.cli`, where the console script is not installed."""

from tinylm.cli import main

main()
