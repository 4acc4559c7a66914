"""``python -m w4gemm``, the program ``w4gemm``."""

import sys

from w4gemm.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
