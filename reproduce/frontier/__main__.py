"""python -m reproduce.frontier [--stage all|a|b|c|d|u|print|smoke] [--runs N]"""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
