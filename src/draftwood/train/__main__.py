"""``torchrun --nproc-per-node 2 -m draftwood.train --method eagle3 --config my.toml``"""

import sys

from draftwood.train.loop import main

sys.exit(main())
