"""python -m reproduce.mlp [--scale here|smoke|paper] [--plan] [--stage …] [--variant adamw|sgd]"""

import sys

from ..command import main
from .scales import SCALES
from .setting import of

if __name__ == "__main__":
    sys.exit(main("mlp", SCALES, of))
