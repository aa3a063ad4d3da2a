"""python -m reproduce.resnet [--scale here|smoke|paper] [--plan] [--stage …]"""

import sys

from ..command import main
from .scales import SCALES
from .setting import of

if __name__ == "__main__":
    sys.exit(main("resnet", SCALES, of))
