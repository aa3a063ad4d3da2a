"""python -m reproduce.growth [--stage all|print|plan|smoke|bench|a part] [--study NAME] [--runs N]"""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
