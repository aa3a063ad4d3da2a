"""python -m reproduce.gpt2 [--scale here|smoke|paper] [--plan] [--stage …] [--variant size|heads]"""

import sys

from ..command import main
from .scales import SCALES
from .setting import of

if __name__ == "__main__":
    sys.exit(main("gpt2", SCALES, of))
